//! Checks a card in `init`.

use crate::cards::CardQuery;
use crate::config::Signals;
use crate::device::{self, Device};
use crate::endpoint::{CounterOffsets, Endpoint, EndpointOptions, Role};
use crate::error::Error;
use crate::memory::{ContextMemory, MemoryLayout, RegisteredMemory};
use crate::platform::Platform;
use crate::rail::{QueueOptions, Rail};
use crate::shortage;
use crate::signal_proxy::inbox::Inbox;
use ferrogin_libfabric::{Info, Version, bindings};

/// Requests in flight on the endpoint that the check opens.
const DEPTH: usize = 16;

/// Runs the steps of `createContext` on one card, for this rank alone, and closes everything again. This way, driver, libfabric and GPU
/// problems show up in `init`, where NCCL can still continue without the plugin.
///
/// # Errors
/// The error of the first step that fails, with its cause if known.
#[allow(unsafe_code)]
pub fn check(query: &CardQuery, signals: Signals, device: &dyn Device, card: &Info) -> Result<(), Error> {
    let rail = Rail::open(0, card, 1)?;
    if signals == Signals::Emulated {
        Inbox::info(query, &rail)?;
        if let Some(reason) = device.cannot_flush_writes() {
            return Err(Error::Usage(format!(
                "FERROGIN_SIGNALS=emulated: {reason}, so a signal could arrive before its bytes: update the driver, \
                 or set FERROGIN_SIGNALS=card"
            )));
        }
    }
    let options = QueueOptions { depth: DEPTH, wide: false, tclass: 0, receives: 0 };
    let info = rail
        .endpoint_info(query, options)
        .map_err(Error::fabric(format!("asking card {} for queue pairs", rail.name())))?;
    let layout = MemoryLayout { page: device::page_size(), endpoints: 1, counters: 2, pooled: 1, slots: DEPTH };
    let memory = ContextMemory::allocate(device, layout)?;
    let _registered = RegisteredMemory::register(&rail, &memory, layout)?;
    let offsets = CounterOffsets { completed: layout.completed(), errors: layout.errors() };
    // One endpoint at a time, so the check needs no more counters than the smallest context.
    for role in [Role::Data, Role::Signal(0)] {
        let options =
            EndpointOptions { provider: query.provider, signals, role, info: &info, depth: DEPTH, isolates: false };
        // SAFETY: `memory` outlives the endpoint, which is dropped in this iteration. Only this endpoint uses `offsets` meanwhile.
        let opened = unsafe { Endpoint::open(&rail, device, options, &*memory.card, offsets) };
        opened.map_err(|error| explain_counters(error, card, query.lib.version()))?;
    }
    Ok(())
}

/// Adds the known cause to the error of a completion counter that doesn't open.
fn explain_counters(error: Error, card: &Info, libfabric: Version) -> Error {
    let Error::Fabric { what, source: source @ ferrogin_libfabric::Error::Call { call: "cntr_open_ext", code, .. } } =
        error
    else {
        return error;
    };
    if shortage::now().is_some() {
        return Error::Fabric { what, source };
    }
    let switch = std::env::var("FI_EFA_USE_HW_CNTR").ok();
    let cause =
        counter_cause(code, card.max_counter_value(), switch.as_deref(), libfabric, Platform::this().lacks_counters());
    Error::Usage(format!("{what}: {source}: {cause}"))
}

/// Explains why the card has no completion counters for kernels, and names the fix.
fn counter_cause(
    code: i32,
    highest: u64,
    switch: Option<&str>,
    libfabric: Version,
    platform: Option<String>,
) -> String {
    if let Some(reason) = platform {
        return reason;
    }
    match (code, switch) {
        (bindings::FI_ENOSYS, _) => format!(
            "this libfabric {libfabric} was built with an rdma-core that has no completion counters: install libfabric and rdma-core \
             with the AWS EFA installer, and name that libfabric in FERROGIN_LIBFABRIC"
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
        _ => "check the EFA driver and the kernel's log".to_owned(),
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
    fn counter_error_names_its_cause() {
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
