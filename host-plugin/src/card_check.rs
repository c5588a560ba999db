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
use ferrogin_libfabric::{CompletionQueue, CqAttr, Info, Version, bindings};

/// Requests in flight on the endpoint that the check opens.
const DEPTH: usize = 16;

/// Entries of the completion queue whose rings are counted: a ring of them fills whole pages.
const RING: usize = 4096;

/// Runs the steps of `createContext` on one card, for this rank alone, and closes everything again. This way, driver,
/// libfabric and GPU problems show up in `init`, where NCCL can still continue without the plugin.
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
    check_rings(&rail)?;
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
        // SAFETY: `memory` outlives the endpoint, which is dropped in this iteration. Only this endpoint uses `offsets`
        // meanwhile.
        let opened = unsafe { Endpoint::open(&rail, device, options, &*memory.card, offsets) };
        opened.map_err(|error| explain_counters(error, card, query.lib.version()))?;
    }
    Ok(())
}

/// Refuses a card that divides a completion queue into several rings ("sub-CQs"), of which a queue pair uses one: the
/// watcher and the signal proxy read the first. libfabric doesn't say how many there are, but the card's driver maps
/// them as one piece.
fn check_rings(rail: &Rail) -> Result<(), Error> {
    let failed = |what: &str| Error::fabric(format!("{what} on card {}", rail.name()));
    let cq =
        CompletionQueue::open(&rail.domain, &CqAttr { size: RING }).map_err(failed("opening a completion queue"))?;
    let ring = rail.gda.query_cq(&cq).map_err(failed("querying a completion queue"))?;
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let bytes = ring.num_entries as usize * ring.entry_size as usize;
    match rings_in(&maps, ring.buffer as usize, bytes) {
        0 | 1 => Ok(()),
        rings => Err(Error::Usage(format!(
            "card {} divides each completion queue into {rings} rings (sub-CQs), but this ferrogin reads only the first, so it would miss \
             failed requests and emulated signals: use another type of card, and please report it",
            rail.name()
        ))),
    }
}

/// Returns how many rings of `bytes` bytes fit in the driver's mapping that begins at `ring`, by the text of
/// /proc/self/maps; 0 if there is no such mapping, as with a software card.
fn rings_in(maps: &str, ring: usize, bytes: usize) -> usize {
    let mapping = maps.lines().filter(|line| line.contains("/dev/infiniband/")).find_map(|line| {
        let (start, end) = line.split_once(' ')?.0.split_once('-')?;
        let [start, end] = [start, end].map(|address| usize::from_str_radix(address, 16));
        Some((start.ok()?, end.ok()?)).filter(|(start, _)| *start == ring)
    });
    mapping.map_or(0, |(start, end)| (end - start) / bytes.max(1))
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

    #[test]
    fn rings_of_completion_queue_are_counted_in_its_mapping() {
        let maps = "7f0000000000-7f0000004000 rw-s 00000000 00:06 412 /dev/infiniband/uverbs0\n\
            7f0000010000-7f0000018000 rw-s 00004000 00:06 412 /dev/infiniband/uverbs0\n\
            7f0000020000-7f0000028000 rw-p 00000000 00:00 0 \n";
        let rings = |at| rings_in(maps, at, 0x4000);
        assert_eq!((rings(0x7f00_0000_0000), rings(0x7f00_0001_0000)), (1, 2));
        assert_eq!((rings(0x7f00_0002_0000), rings(0x7f00_0000_1000)), (0, 0), "no mapping of a driver");
        assert_eq!(rings_in("nothing", 0, 0), 0);
    }

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
