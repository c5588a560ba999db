//! The plugin through its C ABI, on the software card: contexts, windows, errors, leaks.
#![allow(unsafe_code)]

mod harness;

use ferrogin_device::{Action, Context, Flags, Window as DeviceWindow};
use ferrogin_ffi::nccl::GinConfigV14;
use harness::{alone, ranks};
use mini_nccl::{Comm, DeviceMemory, GinContext, Plugin, Window, log};
use std::sync::Arc;
use std::time::{Duration, Instant};

fn config(n_signals: i32, n_counters: i32) -> GinConfigV14 {
    GinConfigV14 {
        n_signals,
        n_counters,
        n_contexts: 1,
        queue_depth: 64,
        traffic_class: -1,
        backend_version: 2,
        rank_stride: 1,
    }
}

fn window(comm: &Comm, bytes: usize) -> (Arc<DeviceMemory>, Window) {
    let memory = Arc::new(DeviceMemory::alloc(bytes).expect("memory"));
    let window = comm.register(&memory, 0).expect("a window");
    (memory, window)
}

fn device(context: &GinContext, id: u32) -> Context<'_> {
    // SAFETY: the handle is of a context that is borrowed as long as the view.
    unsafe { Context::from_handle(context.handle(), id) }.expect("a handle of this plugin")
}

