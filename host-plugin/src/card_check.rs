//! The proof of a card in `init`.

use super::{Memory, RailRegions, Sections};
use crate::device::{self, Device};
use crate::endpoint::{COUNTER_STRIDE, Cells, Endpoint, Role};
use crate::error::Error;
use crate::platform::Platform;
use crate::plugin::Plugin;
use crate::rail::{QueueWish, Rail};
use ferrogin_libfabric::{Info, Version, bindings};

/// Requests in flight of the endpoint that proves a card.
const PROOF_DEPTH: usize = 16;

/// Does on one card, for this rank alone, what `createContext` does: what a driver, a libfabric or a GPU lacks is found out in
/// `init`, where NCCL can still go on without the plugin. Closes all of it again.
///
/// # Errors
/// The first step that fails, with the cause that is known for it.
#[allow(unsafe_code)]
pub fn prove(plugin: &Plugin, device: &dyn Device, card: &Info) -> Result<(), Error> {
    let rail = Rail::open(0, card, 1)?;
    let wish = QueueWish { depth: PROOF_DEPTH, wide: false, tclass: 0 };
    let info = rail
        .endpoint_info(plugin, wish)
        .map_err(Error::fabric(format!("asking card {} for queue pairs", rail.name())))?;
    let sections = Sections { page: device::page_size(), endpoints: 1, counters: 2, slots: PROOF_DEPTH };
    let memory = Memory::allocate(device, sections)?;
    let _regions = RailRegions::register(&rail, &memory, sections)?;
    let cells = Cells { completed: sections.completed(), errors: COUNTER_STRIDE };
    // One after the other: a card with few counters is not asked for more than the smallest context needs.
    for role in [Role::Data, Role::Signal(0)] {
        let queue = (role, &info, PROOF_DEPTH);
        // SAFETY: `memory` outlives the endpoint, which is closed at once; one endpoint at a time has the places.
        let opened = unsafe { Endpoint::open(&rail, device, plugin.config.provider, queue, memory.counters(), cells) };
        opened.map_err(|error| explain_counters(error, card, plugin.lib.version()))?;
    }
    Ok(())
}

/// Adds what is known about completion counters that do not open.
fn explain_counters(error: Error, card: &Info, libfabric: Version) -> Error {
    let Error::Fabric { what, source: source @ ferrogin_libfabric::Error::Call { call: "cntr_open_ext", code, .. } } =
        error
    else {
        return error;
    };
    let switch = std::env::var("FI_EFA_USE_HW_CNTR").ok();
    let cause =
        counter_cause(code, card.max_counter_value(), switch.as_deref(), libfabric, Platform::this().lacks_counters());
    Error::Usage(format!("{what}: {source}: {cause}"))
}

/// Why the card has no completion counter for kernels, and the cure.
fn counter_cause(
    code: i32,
    highest: u64,
    switch: Option<&str>,
    libfabric: Version,
    platform: Option<String>,
) -> String {
    if let Some(why) = platform {
        return why;
    }
    match (code, switch) {
        (bindings::FI_ENOSYS, _) => format!(
            "this libfabric {libfabric} was built with an rdma-core that has no completion counters: install the AWS EFA installer's \
             libfabric and rdma-core, and name the former in FERROGIN_LIBFABRIC"
        ),
        (bindings::FI_EOPNOTSUPP, _) if highest == u64::MAX => {
            "the card, its driver or rdma-core has no completion counters in hardware: update the EFA driver, firmware and rdma-core \
             (AWS EFA installer)"
                .to_owned()
        }
        (bindings::FI_EOPNOTSUPP, Some(value)) if value != "1" => {
            format!("FI_EFA_USE_HW_CNTR={value} switches completion counters in hardware off: set FI_EFA_USE_HW_CNTR=1")
        }
        (bindings::FI_EOPNOTSUPP, None) => format!(
            "this libfabric is {libfabric}, and stock 2.6.0 has completion counters in hardware off: set FI_EFA_USE_HW_CNTR=1, or \
             install a libfabric that has them on (main and the 2.6 branch since August 2026)"
        ),
        _ => "check the EFA driver, and the kernel's log".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OFF: i32 = bindings::FI_EOPNOTSUPP;
    const FINITE: u64 = (1 << 31) - 1;

    fn cause(code: i32, highest: u64, switch: Option<&str>) -> String {
        counter_cause(code, highest, switch, Version::new(2, 6), None)
    }

    #[test]
    fn a_missing_counter_has_its_cause_named() {
        let off = cause(OFF, FINITE, None);
        assert!(off.contains("set FI_EFA_USE_HW_CNTR=1") && off.contains("2.6.0"), "{off}");
        let switched = cause(OFF, FINITE, Some("0"));
        assert!(switched.contains("FI_EFA_USE_HW_CNTR=0 switches"), "{switched}");
        assert!(cause(OFF, u64::MAX, None).contains("driver, firmware and rdma-core"));
        assert!(cause(bindings::FI_ENOSYS, u64::MAX, None).contains("built with an rdma-core"));
        assert!(cause(bindings::FI_ENOMEM, FINITE, None).contains("kernel's log"));
        let known =
            counter_cause(OFF, FINITE, None, Version::new(2, 6), Some("this machine is a p5.48xlarge".to_owned()));
        assert!(known.contains("p5.48xlarge") && !known.contains("FI_EFA"), "{known}");
    }
}
