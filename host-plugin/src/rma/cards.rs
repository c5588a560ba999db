//! Finds cards whose provider has what the RMA plugin needs: reliable datagrams with messages, remote memory access and
//! immediate data. It needs neither queues for kernels nor counters, so every EFA generation works, and so do other
//! fabrics.

use crate::cards;
use crate::config::Provider;
use crate::device::DeviceKind;
use crate::error::Error;
use ferrogin_libfabric::{Hints, Info, Libfabric, bindings, find_datagrams};
use ferrogin_rendezvous::interface;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Memory registration modes that [`super::rail`] and [`super::memory`] support.
const MR_MODES: i32 = bindings::FI_MR_LOCAL
    | bindings::FI_MR_VIRT_ADDR
    | bindings::FI_MR_ALLOCATED
    | bindings::FI_MR_PROV_KEY
    | bindings::FI_MR_HMEM;
/// Queue entries; more are never in use.
const QUEUE: usize = 1024;

/// Returns all of `provider`'s cards on this machine, ordered by PCI address and name.
///
/// # Errors
/// No card is usable; the message says why, and what to do.
pub fn find(lib: &Arc<Libfabric>, provider: Provider, kind: DeviceKind) -> Result<Vec<Info>, Error> {
    let caps = bindings::FI_MSG | bindings::FI_RMA;
    match kind {
        DeviceKind::Cpu => search(lib, provider, caps),
        DeviceKind::Cuda => search(lib, provider, caps | bindings::FI_HMEM).map_err(|error| {
            if search(lib, provider, caps).is_err() {
                return error;
            }
            let refused = cards::refuses_gpu_memory(lib, provider);
            Error::Usage(format!("{refused}. If NCCL registers only host memory, set FERROGIN_DEVICE=cpu instead"))
        }),
    }
}

fn search(lib: &Arc<Libfabric>, provider: Provider, caps: u64) -> Result<Vec<Info>, Error> {
    let hints = |name: &str| {
        Hints::new(name)
            .caps(caps)
            .mode(bindings::FI_CONTEXT | bindings::FI_CONTEXT2 | bindings::FI_RX_CQ_DATA)
            .mr_mode(MR_MODES)
    };
    let ask = |name: &str, what: String| lib.getinfo(&hints(name)).map_err(Error::fabric(what));
    let mut found = match provider {
        Provider::SoftEfa => {
            let dir = cards::load_software_card(lib)?;
            let settings = cards::software_card_settings();
            ask(
                "softefa",
                format!("no software card: libfabric did not load libsoftefa-fi.so from {}{settings}", dir.display()),
            )?
        }
        Provider::Efa => {
            if !cards::has_rdma_device() {
                return Err(Error::Usage(
                    "no EFA card on this machine (/sys/class/infiniband is empty): install the EFA driver on an EFA instance, or set \
                     FERROGIN_PROVIDER to tcp, verbs or softefa"
                        .to_owned(),
                ));
            }
            cards::enable_fork_safety();
            ask("efa", format!("libfabric {} offers no EFA card with RMA (fi_info -p efa -c FI_RMA)", lib.version()))?
        }
        Provider::Tcp => {
            let address = interface::addresses().ok().and_then(|all| all.first().map(ToString::to_string));
            let what = format!("libfabric {} offers no tcp with RMA (fi_info -p tcp -c FI_RMA)", lib.version());
            vec![find_datagrams(lib, "tcp", address.as_deref(), caps).map_err(Error::fabric(what))?]
        }
        Provider::Verbs => ask(
            "verbs;ofi_rxm",
            format!("libfabric {} offers no verbs;ofi_rxm with RMA (fi_info -p 'verbs;ofi_rxm')", lib.version()),
        )?,
    };
    // The fabric with no protocol above the card sorts first, if there is one.
    found.sort_by_key(|info| info.fabric_name() != cards::FABRIC);
    let mut seen = BTreeSet::new();
    found.retain(|info| seen.insert(info.device_name().unwrap_or_else(|| info.domain_name())));
    // Shorter names sort first, so that softefa2 comes before softefa10.
    found.sort_by_key(|card| (card.pci_address(), card.domain_name().len(), card.domain_name()));
    for info in &mut found {
        info.limit_queues(QUEUE);
    }
    Ok(found)
}
