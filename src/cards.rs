//! The mlx5 cards of this machine, for `ferrogin doctor`.

use mlx5::device::{Caps, Device, DeviceError};
use mlx5::verbs::{DeviceEntry, Hardware, Settings, devices};

/// A line of the report, or what to do about the line before.
#[derive(Debug, PartialEq, Eq)]
pub enum Said {
    Line(String),
    Cure(String),
}

/// What is said of the cards of this machine.
pub fn report() -> Vec<Said> {
    describe(devices(), |name| Hardware::open(Some(name), Settings::default()).map(|card| card.caps().clone()))
}

fn describe(
    found: Result<Vec<DeviceEntry>, DeviceError>,
    caps: impl Fn(&str) -> Result<Caps, DeviceError>,
) -> Vec<Said> {
    let line = |text: String| Said::Line(text);
    let found = match found {
        Ok(found) => found,
        Err(DeviceError::Library { library, why }) => {
            return vec![
                line(format!("cannot be looked for: {library}: {why}")),
                Said::Cure("install rdma-core: apt-get install libibverbs1 ibverbs-providers".into()),
                without_a_card(),
            ];
        }
        Err(error) => return vec![line(format!("cannot be looked for: {error}"))],
    };
    let mut said = Vec::new();
    for device in found.iter().filter(|device| device.mlx5) {
        match caps(&device.name) {
            Ok(caps) => said.extend(abilities(&caps)),
            Err(error) => {
                said.push(line(format!("{} cannot be opened: {error}", device.name)));
                said.push(Said::Cure("is its device file there and readable? see /dev/infiniband/uverbs*".into()));
            }
        }
    }
    if said.is_empty() {
        let others: Vec<&str> = found.iter().map(|device| &*device.name).collect();
        let others = if others.is_empty() { "no RDMA device".into() } else { others.join(", ") };
        said = vec![line(format!("none: rdma-core is installed, and this machine has {others}")), without_a_card()];
    }
    said
}

fn without_a_card() -> Said {
    Said::Cure("without one, host-rpc runs over message channels, or on the software card (crate softefa)".into())
}

/// What a card can do.
fn abilities(caps: &Caps) -> [Said; 3] {
    let yes = |able: bool| if able { "yes" } else { "no" };
    let Caps { name, max_posts, max_cqes, limits, .. } = caps;
    [
        Said::Line(format!(
            "{name}: windows of type 1 {}, of type 2 {}; atomics {}; compressed completions {}; BlueFlame {}",
            yes(caps.type1_windows),
            yes(caps.type2_windows),
            yes(caps.atomics),
            yes(caps.compression),
            yes(caps.blueflame)
        )),
        Said::Line(format!(
            "{name}: at most {max_posts} requests a queue, {max_cqes} completions; of one request {} buffers, {} bytes inline",
            limits.max_sge, limits.max_inline
        )),
        if caps.type2_windows {
            Said::Cure("host-rpc can use it".into())
        } else {
            Said::Cure("host-rpc needs windows of type 2 for long messages, which it has not: use channels".into())
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

    fn text(said: &[Said]) -> String {
        said.iter().map(|said| format!("{said:?}\n")).collect()
    }

    #[test]
    fn cards_are_shown_with_what_they_can_do() {
        let found = |name: &str, mlx5| DeviceEntry { name: name.into(), mlx5 };
        let list = vec![found("mlx5_0", true), found("rxe0", false), found("mlx5_1", true), found("mlx5_2", true)];
        let said = describe(Ok(list), |name| match name {
            "mlx5_2" => Err(DeviceError::Call { call: "ibv_open_device", errno: 13 }),
            name => Ok(caps(name)),
        });
        let all = text(&said);
        for part in [
            "mlx5_0: windows of type 1 yes, of type 2 yes; atomics yes; compressed completions no; BlueFlame no",
            "mlx5_0: at most 32768 requests a queue, 4194303 completions; of one request 30 buffers, 512 bytes inline",
            "host-rpc can use it",
            "mlx5_1: windows of type 1 yes, of type 2 no;",
            "which it has not: use channels",
            "mlx5_2 cannot be opened: ibv_open_device failed: Permission denied",
            "/dev/infiniband/uverbs",
        ] {
            assert!(all.contains(part), "{part}\n{all}");
        }
        assert!(!all.contains("rxe0"), "{all}");
    }

    #[test]
    fn no_card_and_no_library_are_told_apart() {
        let never = |name: &str| -> Result<Caps, DeviceError> { panic!("{name} was opened") };
        let none = text(&describe(Ok(Vec::new()), never));
        assert!(none.contains("none: rdma-core is installed, and this machine has no RDMA device"), "{none}");
        let others = vec![DeviceEntry { name: "rxe0".into(), mlx5: false }];
        assert!(text(&describe(Ok(others), never)).contains("this machine has rxe0"));
        let missing = DeviceError::Library { library: "libmlx5.so.1", why: "no such file".into() };
        let missing = text(&describe(Err(missing), never));
        assert!(missing.contains("libmlx5.so.1: no such file"), "{missing}");
        assert!(missing.contains("apt-get install libibverbs1 ibverbs-providers"), "{missing}");
    }
}
