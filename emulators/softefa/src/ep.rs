//! `fid_ep`: a queue pair.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use ferrogin_libfabric::bindings as fi;

use super::av::Av;
use super::cntr::Cntr;
use super::completion::Completer;
use super::cq::Cq;
use super::data_path::DataPath;
use super::domain::Domain;
use super::eq::Eq;
use super::guard::Code;
use super::object::{Held, Uses, object};
use soft_nic::address::Address;
use soft_nic::card::counter::EVENTS;

#[repr(C)]
pub(super) struct Ep {
    pub fid: fi::fid_ep,
    pub domain: Held<Domain>,
    pub state: Mutex<State>,
    /// Capabilities that the application asked for.
    pub caps: u64,
    pub inject_size: usize,
    pub path: OnceLock<Arc<DataPath>>,
    /// Default operation flags of sends and of receives.
    pub tx_flags: AtomicU64,
    pub rx_flags: AtomicU64,
    pub uses: Uses,
}

/// One direction's completion queue.
pub(super) struct Queue {
    pub cq: Held<Cq>,
    pub selective: bool,
}

pub(super) struct State {
    /// How much room a multi-receive buffer needs to take another message.
    pub min_multi_recv: usize,
    /// Writes with immediate data take receives (`FI_RX_CQ_DATA`).
    pub writes_take_receives: bool,
    /// How often to retry a send whose peer has no receive.
    pub rnr_retry: u8,
    /// Size of a work request in bytes, and entries of the send and receive queues.
    pub wqe_size: u32,
    pub sq: u32,
    pub rq: u32,
    pub av: Option<Held<Av>>,
    pub send: Option<Queue>,
    pub recv: Option<Queue>,
    /// The bound event queue. An endpoint without connections has no events, but the event queue cannot be closed
    /// before the endpoint.
    pub eq: Option<Held<Eq>>,
    pub counters: [Option<Held<Cntr>>; EVENTS],
    pub qpn: Option<u16>,
    pub address: Option<Address>,
}

object!(Ep, FI_CLASS_EP, "ep", {
    fn close(&self) -> Result<(), Code> {
        let Some(path) = self.path.get() else { return Ok(()) };
        let completer = path.clone() as Arc<dyn Completer>;
        let drops = self.domain.card.lock().config.faults.close_drops;
        path.close(if drops { Duration::ZERO } else { DRAIN_LIMIT });
        for queue in [&path.bindings.send.queue, &path.bindings.recv.queue].into_iter().flatten() {
            queue.detach(&completer);
        }
        path.release();
        for cntr in self.state().counters.iter().flatten() {
            cntr.detach(&completer);
        }
        Ok(())
    }
});

/// The time limit for a closing endpoint to send posted requests.
const DRAIN_LIMIT: Duration = Duration::from_secs(1);

impl Ep {
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the data path.
    ///
    /// # Errors
    /// `EOPBADSTATE` before the endpoint is enabled.
    pub(super) fn path(&self) -> Result<&Arc<DataPath>, Code> {
        self.path.get().ok_or(Code::STATE)
    }

    /// Returns the default operation flags.
    pub(super) fn op_flags(&self, receive: bool) -> u64 {
        let flags = if receive { &self.rx_flags } else { &self.tx_flags };
        flags.load(Ordering::Relaxed)
    }

    /// Returns an address's entry in the bound address vector.
    pub(super) fn target(&self, at: u64) -> Result<super::av::Entry, Code> {
        self.state().av.as_ref().ok_or(Code::STATE)?.table.get(at).ok_or(Code::INVAL)
    }

    /// Returns the memory of the send and receive queues.
    pub(super) fn queues(&self) -> Result<(fi::fi_efa_wq_attr, fi::fi_efa_wq_attr), Code> {
        let qpn = self.state().qpn.ok_or(Code::STATE)?;
        let mut core = self.domain.card.lock();
        let caps = core.config.faults.qp_caps;
        let qp = core.qp(qpn).ok_or(Code::STATE)?;
        let attr = |queue: &soft_nic::card::queue::WorkQueue, max_batch, caps| fi::fi_efa_wq_attr {
            buffer: queue.buffer(),
            entry_size: queue.entry_size,
            num_entries: queue.entries,
            doorbell: queue.doorbell(),
            max_batch,
            caps,
        };
        Ok((attr(&qp.sq, qp.max_batch, caps), attr(&qp.rq, qp.rq.entries, 0)))
    }
}
