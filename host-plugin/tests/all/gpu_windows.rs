//! Windows in GPU memory, by dma-buf and by address: the card moves their bytes.

use crate::harness::{alone, config, device, gpu_memory, ranks, software_gpu};
use ferrogin_device::{Action, Flags, Window as DeviceWindow};
use ferrogin_test_support::Random;

/// Size of a window in bytes.
const LEN: usize = 300_000;
/// Where a window begins in its allocation: not on a page boundary.
const SKIP: usize = 5 * 65536 + 64;

/// Returns bytes that differ by rank, window and place.
fn pattern(rank: usize, window: usize) -> Vec<u8> {
    let mut random = Random::new((rank * 2 + window) as u64);
    (0..LEN).map(|_| random.next_u32() as u8).collect()
}

#[test]
fn bytes_move_between_windows_by_dma_buf_and_by_address() {
    let test = "bytes_move_between_windows_by_dma_buf_and_by_address";
    let Some(path) = software_gpu(test) else { return };
    alone(test, &[("FERROGIN_DEVICE", "cuda"), ("LD_LIBRARY_PATH", &path)], |plugin| {
        ranks(&plugin, 2, |rank, comm| {
            let memory = [(); 2].map(|()| gpu_memory(SKIP, LEN));
            let by_dma_buf = comm.register_dma_buf(&memory[0], 0).expect("a window by dma-buf");
            let by_address = comm.register(&memory[1], 0).expect("a window by address");
            let windows = [by_dma_buf, by_address].map(|window| (DeviceWindow(window.gin_handle()), window));
            let context = comm.create_context(&config(1, 0)).expect("a context");
            let device = device(&context, 0);
            let peer = 1 - rank;
            // What each window must hold in the end.
            let mut expected = [0, 1].map(|window| pattern(rank, window));
            memory.iter().zip(&expected).for_each(|(memory, bytes)| memory.write(0, bytes));
            let of_peer = [0, 1].map(|window| pattern(peer, window));
            comm.barrier().expect("all ranks");
            // The first half of each window is read, the second half written.
            let (mut posted, mut to) = (0, [LEN / 2 + 1; 2]);
            for (len, from) in [(1, 0), (13, 3), (4096, 64), (9001, 4095), (40_000, 77_777)] {
                for (source, target) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                    let at = to[target];
                    let (into, out_of) = (windows[target].0.at(at as u64), windows[source].0.at(from as u64));
                    device
                        .put(peer as u32, into, out_of, len as u64, Action::signal_inc(0), Flags::NONE)
                        .expect("a put");
                    expected[target][at..at + len].copy_from_slice(&of_peer[source][from..from + len]);
                    to[target] += len + 3;
                    posted += 1;
                }
            }
            device.wait_signal(0, posted).expect("a signal for each put");
            device.flush().expect("a flush");
            comm.barrier().expect("all ranks");
            for (window, (memory, expected)) in memory.iter().zip(&expected).enumerate() {
                let mut bytes = vec![0; LEN];
                memory.read(0, &mut bytes);
                let wrong = bytes.iter().zip(expected).position(|(one, other)| one != other);
                assert_eq!(wrong, None, "the first wrong byte of window {window} of rank {rank}");
            }
        });
    });
}
