//! The NCCL contract, through the built plugin's C ABI on the software card: lifetimes, shapes, rails, versions.
#![allow(unsafe_code)]

use crate::harness::{TraceFile, alone, alone_each, config, device, pass_round, ranks, window};
use ferrogin_device::{Action, Flags, Window as DeviceWindow};
use ferrogin_ffi::device::DevHandle;
use ferrogin_ffi::nccl;
use ferrogin_ffi::nccl::GinConfigV14;
use ferrogin_test_support::wait::HANG_LIMIT;
use mini_nccl::rma::RmaPlugin;
use mini_nccl::{Bootstrap, Comm, GinContext, Plugin, log};
use std::ffi::{CStr, c_char};
use std::process::Command;
use std::sync::Arc;

/// Returns context 0's device handle, as NCCL's own kernels read it.
fn handle(context: &GinContext) -> DevHandle {
    // SAFETY: on the CPU the handle is an address in this process, which the borrowed context keeps valid.
    unsafe { context.handle().cast::<DevHandle>().read() }
}

/// Returns the INFO lines since the last call.
fn infos() -> Vec<String> {
    log::take().into_iter().filter(|line| line.level == nccl::LOG_INFO).map(|line| line.text).collect()
}

#[test]
fn signals_and_counters_may_differ_by_rank() {
    alone("signals_and_counters_may_differ_by_rank", &[], |plugin| {
        ranks(&plugin, 3, |rank, comm| {
            let (memory, window) = window(&comm, 4096);
            // A rank can only use signals that the target rank has, and rank 0 has the fewest.
            let context = comm.create_context(&config(1 + 2 * rank as i32, 2 - rank as i32)).expect("a context");
            pass_round(&comm, &context, 0, &window, &memory, 0);
            let device = device(&context, 0);
            let of_rank_0 = device.signal(0, Action::signal_inc(1), Flags::NONE);
            assert!(of_rank_0.is_err(), "rank 0 has no signal 1");
            device.signal(2, Action::signal_inc(4), Flags::NONE).expect("rank 2 has a signal 4");
            if rank == 2 {
                device.wait_signal(4, 3).expect("a signal from each rank");
            }
            device.flush().expect("a flush");
            comm.barrier().expect("all ranks");
        });
    });
}

