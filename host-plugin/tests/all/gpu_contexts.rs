//! Contexts in GPU memory: what a kernel reads in a wait, and how a failure reaches it and `queryLastError`. The
//! kernels here are CPU threads, which the software GPU lets access its memory.
#![allow(unsafe_code)]

use crate::errors::{RANK_2_IS_GONE, others_go_on};
use crate::harness::software_gpu_driver::is_gpu_memory;
use crate::harness::{alone_each, config, device, ranks, software_gpu, software_gpu_with_gdrcopy, window};
use ferrogin_device::{Action, Flags, Status, Window as DeviceWindow};
use ferrogin_ffi::device::DevHandle;
use ferrogin_ffi::ext::{ContextExt, EndpointConfig, used_words};
use ferrogin_ffi::nccl::GinConfigV14;
use ferrogin_test_support::wait::wait_until;
use mini_nccl::GinContext;

/// The settings of a software GPU, without GDRCopy and with it.
fn with_gpu(test: &str, more: &[(&'static str, &'static str)]) -> Option<Vec<Vec<(&'static str, String)>>> {
    let paths = [("no", software_gpu(test)?), ("yes", software_gpu_with_gdrcopy(test)?)];
    let settings = paths.map(|(gdrcopy, path)| {
        let more = more.iter().copied().chain([("FERROGIN_DEVICE", "cuda"), ("GDRCOPY", gdrcopy)]);
        let more = more.map(|(name, value)| (name, value.to_owned()));
        more.chain([("LD_LIBRARY_PATH", path)]).collect()
    });
    Some(settings.to_vec())
}

