//! The RMA plugin's function tables, through dlopen, on the software card and over TCP.

mod closing;
mod isolated;
mod killed;
mod refused;
mod stopped;
mod transfers;
mod workload;

use crate::harness::software_gpu_driver::{self, ATOMIC_REDUCTION_SUPPORTED};
use crate::harness::{
    self, DEVICE, Gdrcopy, PROVIDER, plugin_path, rma_alone, software_gpu, software_gpu_with_gdrcopy,
};
use crate::metrics::MetricsFile;
use ferrogin_libfabric::Libfabric;
use ferrogin_test_support::wait::{HANG_LIMIT, poll_until};
use ferrogin_test_support::{child, repetitions};
use mini_nccl::rma::{Place, Request, RmaComm, RmaContext, RmaMemory, RmaPlugin, Signal, Transfer};
use mini_nccl::{Bootstrap, DeviceMemory};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use workload::Workload;

/// In host memory: the distributions' libfabric doesn't support GPU memory over TCP.
const TCP: [(&str, &str); 2] = [("FERROGIN_PROVIDER", "tcp"), ("FERROGIN_DEVICE", "cpu")];

/// Runs `body` on each rank of an `n`-rank communicator, each in its own thread. Returns the results by rank.
fn ranks<T: Send + 'static>(
    plugin: &Arc<RmaPlugin>,
    n: usize,
    body: impl Fn(RmaComm) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let body = Arc::new(body);
    let threads: Vec<_> = Bootstrap::threads(n, HANG_LIMIT)
        .into_iter()
        .map(|bootstrap| {
            let (plugin, body) = (plugin.clone(), body.clone());
            std::thread::spawn(move || body(RmaComm::init(&plugin, Arc::new(bootstrap), 0).expect("a communicator")))
        })
        .collect();
    threads.into_iter().map(|thread| thread.join().expect("a rank without a panic")).collect()
}

fn run(plugin: &Arc<RmaPlugin>, n: usize, workload: Workload) {
    ranks(plugin, n, move |comm| workload.run(&comm));
}

#[test]
fn strong_signals_show_all_earlier_puts_on_a_reordering_card() {
    let test = "strong_signals_show_all_earlier_puts_on_a_reordering_card";
    let faults = ["seed=1,reorder=64", "seed=2,reorder=64,reread=0.2", "seed=3,reorder=16,delay_us=0..50"];
    let settings: Vec<_> = faults.iter().map(|faults| vec![("SOFTEFA_FAULTS", *faults)]).collect();
    rma_alone(test, &settings, 16, |plugin| run(&plugin, 3, Workload::default()));
}

#[test]
fn strong_signals_show_all_earlier_puts_over_tcp() {
    let test = "strong_signals_show_all_earlier_puts_over_tcp";
    rma_alone(test, &[TCP.to_vec()], 16, |plugin| run(&plugin, 3, Workload::default()));
}

#[test]
fn every_version_of_the_table_moves_data() {
    let test = "every_version_of_the_table_moves_data";
    for version in [13, 14, 15] {
        rma_alone(test, &[vec![]], version, |plugin| {
            run(&plugin, 2, Workload { operations: 100, epochs: 1, ..Workload::default() });
        });
    }
    let Some(path) = plugin_path(test) else { return };
    assert_eq!(RmaPlugin::load(path).expect("the newest table").version(), 16);
}

/// Finishes one request after another, driven only by `test`.
fn finish(context: &RmaContext, requests: Vec<Request>) {
    requests.iter().for_each(|request| context.wait(request).expect("a request"));
}

/// Describes a transfer of `size` bytes between two registrations.
fn transfer<'a>(peer: usize, here: Place<'a>, there: Place<'a>, size: usize) -> Transfer<'a> {
    Transfer { context: 0, peer, here, there, size, aggregate: false }
}

fn register(comm: &RmaComm, bytes: usize) -> RmaMemory {
    comm.register(&Arc::new(DeviceMemory::alloc(bytes).expect("memory")), 0).expect("a registration")
}

