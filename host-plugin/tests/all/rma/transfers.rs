//! Puts and gets of all sizes, at unaligned places, between two ranks and from a rank to itself.

use super::{TCP, finish, polling, ranks, register, transfer};
use crate::harness::{gpu_memory, rma_alone, software_gpu};
use ferrogin_test_support::Random;
use ferrogin_test_support::wait::poll_until;
use mini_nccl::DeviceMemory;
use mini_nccl::rma::{RmaComm, RmaPlugin, Signal, Transfer};
use std::sync::Arc;

/// Size of a registration in bytes.
const LEN: usize = 4 << 20;
/// Where GPU memory begins in its allocation: not on a page boundary.
const SKIP: usize = 5 * 65536 + 64;
/// Sizes, and where the bytes are. Transfers of 1 MiB and more are spread over the cards.
const TRANSFERS: [(usize, usize); 6] = [(0, 77), (1, 0), (13, 3), (4096, 64), (65_537, 4095), ((1 << 20) + 1, 70_001)];

/// Returns the transfers, each with a place for its bytes.
fn places() -> impl Iterator<Item = (usize, (usize, usize))> {
    TRANSFERS.into_iter().scan(5, |next, (size, from)| {
        let to = *next;
        *next += size + 3;
        Some((to, (size, from)))
    })
}

fn pattern(rank: usize) -> Vec<u8> {
    let mut random = Random::new(rank as u64 + 1);
    (0..LEN).map(|_| random.next_u32() as u8).collect()
}

/// Registers GPU memory by dma-buf if `gpu` is true, otherwise host memory by address.
fn move_all(plugin: &Arc<RmaPlugin>, gpu: bool) {
    ranks(plugin, 2, move |comm: RmaComm| {
        let memory = || if gpu { gpu_memory(SKIP, LEN) } else { Arc::new(DeviceMemory::alloc(LEN).expect("memory")) };
        let register = || comm.register(&memory(), 0).expect("a registration");
        let (source, put, got) = (register(), register(), register());
        let context = comm.create_context(1).expect("a context");
        source.memory().write(0, &pattern(comm.rank()));
        comm.barrier().expect("all ranks");
        let mut requests = Vec::new();
        for peer in 0..2 {
            // This rank's puts have one half of the peer's memory, and its gets from the peer one half of its own.
            let (there, here) = (comm.rank() * LEN / 2, peer * LEN / 2);
            for (to, (size, from)) in places() {
                let bytes = transfer(peer, source.at(from), put.at(there + to), size);
                requests.push(context.put(bytes, None).expect("a put"));
                let bytes = transfer(peer, got.at(here + to), source.at(from), size);
                requests.push(context.get(bytes).expect("a get"));
            }
        }
        requests.reverse();
        finish(&context, requests);
        let flush = context.flush(0, &got, 0).expect("a flush");
        assert!(
            context.test(&flush).expect("a test") && context.test(&flush).is_err(),
            "done at once, and closed once"
        );
        polling(&context, || comm.barrier().expect("all ranks"));
        for peer in 0..2 {
            let (bytes, mut expected) = (pattern(peer), vec![0; LEN / 2]);
            for (to, (size, from)) in places() {
                expected[to..to + size].copy_from_slice(&bytes[from..from + size]);
            }
            for (what, memory) in [("put by", &put), ("got from", &got)] {
                let mut found = vec![0; LEN / 2];
                memory.memory().read(peer * LEN / 2, &mut found);
                let wrong = found.iter().zip(&expected).position(|(one, other)| one != other);
                assert_eq!(wrong, None, "the first wrong byte of rank {}, {what} rank {peer}", comm.rank());
            }
        }
    });
}

#[test]
fn puts_and_gets_of_all_sizes_move_their_bytes() {
    let test = "puts_and_gets_of_all_sizes_move_their_bytes";
    let cards = vec![("SOFTEFA_FAULTS", "seed=21,reorder=64"), ("SOFTEFA_NICS", "2")];
    rma_alone(test, &[cards, TCP.to_vec()], 16, |plugin| move_all(&plugin, false));
}

