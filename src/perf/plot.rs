//! `ferrogin plot`: plots latency and bandwidth against size, from one or more reports, as SVG.

use super::error::Error;
use super::operation::Operation;
use super::report::{Report, Row};
use super::statistics::bytes_text;
use clap::builder::TypedValueParser;
use nccl_gin_ferrogin::log::counted;
use plotters::coord::Shift;
use plotters::prelude::*;
use std::ops::RangeInclusive;
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
pub struct PlotArgs {
    /// Reports written by `ferrogin perf --json`.
    #[arg(required = true)]
    reports: Vec<PathBuf>,
    /// The file to write.
    #[arg(short, long, value_name = "FILE.svg", value_parser = svg_file())]
    output: PathBuf,
}

/// Parses a plot's path: a file named for another format would not be one.
pub fn svg_file() -> impl TypedValueParser<Value = PathBuf> {
    clap::builder::PathBufValueParser::new().try_map(|path: PathBuf| {
        let is_svg =
            path.as_os_str() == "-" || path.extension().is_none_or(|extension| extension.eq_ignore_ascii_case("svg"));
        if is_svg {
            Ok(path)
        } else {
            Err("plots are SVG: give the file a name that ends in .svg, and convert it if you need another format")
        }
    })
}

/// Draws the reports into one plot.
pub fn run(args: &PlotArgs) -> Result<(), Error> {
    let label = |path: &PathBuf| path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
    let reports = args.reports.iter().map(|path| Ok((label(path), Report::read(path)?)));
    let svg = draw(&reports.collect::<Result<Vec<_>, Error>>()?)?;
    let failed =
        |error: std::io::Error| Error::File { action: "write", path: args.output.clone(), text: error.to_string() };
    std::fs::write(&args.output, svg).map_err(failed)
}

const WIDTH: u32 = 1200;
const TITLE: u32 = 64;
const PANEL: u32 = 460;
/// Height of a legend line, and width of a legend column.
const LINE: u32 = 22;
const COLUMN: u32 = 290;
const FONT: &str = "sans-serif";
/// The figures that an axis can show, in µs or GB/s. Near f64's limits plotters never finishes an axis; no measurement
/// comes close to these.
const AXIS: RangeInclusive<f64> = 1e-15..=1e15;
/// Colours that colour-blind readers can tell apart too (Okabe and Ito).
const COLOURS: [RGBColor; 9] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(213, 94, 0),
    RGBColor(110, 110, 110),
    RGBColor(120, 80, 30),
    RGBColor(0, 0, 0),
];

/// One report's rows for one operation.
struct Series {
    label: String,
    operation: Operation,
    colour: RGBColor,
    /// The report's number, which selects the marker.
    report: usize,
    rows: Vec<Row>,
}

/// Draws named reports.
///
/// # Errors
/// No report has an operation with sizes, or a figure doesn't fit on any axis.
pub fn draw(reports: &[(String, Report)]) -> Result<String, Error> {
    let series = series(reports);
    series.iter().try_for_each(check)?;
    let columns = (WIDTH / COLUMN) as usize;
    let height = TITLE + PANEL + 28 + LINE * series.len().div_ceil(columns) as u32;
    let failed = |error: &dyn std::fmt::Display| Error::Usage(format!("the picture cannot be drawn: {error}"));
    let sizes = series.iter().flat_map(|series| &series.rows).map(|row| row.bytes).filter(|bytes| *bytes > 0);
    let Some((least, most)) = sizes.clone().min().zip(sizes.max()) else {
        return Err(Error::Usage("the reports have no operation with sizes, so there is nothing to plot".to_owned()));
    };
    // A single size gets an axis too.
    let room = if least == most { 2.2 } else { 1.3 };
    let sizes = (least as f64 / room, most as f64 * room);
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        let paint = || -> Result<(), Box<dyn std::error::Error>> {
            area.fill(&WHITE)?;
            title(&area, reports)?;
            let (panels, legend_area) = area.margin(TITLE, 0, 0, 0).split_vertically(PANEL);
            let panels = panels.split_evenly((1, 2));
            panel(&panels[0], ("Latency", "median latency (µs)"), sizes, &series, |row| Some(row.latency_us.median))?;
            panel(&panels[1], ("Bandwidth", "bandwidth (GB/s)"), sizes, &series, |row| row.bandwidth_gbs)?;
            legend(&legend_area, &series, columns)?;
            area.present()?;
            Ok(())
        };
        paint().map_err(|error| failed(&error))?;
    }
    Ok(svg)
}