#[test]
fn metrics_count_puts_signals_and_bytes_exactly() {
    let test = "metrics_count_puts_signals_and_bytes_exactly";
    let file = MetricsFile::new(test);
    rma_alone(test, &[vec![file.setting()], [&TCP[..], &[file.setting()]].concat()], 16, |plugin| {
        const PUTS: usize = 10;
        // Those beyond the window leave after an acknowledgement, so the receiver knows their word.
        const SIGNALS: usize = 400;
        const WINDOW: usize = 256;
        ranks(&plugin, 2, |comm| {
            let (context, memory) = (comm.create_context(1).expect("a context"), register(&comm, 4096));
            let peer = 1 - comm.rank();
            let put = |size| transfer(peer, memory.at(0), memory.at(2048), size);
            let plain = (0..PUTS).map(|_| context.put(put(100), None).expect("a put"));
            finish(&context, plain.collect());
            let signal = || Signal { word: memory.at(8), value: 1, strong: true };
            let signals = (0..SIGNALS).map(|_| context.put(put(8), Some(signal())).expect("a signal"));
            finish(&context, signals.collect());
            poll_until("all signals of the peer", || {
                context.progress().expect("progress");
                memory.memory().load(8) == SIGNALS as u64
            });
            comm.barrier().expect("all ranks");
        });
        drop(plugin);
        // The last finalize wrote the file.
        let metrics = MetricsFile::read();
        for rank in ["0", "1"] {
            let labels = [("rank", rank), ("context", "closed")];
            let sum = |name: &str| metrics.sum(name, &labels).expect(name);
            assert_eq!(sum("ferrogin_bytes_total"), (PUTS * 100 + SIGNALS * 8) as u64, "{metrics:?}");
            assert_eq!(sum("ferrogin_signals_total"), SIGNALS as u64, "{metrics:?}");
            assert_eq!((sum("ferrogin_errors_total"), sum("ferrogin_signals_refused_total")), (0, 0), "{metrics:?}");
            // Besides the writes there are messages: for signals in the first window at most, or for all of them over
            // TCP; an acknowledgement for every 64 signals; and two or three before the context is destroyed.
            let messages = sum("ferrogin_posts_total") as usize - PUTS - SIGNALS;
            let is_tcp = std::env::var("FERROGIN_PROVIDER").is_ok_and(|provider| provider == "tcp");
            let of_signals = if is_tcp { SIGNALS..=SIGNALS } else { 1..=WINDOW };
            assert!((of_signals.start() + 1..=of_signals.end() + SIGNALS / 64 + 3).contains(&messages), "{metrics:?}");
            assert!(sum("ferrogin_completions_total") as usize >= PUTS + SIGNALS, "{metrics:?}");
        }
    });
}

#[test]
fn put_to_this_rank_completes_by_test_alone() {
    rma_alone("put_to_this_rank_completes_by_test_alone", &[vec![], TCP.to_vec()], 16, |plugin| {
        ranks(&plugin, 1, |comm| {
            let (context, memory) = (comm.create_context(1).expect("a context"), register(&comm, 4096));
            assert!(!comm.flushes_all_puts_on_any_signal().expect("an answer"), "a signal covers its own stream");
            memory.memory().store(0, 7);
            let put = transfer(0, memory.at(0), memory.at(8), 8);
            let signal = Signal { word: memory.at(16), value: 3, strong: true };
            finish(&context, vec![context.put(put, None).expect("a put")]);
            assert_eq!(memory.memory().load(8), 7);
            finish(&context, vec![context.put(put, Some(signal)).expect("a signal")]);
            while memory.memory().load(16) != 3 {
                context.progress().expect("progress");
            }
        });
    });
}

