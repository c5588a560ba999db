//! Calls that the plugin refuses, without harm to anything that is open.
#![allow(unsafe_code)]

use super::{finish, ranks, register, transfer};
use crate::harness::rma_alone;
use ferrogin_ffi::nccl::{self, NetPropertiesV12};
use ferrogin_ffi::rma::{RmaConfigV14, RmaPropertiesV16, RmaV16, SIGNAL_OP_ADD};
use mini_nccl::rma::{RmaComm, RmaContext, RmaMemory, Signal};
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr::{dangling_mut, null_mut};

/// Calls `$table`'s entry `$entry`.
macro_rules! call {
    ($table:expr, $entry:ident($($arg:expr),* $(,)?)) => {
        // SAFETY: pointers are NULL or point to local variables that outlive the call; the plugin checks handles before
        // it uses them.
        (stringify!($entry($($arg),*)), unsafe { ($table.$entry.expect("an entry"))($($arg),*) })
    };
}

type Refused = Vec<(&'static str, nccl::Result)>;

fn set_up(table: &RmaV16, comm: &RmaComm, memory: &RmaMemory) -> Refused {
    let (mut out, mut count, mut handle) = (null_mut::<c_void>(), 0, [0u8; nccl::HANDLE_MAXSIZE]);
    let mut properties = RmaPropertiesV16::default();
    let mut net = MaybeUninit::<NetPropertiesV12>::zeroed();
    let mut config = RmaConfigV14 { n_contexts: 1, traffic_class: -1, rank_stride: 1 };
    let mut bad = RmaConfigV14 { n_contexts: -1, ..config };
    let mut stride = RmaConfigV14 { rank_stride: -1, ..config };
    let mut many = RmaConfigV14 { n_contexts: i32::MAX, ..config };
    let (open, foreign) = (comm.handle(), 0x1234_5678 as *mut c_void);
    let data = memory.memory().as_ptr();
    vec![
        call!(table, init(null_mut(), 1, None)),
        call!(table, devices(null_mut())),
        call!(table, get_rma_properties(foreign, &mut properties)),
        call!(table, get_rma_properties(open, null_mut())),
        call!(table, get_properties(-1, net.as_mut_ptr())),
        call!(table, get_properties(99, net.as_mut_ptr())),
        call!(table, get_properties(0, null_mut())),
        call!(table, listen(foreign, 0, handle.as_mut_ptr().cast(), &mut out)),
        call!(table, connect(null_mut(), null_mut(), 1, 0, foreign, &mut out)),
        call!(table, connect(null_mut(), null_mut(), 1, 0, open, &mut out)),
        call!(table, create_context(foreign, &mut config, &mut out)),
        call!(table, create_context(open, null_mut(), &mut out)),
        call!(table, create_context(open, &mut config, null_mut())),
        call!(table, create_context(open, &mut bad, &mut out)),
        call!(table, create_context(open, &mut stride, &mut out)),
        call!(table, create_context(open, &mut many, &mut out)),
        call!(table, reg_mr_sym(foreign, data, 8, nccl::PTR_HOST, 0, &mut out)),
        call!(table, reg_mr_sym(open, null_mut(), 8, nccl::PTR_HOST, 0, &mut out)),
        call!(table, reg_mr_sym(open, data, 0, nccl::PTR_HOST, 0, &mut out)),
        call!(table, reg_mr_sym(open, data, usize::MAX, nccl::PTR_HOST, 0, &mut out)),
        call!(table, reg_mr_sym(open, data, 8, 9, 0, &mut out)),
        call!(table, reg_mr_sym(open, data, 8, nccl::PTR_HOST, 0, null_mut())),
        call!(table, reg_mr_sym_dma_buf(open, data, 8, nccl::PTR_CUDA, 0, -1, 0, &mut out)),
        call!(table, reg_mr_sym_dma_buf(open, data, 8, nccl::PTR_CUDA, 0, i32::MAX, 0, &mut out)),
        call!(table, reg_mr_sym_dma_buf(open, data, 8, nccl::PTR_CUDA, u64::MAX, 0, 0, &mut out)),
        call!(table, reg_mr_sym_dma_buf(open, data, 0, nccl::PTR_CUDA, 0, 0, 0, &mut out)),
        call!(table, reg_mr_sym_dma_buf(open, data, 8, 9, 0, 0, 0, &mut out)),
        call!(table, dereg_mr_sym(open, foreign)),
        call!(table, dereg_mr_sym(foreign, memory.handle())),
        call!(table, destroy_context(open)),
        call!(table, close_coll(memory.handle())),
        call!(table, close_listen(open)),
        call!(table, finalize(open)),
        call!(table, query_last_error(open, dangling_mut())),
        call!(table, test(open, null_mut(), &mut count)),
        call!(table, test(open, foreign, &mut count)),
        call!(table, test(open, open, &mut count)),
        call!(table, rma_progress(null_mut())),
    ]
}

/// Makes the invalid data-path calls. `other` belongs to another communicator.
fn data(table: &RmaV16, ctx: *mut c_void, memory: &RmaMemory, other: &RmaMemory) -> Refused {
    let (mut request, mut error) = (null_mut::<c_void>(), 0u8);
    let (m, x, end) = (memory.handle(), other.handle(), memory.memory().len() as u64);
    let out = &raw mut request;
    let signal = |offset, word, op| call!(table, iput_signal(ctx, 0, 0, m, 8, 0, m, 1, offset, word, 1, op, 1, 0, out));
    let signals = [
        signal(0, null_mut(), SIGNAL_OP_ADD),
        signal(0, x, SIGNAL_OP_ADD),
        signal(0, m, 0),
        signal(0, m, 3),
        signal(4, m, SIGNAL_OP_ADD),
        signal(end, m, SIGNAL_OP_ADD),
        signal(end - 4, m, SIGNAL_OP_ADD),
        signal(u64::MAX - 7, m, SIGNAL_OP_ADD),
    ];
    let mut all = vec![
        call!(table, iput(null_mut(), 0, 0, m, 8, 0, m, 1, 0, out)),
        call!(table, iput(m, 0, 0, m, 8, 0, m, 1, 0, out)),
        call!(table, iput(ctx, -1, 0, m, 8, 0, m, 1, 0, out)),
        call!(table, iput(ctx, 1, 0, m, 8, 0, m, 1, 0, out)),
        call!(table, iput(ctx, 0, 0, m, 8, 0, m, 2, 0, out)),
        call!(table, iput(ctx, 0, 0, m, 8, 0, m, u32::MAX, 0, out)),
        call!(table, iput(ctx, 0, 0, null_mut(), 8, 0, m, 1, 0, out)),
        call!(table, iput(ctx, 0, 0, m, 8, 0, null_mut(), 1, 0, out)),
        call!(table, iput(ctx, 0, 0, x, 8, 0, m, 1, 0, out)),
        call!(table, iput(ctx, 0, 0, m, 8, 0, x, 1, 0, out)),
        call!(table, iput(ctx, 0, end - 7, m, 8, 0, m, 1, 0, out)),
        call!(table, iput(ctx, 0, 0, m, 8, end - 7, m, 1, 0, out)),
        call!(table, iput(ctx, 0, u64::MAX, m, 8, 0, m, 1, 0, out)),
        call!(table, iput(ctx, 0, 0, m, usize::MAX, 0, m, 1, 0, out)),
        call!(table, iput(ctx, 0, 0, m, 8, 0, m, 1, 0, null_mut())),
        call!(table, iget(ctx, 0, 0, m, 8, end, m, 1, 0, out)),
        call!(table, iget(ctx, 0, end, m, 8, 0, m, 1, 0, out)),
        call!(table, iget(ctx, 0, 0, m, 8, 0, m, 2, 0, out)),
        call!(table, iflush(ctx, 0, m, 2, out)),
        call!(table, iflush(ctx, 7, m, 0, out)),
        call!(table, iflush(ctx, 0, x, 0, out)),
        call!(table, iflush(ctx, 0, m, 0, null_mut())),
        call!(table, query_last_error(ctx, null_mut())),
        call!(table, query_last_error(null_mut(), &mut error)),
    ];
    all.extend(signals);
    all
}

#[test]
fn invalid_arguments_of_every_call_are_refused() {
    rma_alone("invalid_arguments_of_every_call_are_refused", &[vec![]], 16, |plugin| {
        let table = plugin.raw_table().expect("v16");
        let again = plugin.clone();
        ranks(&plugin, 2, move |comm| {
            let other = RmaComm::init(&again, comm.bootstrap().clone(), 0).expect("a second communicator");
            let (memory, foreign) = (register(&comm, 4096), register(&other, 4096));
            let context = comm.create_context(1).expect("a context");
            if comm.rank() == 0 {
                for (call, code) in
                    [set_up(&table, &comm, &memory), data(&table, context.handle(), &memory, &foreign)].concat()
                {
                    let refused = [nccl::INVALID_ARGUMENT, nccl::INVALID_USAGE].contains(&code);
                    assert!(refused, "{call} returned {code}");
                }
                works(&context, &memory);
            }
            comm.barrier().expect("all ranks");
        });
    });
}

#[test]
fn request_of_a_destroyed_context_is_refused() {
    rma_alone("request_of_a_destroyed_context_is_refused", &[vec![]], 16, |plugin| {
        ranks(&plugin, 1, |comm| {
            let memory = register(&comm, 4096);
            let put = transfer(0, memory.at(0), memory.at(64), 8);
            let context = comm.create_context(1).expect("a context");
            let old = context.put(put, None).expect("a put");
            drop(context);
            // In the same place, with a request of the same number.
            let context = comm.create_context(1).expect("a context");
            let new = context.put(put, None).expect("a put");
            assert!(context.test(&old).is_err());
            finish(&context, vec![new]);
        });
    });
}

#[test]
fn memory_that_a_put_named_is_refused_once_deregistered() {
    rma_alone("memory_that_a_put_named_is_refused_once_deregistered", &[vec![]], 16, |plugin| {
        let table = plugin.raw_table().expect("v16");
        ranks(&plugin, 1, move |comm| {
            let (memory, kept) = (register(&comm, 4096), register(&comm, 4096));
            let context = comm.create_context(1).expect("a context");
            let put = context.put(transfer(0, memory.at(0), memory.at(64), 8), None).expect("a put");
            finish(&context, vec![put]);
            let gone = memory.handle();
            drop(memory);
            let mut request = null_mut::<c_void>();
            let (ctx, other, out) = (context.handle(), kept.handle(), &raw mut request);
            for (call, code) in [
                call!(table, iput(ctx, 0, 0, gone, 8, 0, other, 0, 0, out)),
                call!(table, iput(ctx, 0, 0, other, 8, 0, gone, 0, 0, out)),
            ] {
                assert_ne!(code, nccl::SUCCESS, "{call}");
            }
        });
    });
}

#[test]
fn memory_stays_registered_for_puts_under_way() {
    // The card reads a put's bytes long after the post.
    let slow = vec![("SOFTEFA_FAULTS", "delay_us=20000..20001")];
    rma_alone("memory_stays_registered_for_puts_under_way", &[slow], 16, |plugin| {
        ranks(&plugin, 1, move |comm| {
            // Fewer puts than a card has room for, more, and more signals than a stream's window.
            for (count, has_signal) in [(256, false), (600, false), (300, true)] {
                let (source, target) = (register(&comm, 8), register(&comm, 16));
                let context = comm.create_context(1).expect("a context");
                let signal = Signal { word: target.at(8), value: 1, strong: true };
                let put = transfer(0, source.at(0), target.at(0), 8);
                let put = |_| context.put(put, has_signal.then_some(signal)).expect("a put");
                let puts = (0..count).map(put).collect();
                let _bytes = source.memory().clone();
                drop(source);
                finish(&context, puts);
            }
        });
    });
}

/// Checks that the refused calls did no harm.
fn works(context: &RmaContext, memory: &RmaMemory) {
    assert!(!context.has_error().expect("an answer"));
    let put = transfer(0, memory.at(0), memory.at(64), 8);
    let request = context.put(put, Some(Signal { word: memory.at(128), value: 1, strong: true })).expect("a put");
    finish(context, vec![request]);
    while memory.memory().load(128) != 1 {
        context.progress().expect("progress");
    }
}
