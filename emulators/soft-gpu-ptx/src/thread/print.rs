//! `vprintf`, with which kernels print.

use super::access::peek;
use super::{Space, Thread};
use crate::bulk::Shared;
use crate::core::{Core, Fault};

/// The longest format or string, in bytes.
const MAX_LEN: usize = 4096;

impl Thread {
    /// Formats and prints the arguments at `arguments`, each aligned to its size. Returns how many there were.
    pub(super) fn print(
        &self,
        core: &mut Core<'_>,
        shared: &Shared,
        format: u64,
        arguments: u64,
    ) -> Result<u32, Fault> {
        let format = self.string(core, shared, format)?;
        let (mut text, mut rest, mut at, mut count) = (String::new(), format.as_str(), arguments, 0);
        while let Some((before, after)) = rest.split_once('%') {
            text += before;
            let end = after.find(|c: char| c.is_ascii_alphabetic() && !"hlzjtL".contains(c) || c == '%');
            let Some(end) = end else {
                // Not a conversion: print it as is.
                text.push('%');
                rest = after;
                continue;
            };
            let (spec, conversion) = (&after[..end], after.as_bytes()[end]);
            rest = &after[end + 1..];
            if conversion == b'%' {
                text.push('%');
                continue;
            }
            let mut next = |this: &Self, core: &mut Core<'_>, bytes: u64| {
                at = at.next_multiple_of(bytes);
                count += 1;
                let value = this.read(core, shared, at, bytes);
                at += bytes;
                value
            };
            let mut numbers = Vec::new();
            for _ in spec.matches('*') {
                numbers.push(next(self, core, 4)? as u32 as i32);
            }
            let layout = Layout::new(spec, &numbers);
            let is_long = spec.contains(['l', 'z', 'j', 't']);
            let size = if is_long || b"fFeEgGaAsp".contains(&conversion) { 8 } else { 4 };
            let value = next(self, core, size)?;
            let value = match conversion {
                b'd' | b'i' if is_long => (value as i64).to_string(),
                b'd' | b'i' => (value as u32 as i32).to_string(),
                b'u' => value.to_string(),
                b'x' => format!("{}{value:x}", layout.prefix("0x")),
                b'X' => format!("{}{value:X}", layout.prefix("0X")),
                b'o' => format!("{value:o}"),
                b'p' => format!("{value:#x}"),
                b'c' => char::from(value as u8).to_string(),
                b's' => {
                    let string = self.string(core, shared, value)?;
                    string.chars().take(layout.precision.unwrap_or(usize::MAX)).collect()
                }
                _ => layout.float(conversion, f64::from_bits(value)),
            };
            text += &layout.padded(value, conversion);
        }
        text += rest;
        core.view.print(&text);
        Ok(count)
    }

    /// Reads a NUL-terminated string.
    pub(super) fn string(&self, core: &mut Core<'_>, shared: &Shared, address: u64) -> Result<String, Fault> {
        let mut bytes = Vec::new();
        while bytes.len() < MAX_LEN {
            match self.read(core, shared, address.wrapping_add(bytes.len() as u64), 1)? as u8 {
                0 => break,
                byte => bytes.push(byte),
            }
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn read(&self, core: &mut Core<'_>, shared: &Shared, address: u64, bytes: u64) -> Result<u64, Fault> {
        let (space, at) = self.locate(Space::Generic, address);
        let width = (bytes * 8) as u8;
        let outside = || super::access::outside("the thread's", at, bytes, self.local.len());
        match space {
            Space::Local => peek(&self.local, at, width).ok_or_else(outside),
            Space::Param => peek(&self.params, at, width).ok_or_else(outside),
            Space::Shared => peek(&shared.bytes, at, width).ok_or_else(outside),
            _ => core.view.load(at, width).map_err(|refusal| core.refused(refusal, "printf's load", at, bytes)),
        }
    }
}

/// A conversion's flags, width and precision.
struct Layout {
    left: bool,
    zero: bool,
    plus: bool,
    space: bool,
    alternate: bool,
    width: usize,
    precision: Option<usize>,
}

impl Layout {
    /// Parses a conversion; `stars` are the values for `*`.
    fn new(spec: &str, stars: &[i32]) -> Self {
        let flags = spec.len() - spec.trim_start_matches(['-', '0', '+', ' ', '#']).len();
        let (flags, rest) = spec.split_at(flags);
        let (width, precision) =
            rest.split_once('.').map_or((rest, None), |(width, precision)| (width, Some(precision)));
        let mut stars = stars.iter();
        let mut number = |text: &str| match text.starts_with('*') {
            true => stars.next().copied().unwrap_or(0),
            false => text.trim_end_matches(|c: char| !c.is_ascii_digit()).parse().unwrap_or(0),
        };
        let width = number(width);
        // A negative precision means none.
        let precision = precision.map(&mut number).and_then(|number| usize::try_from(number).ok());
        let has = |flag| flags.contains(flag);
        Self {
            left: has('-') || width < 0,
            zero: has('0'),
            plus: has('+'),
            space: has(' '),
            alternate: has('#'),
            width: (width.unsigned_abs() as usize).min(MAX_LEN),
            precision: precision.map(|precision| precision.min(MAX_LEN)),
        }
    }

    fn prefix(&self, prefix: &'static str) -> &'static str {
        if self.alternate { prefix } else { "" }
    }

    fn float(&self, conversion: u8, value: f64) -> String {
        let precision = self.precision.unwrap_or(6);
        if !value.is_finite() {
            return value.to_string().to_lowercase();
        }
        let text = match conversion.to_ascii_lowercase() {
            b'f' => format!("{value:.precision$}"),
            b'e' => scientific(value, precision),
            _ => general(value, precision.max(1)),
        };
        if conversion.is_ascii_uppercase() { text.to_uppercase() } else { text }
    }

    /// Adds the sign and padding.
    fn padded(&self, value: String, conversion: u8) -> String {
        let is_signed = b"difFeEgG".contains(&conversion);
        let value = match (is_signed && !value.starts_with('-'), self.plus, self.space) {
            (true, true, _) => format!("+{value}"),
            (true, false, true) => format!(" {value}"),
            _ => value,
        };
        let missing = self.width.saturating_sub(value.chars().count());
        let is_number = !b"csp".contains(&conversion);
        if self.left {
            value + &" ".repeat(missing)
        } else if self.zero && is_number {
            let digits = value.find(|c: char| c.is_ascii_hexdigit()).unwrap_or(0);
            format!("{}{}{}", &value[..digits], "0".repeat(missing), &value[digits..])
        } else {
            " ".repeat(missing) + &value
        }
    }
}

/// Formats as in `1.500000e+03`.
fn scientific(value: f64, precision: usize) -> String {
    let text = format!("{value:.precision$e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
}

/// Formats as `%g` does: in the shorter form, without trailing zeros.
fn general(value: f64, precision: usize) -> String {
    let short = |text: String| match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    };
    let text = scientific(value, precision - 1);
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "+00"));
    match exponent.parse::<i32>().unwrap_or(0) {
        exponent if exponent >= -4 && exponent < precision as i32 => {
            let decimals = (precision as i32 - 1 - exponent).max(0) as usize;
            short(format!("{value:.decimals$}"))
        }
        _ => format!("{}e{exponent}", short(digits.to_owned())),
    }
}