#[test]
fn requests_beyond_all_queues_are_taken_and_complete_in_any_order() {
    let test = "requests_beyond_all_queues_are_taken_and_complete_in_any_order";
    rma_alone(test, &[vec![("SOFTEFA_FAULTS", "seed=4,reorder=64")], TCP.to_vec()], 16, |plugin| {
        ranks(&plugin, 2, |comm| {
            const COUNT: usize = 3000;
            let (context, memory) = (comm.create_context(1).expect("a context"), register(&comm, 16 * COUNT + 8));
            let peer = 1 - comm.rank();
            let word = Signal { word: memory.at(16 * COUNT), value: 1, strong: true };
            (0..COUNT).for_each(|n| memory.memory().store(8 * n, n as u64 + 1));
            comm.barrier().expect("all ranks");
            // Far more signals than a stream's window, with no test or progress call in between.
            let mut requests: Vec<_> = (0..COUNT)
                .map(|n| {
                    let put = transfer(peer, memory.at(8 * n), memory.at(8 * (COUNT + n)), 8);
                    let aggregate = n + 1 < COUNT;
                    context.put(Transfer { aggregate, ..put }, (n % 2 == 0).then_some(word)).expect("a request")
                })
                .collect();
            requests.reverse();
            finish(&context, requests);
            while memory.memory().load(16 * COUNT) != COUNT as u64 / 2 {
                context.progress().expect("progress");
                std::thread::yield_now();
            }
            // All but the last put are before the last strong signal.
            (0..COUNT - 1).for_each(|n| assert_eq!(memory.memory().load(8 * (COUNT + n)), n as u64 + 1));
            polling(&context, || comm.barrier().expect("all ranks"));
        });
    });
}

#[test]
fn aggregated_puts_leave_together() {
    rma_alone("aggregated_puts_leave_together", &[vec![]], 16, |plugin| {
        ranks(&plugin, 1, |comm| {
            let (context, memory) = (comm.create_context(1).expect("a context"), register(&comm, 4096));
            let other = comm.create_context(1).expect("a context");
            let put = |to, aggregate| Transfer { aggregate, ..transfer(0, memory.at(0), memory.at(to), 8) };
            memory.memory().store(0, 7);
            let mut requests = vec![context.put(put(8, true), None).expect("a put")];
            // The card would carry out a posted put before this later one.
            finish(&other, vec![other.put(put(16, false), None).expect("a put")]);
            assert_eq!((memory.memory().load(8), memory.memory().load(16)), (0, 7));
            requests.push(context.put(put(24, false), None).expect("a put"));
            finish(&context, requests);
            assert_eq!((memory.memory().load(8), memory.memory().load(24)), (7, 7));
            // Sixteen are enough to leave without another one.
            let sixteen: Vec<_> = (4..20).map(|n| context.put(put(8 * n, true), None).expect("a put")).collect();
            poll_until("the puts", || {
                other.progress().expect("progress");
                (4..20).all(|n| memory.memory().load(8 * n) == 7)
            });
            finish(&context, sixteen);
        });
    });
}

/// Calls `body` while polling like NCCL's thread.
fn polling(context: &RmaContext, body: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        let thread = scope.spawn(body);
        while !thread.is_finished() {
            let _ = context.progress();
            std::thread::yield_now();
        }
    });
}

#[test]
fn signal_to_memory_that_its_receiver_is_still_registering_is_added() {
    let test = "signal_to_memory_that_its_receiver_is_still_registering_is_added";
    rma_alone(test, &[vec![], TCP.to_vec()], 16, |plugin| {
        ranks(&plugin, 2, |comm| {
            let (first, context) = (register(&comm, 4096), comm.create_context(1).expect("a context"));
            comm.barrier().expect("all ranks");
            polling(&context, || {
                for round in 1..=repetitions("FERROGIN_RMA_ROUNDS", 150, 3000) {
                    let memory = register(&comm, 4096);
                    if comm.rank() == 0 {
                        let signal = |word| {
                            let signal = Signal { word, value: 1, strong: true };
                            context.put(transfer(1, Place::NONE, Place::NONE, 0), Some(signal)).expect("a signal")
                        };
                        finish(&context, vec![signal(memory.at(0)), signal(first.at(0))]);
                    } else {
                        poll_until("the second signal", || first.memory().load(0) == round);
                        assert_eq!(memory.memory().load(0), 1, "the first signal of round {round}");
                    }
                    comm.barrier().expect("all ranks");
                }
            });
        });
    });
}

