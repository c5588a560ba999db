//! Counts the instructions of mlx5 posts and polls: `cargo bench -p soft-mlx5 --bench instructions [-- --check]`.
//!
//! Each figure is the mean over many operations and counts all executed instructions: the loop, loading the arguments
//! from memory, the doorbell, and for polls also reading each completion's byte count and request index and releasing
//! the slots. The card executes no instructions, because the completions are already in the queue. With `--check` the
//! program prints PASS, FAIL or SKIP for each budget, and fails if one is exceeded.
#![allow(unsafe_code)]

use ferrogin_test_support::callgrind::{self, Count};
use mlx5::cq::{CompletionQueue, CqParts, Layout, Polled, Slots};
use mlx5::device::Handle;
use mlx5::mmio::{ArmRegister, BlueFlame, DoorbellRecord, DoorbellRegister, DoorbellRegisterParts};
use mlx5::ring::Ring;
use mlx5::sq::{Flags, SendParts, SendQueue};
use mlx5::wire::{Cqe, CqeOpcode, OpOwn};
use mlx5::wqe::{Data, Limits, Op, Remote, Sge, Transport};
use soft_mlx5::cq_writer::{Blocks, CompressedLayout, Compression, CqMemory, CqWriter};
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::ptr::NonNull;
use std::slice::from_ref;

/// Budgets, and the instruction counts of the usual drivers (UCX for polls, rdma-core for posts).
const ROWS: &[(&str, Option<f64>, &str)] = &[
    ("poll, plain", Some(18.0), "25.3"),
    ("poll, plain, one by one", None, "25.3"),
    ("poll, zip, regular", Some(20.0), "27.3"),
    ("poll, zip, regular, one by one", None, "27.3"),
    ("poll, zip, blocks of 7, requester", Some(40.0), "84.8"),
    ("poll, zip, blocks of 7, responder", Some(40.0), "84.8"),
    ("poll, zip, blocks of 7, one by one", None, "84.8"),
    ("post, write, doorbell", Some(60.0), "236"),
    ("post, write, doorbell, by a call", None, "236"),
    ("post, write, BlueFlame", None, "236"),
    ("post, write, batch of 16", Some(40.0), "140"),
    ("complete a write", None, "-"),
];

/// The name in the last line, which the test run parses: a single word (`xtask`'s `closing_line`).
const LABEL: &str = "mlx5";

fn main() -> ExitCode {
    if callgrind::running() {
        count_all();
        return ExitCode::SUCCESS;
    }
    let check = std::env::args().any(|arg| arg == "--check");
    match callgrind::run_again(&[], &target_dir().join("bench-mlx5")) {
        Ok(counts) => {
            let failed = report(&counts, check);
            if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error @ (callgrind::Error::Missing(_) | callgrind::Error::Processor)) => {
            println!("SKIP {LABEL}: {error}\n{LABEL}: 0 passed, 0 failed, 1 skipped");
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("FAIL {LABEL}: {error}\n{LABEL}: 0 passed, 1 failed, 0 skipped");
            ExitCode::FAILURE
        }
    }
}

/// Returns the target directory that cargo built this program in.
fn target_dir() -> PathBuf {
    let program = std::env::current_exe().unwrap_or_default();
    program.ancestors().nth(3).map_or_else(std::env::temp_dir, Path::to_path_buf)
}

/// Prints every row, or with `check` the verdict on each budget. Returns the number of failures.
fn report(counts: &[Count], check: bool) -> u32 {
    let (mut passed, mut failed) = (0, 0);
    if !check {
        println!("{:<38}{:>8}{:>8}{:>12}", "instructions of one", "here", "budget", "others");
    }
    for &(row, budget, other) in ROWS {
        let each = counts.iter().find(|count| count.name == row).map(|count| count.each);
        match (check, each, budget) {
            (false, each, budget) => {
                let each = each.map_or("-".into(), |each| format!("{each:.1}"));
                let budget = budget.map_or("-".into(), |budget| format!("{budget:.0}"));
                println!("{row:<38}{each:>8}{budget:>8}{other:>12}");
            }
            (true, Some(each), Some(budget)) if each <= budget => {
                passed += 1;
                println!("PASS mlx5 {row}: {each:.1} instructions, at most {budget:.0}");
            }
            (true, Some(each), Some(budget)) => {
                failed += 1;
                println!("FAIL mlx5 {row}: {each:.1} instructions, at most {budget:.0}");
            }
            (true, None, _) => {
                failed += 1;
                println!("FAIL mlx5 {row}: not counted");
            }
            (true, Some(_), None) => {}
        }
    }
    if check {
        println!("{LABEL}: {passed} passed, {failed} failed, 0 skipped");
    }
    failed
}