fn borrowed<'a>(settings: &'a [Vec<(&'static str, String)>]) -> Vec<Vec<(&'a str, &'a str)>> {
    settings.iter().map(|all| all.iter().map(|(name, value)| (*name, value.as_str())).collect()).collect()
}

/// Returns the addresses that a kernel loads from when it posts, waits or flushes, with a name each.
fn read_by_waits(context: &GinContext) -> Vec<(String, u64)> {
    let kernel = device(context, 0);
    // SAFETY: the context keeps its struct, which this process can read.
    let ext: ContextExt = unsafe { kernel.as_ptr().read() };
    let (summaries, leaves) = used_words(ext.n_endpoints);
    let mut places = vec![
        ("context".to_owned(), kernel.as_ptr() as u64),
        ("abort flag".to_owned(), ext.abort_flag as u64),
        ("time limit".to_owned(), ext.timeout_ns as u64),
        ("set of used endpoints".to_owned(), ext.used as u64),
        ("its end".to_owned(), ext.used.wrapping_add(summaries + leaves - 1) as u64),
        ("targets".to_owned(), ext.routes.targets as u64),
        ("scratch".to_owned(), ext.routes.scratch as u64),
        ("device handle".to_owned(), ext.routes.dev as u64),
    ];
    for i in 0..ext.n_endpoints {
        let endpoint = ext.routes.endpoints.wrapping_add(i as usize);
        // SAFETY: the context has that many endpoints, which begin with their configurations, and keeps them.
        let config = unsafe { endpoint.cast::<EndpointConfig>().read() };
        for (name, at) in [
            ("struct", endpoint as u64),
            ("completion counter", config.completed as u64),
            ("error counter", config.errors as u64),
            ("handle", config.handle as u64),
        ] {
            places.push((format!("{name} of endpoint {i}"), at));
        }
    }
    // SAFETY: the context keeps the handle that NCCL sees.
    let dev: DevHandle = unsafe { ext.routes.dev.read() };
    for i in 0..dev.n_signals as usize {
        // SAFETY: the handle has that many signals.
        let handle = unsafe { dev.signal_handles.wrapping_add(i).read() };
        // SAFETY: as above.
        places.push((format!("signal {i}"), unsafe { (*handle).cntr_value } as u64));
    }
    places
}

#[test]
fn what_waits_read_is_gpu_memory() {
    let test = "what_waits_read_is_gpu_memory";
    let Some(settings) = with_gpu(test, &[]) else { return };
    alone_each(test, &borrowed(&settings), |plugin| {
        ranks(&plugin, 2, |_, comm| {
            let context = comm.create_context(&config(2, 1)).expect("a context");
            for (name, at) in read_by_waits(&context) {
                assert!(is_gpu_memory(at), "{name} at {at:#x}");
            }
            comm.barrier().expect("all ranks");
        });
    });
}

#[test]
fn words_of_emulated_signals_are_gpu_memory_with_gdrcopy() {
    let test = "words_of_emulated_signals_are_gpu_memory_with_gdrcopy";
    let Some(settings) = with_gpu(test, &[("FERROGIN_SIGNALS", "emulated")]) else { return };
    alone_each(test, &borrowed(&settings), |plugin| {
        let has_gdrcopy = std::env::var("GDRCOPY").is_ok_and(|has| has == "yes");
        ranks(&plugin, 2, move |rank, comm| {
            let context = comm.create_context(&GinConfigV14 { n_contexts: 2, ..config(3, 0) }).expect("contexts");
            for id in 0..2 {
                let kernel = device(&context, id);
                // SAFETY: the context keeps its structs, which this process can read.
                let ext: ContextExt = unsafe { kernel.as_ptr().read() };
                // SAFETY: as above; the context's signals are emulated.
                let words = unsafe { (*ext.emulated).words };
                assert_eq!(is_gpu_memory(words as u64), has_gdrcopy);
                for round in 1..=100 {
                    kernel.signal(1 - rank as u32, Action::signal_add(2, id + round), Flags::NONE).expect("a signal");
                    kernel.wait_signal(2, u64::from(id + round)).expect("the peer's signal");
                    assert_eq!(kernel.read_signal(2), Ok(u64::from(id + round)), "added once");
                    kernel.reset_signal(2).expect("a reset");
                    comm.barrier().expect("all ranks");
                }
                assert_eq!([0, 1, 2].map(|signal| kernel.read_signal(signal)), [Ok(0); 3]);
            }
        });
    });
}

#[test]
fn failure_on_gpu_reaches_queries_at_once_and_waits_soon() {
    let test = "failure_on_gpu_reaches_queries_at_once_and_waits_soon";
    let Some(settings) = with_gpu(test, &[("SOFTEFA_FAULTS", "error_every=1,error_status=7")]) else { return };
    alone_each(test, &borrowed(&settings), |plugin| {
        ranks(&plugin, 2, |rank, comm| {
            let (_memory, window) = window(&comm, 4096);
            let context = comm.create_context(&config(2, 1)).expect("a context");
            let (kernel, target) = (device(&context, 0), DeviceWindow(window.gin_handle()));
            comm.barrier().expect("all ranks");
            if rank == 0 {
                assert!(!context.query_last_error().expect("a query"));
                kernel.put(1, target.at(0), target.at(8), 8, Action::NONE, Flags::NONE).expect("a post");
                let flushed = kernel.flush();
                // The error counter or, if the watcher was faster, the abort flag.
                assert!(matches!(flushed, Err(Status::CardError | Status::Aborted)), "{flushed:?}");
                assert!(context.query_last_error().expect("a query"), "after a kernel's error");
                // Nothing else ends this wait, which has no time limit: its endpoint has posted nothing.
                assert_eq!(kernel.wait_signal(1, 1), Err(Status::Aborted));
                wait_until("WARN line", || mini_nccl::log::last_warn().is_some());
                let line = mini_nccl::log::last_warn().expect("a line");
                assert!(line.contains("a write to rank 1") && line.contains("status 7"), "{line}");
            }
            comm.barrier().expect("all ranks");
            assert_eq!(context.query_last_error().expect("a query"), rank == 0);
            context.destroy().expect("destroyed");
        });
    });
}

#[test]
fn lost_rank_costs_its_own_requests_on_gpu() {
    let test = "lost_rank_costs_its_own_requests_on_gpu";
    let Some(settings) = with_gpu(test, &RANK_2_IS_GONE) else { return };
    alone_each(test, &borrowed(&settings), |plugin| others_go_on(&plugin));
}