#[test]
fn threads_with_33_contexts_each_share_a_communicator() {
    let test = "threads_with_33_contexts_each_share_a_communicator";
    rma_alone(test, &[vec![("SOFTEFA_FAULTS", "seed=6,reorder=64"), ("SOFTEFA_NICS", "2")]], 16, |plugin| {
        const THREADS: usize = 3;
        let done = Arc::new(AtomicUsize::new(0));
        ranks(&plugin, 2, move |comm| {
            let workload = Workload { contexts: 33, operations: 20, ..Workload::default() };
            let parts: Vec<_> = (0..THREADS).map(|_| workload.prepare(&comm)).collect();
            comm.barrier().expect("all ranks");
            let (place, done) = ((comm.rank(), comm.nranks()), &done);
            std::thread::scope(|scope| {
                for (epoch, (context, areas)) in parts.iter().enumerate() {
                    let workload = &workload;
                    scope.spawn(move || {
                        let mut arrived = false;
                        workload.epoch(place, context, areas, epoch as u64, || {
                            if !std::mem::replace(&mut arrived, true) {
                                done.fetch_add(1, Ordering::SeqCst);
                            }
                            done.load(Ordering::SeqCst) == 2 * THREADS
                        });
                    });
                }
            });
        });
    });
}

#[test]
fn late_traffic_after_destroy_changes_nothing_and_fails_nobody() {
    let test = "late_traffic_after_destroy_changes_nothing_and_fails_nobody";
    rma_alone(test, &[vec![("SOFTEFA_FAULTS", "seed=8,reorder=64,delay_us=0..200")]], 16, |plugin| {
        ranks(&plugin, 2, |comm| {
            for _ in 0..3 {
                let memory = register(&comm, 4096);
                let context = comm.create_context(1).expect("a context");
                if comm.rank() == 0 {
                    let signal = Signal { word: memory.at(8), value: 1, strong: true };
                    let put = |n: usize| transfer(1, memory.at(0), memory.at(64 + 8 * n), 8);
                    let requests = (0..64).map(|n| context.put(put(n), Some(signal)).expect("a signal"));
                    finish(&context, requests.collect());
                    assert!(!context.has_error().expect("an answer"));
                }
                // Rank 1 destroys its context while the signals are on their way, or waiting in its queues.
                drop(context);
                comm.barrier().expect("all ranks");
            }
            Workload { operations: 50, epochs: 1, ..Workload::default() }.run(&comm);
        });
    });
}

#[test]
fn dead_peer_fails_the_context_and_not_the_close() {
    let test = "dead_peer_fails_the_context_and_not_the_close";
    rma_alone(test, &[vec![("SOFTEFA_FAULTS", "die_after=40")]], 16, |plugin| {
        let failed = ranks(&plugin, 2, |comm| {
            let (context, memory) = (comm.create_context(1).expect("a context"), register(&comm, 4096));
            let signal = Signal { word: memory.at(8), value: 1, strong: true };
            let put = transfer(1 - comm.rank(), memory.at(0), memory.at(64), 8);
            let error = loop {
                match context.put(put, Some(signal)).and_then(|request| context.wait(&request)) {
                    Ok(()) => {}
                    Err(error) => break error.to_string(),
                }
            };
            assert!(context.has_error().expect("an answer"));
            let again = context.put(put, None).expect_err("a context that has failed").to_string();
            let progress = context.progress().is_err();
            // Otherwise, the other rank's requests may fail because this one closes its communicator.
            comm.barrier().expect("all ranks");
            (error, again, progress)
        });
        for (rank, (error, again, progress)) in failed.into_iter().enumerate() {
            let cause = format!("from rank {rank} to rank {}", 1 - rank);
            assert!(error.contains(&cause) && again.contains(&cause) && progress, "{error}\n{again}");
        }
    });
}

#[test]
#[ignore = "make check"]
fn transfer_beyond_one_write_is_split() {
    rma_alone(
        "transfer_beyond_one_write_is_split",
        &[vec![("SOFTEFA_NICS", "1")], vec![("SOFTEFA_NICS", "2")]],
        16,
        |plugin| {
            ranks(&plugin, 1, |comm| {
                let size = ((repetitions("FERROGIN_RMA_GIB", 1, 4) as usize) << 30) + 4104;
                let (context, memory) = (comm.create_context(1).expect("a context"), register(&comm, 2 * size + 8));
                let marks: Vec<_> = (0..size).step_by((1 << 29) - 8).chain([1 << 30, size - 8]).collect();
                marks.iter().for_each(|at| memory.memory().store(*at, *at as u64 + 1));
                let signal = Signal { word: memory.at(2 * size), value: 1, strong: false };
                let put = transfer(0, memory.at(0), memory.at(size), size);
                let request = context.put(put, Some(signal)).expect("a put");
                while memory.memory().load(2 * size) == 0 {
                    context.progress().expect("progress");
                }
                marks.iter().for_each(|at| assert_eq!(memory.memory().load(size + at), *at as u64 + 1));
                finish(&context, vec![request]);
            });
        },
    );
}

