//! Puts and gets of all sizes, at places that are not aligned, between two ranks and of a rank to itself.

use super::{TCP, finish, polling, ranks, transfer};
use crate::harness::{gpu_memory, rma_alone, software_gpu};
use ferrogin_test_support::Random;
use mini_nccl::DeviceMemory;
use mini_nccl::rma::{RmaComm, RmaPlugin};
use std::sync::Arc;

/// Bytes of a registration.
const LEN: usize = 4 << 20;
/// Where GPU memory begins in its allocation: not at a page.
const SKIP: usize = 5 * 65536 + 64;
/// Sizes, and where the bytes are. Those of 1 MiB and more spread over the cards.
const TRANSFERS: [(usize, usize); 6] = [(0, 77), (1, 0), (13, 3), (4096, 64), (65_537, 4095), ((1 << 20) + 1, 70_001)];

/// The transfers, each with a place for its bytes.
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

/// Registers memory of `gpu` by dma-buf, or of the host by address.
fn move_all(plugin: &Arc<RmaPlugin>, gpu: bool) {
    ranks(plugin, 2, move |comm: RmaComm| {
        let memory = || match gpu {
            true => gpu_memory(SKIP, LEN),
            false => Arc::new(DeviceMemory::alloc(LEN).expect("memory")),
        };
        let register = || comm.register(&memory(), 0).expect("a registration");
        let (source, put, got) = (register(), register(), register());
        let context = comm.create_context(1).expect("a context");
        source.memory().write(0, &pattern(comm.rank()));
        comm.barrier().expect("all ranks");
        let mut requests = Vec::new();
        for peer in 0..2 {
            // What this rank puts has a half of the peer's memory, and what it gets from the peer a half of its own.
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
        assert!(context.flush(0, &got, 0).expect("a flush").is_none());
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