fn series(reports: &[(String, Report)]) -> Vec<Series> {
    let mut all = Vec::new();
    // An operation's runs are next to each other in the legend.
    for operation in Operation::ALL {
        for (at, (name, report)) in reports.iter().enumerate() {
            let rows: Vec<Row> = report.rows.iter().filter(|row| row.operation == operation).cloned().collect();
            if rows.is_empty() {
                continue;
            }
            let label =
                if name.is_empty() { operation.name().to_owned() } else { format!("{} · {name}", operation.name()) };
            all.push(Series { label, operation, colour: RGBColor(0, 0, 0), report: at, rows });
        }
    }
    let operations = all.iter().map(|series| series.operation).fold(Vec::new(), |mut seen, operation| {
        if !seen.contains(&operation) {
            seen.push(operation);
        }
        seen
    });
    // With one operation, a colour per run; with several, a colour per operation and a marker per run.
    for series in &mut all {
        let of_operation = operations.iter().position(|operation| *operation == series.operation).unwrap_or(0);
        let number = if operations.len() == 1 { series.report } else { of_operation };
        series.colour = COLOURS[number % COLOURS.len()];
    }
    all
}

/// Refuses figures outside [`AXIS`]. An operation that was too fast for the clock has a latency of 0.
fn check(series: &Series) -> Result<(), Error> {
    for row in &series.rows {
        let figures = [("latency", "µs", Some(row.latency_us.median)), ("bandwidth", "GB/s", row.bandwidth_gbs)];
        for (name, unit, figure) in figures {
            if let Some(figure) = figure.filter(|figure| *figure != 0.0 && !AXIS.contains(figure)) {
                let (label, size, (least, most)) = (&series.label, row.bytes, AXIS.into_inner());
                return Err(Error::Usage(format!(
                    "{label}, {size} bytes: a {name} of {figure:e} {unit} cannot be drawn (only {least:e} to {most:e}): the report is damaged; measure again"
                )));
            }
        }
    }
    Ok(())
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn std::error::Error>>;

fn title(area: &Area<'_>, reports: &[(String, Report)]) -> Drawn {
    let large = (FONT, 20).into_font().color(&BLACK);
    let small = (FONT, 13).into_font().color(&RGBColor(90, 90, 90));
    area.draw_text("ferrogin perf", &large, (24, 14))?;
    let describe = |report: &Report| {
        let (about, settings) = (&report.about, &report.settings);
        format!(
            "{} over {}, {} ranks, {}, depth {}, aggregation {}; {}, {} cores{}",
            about.provider,
            about.wire,
            about.ranks,
            counted(settings.threads as usize, "thread"),
            settings.depth,
            settings.aggregate,
            about.machine.processor,
            about.machine.cores,
            if about.software_gpu().is_some() { "; on a software GPU, so times mean nothing" } else { "" }
        )
    };
    let mut texts: Vec<String> = reports.iter().map(|(_, report)| describe(report)).collect();
    texts.dedup();
    let text = match &texts[..] {
        [one] => one.clone(),
        _ => "the runs have different settings: see the reports".to_owned(),
    };
    area.draw_text(&text, &small, (24, 42))?;
    Ok(())
}

fn panel(
    area: &Area<'_>,
    (name, unit): (&str, &str),
    (least, most): (f64, f64),
    series: &[Series],
    figure: impl Fn(&Row) -> Option<f64>,
) -> Drawn {
    let points = |series: &Series| -> Vec<(f64, f64)> {
        let figures = series.rows.iter().filter_map(|row| Some((row.bytes as f64, figure(row)?)));
        if series.operation.has_bytes() {
            figures.filter(|(_, figure)| *figure > 0.0).collect()
        } else {
            // An operation without sizes is a horizontal line.
            figures.flat_map(|(_, figure)| [(least, figure), (most, figure)]).collect()
        }
    };
    let figures = series.iter().flat_map(points).map(|(_, figure)| figure);
    let low = figures.clone().fold(f64::INFINITY, f64::min);
    let high = figures.fold(0.0, f64::max);
    // Whole decades and a little more, so that the axis has labels at its ends.
    let (low, high) = if high > 0.0 { (decade(low, f64::floor), decade(high, f64::ceil)) } else { (1.0, 10.0) };
    // A single decade would have a label for each digit.
    let low = if high < low * 50.0 { low / 10.0 } else { low };
    let (low, high) = (low * 0.99, high * 1.01);
    let mut chart = ChartBuilder::on(area)
        .margin_right(28)
        .margin_left(12)
        .caption(name, (FONT, 16))
        .x_label_area_size(46)
        .y_label_area_size(64)
        .build_cartesian_2d((least..most).log_scale().base(2.0), (low..high).log_scale())?;
    chart
        .configure_mesh()
        .x_desc("size (bytes)")
        .y_desc(unit)
        .x_labels(12)
        .x_label_formatter(&|size| bytes_text(size.round() as u64))
        .y_label_formatter(&|figure| decimal(*figure))
        .label_style((FONT, 13))
        .axis_desc_style((FONT, 14))
        .bold_line_style(RGBColor(210, 210, 210))
        .light_line_style(RGBColor(238, 238, 238))
        .draw()?;
    for series in series {
        let points = points(series);
        let style = series.colour.stroke_width(2);
        if series.operation.has_bytes() {
            chart.draw_series(LineSeries::new(points.clone(), style))?;
            chart.draw_series(points.into_iter().map(|point| marker(series, point)))?;
        } else {
            chart.draw_series(DashedLineSeries::new(points, dash(series), 5, style))?;
        }
    }
    Ok(())
}

/// Returns the marker of a series' report.
fn marker<'a, C: Clone + 'static>(series: &Series, at: C) -> DynElement<'static, SVGBackend<'a>, C> {
    let (filled, line) = (series.colour.filled(), series.colour.stroke_width(2));
    match series.report % 4 {
        0 => Circle::new(at, 3, filled).into_dyn(),
        1 => TriangleMarker::new(at, 5, filled).into_dyn(),
        2 => Cross::new(at, 4, line).into_dyn(),
        _ => Circle::new(at, 4, line).into_dyn(),
    }
}

/// Returns the dash length of a horizontal line, by report.
fn dash(series: &Series) -> u32 {
    [12, 7, 3, 1][series.report % 4]
}

fn legend(area: &Area<'_>, series: &[Series], columns: usize) -> Drawn {
    let font = (FONT, 13).into_font().color(&BLACK);
    for (at, series) in series.iter().enumerate() {
        let (x, y) = ((at % columns) as i32 * COLUMN as i32 + 40, (at / columns) as i32 * LINE as i32 + 16);
        let style = series.colour.stroke_width(2);
        if series.operation.has_bytes() {
            area.draw(&PathElement::new([(x, y), (x + 28, y)], style))?;
            area.draw(&marker(series, (x + 14, y)))?;
        } else {
            let dash = dash(series) as i32;
            for start in (x..x + 28).step_by(dash as usize + 5) {
                area.draw(&PathElement::new([(start, y), ((start + dash).min(x + 28), y)], style))?;
            }
        }
        area.draw_text(&shorten(&series.label), &font, (x + 36, y - 6))?;
    }
    Ok(())
}

/// Shortens a legend label to fit a column.
fn shorten(label: &str) -> String {
    const MAX: usize = 36;
    if label.chars().count() <= MAX {
        return label.to_owned();
    }
    let start: String = label.chars().take(MAX - 1).collect();
    start + "…"
}

/// Returns the power of ten next to `figure`.
fn decade(figure: f64, round: fn(f64) -> f64) -> f64 {
    10f64.powf(round(figure.log10()))
}

/// Formats a power of ten without an exponent: "0.01", "1000".
fn decimal(figure: f64) -> String {
    let digits = (-figure.log10().floor()).max(0.0) as usize;
    format!("{figure:.digits$}")
}

/// Replaces the C library's function, which plotters calls through `f32::hypot`: its newest version needs glibc 2.35,
/// and Amazon Linux 2023 has 2.34.
// SAFETY: the function has the C library's signature and meaning.
#[allow(unsafe_code)]
#[unsafe(no_mangle)]
extern "C" fn hypotf(x: f32, y: f32) -> f32 {
    let (x, y) = (f64::from(x), f64::from(y));
    (x * x + y * y).sqrt() as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axis_labels_are_decimal() {
        assert_eq!([0.001, 0.1, 1.0, 1000.0].map(decimal), ["0.001", "0.1", "1", "1000"]);
        assert_eq!((decade(0.7, f64::floor), decade(7.0, f64::ceil)), (0.1, 10.0));
    }
}