/// All work happens in NCCL's thread. The watcher only tells the other ranks that this process runs.
#[test]
fn communicator_has_no_thread_but_the_watcher() {
    let test = "communicator_has_no_thread_but_the_watcher";
    rma_alone(test, &[TCP.to_vec()], 16, |plugin| {
        let threads = || std::fs::read_dir("/proc/self/task").expect("the threads").count();
        let before = threads();
        let bootstrap = Bootstrap::threads(1, HANG_LIMIT).remove(0);
        let comm = RmaComm::init(&plugin, Arc::new(bootstrap), 0).expect("a communicator");
        let (context, memory) = (comm.create_context(1).expect("a context"), register(&comm, 4096));
        let put = transfer(0, memory.at(0), memory.at(64), 8);
        finish(&context, vec![context.put(put, None).expect("a put")]);
        let lib = Libfabric::load(None).expect("libfabric");
        if lib.version().major > 1 {
            return ferrogin_test_support::skip(test, format!("the tcp of libfabric {} has threads", lib.version()));
        }
        assert_eq!(threads(), before + 1);
    });
}

/// Rank 1 is later than FERROGIN_TIMEOUT to registering memory and to creating a context.
#[test]
#[ignore = "make check"]
fn rank_that_is_late_to_a_collective_call_is_waited_for() {
    let test = "rank_that_is_late_to_a_collective_call_is_waited_for";
    rma_alone(test, &[vec![("FERROGIN_TIMEOUT", "5")]], 16, |plugin| {
        ranks(&plugin, 2, |comm| {
            let late = || {
                if comm.rank() == 1 {
                    std::thread::sleep(std::time::Duration::from_secs(12));
                }
            };
            late();
            let memory = register(&comm, 4096);
            late();
            let context = comm.create_context(1).expect("a context");
            let put = transfer(1 - comm.rank(), memory.at(0), memory.at(64), 8);
            finish(&context, vec![context.put(put, None).expect("a put")]);
            comm.barrier().expect("all ranks");
        });
    });
}

/// The driver adds to words that kernels may reset; the card writes the others.
#[test]
fn words_in_gpu_memory_that_no_kernel_resets_are_written_by_the_card() {
    let test = "words_in_gpu_memory_that_no_kernel_resets_are_written_by_the_card";
    let Some(path) = software_gpu(test) else { return };
    let gpu = |cards| {
        let card = [("SOFTEFA_FAULTS", "seed=9,reorder=64,delay_us=0..50"), ("SOFTEFA_NICS", cards)];
        let gpu = [("FERROGIN_DEVICE", "cuda"), ("LD_LIBRARY_PATH", &*path), ("SOFTGPU_CPU_ACCESS", "no")];
        [card.as_slice(), &gpu].concat()
    };
    rma_alone(test, &[gpu("1"), gpu("2")], 16, |plugin| {
        run(&plugin, 2, Workload { operations: 100, gpu: true, ..Workload::default() });
    });
}

#[test]
fn words_that_kernels_may_reset_are_mapped_by_gdrcopy_without_reductions() {
    let test = "words_that_kernels_may_reset_are_mapped_by_gdrcopy_without_reductions";
    let Some(path) = software_gpu_with_gdrcopy(test) else { return };
    let faults = ("SOFTEFA_FAULTS", "seed=9,reorder=64,delay_us=0..50");
    rma_alone(test, &[vec![faults, ("FERROGIN_DEVICE", "cuda"), ("LD_LIBRARY_PATH", &path)]], 16, |plugin| {
        let gdrcopy = Gdrcopy::load();
        software_gpu_driver::set_attribute(ATOMIC_REDUCTION_SUPPORTED, 0);
        run(&plugin, 2, Workload { operations: 100, gpu: true, ..Workload::default() });
        assert_eq!(gdrcopy.counts(), [0, 0, 2], "one registration of each rank, deregistered");
    });
}

