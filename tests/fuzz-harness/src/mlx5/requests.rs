//! Arbitrary bytes in a send ring.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::OnceLock;
use std::time::Duration;

use ferrogin_test_support::wait::wait_until;
use mlx5::cq::{CompletionQueue, Polled};
use mlx5::device::{Access, CqAttr, Device, Mr, Pd, QpAttr};
use mlx5::wire::{CtrlSeg, FmCeSe};
use mlx5::wqe::{Limits, SegmentWriter, Transport, WindowType};

use soft_mlx5::{Card, Settings};

const LIMITS: Limits = Limits { max_inline: 128, max_sge: 4 };
const BYTES: usize = 4096;
const GUARD: u8 = 0x5a;

struct Fixture {
    card: Card,
    pd: Pd,
    mr: Mr,
    window: u32,
    /// A page of guard bytes on each side of the region.
    guards: [&'static [u8]; 2],
}

fn fixture() -> &'static Fixture {
    static FIXTURE: OnceLock<Fixture> = OnceLock::new();
    FIXTURE.get_or_init(|| {
        let settings = Settings {
            seed: Some(1),
            rnr_timeout: Some(Duration::from_millis(1)),
            max_bind_delay: Duration::from_micros(20),
            ..Settings::default()
        };
        let card = Card::open(settings).expect("a card");
        let pd = card.alloc_pd().expect("a domain");
        let (before, rest) = vec![GUARD; 3 * BYTES].leak().split_at_mut(BYTES);
        let (region, after) = rest.split_at_mut(BYTES);
        let base = NonNull::from(region).cast();
        // SAFETY: leaked memory that nothing else accesses: the guards are other slices.
        let mr = unsafe { card.register(&pd, base, BYTES, Access(0x1f)) }.expect("a region");
        let window = card.alloc_window(&pd, WindowType::Type2).expect("a window");
        let rkey = window.rkey;
        // The window stays allocated as long as the card is open.
        std::mem::forget(window);
        Fixture { card, pd, mr, window: rkey, guards: [before, after] }
    })
}

/// Puts arbitrary bytes into one of the card's send rings: it executes or refuses each request, and completes it. Bytes
/// outside the registered memory don't change.
///
/// # Panics
/// If one of these rules is broken.
pub fn requests(data: &[u8]) {
    let Fixture { card, pd, mr, window, guards } = fixture();
    let Some((&mode, mut rest)) = data.split_first() else { return };
    let transport = if mode & 1 == 0 { Transport::Rc } else { Transport::Ud };
    let cq = card.create_cq(&CqAttr { entries: 64, compression: mode & 2 != 0 }).expect("a queue");
    let attr = QpAttr {
        transport,
        send_cq: cq.handle.clone(),
        recv_cq: cq.handle.clone(),
        srq: None,
        max_send: 16,
        max_recv: 4,
        limits: LIMITS,
        max_recv_sge: 1,
        signal_all: false,
    };
    let mut qp = card.create_qp(pd, &attr).expect("a queue pair");
    match transport {
        Transport::Rc => {
            let own = card.endpoint(&qp.handle).expect("an endpoint");
            card.connect(&qp.handle, &own).expect("connected to itself");
        }
        Transport::Ud => card.open_datagrams(&qp.handle, 7).expect("open"),
    }
    let mut queue = CompletionQueue::new(cq.parts);
    let (qpn, mut next) = (qp.send.qpn, 0_u32);
    // Each request: how to repair it, its size in units of 16 bytes, and its bytes.
    while let Some((&[repair, units], after)) = rest.split_first_chunk::<2>() {
        let bytes = (usize::from(units) % 12 + 1) * 16;
        if after.len() < bytes || next > 12 {
            break;
        }
        let (request, after) = after.split_at(bytes);
        rest = after;
        let mut request = request.to_vec();
        if repair & 1 != 0 {
            request[1..3].copy_from_slice(&(next as u16).to_be_bytes());
            request[4..7].copy_from_slice(&qpn.to_be_bytes()[1..]);
            request[7] = (bytes / 16) as u8;
            request[0] = 0;
        }
        if repair & 2 != 0 {
            // Keys that exist, with addresses that may exist.
            let key = if repair & 4 != 0 { *window } else { mr.rkey };
            let addr = mr.addr + u64::from(repair) * 16;
            for (at, value) in [(16, addr.to_be_bytes()), (24, (u64::from(key) << 32).to_be_bytes())] {
                if let Some(to) = request.get_mut(at..at + 8) {
                    to.copy_from_slice(&value);
                }
            }
            for at in (32..bytes).step_by(16) {
                request[at..at + 3].fill(0);
                request[at + 4..at + 8].copy_from_slice(&mr.lkey.to_be_bytes());
                request[at + 8..at + 16].copy_from_slice(&addr.to_be_bytes());
            }
        }
        qp.send.ring.at(next).put_bytes(0, &request);
        next += bytes.div_ceil(64) as u32;
    }
    // The last request is signaled; if the queue pair has failed by then, it completes with a flush error.
    let nop = CtrlSeg::new(0, next as u16, qpn, 1, FmCeSe::CQ_UPDATE, 0);
    qp.send.ring.at(next).put(0, nop);
    qp.send.record.set((next + 1) & 0xffff);
    qp.send.register.ring(u64::from_ne_bytes({
        let mut word = [0; 8];
        word[4..7].copy_from_slice(&qpn.to_be_bytes()[1..]);
        word[7] = 1;
        word
    }));
    let mut is_done = || {
        let last = match queue.poll().expect("the card writes no nonsense") {
            Polled::Empty => false,
            Polled::Done(entry) => entry.wqe_counter() == next as u16,
            Polled::Failed(_) => true,
        };
        queue.release();
        last
    };
    // Polls many times between two pauses of the wait.
    wait_until("answer of the card", || (0..1000).any(|_| is_done()));
    assert!(guards.iter().copied().flatten().all(|byte| *byte == GUARD), "bytes outside the region changed");
}
