//! Instructions per post, compared with NCCL's device code: `cargo bench -p ferrogin-benches --bench posts`.
//!
//! Each figure is the mean over many posts and counts every instruction of a post: arguments, call, return and status
//! check. The card adds none. The loop around the post, which loads the arguments from a list, is counted separately
//! and subtracted, from NCCL's figures too. The program prints PASS or FAIL for each operation that both have, and
//! fails unless ours takes fewer instructions than NCCL's.
#![allow(unsafe_code)]

use ferrogin_bench::card::{Card, PEER, Values};
use ferrogin_bench::nccl::{self, Build, Flush, Loop, Nccl, POSTS, Post, Put, PutValue};
use ferrogin_bench::target_dir;
use ferrogin_device::Sharing;
use ferrogin_device::{Action, Context, Flags, capi};
use ferrogin_ffi::ext::{POLICY_COMBINING, POLICY_LOCKED};
use ferrogin_test_support::callgrind::{self, Count};
use std::hint::black_box;
use std::path::Path;
use std::process::ExitCode;

/// The number of counted posts; a multiple of the largest batch.
const REPS: u32 = 8192;

/// Flags of the C ABI; NCCL's have the same values.
const DEFAULT: u32 = 0;
const AGGREGATE: u32 = 2;
/// Sharing modes of the C ABI.
const GPU: u32 = 0;
const SHARING_THREAD: u32 = 0x200;

/// Columns: the posting functions.
const C: &str = "C";
const INLINE: &str = "inlined";
const THREAD: &str = "THREAD";
const NCCL_C: &str = "NCCL C";
const NCCL_INLINE: &str = "NCCL inlined";
const LOCKED: &str = "locked C";
const THREAD_C: &str = "THREAD C";
const COLUMNS: [&str; 7] = [C, INLINE, THREAD_C, THREAD, LOCKED, NCCL_C, NCCL_INLINE];

/// Rows: the operations.
const ROWS: [&str; 18] = [
    "put",
    "put, aggregated",
    "putValue, inline",
    "putValue, slots",
    "put with signal",
    "putValue with signal",
    MEMORY[0],
    MEMORY[1],
    "get",
    "signal",
    MEMORY[2],
    WAIT,
    "flush, 2 signals",
    "flush, 16 signals",
    "flush, 64 signals",
    "flush, 1024 signals",
    PUT_AND_FLUSH[0],
    PUT_AND_FLUSH[1],
];
/// Operations with an emulated signal, which is a word in memory.
const MEMORY: [&str; 3] = ["put with memory signal", "putValue with memory sig", "signal in memory"];
/// A wait for a signal that has already been raised.
const WAIT: &str = "wait, satisfied";
/// A put and the flush after it, with few signals and with many.
const PUT_AND_FLUSH: [&str; 2] = ["put and flush", "put and flush, 1024"];
/// Numbers of signals of the contexts whose flushes are counted.
const FLUSHED: [usize; 4] = [2, 16, 64, 1024];

/// Empty loops, named after the operation whose arguments they load.
const LOOPS: [&str; 3] = ["put", "putValue", "signal"];
const LOOP: &str = "loop";

