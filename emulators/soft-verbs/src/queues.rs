//! The program's side of the work queues: what a driver writes into the rings, and the ids of the posted requests.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use efa_dp_direct::rq::host_length;
use efa_dp_direct::wire::RxDesc;
use efa_dp_direct::wqe::{Geometry, SendWqe, Sge};
use soft_nic::card::queue::{RQ_ENTRY_LEN, WorkQueue};

use crate::guard::Errno;

/// The ids of the requests in flight. On the card an id has 16 bits: its entry's index here and, above that, the queue
/// pair's generation, which reveals a completion from an earlier queue pair with the same number.
#[derive(Debug)]
struct Ids {
    wr_ids: Vec<Option<u64>>,
    free: Vec<u16>,
    generation: u16,
}

impl Ids {
    fn new(entries: u32, generation: u16) -> Self {
        let bits = u32::BITS - entries.saturating_sub(1).leading_zeros();
        let ids = u16::try_from(entries.saturating_sub(1)).unwrap_or(u16::MAX);
        Self {
            wr_ids: vec![None; entries as usize],
            free: if entries == 0 { Vec::new() } else { (0..=ids).rev().collect() },
            generation: u32::from(generation).checked_shl(bits).unwrap_or(0) as u16,
        }
    }

    fn take(&mut self, wr_id: u64) -> Option<u16> {
        let at = self.free.pop()?;
        self.wr_ids[usize::from(at)] = Some(wr_id);
        Some(self.generation | at)
    }

    fn finish(&mut self, id: u64) -> Option<u64> {
        let at = u16::try_from(id).ok()? ^ self.generation;
        let wr_id = self.wr_ids.get_mut(usize::from(at))?.take()?;
        self.free.push(at);
        Some(wr_id)
    }
}

/// A queue pair's two work queues.
#[derive(Debug)]
pub(crate) struct Queues {
    sq: Mutex<SendQueue>,
    rq: Mutex<RecvQueue>,
}

/// The work queues' sizes.
pub(crate) struct Sizes {
    pub max_batch: u32,
    /// The send queue's first index.
    pub start: u32,
    pub max_inline: u32,
    pub max_send_sge: u32,
    pub receives: u32,
    pub max_recv_sge: u32,
}

fn next_generation() -> u16 {
    static GENERATION: AtomicU32 = AtomicU32::new(0);
    GENERATION.fetch_add(1, Ordering::Relaxed) as u16
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Queues {
    pub(crate) fn new(sq: Arc<WorkQueue>, rq: Arc<WorkQueue>, sizes: &Sizes) -> Self {
        let generation = next_generation();
        let geometry = if sq.entry_size == 128 { Geometry::WIDE } else { Geometry::NARROW };
        Self {
            sq: Mutex::new(SendQueue {
                ids: Ids::new(sq.entries, generation),
                queue: sq,
                geometry,
                max_batch: sizes.max_batch,
                max_inline: sizes.max_inline,
                max_sge: sizes.max_send_sge,
                pc: sizes.start,
                unrung: 0,
            }),
            rq: Mutex::new(RecvQueue {
                ids: Ids::new(sizes.receives, generation),
                queue: rq,
                max_sge: sizes.max_recv_sge,
                pc: 0,
            }),
        }
    }

    /// Drops all requests; the next send gets index `start`.
    pub(crate) fn reset(&self, start: u32) {
        let generation = next_generation();
        let (mut sq, mut rq) = (self.send(), self.recv());
        (sq.ids, sq.pc, sq.unrung) = (Ids::new(sq.queue.entries, generation), start, 0);
        (rq.ids, rq.pc) = (Ids::new(rq.ids.wr_ids.len() as u32, generation), 0);
    }

    pub(crate) fn send(&self) -> MutexGuard<'_, SendQueue> {
        lock(&self.sq)
    }

    pub(crate) fn recv(&self) -> MutexGuard<'_, RecvQueue> {
        lock(&self.rq)
    }
}

/// The program's side of a send queue.
#[derive(Debug)]
pub(crate) struct SendQueue {
    ids: Ids,
    pub(crate) queue: Arc<WorkQueue>,
    geometry: Geometry,
    pub(crate) max_batch: u32,
    pub(crate) max_inline: u32,
    pub(crate) max_sge: u32,
    pc: u32,
    unrung: u32,
}

impl SendQueue {
    /// Returns how many requests can be posted now.
    pub(crate) fn room(&self) -> usize {
        self.ids.free.len()
    }

    /// Whether writes can carry inline data.
    pub(crate) fn has_inline_writes(&self) -> bool {
        self.geometry == Geometry::WIDE
    }