fn wait_for(what: &str, limit: Duration, done: impl Fn() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < limit, "{what} within {limit:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// One value with signal `signal` of the next rank, and one from the one before.
fn pass_round(comm: &Comm, context: &GinContext, id: u32, window: &Window, memory: &DeviceMemory, signal: u16) {
    let (rank, n) = (comm.rank() as u64, comm.nranks() as u64);
    let device = device(context, id);
    let next = ((rank + 1) % n) as u32;
    let before = device.read_signal(signal.into()).expect("a signal");
    comm.barrier().expect("all ranks");
    let target = DeviceWindow(window.gin_handle());
    device.put_value(next, target, 64, 0x1000 + rank, 8, Action::signal_inc(signal), Flags::NONE).expect("a value");
    device.wait_signal(signal.into(), before + 1).expect("a signal");
    assert_eq!(memory.load(64), 0x1000 + (rank + n - 1) % n);
    device.flush().expect("a flush");
    comm.barrier().expect("all ranks");
}

#[test]
fn signals_and_counters_may_differ_by_rank() {
    alone("signals_and_counters_may_differ_by_rank", &[], |plugin| {
        ranks(&plugin, 3, |rank, comm| {
            let (memory, window) = window(&comm, 4096);
            // Rank 0 has fewest signals: everyone may use only what the target has.
            let context = comm.create_context(&config(1 + 2 * rank as i32, 2 - rank as i32)).expect("a context");
            pass_round(&comm, &context, 0, &window, &memory, 0);
            let device = device(&context, 0);
            let of_rank_0 = device.signal(0, Action::signal_inc(1), Flags::NONE);
            assert!(of_rank_0.is_err(), "rank 0 has no signal 1");
            device.signal(2, Action::signal_inc(4), Flags::NONE).expect("rank 2 has a signal 4");
            if rank == 2 {
                device.wait_signal(4, 3).expect("a signal from each");
            }
            device.flush().expect("a flush");
            comm.barrier().expect("all ranks");
        });
    });
}

#[test]
fn contexts_take_the_rails_in_turn() {
    alone("contexts_take_the_rails_in_turn", &[("SOFTEFA_NICS", "2")], |plugin| {
        ranks(&plugin, 2, |_, comm| {
            assert_eq!(comm.device_name(), "softefa0-rdm+softefa1-rdm");
            let (memory, window) = window(&comm, 4096);
            for n_contexts in [1, 2, 3] {
                let context = comm.create_context(&GinConfigV14 { n_contexts, ..config(1, 0) }).expect("contexts");
                for id in 0..n_contexts as u32 {
                    pass_round(&comm, &context, id, &window, &memory, 0);
                }
            }
        });
    });
}

#[test]
fn the_same_memory_may_be_registered_twice() {
    alone("the_same_memory_may_be_registered_twice", &[], |plugin| {
        ranks(&plugin, 2, |_, comm| {
            let (memory, first) = window(&comm, 4096);
            let second = comm.register(&memory, 0).expect("a second window");
            let third = comm.register_dma_buf(&memory, 0).expect("a window by descriptor");
            let context = comm.create_context(&config(1, 0)).expect("a context");
            pass_round(&comm, &context, 0, &first, &memory, 0);
            first.deregister().expect("the first ends");
            pass_round(&comm, &context, 0, &second, &memory, 0);
            pass_round(&comm, &context, 0, &third, &memory, 0);
        });
    });
}

/// What a process holds: descriptors, mappings, threads.
fn holdings() -> (usize, usize, usize) {
    let count = |dir: &str| std::fs::read_dir(dir).map_or(0, Iterator::count);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let memfds = maps.lines().filter(|line| line.contains("memfd:")).count();
    (count("/proc/self/fd"), memfds, count("/proc/self/task"))
}

#[test]
fn cycles_leak_nothing() {
    alone("cycles_leak_nothing", &[], |plugin| {
        let cycle = |times: usize| {
            for i in 0..times {
                ranks(&plugin, 2, move |_, comm| {
                    let (memory, window) = window(&comm, 4096);
                    let context = comm.create_context(&config(2, 1)).expect("a context");
                    pass_round(&comm, &context, 0, &window, &memory, 1);
                    // Every other time, closeColl has to sweep.
                    if i % 2 == 0 {
                        context.abandon();
                    } else {
                        context.destroy().expect("destroyed");
                    }
                });
            }
        };
        cycle(10);
        let before = holdings();
        cycle(100);
        assert_eq!(holdings(), before, "descriptors, mappings, threads");
    });
}

#[test]
fn contexts_of_one_communicator_leak_nothing() {
    alone("contexts_of_one_communicator_leak_nothing", &[], |plugin| {
        ranks(&plugin, 2, |rank, comm| {
            let cycle = |times: usize| {
                for _ in 0..times {
                    let (_, window) = window(&comm, 4096);
                    let context = comm.create_context(&config(2, 1)).expect("a context");
                    context.destroy().expect("destroyed");
                    window.deregister().expect("deregistered");
                }
                // The other rank's part is counted too, and counting opens a descriptor itself.
                comm.barrier().expect("all ranks");
                let held = (rank == 0).then(holdings);
                comm.barrier().expect("all ranks");
                held
            };
            let before = cycle(10);
            assert_eq!(cycle(200), before, "descriptors, mappings, threads");
        });
    });
}

/// Provokes the card's `status` and looks at what the host is told.
fn an_error_is_told(test: &'static str, status: u8, backend_version: i32) {
    let faults = format!("error_every=3,error_status={status}");
    alone(test, &[("SOFTEFA_FAULTS", &faults)], move |plugin| {
        ranks(&plugin, 2, move |rank, comm| {
            let (_memory, window) = window(&comm, 4096);
            let context = comm.create_context(&GinConfigV14 { backend_version, ..config(1, 1) }).expect("a context");
            let device = device(&context, 0);
            let target = DeviceWindow(window.gin_handle());
            assert!(!context.query_last_error().expect("a query"), "no error before the first");
            comm.barrier().expect("all ranks");
            if rank == 0 {
                for i in 0..3 {
                    let posted = device.put(1, target, 8 * i, target, 0, 8, Action::NONE, Flags::NONE);
                    posted.expect("a post before the error");
                }
                wait_for("queryLastError", Duration::from_secs(1), || context.query_last_error().expect("a query"));
                wait_for("the WARN line", Duration::from_secs(1), || log::last_warn().is_some());
                let line = log::last_warn().expect("a line");
                for part in ["rank 0", "write to rank 1", "endpoint data", &format!("status {status}")] {
                    assert!(line.contains(part), "{part} in {line}");
                }
                // No wait hangs, on this endpoint or another.
                assert!(device.flush().is_err());
                assert!(device.wait_signal(0, 1).is_err());
                assert!(context.query_last_error().expect("a query"), "sticky");
            }
            comm.barrier().expect("all ranks");
            assert_eq!(context.query_last_error().expect("a query"), rank == 0);
            let warnings = log::take().into_iter().filter(|line| line.is_warn()).count();
            assert!(warnings <= 1, "one line for one failure");
            comm.barrier().expect("all ranks");
        });
    });
}

#[test]
fn a_remote_error_is_told() {
    an_error_is_told("a_remote_error_is_told", 7, 2);
}

#[test]
fn a_local_error_is_told() {
    an_error_is_told("a_local_error_is_told", 5, 1);
}

#[test]
fn an_unresponsive_peer_is_told() {
    an_error_is_told("an_unresponsive_peer_is_told", 13, 2);
}

#[test]
fn counters_are_budgeted_before_the_first_is_opened() {
    alone("counters_are_budgeted_before_the_first_is_opened", &[("SOFTEFA_FAULTS", "cntr_budget=20")], |plugin| {
        ranks(&plugin, 2, |_, comm| {
            // 2 + 2 + 2 * 9 = 22.
            let error = comm.create_context(&config(9, 2)).expect_err("too many counters").to_string();
            assert!(error.contains("22 completion counters") && error.contains("20"), "{error}");
            comm.barrier().expect("all ranks");
        });
    });
}

#[test]
fn a_rank_that_asks_for_another_number_of_contexts_fails_all() {
    alone("a_rank_that_asks_for_another_number_of_contexts_fails_all", &[], |plugin| {
        ranks(&plugin, 2, |rank, comm| {
            let shape = GinConfigV14 { n_contexts: 1 + rank as i32, ..config(1, 0) };
            comm.create_context(&shape).expect_err("other numbers of contexts");
            // The communicator is as it was.
            let (memory, window) = window(&comm, 4096);
            let context = comm.create_context(&config(1, 0)).expect("a context");
            pass_round(&comm, &context, 0, &window, &memory, 0);
        });
    });
}

#[test]
fn the_older_symbol_leads_to_the_same_plugin() {
    alone("the_older_symbol_leads_to_the_same_plugin", &[("FERROGIN_POST", "locked")], |plugin| {
        let plugin = Plugin::load_v13(plugin.path()).expect("ncclGinPlugin_v13");
        ranks(&plugin, 2, |_, comm| {
            let (memory, window) = window(&comm, 4096);
            let context = comm.create_context(&config(1, 1)).expect("a context");
            pass_round(&comm, &context, 0, &window, &memory, 0);
        });
    });
}

#[test]
fn settings_are_traced() {
    let path = std::env::temp_dir().join(format!("ferrogin-softcard-{}.json", std::process::id()));
    let name = path.to_string_lossy().into_owned();
    alone("settings_are_traced", &[("FERROGIN_TRACE", &name)], |plugin| {
        ranks(&plugin, 2, |_, comm| {
            let (_memory, _window) = window(&comm, 4096);
            let _context = comm.create_context(&config(1, 0)).expect("a context");
        });
        let text = std::fs::read_to_string(std::env::var_os("FERROGIN_TRACE").expect("set")).expect("a trace");
        for step in ["init", "listen", "connect", "regMrSym", "createContext", "destroyContext", "closeColl"] {
            assert!(text.contains(&format!("\"name\":\"{step}\"")), "{step} in {text}");
        }
    });
    let _ = std::fs::remove_file(path);
}