/// Allocates memory that lives until the program ends.
fn memory(bytes: usize) -> NonNull<u8> {
    let layout = std::alloc::Layout::from_size_align(bytes, 4096).expect("a layout");
    // SAFETY: the layout isn't empty.
    NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).expect("memory")
}

/// Makes a doorbell record in memory that lives until the program ends.
fn record_at(word: NonNull<u32>) -> DoorbellRecord {
    // SAFETY: the word is aligned and mapped until the program ends.
    unsafe { DoorbellRecord::new(word) }
}

/// Slots per completion queue. Every run takes fewer completions, so none wraps around.
const LOG_SLOTS: u32 = 16;
/// The number of completions counted; a multiple of whole blocks and batches.
const POLLS: u32 = 64 * 7 * 80;
/// The number of completions that one call returns.
const BATCH: u32 = 64;

/// Makes a queue that holds completions of one kind with consecutive request indices.
fn completions(blocks: Option<Blocks>, opcode: CqeOpcode) -> CompletionQueue {
    let slots = memory(64 << LOG_SLOTS);
    let record = memory(8).cast::<u32>();
    let arm = memory(8).cast();
    // SAFETY: the memory is aligned and mapped until the program ends, and no other queue uses it.
    let mut ring = unsafe { Slots::new(slots.cast(), LOG_SLOTS) };
    // SAFETY: the memory is aligned and mapped until the program ends, and no other queue uses it.
    let arm = unsafe { ArmRegister::new(arm) };
    ring.initialise();
    // SAFETY: the queue's memory is aligned and mapped until the program ends; driver and card access it by the
    // format's rules.
    let card = unsafe { CqMemory::new(slots.cast(), LOG_SLOTS, record) };
    let layout = if blocks.is_some() { Layout::Enhanced } else { Layout::Plain };
    let mut writer = CqWriter::new(
        card,
        0,
        blocks.map(|blocks| Compression { layout: CompressedLayout::Enhanced, blocks, across_laps: false }),
    );
    for number in 0..(1 << LOG_SLOTS) - 7 {
        let mut cqe = Cqe { signature: 0, op_own: OpOwn::regular(opcode, false), ..Cqe::INITIAL };
        cqe.sop_drop_qpn = 0x0800_1234.into();
        cqe.wqe_counter = (number as u16).into();
        cqe.byte_cnt = 4096.into();
        writer.push(cqe);
    }
    writer.flush().expect("room for all");
    CompletionQueue::new(CqParts {
        slots: ring,
        record: record_at(record),
        arm_record: record_at(memory(8).cast()),
        arm,
        cqn: 1,
        layout,
        start_index: 0,
        keep_alive: Handle::new(()),
    })
}

#[inline(never)]
fn drain(queue: &mut CompletionQueue, count: u32) -> u64 {
    let mut sum = 0;
    let mut left = count;
    while left != 0 {
        let taken = queue.drain(BATCH.min(left), |one| match one {
            Ok(entry) => sum += entry.byte_cnt() as u64 + entry.wqe_counter() as u64,
            Err(failure) => panic!("{failure}"),
        });
        left -= taken.expect("a valid completion");
    }
    sum
}

#[inline(never)]
fn one_by_one(queue: &mut CompletionQueue, count: u32) -> u64 {
    let mut sum = 0;
    for number in 1..=count {
        match queue.poll() {
            Ok(Polled::Done(entry)) => sum += entry.byte_cnt() as u64 + entry.wqe_counter() as u64,
            other => panic!("{other:?}"),
        }
        if number % BATCH == 0 {
            queue.release();
        }
    }
    sum
}

fn count_polls(name: &str, mut queue: CompletionQueue, poll: fn(&mut CompletionQueue, u32) -> u64) {
    callgrind::count(name, POLLS, |count| {
        black_box(poll(black_box(&mut queue), black_box(count)));
    });
}

/// Blocks in the send queue: more than a run posts, so that no post waits for a completion.
const LOG_BLOCKS: u32 = 15;
/// The number of posts counted; a multiple of the batch.
const POSTS: u32 = 8192;
const POST_BATCH: usize = 16;