    /// Writes a request. The card takes it at the next [`ring`](Self::ring), if not earlier.
    ///
    /// # Errors
    /// `ENOMEM` when the queue is full, `EINVAL` for a request that its entries can't hold.
    pub(crate) fn post(&mut self, request: SendWqe) -> Result<(), Errno> {
        let wr_id = request.wr_id;
        let id = self.ids.take(wr_id).ok_or(Errno::NOMEM)?;
        let wqe = SendWqe { wr_id: id.into(), phase: self.queue.phase_of(self.pc) != 0, ..request };
        let mut bytes = [0; 128];
        let len = self.geometry.wqe_size.bytes();
        if wqe.emit(&self.geometry, &mut bytes[..len]).is_err() {
            self.ids.finish(id.into());
            return Err(Errno::INVAL);
        }
        self.queue.store(self.pc, &bytes[..len]);
        self.pc = self.pc.wrapping_add(1);
        self.unrung += 1;
        if self.unrung == self.max_batch {
            self.ring();
        }
        Ok(())
    }

    /// Posts a session's requests, or none if one of its calls failed or there is no room for all.
    pub(crate) fn post_all(&mut self, session: &Session) -> Result<(), Errno> {
        if let Some(error) = session.error {
            return Err(error);
        }
        // Another thread may have posted since the session began.
        if session.requests.len() > self.room() {
            return Err(Errno::NOMEM);
        }
        let done = session.requests.iter().try_for_each(|request| self.post(*request));
        self.ring();
        done
    }

    pub(crate) fn ring(&mut self) {
        if self.unrung > 0 {
            self.unrung = 0;
            self.queue.ring(self.pc);
        }
    }

    /// Returns the program's id for a completed request; `None` if no such request is in flight.
    pub(crate) fn finish(&mut self, id: u64) -> Option<u64> {
        self.ids.finish(id)
    }
}

/// The requests between `ibv_wr_start` and `ibv_wr_complete`.
#[derive(Debug, Default)]
pub(crate) struct Session {
    pub(crate) requests: Vec<SendWqe>,
    pub(crate) error: Option<Errno>,
}

/// The program's side of a receive queue.
#[derive(Debug)]
pub(crate) struct RecvQueue {
    ids: Ids,
    pub(crate) queue: Arc<WorkQueue>,
    pub(crate) max_sge: u32,
    pc: u32,
}

impl RecvQueue {
    /// Writes a receive. The card takes it after the next [`ring`](Self::ring).
    ///
    /// # Errors
    /// `ENOMEM` when the queue is full.
    pub(crate) fn post(&mut self, wr_id: u64, buffers: &[Sge]) -> Result<(), Errno> {
        let id = self.ids.take(wr_id).ok_or(Errno::NOMEM)?;
        let empty = [Sge::default()];
        let buffers = if buffers.is_empty() { &empty } else { buffers };
        for (i, sge) in buffers.iter().enumerate() {
            // Only a receive's first descriptor has the id.
            let id = if i == 0 { id } else { 0 };
            let mut desc = RxDesc::single(id, sge.addr, host_length(sge.length), sge.lkey);
            desc.lkey_ctrl = desc.lkey_ctrl.with_first(i == 0).with_last(i + 1 == buffers.len());
            let [addr, rest] = desc.to_words();
            let mut bytes = [0; RQ_ENTRY_LEN as usize];
            bytes[..8].copy_from_slice(&addr.to_ne_bytes());
            bytes[8..].copy_from_slice(&rest.to_ne_bytes());
            self.queue.store(self.pc, &bytes);
            self.pc = self.pc.wrapping_add(1);
        }
        Ok(())
    }

    pub(crate) fn ring(&self) {
        self.queue.ring(self.pc);
    }

    /// Returns the program's id for a completed receive; `None` if no such receive is posted.
    pub(crate) fn finish(&mut self, id: u64) -> Option<u64> {
        self.ids.finish(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_another_generation_are_unknown() {
        let (mut old, mut new) = (Ids::new(8, 1), Ids::new(8, 2));
        let id = old.take(77).unwrap();
        assert_eq!((id, new.take(78)), (0b1000, Some(0b10000)));
        assert_eq!(new.finish(id.into()), None);
        assert_eq!((old.finish(id.into()), old.finish(id.into())), (Some(77), None));
        assert_eq!(old.finish(u64::MAX), None);
    }

    #[test]
    fn as_many_requests_as_entries_are_in_flight() {
        for entries in [0, 1, 2, 5, 4096, 32768] {
            let mut ids = Ids::new(entries, 3);
            let taken: Vec<_> = std::iter::from_fn(|| ids.take(9)).collect();
            assert_eq!(taken.len(), entries as usize);
            assert!(taken.iter().all(|id| ids.finish((*id).into()) == Some(9)));
        }
    }
}