#[test]
fn contexts_use_rails_in_turn() {
    alone("contexts_use_rails_in_turn", &[("SOFTEFA_NICS", "2")], |plugin| {
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
fn contexts_on_cpu_get_progress_function_of_software_card() {
    let settings = [("SOFTEFA_NICS", "2"), ("FERROGIN_DEVICE", "cpu")];
    alone("contexts_on_cpu_get_progress_function_of_software_card", &settings, |plugin| {
        ranks(&plugin, 2, |_, comm| {
            let context = comm.create_context(&GinConfigV14 { n_contexts: 2, ..config(1, 0) }).expect("contexts");
            let domains = [0, 1].map(|id| {
                // SAFETY: on the CPU the description is in this process, and `context` keeps it valid.
                let ext = unsafe { &*device(&context, id).as_ptr() };
                let (progress, domain) = (ext.progress.expect("the provider's function"), ext.progress_arg);
                let has_few_cores = std::thread::available_parallelism().expect("a number").get() < 8;
                // SAFETY: the domain is open while the context is.
                assert_eq!(unsafe { progress(domain) }, has_few_cores, "the call reaches the card");
                domain
            });
            assert!(!domains[0].is_null() && domains[0] != domains[1], "each context has the domain of its rail");
            comm.barrier().expect("all ranks");
        });
    });
}

#[test]
fn memory_may_be_registered_twice() {
    alone("memory_may_be_registered_twice", &[], |plugin| {
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

#[test]
fn too_many_counters_are_refused_before_first_opens() {
    alone("too_many_counters_are_refused_before_first_opens", &[("SOFTEFA_FAULTS", "cntr_budget=20")], |plugin| {
        ranks(&plugin, 2, |_, comm| {
            // 2 + 2 + 2 * 9 = 22.
            let error = comm.create_context(&config(9, 2)).expect_err("too many counters").to_string();
            assert!(error.contains("22 completion counters") && error.contains("20"), "{error}");
            comm.barrier().expect("all ranks");
        });
    });
}

#[test]
fn different_numbers_of_contexts_fail_on_all_ranks() {
    alone("different_numbers_of_contexts_fail_on_all_ranks", &[], |plugin| {
        ranks(&plugin, 2, |rank, comm| {
            let shape = GinConfigV14 { n_contexts: 1 + rank as i32, ..config(1, 0) };
            comm.create_context(&shape).expect_err("other numbers of contexts");
            // The communicator stays usable.
            let (memory, window) = window(&comm, 4096);
            let context = comm.create_context(&config(1, 0)).expect("a context");
            pass_round(&comm, &context, 0, &window, &memory, 0);
        });
    });
}

#[test]
fn v13_symbol_works_like_v14() {
    alone("v13_symbol_works_like_v14", &[("FERROGIN_POST", "locked")], |plugin| {
        let plugin = Plugin::load_v13(plugin.path()).expect("ncclGinPlugin_v13");
        ranks(&plugin, 2, |_, comm| {
            let (memory, window) = window(&comm, 4096);
            let context = comm.create_context(&config(1, 1)).expect("a context");
            pass_round(&comm, &context, 0, &window, &memory, 0);
        });
    });
}

#[test]
fn set_up_steps_are_traced() {
    let trace = TraceFile::new("settings");
    alone("set_up_steps_are_traced", &[trace.setting()], |plugin| {
        ranks(&plugin, 2, move |_, comm| {
            let (_memory, _window) = window(&comm, 4096);
            let _context = comm.create_context(&config(1, 0)).expect("a context");
            // The file is complete after every step, in case the process is killed.
            assert!(TraceFile::steps().len() > 4);
        });
        let steps = TraceFile::steps();
        for step in ["init", "listen", "connect", "regMrSym", "createContext", "destroyContext", "closeColl"] {
            let of_step: Vec<_> = steps.iter().filter(|event| event["name"] == step).collect();
            assert_eq!(of_step.len(), 2, "{step} of two ranks");
            assert!(of_step.iter().all(|event| event["ph"] == "X" && event["dur"].is_u64() && event["ts"].is_u64()));
        }
        let contexts: Vec<_> = steps.iter().filter(|event| event["name"] == "createContext").collect();
        assert!(contexts.iter().all(|event| event["args"]["endpoints"] == 3 && event["args"]["addresses"] == 1));
    });
}

#[test]
fn unwritable_trace_is_one_warning() {
    let settings = ["/nonexistent/trace.json", "/dev/full"].map(|path| vec![("FERROGIN_TRACE", path)]);
    alone_each("unwritable_trace_is_one_warning", &settings, |plugin| {
        ranks(&plugin, 2, |_, comm| {
            let (memory, window) = window(&comm, 4096);
            let context = comm.create_context(&config(1, 0)).expect("a context");
            pass_round(&comm, &context, 0, &window, &memory, 0);
        });
        let lines: Vec<_> = log::take().into_iter().filter(|line| line.is_warn()).collect();
        assert_eq!(lines.len(), 1, "{lines:?}");
        let path = std::env::var("FERROGIN_TRACE").expect("set");
        for part in [&*path, "cannot be written", "without a trace"] {
            assert!(lines[0].text.contains(part), "{part} in {lines:?}");
        }
    });
}

#[test]
fn unknown_setting_is_reported() {
    alone("unknown_setting_is_reported", &[("FERROGIN_TIMOUT", "3")], |plugin| {
        assert_eq!(Comm::probe(&plugin).expect("an init").len(), 1);
        let reports =
            infos().into_iter().filter(|line| line.contains("FERROGIN_TIMOUT") && line.contains("FERROGIN_TIMEOUT"));
        assert_eq!(reports.count(), 1);
    });
}

/// NCCL continues without a plugin whose init fails, but a later failure ends the job.
#[test]
fn init_fails_without_control_plane() {
    alone("init_fails_without_control_plane", &[("NCCL_SOCKET_IFNAME", "nowhere")], |plugin| {
        Comm::probe(&plugin).expect_err("no control plane");
        let line = log::last_warn().expect("a line");
        assert!(line.contains("init") && line.contains("NCCL_SOCKET_IFNAME=nowhere"), "{line}");
    });
}

#[test]
fn card_of_peers_is_inserted_once() {
    let trace = TraceFile::new("insertions");
    let settings = [("SOFTEFA_NICS", "2"), trace.setting()];
    alone("card_of_peers_is_inserted_once", &settings, |plugin| {
        const RANKS: usize = 4;
        for (signals, contexts, stride) in [(64, 1, 1), (0, 1, 1), (3, 4, 1), (5, 2, 2)] {
            ranks(&plugin, RANKS, move |_, comm| {
                let shape = GinConfigV14 { n_contexts: contexts, rank_stride: stride, ..config(signals, 2) };
                comm.create_context(&shape).expect("contexts").destroy().expect("destroyed");
            });
            let steps = TraceFile::steps();
            let peers = steps.iter().filter(|event| event["name"] == "createContext: peers");
            let inserted: Vec<_> = peers.map(|event| event["args"]["av_insertions"].clone()).collect();
            let newest = &inserted[inserted.len() - RANKS..];
            // The ranks are threads of one process with two cards. Contexts are assigned to the cards in turn.
            let expected = contexts.min(2);
            assert!(newest.iter().all(|n| *n == expected), "{newest:?}, not {expected}");
        }
    });
}

#[test]
fn messages_of_each_exchange_are_in_the_trace() {
    let trace = TraceFile::new("messages");
    alone("messages_of_each_exchange_are_in_the_trace", &[trace.setting()], |plugin| {
        const RANKS: usize = 3;
        ranks(&plugin, RANKS, |_, comm| {
            let (_memory, _window) = window(&comm, 4096);
            comm.create_context(&config(1, 0)).expect("a context").destroy().expect("destroyed");
        });
        let steps = TraceFile::steps();
        // A frame's header, and one rank's block: a greeting, a window on one rail, a context with two targets,
        // nothing.
        let steps_of = |name: &str| steps.iter().filter(|event| event["name"] == name).collect::<Vec<_>>();
        for (name, block) in [
            ("connect: exchange", 6),
            ("regMrSym: exchange", 20),
            ("createContext: exchange", 4 + 40 + 2 * 6),
            ("createContext: ready", 0),
        ] {
            let each = steps_of(name);
            assert_eq!(each.len(), RANKS, "{name}");
            let (messages, bytes) = (RANKS - 1, (RANKS - 1) * (20 + block));
            for (key, expected) in [("messages", messages), ("bytes_sent", bytes), ("bytes_received", bytes)] {
                assert!(each.iter().all(|event| event["args"][key] == expected), "{name}, {key} {expected}: {each:?}");
            }
        }
    });
}

#[test]
fn one_line_describes_each_context() {
    alone(
        "one_line_describes_each_context",
        &[("SOFTEFA_NICS", "2"), ("SOFTEFA_FAULTS", "cntr_budget=100")],
        |plugin| {
            ranks(&plugin, 2, |rank, comm| {
                let context = comm.create_context(&GinConfigV14 { n_contexts: 2, ..config(1, 3) }).expect("contexts");
                comm.barrier().expect("all ranks");
                let lines = (rank == 0).then(infos).unwrap_or_default();
                let kernels = format!("kernels on {}", std::env::var("FERROGIN_DEVICE").expect("a device"));
                if rank == 0 {
                    for r in 0..2 {
                        let begin = format!("rank {r} of 2: 2 contexts of 1 signal and 3 counters");
                        let of_rank: Vec<_> = lines.iter().filter(|line| line.contains(&begin)).collect();
                        assert_eq!(of_rank.len(), 1, "{lines:?}");
                        for part in [
                            &kernels,
                            "provider softefa",
                            "2 rails on",
                            "softefa0-rdm+softefa1-rdm",
                            "backendVersion 2",
                            "64 requests in flight",
                            "requests of 64 bytes and for values of 128",
                            // 2 + 3 + 2 * 1 per rank on each card.
                            "of 100 on softefa0-rdm",
                            "of 100 on softefa1-rdm",
                            "2 peer addresses",
                        ] {
                            assert!(of_rank[0].contains(part), "{part} in {}", of_rank[0]);
                        }
                    }
                }
                comm.barrier().expect("all ranks");
                drop(context);
            });
        },
    );
}

#[test]
fn peers_outside_stride_are_refused() {
    alone("peers_outside_stride_are_refused", &[], |plugin| {
        ranks(&plugin, 4, |rank, comm| {
            let (memory, window) = window(&comm, 4096);
            // 3 doesn't divide 4, so the plugin ignores the stride and the next rank is reachable.
            let all = comm.create_context(&GinConfigV14 { rank_stride: 3, ..config(1, 0) }).expect("a context");
            pass_round(&comm, &all, 0, &window, &memory, 0);
            all.destroy().expect("destroyed");
            let context = comm.create_context(&GinConfigV14 { rank_stride: 2, ..config(1, 0) }).expect("a context");
            let (kernel, target) = (device(&context, 0), DeviceWindow(window.gin_handle()));
            comm.barrier().expect("all ranks");
            let other = (rank as u32 + 2) % 4;
            let value = 0x2000 + rank as u64;
            kernel.put_value(other, target.at(64), value, 8, Action::signal_inc(0), Flags::NONE).expect("in stride");
            kernel.wait_signal(0, 1).expect("a signal");
            assert_eq!(memory.load(64), 0x2000 + u64::from(other));
            let refused = kernel.put_value((rank as u32 + 1) % 4, target.at(64), 1, 8, Action::NONE, Flags::NONE);
            assert!(refused.is_err(), "out of stride");
            kernel.flush().expect("a flush");
            comm.barrier().expect("all ranks");
        });
    });
}

#[test]
fn queue_depth_is_honoured() {
    alone("queue_depth_is_honoured", &[("SOFTEFA_FAULTS", "sq_size=2048")], |plugin| {
        ranks(&plugin, 1, |_, comm| {
            for (asked, got) in [(0, 1024), (1, 1), (16, 16), (100, 128), (1024, 1024), (1 << 20, 2048)] {
                for backend_version in [0, 1, 2] {
                    let shape = GinConfigV14 { queue_depth: asked, backend_version, ..config(1, 1) };
                    let context = comm.create_context(&shape).expect("a context");
                    assert_eq!(handle(&context).data.sq_size, got, "queueDepth {asked}, version {backend_version}");
                }
            }
        });
    });
}

#[test]
fn backend_versions_are_honoured_or_refused() {
    alone("backend_versions_are_honoured_or_refused", &[], |plugin| {
        ranks(&plugin, 2, |_, comm| {
            let (memory, window) = window(&comm, 4096);
            for version in [0, 1, 2] {
                let context = comm.create_context(&GinConfigV14 { backend_version: version, ..config(1, 0) });
                let context = context.expect("a context");
                // SAFETY: createContext returned the pointer, which the context keeps valid.
                let device = unsafe { context.net_device_handle().read() };
                assert_eq!((device.net_device_version, device.needs_proxy_progress), (version, 0));
                assert_eq!(context.stride(), size_of::<DevHandle>());
                pass_round(&comm, &context, 0, &window, &memory, 0);
            }
            for version in [-1, 3, 99, i32::MAX] {
                let error = comm.create_context(&GinConfigV14 { backend_version: version, ..config(1, 0) });
                let error = error.expect_err("an unknown version").to_string();
                assert!(error.contains(&format!("backendVersion {version}")) && error.contains("newer"), "{error}");
            }
        });
    });
}

#[test]
fn all_traffic_classes_are_accepted() {
    alone("all_traffic_classes_are_accepted", &[], |plugin| {
        ranks(&plugin, 2, |_, comm| {
            let (memory, window) = window(&comm, 4096);
            for traffic_class in [-1, 0, 104, 184, 255, 1 << 20] {
                let context = comm.create_context(&GinConfigV14 { traffic_class, ..config(1, 0) }).expect("a context");
                pass_round(&comm, &context, 0, &window, &memory, 0);
            }
        });
    });
}

#[test]
fn communicators_share_plugin_and_close_in_any_order() {
    alone("communicators_share_plugin_and_close_in_any_order", &[], |plugin| {
        let pairs = Arc::new(std::sync::Mutex::new(
            [(); 2].map(|()| Bootstrap::threads(2, HANG_LIMIT).into_iter().map(Some).collect::<Vec<_>>()),
        ));
        ranks(&plugin, 4, move |rank, comm| {
            let (memory, first_window) = window(&comm, 4096);
            let first = comm.create_context(&config(1, 1)).expect("a context");
            // A second communicator of the same ranks, and a split into odd and even ranks.
            let same = comm.share(comm.bootstrap().clone(), 0).expect("a second communicator");
            let bootstrap = pairs.lock().expect("bootstraps")[rank % 2][rank / 2].take().expect("a bootstrap");
            let split = comm.share(Arc::new(bootstrap), 0).expect("a split");
            assert_eq!((split.nranks(), split.rank()), (2, rank / 2));
            let (split_memory, split_window) = window(&split, 4096);
            let (of_same, of_split) = (
                same.register(&memory, 0).expect("a window"),
                [0, 1].map(|_| split.create_context(&config(2, 0)).expect("a context")),
            );
            let second = same.create_context(&config(1, 0)).expect("a context");
            pass_round(&comm, &first, 0, &first_window, &memory, 0);
            pass_round(&same, &second, 0, &of_same, &memory, 0);
            for context in &of_split {
                pass_round(&split, context, 0, &split_window, &split_memory, 1);
            }
            // The ranks close in different orders, and the remaining communicators still work.
            let [a, b] = of_split;
            if rank % 2 == 0 {
                drop((a, second, of_same))
            } else {
                drop((of_same, second, a))
            }
            drop(same);
            pass_round(&split, &b, 0, &split_window, &split_memory, 0);
            pass_round(&comm, &first, 0, &first_window, &memory, 0);
            if rank < 2 {
                drop((first, first_window, comm));
                drop((b, split_window, split));
            } else {
                drop((b, split_window, split));
                drop((first, first_window, comm));
            }
            drop(split_memory);
        });
        // The last communicator has finalized the plugin.
        assert!(plugin.devices().is_err());
        assert_eq!(Comm::probe(&plugin).expect("another init").len(), 1);
    });
}

#[test]
fn host_memory_is_registered_by_address_and_by_descriptor() {
    alone("host_memory_is_registered_by_address_and_by_descriptor", &[], |plugin| {
        ranks(&plugin, 2, |_, comm| {
            let context = comm.create_context(&config(1, 0)).expect("a context");
            // Flag 1 is NCCL_NET_MR_FLAG_FORCE_SO, for VA signals. The plugin refuses VA signals and ignores the flag.
            for (flags, by_descriptor) in [(0, false), (1, false), (0, true), (1, true)] {
                let memory = Arc::new(mini_nccl::DeviceMemory::alloc(3 << 16).expect("memory"));
                let window = if by_descriptor {
                    comm.register_dma_buf(&memory, flags).expect("a window by descriptor")
                } else {
                    comm.register(&memory, flags).expect("a window")
                };
                pass_round(&comm, &context, 0, &window, &memory, 0);
            }
        });
    });
}

/// A library that says it's an NCCL release, and keeps the last line that its logger got.
const FAKE_NCCL: &str = r"
#include <stdarg.h>
#include <stdio.h>
char line[4096];
void logger(int level, unsigned long flags, const char* file, int n, const char* format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(line, sizeof line, format, args);
  va_end(args);
}
int ncclGetVersion(int* version) { *version = VERSION; return 0; }
";

#[test]
fn releases_whose_kernels_are_unknown_get_the_rma_plugin_only() {
    let test = "releases_whose_kernels_are_unknown_get_the_rma_plugin_only";
    let settings = ["23007", "23102", "23203", "23300"].map(|version| vec![("FERROGIN_TEST_VERSION", version)]);
    alone_each(test, &settings, |plugin| {
        let version = std::env::var("FERROGIN_TEST_VERSION").expect("set");
        let place = ferrogin_test_support::of_process(env!("CARGO_TARGET_TMPDIR"), test);
        let (source, library) = (place.with_extension("c"), place.with_extension("so"));
        std::fs::write(&source, FAKE_NCCL).expect("a file");
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", &format!("-DVERSION={version}"), "-o"]).arg(&library).arg(&source);
        if !cc.status().is_ok_and(|status| status.success()) {
            return ferrogin_test_support::skip(test, "cc is missing");
        }
        // SAFETY: the library has no initialisers.
        let fake = unsafe { libloading::Library::new(&library) }.expect("the library");
        std::fs::remove_file(&library).expect("the file");
        std::fs::remove_file(&source).expect("the file");
        // SAFETY: the library defines the function with this type.
        let logger = unsafe { fake.get::<nccl::DebugLogger>(b"logger\0") }.expect("the logger");
        // SAFETY: the library defines 4096 bytes with this name, which end with a 0.
        let line = *unsafe { fake.get::<*const c_char>(b"line\0") }.expect("the line");
        let gin = plugin.raw_table().expect("v14");
        let rma = RmaPlugin::load_version(plugin.path(), 16).expect("the RMA plugin").raw_table().expect("v16");
        let mut ctx = std::ptr::null_mut();
        // SAFETY: the pointer is to a local variable.
        let code = unsafe { gin.init.expect("init")(&mut ctx, 1, *logger) };
        // SAFETY: the library's logger ends the line with a 0, and no other thread logs.
        let text = unsafe { CStr::from_ptr(line) }.to_string_lossy().into_owned();
        if ["23102", "23203"].contains(&version.as_str()) {
            assert_eq!(code, nccl::SUCCESS, "{text}");
        } else {
            assert_eq!((code, ctx.is_null()), (nccl::INVALID_USAGE, true), "{text}");
            assert!(text.contains("set NCCL_RMA_PLUGIN to this library and NCCL_GIN_TYPE=2"), "{text}");
        }
        // SAFETY: the pointer is to a local variable.
        assert_eq!(unsafe { rma.init.expect("init")(&mut ctx, 1, *logger) }, nccl::SUCCESS, "{version}");
    });
}
