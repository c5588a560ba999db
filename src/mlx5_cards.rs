//! The mlx5 cards of this machine, for `ferrogin doctor`.

use mlx5::device::{Caps, Device, DeviceError};
use mlx5::verbs::{DeviceEntry, Hardware, Settings, devices};

/// An entry of the report: a line, or a fix for what the previous line says.
#[derive(Debug, PartialEq, Eq)]
pub enum Report {
    Line(String),
    Fix(String),
}

/// Reports on this machine's cards.
pub fn report() -> Vec<Report> {
    describe(devices(), |name| Hardware::open(Some(name), Settings::default()).map(|card| card.caps().clone()))
}

fn describe(
    found: Result<Vec<DeviceEntry>, DeviceError>,
    caps: impl Fn(&str) -> Result<Caps, DeviceError>,
) -> Vec<Report> {
    let line = |text: String| Report::Line(text);
    let found = match found {
        Ok(found) => found,
        Err(DeviceError::Library { library, why: reason }) => {
            return vec![
                line(format!("unknown: cannot load {library}: {reason}")),
                Report::Fix("install rdma-core: apt-get install libibverbs1 ibverbs-providers".into()),
                without_a_card(),
            ];
        }
        Err(error) => return vec![line(format!("unknown: {error}"))],
    };
    let mut report = Vec::new();
    for device in found.iter().filter(|device| device.mlx5) {
        match caps(&device.name) {
            Ok(caps) => report.extend(capabilities(&caps)),
            Err(error) => {
                report.push(line(format!("{} cannot be opened: {error}", device.name)));
                report.push(Report::Fix(
                    "check that the device file /dev/infiniband/uverbs* exists and is readable for this user".into(),
                ));
            }
        }
    }
    if report.is_empty() {
        let others: Vec<&str> = found.iter().map(|device| &*device.name).collect();
        let others = if others.is_empty() { "no RDMA device".into() } else { others.join(", ") };
        report = vec![line(format!("none: rdma-core is installed, but this machine has {others}")), without_a_card()];
    }
    report
}

fn without_a_card() -> Report {
    Report::Fix(
        "without an mlx5 card, host-rpc runs over message channels, or on the software card (crate soft-mlx5)".into(),
    )
}

/// Describes a card's capabilities.
fn capabilities(caps: &Caps) -> [Report; 3] {
    let yes = |able: bool| if able { "yes" } else { "no" };
    let Caps { name, max_posts, max_cqes, limits, .. } = caps;
    [
        Report::Line(format!(
            "{name}: memory windows of type 1 {}, of type 2 {}; atomics {}; compressed completions {}; BlueFlame {}",
            yes(caps.type1_windows),
            yes(caps.type2_windows),
            yes(caps.atomics),
            yes(caps.compression),
            yes(caps.blueflame)
        )),
        Report::Line(format!(
            "{name}: at most {max_posts} requests in a queue, {max_cqes} completions, {} buffers in a request, {} bytes inline",
            limits.max_sge, limits.max_inline
        )),
        if caps.type2_windows {
            Report::Fix("host-rpc can use it".into())
        } else {
            Report::Fix(
                "host-rpc needs memory windows of type 2 for long messages: use message channels with this card".into(),
            )
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use mlx5::wqe::Limits;

    fn caps(name: &str) -> Caps {
        Caps {
            name: name.into(),
            compression: false,
            type1_windows: true,
            type2_windows: name != "mlx5_1",
            atomics: true,
            blueflame: false,
            max_posts: 32768,
            max_cqes: 4_194_303,
            limits: Limits { max_inline: 512, max_sge: 30 },
        }
    }

    fn text(report: &[Report]) -> String {
        report.iter().map(|entry| format!("{entry:?}\n")).collect()
    }

    #[test]
    fn report_has_capabilities_of_each_card() {
        let found = |name: &str, mlx5| DeviceEntry { name: name.into(), mlx5 };
        let list = vec![found("mlx5_0", true), found("rxe0", false), found("mlx5_1", true), found("mlx5_2", true)];
        let report = describe(Ok(list), |name| match name {
            "mlx5_2" => Err(DeviceError::Call { call: "ibv_open_device", errno: 13 }),
            name => Ok(caps(name)),
        });
        let all = text(&report);
        for part in [
            "mlx5_0: memory windows of type 1 yes, of type 2 yes; atomics yes; compressed completions no; BlueFlame no",
            "mlx5_0: at most 32768 requests in a queue, 4194303 completions, 30 buffers in a request, 512 bytes inline",
            "host-rpc can use it",
            "mlx5_1: memory windows of type 1 yes, of type 2 no;",
            "use message channels with this card",
            "mlx5_2 cannot be opened: ibv_open_device failed: Permission denied",
            "/dev/infiniband/uverbs",
        ] {
            assert!(all.contains(part), "{part}\n{all}");
        }
        assert!(!all.contains("rxe0"), "{all}");
    }

    #[test]
    fn missing_card_and_missing_library_have_own_reports() {
        let never = |name: &str| -> Result<Caps, DeviceError> { panic!("{name} was opened") };
        let none = text(&describe(Ok(Vec::new()), never));
        assert!(none.contains("none: rdma-core is installed, but this machine has no RDMA device"), "{none}");
        let others = vec![DeviceEntry { name: "rxe0".into(), mlx5: false }];
        assert!(text(&describe(Ok(others), never)).contains("this machine has rxe0"));
        let missing = DeviceError::Library { library: "libmlx5.so.1", why: "no such file".into() };
        let missing = text(&describe(Err(missing), never));
        assert!(missing.contains("libmlx5.so.1: no such file"), "{missing}");
        assert!(missing.contains("apt-get install libibverbs1 ibverbs-providers"), "{missing}");
    }
}