/// ferrogin's columns, each with the NCCL column it is compared with.
const COMPARED: [(&str, &str); 2] = [(C, NCCL_C), (INLINE, NCCL_INLINE)];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    if callgrind::running() {
        let library = args.get(1).filter(|path| !path.is_empty()).map(Path::new);
        return match count_all(library) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("posts: {error}");
                ExitCode::FAILURE
            }
        };
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let dir = match target_dir("bench-posts") {
        Ok(dir) => dir,
        Err(error) => {
            eprintln!("posts: no directory to work in: {error}");
            return ExitCode::FAILURE;
        }
    };
    let library = nccl::make(&root, &dir, Build::Bare);
    let path = match &library {
        Ok(path) => path.to_string_lossy().into_owned(),
        Err(error) => {
            println!("SKIP the baseline, NCCL {}: {error}", nccl::RELEASE);
            String::new()
        }
    };
    match callgrind::run_again(&[&path], &dir.join("callgrind")) {
        Ok(counts) => {
            print_table(&counts);
            if is_below_nccl(&counts) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error @ (callgrind::Error::Missing(_) | callgrind::Error::Processor)) => {
            println!("SKIP instructions of a post: {error}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("FAIL instructions of a post: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The count for a row and column, including the loop.
fn raw(counts: &[Count], row: &str, column: &str) -> Option<f64> {
    let name = format!("{row}/{column}");
    counts.iter().find(|count| count.name == name).map(|count| count.each)
}

/// A row's loop; for flushes and waits it is negligible.
fn loop_of(row: &str) -> Option<&'static str> {
    let row = row.replace("get", "put");
    LOOPS.into_iter().rev().find(|name| row.starts_with(name) && !row.starts_with(PUT_AND_FLUSH[0]))
}

/// The count for a row and column, without the loop.
fn find(counts: &[Count], row: &str, column: &str) -> Option<f64> {
    Some(raw(counts, row, column)? - loop_of(row).map_or(Some(0.0), |name| raw(counts, name, LOOP))?)
}

fn print_table(counts: &[Count]) {
    let loops = LOOPS.map(|name| format!("{name} {:.1}", raw(counts, name, LOOP).unwrap_or_default()));
    println!("instructions of one post; taken off for the loop around it: {}", loops.join(", "));
    print!("{:<24}", "");
    COLUMNS.iter().for_each(|column| print!("{column:>14}"));
    println!();
    for row in ROWS {
        print!("{row:<24}");
        for column in COLUMNS {
            match find(counts, row, column) {
                Some(each) => print!("{each:>14.1}"),
                None => print!("{:>14}", "-"),
            }
        }
        println!();
    }
}

/// Compares each operation that both sides have.
fn is_below_nccl(counts: &[Count]) -> bool {
    let mut is_below = true;
    for (row, (ours, nccl)) in ROWS.into_iter().flat_map(|row| COMPARED.map(|columns| (row, columns))) {
        let (Some(our_count), Some(nccl_count)) = (find(counts, row, ours), find(counts, row, nccl)) else { continue };
        let verdict = if our_count < nccl_count { "PASS" } else { "FAIL" };
        is_below &= our_count < nccl_count;
        println!("{verdict} {row}, {ours}: {our_count:.1} instructions, {nccl}: {nccl_count:.1}");
    }
    is_below
}

type Failure = Box<dyn std::error::Error>;

/// Counts everything, in the process under valgrind.
fn count_all(library: Option<&Path>) -> Result<(), Failure> {
    let inline = Card::new(POLICY_COMBINING, Values::Inline)?;
    let slots = Card::new(POLICY_COMBINING, Values::Slots)?;
    let locked = Card::new(POLICY_LOCKED, Values::Inline)?;
    let locked_slots = Card::new(POLICY_LOCKED, Values::Slots)?;
    loops(&inline);
    by_call(C, GPU, &inline, &slots)?;
    by_call(THREAD_C, SHARING_THREAD, &inline, &slots)?;
    by_call(LOCKED, GPU, &locked, &locked_slots)?;
    let memory = Card::emulated(POLICY_COMBINING, Values::Slots)?;
    with_memory_signal(C, GPU, &memory)?;
    with_memory_signal(THREAD_C, SHARING_THREAD, &memory)?;
    inlined(&inline, &slots)?;
    exclusive(&inline, &slots)?;
    completion(C, POLICY_COMBINING)?;
    completion(LOCKED, POLICY_LOCKED)?;
    match library {
        Some(library) => baseline(library),
        None => Ok(()),
    }
}

fn count(row: &str, column: &str, work: impl FnMut(u32)) {
    callgrind::count(&format!("{row}/{column}"), REPS, work);
}

/// Post `i` of the list.
#[inline(always)]
fn post(posts: &[Post; POSTS], i: u32) -> &Post {
    &posts[i as usize % POSTS]
}

/// A loop that loads a post's arguments but doesn't post.
macro_rules! empty_loop {
    ($name:ident, $($field:expr),+) => {
        #[inline(never)]
        fn $name(posts: &[Post; POSTS], n: u32) {
            for i in 0..n {
                let p = post(posts, i);
                $(consume($field(p));)+
            }
        }
    };
}

/// Keeps the value in a register.
#[inline(always)]
fn consume(value: u64) {
    // SAFETY: the block emits no instruction.
    unsafe { std::arch::asm!("/* {0} */", in(reg) value, options(nomem, nostack, preserves_flags)) };
}

empty_loop!(
    loop_of_puts,
    |p: &Post| p.peer.into(),
    |p: &Post| p.dst.0 as u64,
    |p: &Post| p.dst_off,
    |p: &Post| p.src.0 as u64,
    |p: &Post| p.src_off,
    |p: &Post| p.bytes
);
empty_loop!(loop_of_values, |p: &Post| p.peer.into(), |p: &Post| p.dst.0 as u64, |p: &Post| p.dst_off, |p: &Post| p
    .value);
empty_loop!(loop_of_signals, |p: &Post| p.peer.into());

fn loops(card: &Card) {
    let list = black_box(nccl::posts(card));
    count("put", LOOP, |n| loop_of_puts(&list, n));
    count("putValue", LOOP, |n| loop_of_values(&list, n));
    count("signal", LOOP, |n| loop_of_signals(&list, n));
}

/// Posts through the C ABI: calls `fgin_*` through pointers, so that the compiler inlines nothing.
fn by_call(column: &str, mode: u32, inline: &Card, slots: &Card) -> Result<(), Failure> {
    let put = black_box(capi::fgin_put as unsafe extern "C" fn(_, _, _, _, _, _, _, _, _) -> _);
    let put_value = black_box(capi::fgin_put_value as unsafe extern "C" fn(_, _, _, _, _, _, _, _) -> _);
    let get = black_box(capi::fgin_get as unsafe extern "C" fn(_, _, _, _, _, _, _, _) -> _);
    let signal = black_box(capi::fgin_signal as unsafe extern "C" fn(_, _, _, _) -> _);
    let context = inline.context()?;
    let ctx = context.as_ptr();
    let slots_ctx = slots.context()?.as_ptr();
    let list = black_box(nccl::posts(inline));
    let puts = |action: Action, flags: u32| {
        let (action, flags) = black_box((action.bits(), flags | mode));
        move |n: u32| {
            for i in 0..n {
                let p = post(&list, i);
                // SAFETY: the card keeps the context and windows alive during the bench.
                let code = unsafe { put(ctx, p.peer, p.dst.0, p.dst_off, p.src.0, p.src_off, p.bytes, action, flags) };
                assert!(code == 0);
            }
        }
    };
    count("put", column, puts(Action::NONE, DEFAULT));
    count("put, aggregated", column, puts(Action::NONE, AGGREGATE));
    count("put with signal", column, puts(Action::signal_inc(1), DEFAULT));
    for (row, card) in [("putValue, inline", inline), ("putValue, slots", slots)] {
        let context = card.context()?;
        let ctx = context.as_ptr();
        let (bytes, action, flags) = black_box((8u32, 0u64, mode));
        count(row, column, |n| {
            for i in 0..n {
                let p = post(&list, i);
                // SAFETY: the card keeps the context and windows alive during the bench.
                let code = unsafe { put_value(ctx, p.peer, p.dst.0, p.dst_off, p.value, bytes, action, flags) };
                assert!(code == 0);
            }
        });
    }
    let (action, flags) = black_box((Action::signal_inc(1).bits(), mode));
    count("putValue with signal", column, |n| {
        for i in 0..n {
            let p = post(&list, i);
            // SAFETY: the card keeps the context and windows alive during the bench.
            let code = unsafe { put_value(slots_ctx, p.peer, p.dst.0, p.dst_off, p.value, 8, action, flags) };
            assert!(code == 0);
        }
    });
    count("get", column, |n| {
        for i in 0..n {
            let p = post(&list, i);
            // SAFETY: the card keeps the context and windows alive during the bench.
            let code = unsafe { get(ctx, p.peer, p.dst.0, p.dst_off, p.src.0, p.src_off, p.bytes, flags) };
            assert!(code == 0);
        }
    });
    let action = black_box(Action::signal_inc(1).bits());
    count("signal", column, |n| {
        for i in 0..n {
            // SAFETY: the card keeps the context and windows alive during the bench.
            let code = unsafe { signal(ctx, post(&list, i).peer, action, flags) };
            assert!(code == 0);
        }
    });
    Ok(())
}

/// Posts with an emulated signal, through the C ABI.
fn with_memory_signal(column: &str, mode: u32, card: &Card) -> Result<(), Failure> {
    let put = black_box(capi::fgin_put as unsafe extern "C" fn(_, _, _, _, _, _, _, _, _) -> _);
    let put_value = black_box(capi::fgin_put_value as unsafe extern "C" fn(_, _, _, _, _, _, _, _) -> _);
    let signal = black_box(capi::fgin_signal as unsafe extern "C" fn(_, _, _, _) -> _);
    let context = card.context()?;
    let (ctx, list) = (context.as_ptr(), black_box(nccl::posts(card)));
    let (action, flags) = black_box((Action::signal_inc(1).bits(), mode));
    count(MEMORY[0], column, |n| {
        for i in 0..n {
            let p = post(&list, i);
            // SAFETY: the card keeps the context and windows alive during the bench.
            let code = unsafe { put(ctx, p.peer, p.dst.0, p.dst_off, p.src.0, p.src_off, p.bytes, action, flags) };
            assert!(code == 0);
        }
    });
    count(MEMORY[1], column, |n| {
        for i in 0..n {
            let p = post(&list, i);
            // SAFETY: the card keeps the context and windows alive during the bench.
            let code = unsafe { put_value(ctx, p.peer, p.dst.0, p.dst_off, p.value, 8u32, action, flags) };
            assert!(code == 0);
        }
    });
    count(MEMORY[2], column, |n| {
        for i in 0..n {
            // SAFETY: the card keeps the context alive during the bench.
            let code = unsafe { signal(ctx, post(&list, i).peer, action, flags) };
            assert!(code == 0);
        }
    });
    Ok(())
}

/// Through the C ABI: flushes of a context whose endpoints have all been used and are idle, a put and its flush, and a
/// wait for a signal that has already been raised.
fn completion(column: &str, policy: u32) -> Result<(), Failure> {
    let flush = black_box(capi::fgin_flush as unsafe extern "C" fn(_) -> _);
    let wait = black_box(capi::fgin_wait_signal as unsafe extern "C" fn(_, _, _) -> _);
    for signals in FLUSHED {
        let card = Card::with_signals(policy, Values::Slots, signals)?;
        let context = card.context()?;
        let ctx = context.as_ptr();
        let window = card.window();
        let put = || context.put(PEER, window.at(0), window.at(0), 8, Action::NONE, Flags::NONE);
        put()?;
        context.put_value(PEER, window.at(0), 1, 8, Action::NONE, Flags::NONE)?;
        for id in 0..signals {
            context.signal(PEER, Action::signal_inc(id as u16), Flags::NONE)?;
        }
        let flushes = |n: u32| {
            for _ in 0..n {
                // SAFETY: the card keeps the context alive during the bench.
                let code = unsafe { flush(ctx) };
                assert!(code == 0);
            }
        };
        count(&format!("flush, {signals} signals"), column, flushes);
        let both = if signals == FLUSHED[0] { Some(0) } else { (signals == 1024).then_some(1) };
        if let Some(row) = both {
            count(PUT_AND_FLUSH[row], column, |n| {
                for _ in 0..n {
                    assert!(put().is_ok());
                    flushes(1);
                }
            });
        }
        if signals == FLUSHED[0] {
            let (id, least) = black_box((1u32, 0u64));
            count(WAIT, column, |n| {
                for _ in 0..n {
                    // SAFETY: the card keeps the context alive during the bench.
                    let code = unsafe { wait(ctx, id, least) };
                    assert!(code == 0);
                }
            });
        }
    }
    Ok(())
}

/// Gives each case its own loop, as in a kernel.
macro_rules! stream {
    ($name:ident, $context:ident, $p:ident, $post:expr) => {
        #[inline(never)]
        pub fn $name($context: Context<'_>, posts: &[Post; POSTS], n: u32) {
            for i in 0..n {
                let $p = post(posts, i);
                if $post.is_err() {
                    refused();
                }
            }
        }
    };
}

#[cold]
#[inline(never)]
fn refused() {
    panic!("a post was refused");
}

/// The cases of one sharing mode.
macro_rules! streams {
    ($module:ident, $of:ident, $column:expr, $sharing:expr) => {
        mod $module {
            use super::*;
            const PLAIN: Flags = Flags::NONE.shared($sharing);
            const AGGREGATED: Flags = Flags::AGGREGATE.shared($sharing);

            stream!(put, c, p, c.put(p.peer, p.dst.at(p.dst_off), p.src.at(p.src_off), p.bytes, Action::NONE, PLAIN));
            stream!(
                put_agg,
                c,
                p,
                c.put(p.peer, p.dst.at(p.dst_off), p.src.at(p.src_off), p.bytes, Action::NONE, AGGREGATED)
            );
            stream!(
                put_signal,
                c,
                p,
                c.put(
                    p.peer,
                    p.dst.at(p.dst_off),
                    p.src.at(p.src_off),
                    p.bytes,
                    Action::signal_inc(p.signal as u16),
                    PLAIN
                )
            );
            stream!(value_inline, c, p, c.put_value(p.peer, p.dst.at(p.dst_off), p.value, 8, Action::NONE, PLAIN));
            stream!(value_slots, c, p, c.put_value(p.peer, p.dst.at(p.dst_off), p.value, 8, Action::NONE, PLAIN));
            stream!(
                value_signal,
                c,
                p,
                c.put_value(p.peer, p.dst.at(p.dst_off), p.value, 8, Action::signal_inc(p.signal as u16), PLAIN)
            );
            stream!(get, c, p, c.get(p.peer, p.dst.at(p.dst_off), p.src.at(p.src_off), p.bytes, PLAIN));
            stream!(signal, c, p, c.signal(p.peer, Action::signal_inc(p.signal as u16), PLAIN));
        }

        fn $of(inline: &Card, slots: &Card) -> Result<(), Failure> {
            let context = inline.context()?;
            let list = black_box(nccl::posts(inline));
            count("put", $column, |n| $module::put(context, &list, n));
            count("put, aggregated", $column, |n| $module::put_agg(context, &list, n));
            count("put with signal", $column, |n| $module::put_signal(context, &list, n));
            count("putValue, inline", $column, |n| $module::value_inline(context, &list, n));
            let with_slots = slots.context()?;
            count("putValue, slots", $column, |n| $module::value_slots(with_slots, &list, n));
            count("putValue with signal", $column, |n| $module::value_signal(with_slots, &list, n));
            count("get", $column, |n| $module::get(context, &list, n));
            count("signal", $column, |n| $module::signal(context, &list, n));
            Ok(())
        }
    };
}

streams!(gpu, inlined, INLINE, Sharing::Gpu);
streams!(thread, exclusive, THREAD, Sharing::Thread);

/// NCCL's code, on its own context.
fn baseline(library: &Path) -> Result<(), Failure> {
    let card = Card::new(POLICY_COMBINING, Values::Inline)?;
    let nccl = Nccl::open(library, &card)?;
    let handle = nccl.handle();
    let list = black_box(nccl::posts(&card));
    for (row, name, last) in [
        ("put", "nccl_put", DEFAULT),
        ("put, aggregated", "nccl_put", AGGREGATE),
        ("put with signal", "nccl_put_signal", 1),
        ("get", "nccl_get", DEFAULT),
    ] {
        // SAFETY: posts.cpp defines the function with this type.
        let function: Put = unsafe { nccl.function(name) }?;
        let last = black_box(last);
        count(row, NCCL_C, |n| {
            for i in 0..n {
                let p = post(&list, i);
                // SAFETY: the card keeps the context and windows alive during the bench.
                unsafe { function(handle, p.peer, p.dst, p.dst_off, p.src, p.src_off, p.bytes, last) };
            }
        });
    }
    // SAFETY: posts.cpp defines the function with this type.
    let signal: Put = unsafe { nccl.function("nccl_put_signal") }?;
    let id = black_box(1);
    count("signal", NCCL_C, |n| {
        for i in 0..n {
            let p = post(&list, i);
            // SAFETY: the card keeps the context and windows alive during the bench; a signal has no bytes.
            unsafe { signal(handle, p.peer, p.dst, p.dst_off, p.src, p.src_off, 0, id) };
        }
    });
    // SAFETY: posts.cpp defines the function with this type.
    let put_value: PutValue = unsafe { nccl.function("nccl_put_value") }?;
    // SAFETY: posts.cpp defines the function with this type.
    let put_value_signal: PutValue = unsafe { nccl.function("nccl_put_value_signal") }?;
    let id = black_box(1);
    count("putValue with signal", NCCL_C, |n| {
        for i in 0..n {
            let p = post(&list, i);
            // SAFETY: the card keeps the context and windows alive during the bench.
            unsafe { put_value_signal(handle, p.peer, p.dst, p.dst_off, p.value, id) };
        }
    });
    // SAFETY: posts.cpp defines the function with this type.
    let flush: Flush = unsafe { nccl.function("nccl_flush") }?;
    count("flush, 2 signals", NCCL_C, |n| {
        for _ in 0..n {
            // SAFETY: the card keeps the context alive during the bench.
            unsafe { flush(handle) };
        }
    });
    let flags = black_box(0);
    count("putValue, inline", NCCL_C, |n| {
        for i in 0..n {
            let p = post(&list, i);
            // SAFETY: the card keeps the context and windows alive during the bench.
            unsafe { put_value(handle, p.peer, p.dst, p.dst_off, p.value, flags) };
        }
    });
    for (row, name) in [
        ("put", "nccl_inline_put"),
        ("put, aggregated", "nccl_inline_put_aggregated"),
        ("put with signal", "nccl_inline_put_signal"),
        ("putValue, inline", "nccl_inline_put_value"),
        ("putValue with signal", "nccl_inline_put_value_signal"),
        ("get", "nccl_inline_get"),
        ("signal", "nccl_inline_signal"),
    ] {
        // SAFETY: posts.cpp defines the function with this type.
        let function: Loop = unsafe { nccl.function(name) }?;
        // SAFETY: the card keeps the context and windows alive during the bench.
        count(row, NCCL_INLINE, |n| unsafe { function(handle, list.as_ptr(), POSTS as u32 - 1, n) });
    }
    Ok(())
}