fn send_queue(blueflame: BlueFlame) -> SendQueue<u64> {
    let (ring, register) = (memory(64 << LOG_BLOCKS), memory(512).cast());
    // SAFETY: the memory is aligned and mapped until the program ends, and no other queue uses it.
    let ring = unsafe { Ring::new(ring, LOG_BLOCKS, 6) };
    // SAFETY: the memory is aligned and mapped until the program ends, and no other queue uses it.
    let register = unsafe { DoorbellRegister::new(DoorbellRegisterParts { register, buf_size: 256, blueflame }) };
    SendQueue::new(SendParts {
        ring,
        record: record_at(memory(8).cast()),
        register,
        qpn: 0x12_3456,
        transport: Transport::Rc,
        limits: Limits { max_inline: 124, max_sge: 4 },
        max_posts: 1 << LOG_BLOCKS,
        signal_all: false,
        start_index: 0,
        keep_alive: Handle::new(()),
    })
    .expect("legal sizes")
}

/// A function that posts all writes.
type PostAll = fn(&mut SendQueue<u64>, &[Write]) -> bool;

/// One write's arguments, which are read from memory for each post.
#[derive(Clone, Copy)]
#[repr(C)]
struct Write {
    sge: Sge,
    remote: Remote,
    token: u64,
}

fn writes() -> Vec<Write> {
    (0..POST_BATCH as u64)
        .map(|n| Write {
            token: n,
            remote: Remote { addr: 0x7000_0000 + n * 4096, rkey: 0x1100 },
            sge: Sge { addr: 0x1000 * n, length: 4096, lkey: 0x2200 },
        })
        .collect()
}

#[inline(never)]
fn post_one(queue: &mut SendQueue<u64>, write: &Write) -> bool {
    let post = Op::Write { remote: write.remote, data: Data::Sges(from_ref(&write.sge)), imm: None };
    queue.post(write.token, Flags::SIGNALED, &post).is_ok()
}

#[inline(never)]
fn post_each(queue: &mut SendQueue<u64>, writes: &[Write]) -> bool {
    for write in writes {
        let post = Op::Write { remote: write.remote, data: Data::Sges(from_ref(&write.sge)), imm: None };
        if queue.post(write.token, Flags::SIGNALED, &post).is_err() {
            return false;
        }
    }
    true
}

#[inline(never)]
fn post_batch(queue: &mut SendQueue<u64>, writes: &[Write]) -> bool {
    let mut batch = queue.batch();
    for write in writes {
        let post = Op::Write { remote: write.remote, data: Data::Sges(from_ref(&write.sge)), imm: None };
        if batch.post(write.token, Flags::SIGNALED, &post).is_err() {
            return false;
        }
    }
    batch.ring();
    true
}

fn count_posts() {
    let writes = writes();
    let each: [(&str, BlueFlame, PostAll); 3] = [
        ("post, write, doorbell", BlueFlame::Never, post_each),
        ("post, write, BlueFlame", BlueFlame::Single, post_each),
        ("post, write, batch of 16", BlueFlame::Never, post_batch),
    ];
    for (name, blueflame, post) in each {
        let mut queue = send_queue(blueflame);
        callgrind::count(name, POSTS, |count| {
            for _ in 0..count as usize / POST_BATCH {
                assert!(post(black_box(&mut queue), black_box(&writes)));
            }
        });
    }
    let mut queue = send_queue(BlueFlame::Never);
    callgrind::count("post, write, doorbell, by a call", POSTS, |count| {
        for number in 0..count as usize {
            assert!(post_one(black_box(&mut queue), black_box(&writes[number % POST_BATCH])));
        }
    });
    let mut next = oldest(&queue);
    callgrind::count("complete a write", POSTS / 2, |count| {
        for _ in 0..count {
            let freed = queue.complete(black_box(next)).expect("outstanding").map(|done| done.token).sum::<u64>();
            black_box(freed);
            next = next.wrapping_add(1);
        }
    });
}

/// Returns the index of the oldest outstanding request in a queue.
fn oldest(queue: &SendQueue<u64>) -> u16 {
    queue.producer().wrapping_sub((1 << LOG_BLOCKS) - queue.free_blocks()) as u16
}

fn count_all() {
    count_polls("poll, plain", completions(None, CqeOpcode::Req), drain);
    count_polls("poll, plain, one by one", completions(None, CqeOpcode::Req), one_by_one);
    count_polls("poll, zip, regular", completions(Some(Blocks::Never), CqeOpcode::Req), drain);
    count_polls("poll, zip, regular, one by one", completions(Some(Blocks::Never), CqeOpcode::Req), one_by_one);
    count_polls("poll, zip, blocks of 7, requester", completions(Some(Blocks::Full), CqeOpcode::Req), drain);
    count_polls("poll, zip, blocks of 7, responder", completions(Some(Blocks::Full), CqeOpcode::RespSend), drain);
    count_polls("poll, zip, blocks of 7, one by one", completions(Some(Blocks::Full), CqeOpcode::Req), one_by_one);
    count_posts();
}