/// The distributions' libfabric refuses GPU memory over TCP.
#[test]
fn tcp_on_a_machine_with_a_gpu_carries_host_memory() {
    let test = "tcp_on_a_machine_with_a_gpu_carries_host_memory";
    let Some(path) = software_gpu(test) else { return };
    let gpu = ("LD_LIBRARY_PATH", &*path);
    let automatic = vec![("FERROGIN_PROVIDER", "tcp"), ("FERROGIN_DEVICE", "auto"), gpu];
    rma_alone(test, &[automatic, [&TCP[..], &[gpu]].concat()], 16, |plugin| {
        let bootstrap = Arc::new(Bootstrap::threads(1, HANG_LIMIT).remove(0));
        let comm = RmaComm::init(&plugin, bootstrap, 0);
        if std::env::var("FERROGIN_DEVICE").is_ok_and(|device| device == "cpu") {
            let comm = comm.expect("a communicator");
            let (context, memory) = (comm.create_context(1).expect("a context"), register(&comm, 4096));
            let put = transfer(0, memory.at(0), memory.at(64), 8);
            finish(&context, vec![context.put(put, None).expect("a put")]);
        } else {
            let error = comm.map(drop).expect_err("a refusal of GPU memory").to_string();
            assert!(error.contains("refuses GPU memory") && error.contains("set FERROGIN_DEVICE=cpu"), "{error}");
        }
    });
}

#[test]
#[ignore = "make check"]
fn tests_of_the_rma_plugin_pass_on_another_libfabric() {
    let test = "tests_of_the_rma_plugin_pass_on_another_libfabric";
    let Some(path) = harness::second_libfabric(test) else { return };
    child::run_again(&["rma::"], &[("FERROGIN_LIBFABRIC", &path)]);
}

/// Runs on the software card's verbs front end.
#[test]
#[ignore = "make check"]
fn libfabrics_efa_provider_carries_puts_gets_and_signals() {
    let test = "libfabrics_efa_provider_carries_puts_gets_and_signals";
    let tool = ["ferrogin", "libnccl-gin-ferrogin.so", "verbs/libibverbs.so.1"];
    let Some(dist) = ferrogin_test_support::dist(test, &tool) else { return };
    let Some(library) = std::env::var_os("FERROGIN_LIBFABRIC_ALT").map(PathBuf::from) else {
        return ferrogin_test_support::skip(
            test,
            "FERROGIN_LIBFABRIC_ALT names no libfabric with a newer efa provider",
        );
    };
    let mut command = Command::new(dist.join("ferrogin"));
    command.args(["verbs", "--"]).arg(std::env::current_exe().expect("the path of this program")).args([
        "rma::strong_signals_show_all_earlier_puts_on_a_reordering_card",
        "rma::transfers::puts_and_gets_of_all_sizes_move_their_bytes",
        "rma::threads_with_33_contexts_each_share_a_communicator",
        "rma::requests_beyond_all_queues_are_taken_and_complete_in_any_order",
        "rma::late_traffic_after_destroy_changes_nothing_and_fails_nobody",
        "rma::dead_peer_fails_the_context_and_not_the_close",
    ]);
    // A wheel's providers are next to its library.
    command.env("FI_PROVIDER_PATH", library.with_file_name("libfabric")).env("FERROGIN_LIBFABRIC", library);
    // This libfabric was built without CUDA.
    command.env(PROVIDER, "efa").env(DEVICE, "cpu").env("SOFTEFA_NICS", "2");
    let output = command.output().expect("the tool");
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    if text.contains("no mount namespace") || text.contains("mounts are forbidden") {
        return ferrogin_test_support::skip(test, "the system allows this user no mount namespace");
    }
    assert!(output.status.success() && text.contains("6 passed"), "{text}");
}

/// 96,000 operations; 5 million with each provider in a soak run.
#[test]
#[ignore = "make check"]
fn many_operations_among_four_ranks_are_all_verified() {
    let test = "many_operations_among_four_ranks_are_all_verified";
    let faults = "seed=11,reorder=64,reread=0.1";
    rma_alone(test, &[vec![("SOFTEFA_FAULTS", faults)], TCP.to_vec()], 16, |plugin| {
        // From each rank to each rank in two contexts: 32,000 operations per epoch.
        let epochs = repetitions("FERROGIN_RMA_EPOCHS", 3, 160);
        run(&plugin, 4, Workload { seed: 11, operations: 1000, epochs, ..Workload::default() });
    });
}
