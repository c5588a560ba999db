//! RDMA devices as listed by the kernel, and what the mlx5 cards among them can do.

use super::finding::Finding;
use super::machine::Machine;
use crate::probe;
use std::path::Path;

/// The area of findings that only hint at an unusable card.
pub const AREA: &str = "RDMA device";
const AMAZON: &str = "0x1d0f";
const MELLANOX: &str = "0x15b3";

pub fn check(machine: &Machine) -> Vec<Finding> {
    let mut findings = devices(machine);
    findings.extend(mlx5(machine));
    findings
}

fn devices(machine: &Machine) -> Vec<Finding> {
    let class = machine.path("/sys/class/infiniband");
    let entries = std::fs::read_dir(&class).map(|entries| entries.flatten().map(|entry| entry.path()).collect());
    let mut devices: Vec<_> = entries.unwrap_or_default();
    devices.sort();
    let mut findings = Vec::new();
    if let Some(machine_type) = machine.read("/sys/devices/virtual/dmi/id/product_name").filter(|name| !name.is_empty())
    {
        findings.push(Finding::ok("machine", machine_type));
    }
    // Counts devices that may be EFA cards, including those whose vendor is not known.
    let mut efa = 0;
    for device in &devices {
        let name = device.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let part = |file: &str| {
            std::fs::read_to_string(device.join("device").join(file)).unwrap_or_default().trim().to_owned()
        };
        let (vendor, id) = (part("vendor"), part("device"));
        let maker = match &*vendor {
            AMAZON => {
                efa += 1;
                "Amazon EFA".to_owned()
            }
            MELLANOX => "NVIDIA/Mellanox".to_owned(),
            "" => {
                efa += 1;
                "vendor not known".to_owned()
            }
            other => format!("vendor {other}"),
        };
        findings.push(Finding::ok(
            AREA,
            format!("{name}: {maker}{}", if id.is_empty() { id } else { format!(", device {id}") }),
        ));
    }
    if devices.is_empty() {
        findings.push(Finding::ok(AREA, "none"));
    }
    if let Some(directory) = &machine.verbs {
        findings.push(software(directory, &class, devices.is_empty()));
        return findings;
    }
    if machine.is_software_card() {
        return findings;
    }
    match &*machine.provider {
        "tcp" => return findings,
        "verbs" if devices.is_empty() => findings.push(Finding::problem(
            AREA,
            "no RDMA device found",
            "the provider verbs drives InfiniBand and RoCE cards",
            "load the card's driver (ibv_devices lists the cards), or set FERROGIN_PROVIDER=tcp",
        )),
        "verbs" => findings.extend(verbs(&machine.path("/dev/infiniband"))),
        _ if efa == 0 => findings.push(Finding::problem(
            AREA,
            if devices.is_empty() { "no RDMA device found" } else { "no RDMA device here is an EFA card" },
            "the provider efa only drives EFA cards",
            "use an EFA instance with EFA interfaces and the EFA driver (modinfo efa), or set FERROGIN_PROVIDER=softefa",
        )),
        _ => findings.extend(verbs(&machine.path("/dev/infiniband"))),
    }
    findings
}

/// Returns the software cards below verbs, which need no driver and no device files.
fn software(directory: &Path, class: &Path, hidden: bool) -> Finding {
    let what = format!("software cards through verbs (ferrogin verbs), from {}", directory.display());
    if !hidden {
        return Finding::ok(AREA, what);
    }
    Finding::warning(
        AREA,
        format!("{what}, and {} shows none", class.display()),
        "ferrogin verbs could not make a mount namespace, so programs that look there, such as the plugin, find no card",
        "run ferrogin verbs as root, or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces)",
    )
}

/// Checks the device files through which a process opens RDMA devices.
fn verbs(directory: &Path) -> Option<Finding> {
    let why = "libfabric opens cards through these files";
    let entries =
        std::fs::read_dir(directory).map(|entries| entries.flatten().map(|entry| entry.path()).collect::<Vec<_>>());
    let files: Vec<_> = entries
        .unwrap_or_default()
        .into_iter()
        .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("uverbs")))
        .collect();
    if files.is_empty() {
        return Some(Finding::problem(
            AREA,
            format!("{} has no uverbs file", directory.display()),
            why,
            "load ib_uverbs (modprobe ib_uverbs); in a container, pass the files in (docker run \
             --device=/dev/infiniband/uverbs0)",
        ));
    }
    // Only checks the permission: opening a device file may have effects.
    let both = nix::unistd::AccessFlags::R_OK | nix::unistd::AccessFlags::W_OK;
    let refused = files.iter().find(|path| nix::unistd::access(*path, both).is_err())?;
    Some(Finding::problem(
        AREA,
        format!("this user may not open {}", refused.display()),
        why,
        "give this user read and write access to /dev/infiniband/uverbs* (udev rules of rdma-core)",
    ))
}

fn mlx5(machine: &Machine) -> Vec<Finding> {
    const AREA: &str = "mlx5 card";
    let probed = probe::start(&["mlx5"], &[], machine.limit);
    if let Some(reason) = probed.failure() {
        let why = "host-rpc cannot use mlx5 cards; the plugin does not need them";
        let fix = "check rdma-core (ibv_devinfo), or ignore it if the machine has no mlx5 card";
        return vec![Finding::warning(AREA, reason, why, fix).details(probed.ended.last_errors(8))];
    }
    let mut findings: Vec<Finding> = probed.texts("line").into_iter().map(|text| Finding::ok(AREA, text)).collect();
    // Each fix follows its line; the plugin doesn't need these cards, so the fixes become notes.
    if let Some(last) = findings.last_mut() {
        last.why = probed.texts("fix").join("; ");
    }
    findings
}