#[test]
fn puts_and_gets_of_gpu_memory_by_dma_buf_move_their_bytes() {
    let test = "puts_and_gets_of_gpu_memory_by_dma_buf_move_their_bytes";
    let Some(path) = software_gpu(test) else { return };
    let gpu = [("FERROGIN_DEVICE", "cuda"), ("LD_LIBRARY_PATH", &path), ("SOFTEFA_FAULTS", "seed=22,reorder=64")];
    rma_alone(test, &[gpu.to_vec()], 16, |plugin| move_all(&plugin, true));
}

/// Puts from one source, which changes as soon as `test` says that the put is done.
#[test]
fn source_may_change_once_its_put_is_done() {
    const PUTS: usize = 300;
    let card = vec![("SOFTEFA_FAULTS", "seed=23,reorder=64,reread=0.5,delay_us=0..50")];
    rma_alone("source_may_change_once_its_put_is_done", &[card, TCP.to_vec()], 16, |plugin| {
        ranks(&plugin, 2, |comm| {
            let (memory, context) = (register(&comm, 8 * (PUTS + 2)), comm.create_context(1).expect("a context"));
            let (source, word, peer) = (8 * PUTS, 8 * (PUTS + 1), 1 - comm.rank());
            comm.barrier().expect("all ranks");
            for n in 0..PUTS {
                memory.memory().store(source, n as u64 + 1);
                let put = transfer(peer, memory.at(source), memory.at(8 * n), 8);
                finish(&context, vec![context.put(put, None).expect("a put")]);
            }
            let put = transfer(peer, memory.at(source), memory.at(0), 0);
            let signal = Signal { word: memory.at(word), value: 1, strong: true };
            finish(&context, vec![context.put(put, Some(signal)).expect("a signal")]);
            poll_until("the peer's signal", || {
                context.progress().expect("progress");
                memory.memory().load(word) == 1
            });
            let wrong = (0..PUTS).find(|n| memory.memory().load(8 * n) != *n as u64 + 1);
            assert_eq!(wrong, None, "the first word of rank {} that has the bytes of another put", comm.rank());
            polling(&context, || comm.barrier().expect("all ranks"));
        });
    });
}

/// Deregisters the sources of puts that no card has yet: queued ones, or those that follow a full window of signals.
fn deregister_sources(test: &str, signals: usize) {
    // The card reads the source late.
    let card = [("SOFTEFA_FAULTS", "seed=24,delay_us=20000..20000")];
    rma_alone(test, &[card.to_vec()], 16, move |plugin| {
        ranks(&plugin, 1, move |comm| {
            let (memory, context) = (register(&comm, 4096), comm.create_context(1).expect("a context"));
            let signal = Signal { word: memory.at(0), value: 1, strong: true };
            let bytes = [1, 2].map(|value| {
                let bytes = Arc::new(DeviceMemory::alloc(64).expect("memory"));
                bytes.store(0, value);
                bytes
            });
            let sources = bytes.each_ref().map(|bytes| comm.register(bytes, 0).expect("a registration"));
            let earlier = transfer(0, memory.at(8), memory.at(16), 8);
            let mut requests: Vec<_> =
                (0..signals).map(|_| context.put(earlier, Some(signal)).expect("a signal")).collect();
            for (source, to) in sources.iter().zip([24, 32]) {
                let put = Transfer { aggregate: true, ..transfer(0, source.at(0), memory.at(to), 8) };
                requests.push(context.put(put, (signals > 0).then_some(signal)).expect("a put"));
            }
            drop(sources);
            finish(&context, requests);
            assert_eq!([24, 32].map(|at| memory.memory().load(at)), [1, 2]);
        });
    });
}

#[test]
fn source_of_a_queued_put_stays_registered_until_the_put_is_done() {
    deregister_sources("source_of_a_queued_put_stays_registered_until_the_put_is_done", 0);
}

#[test]
fn source_of_a_put_behind_a_full_window_stays_registered_until_the_put_is_done() {
    deregister_sources("source_of_a_put_behind_a_full_window_stays_registered_until_the_put_is_done", 256);
}
