//! Machines with defects, simulated by the software card: `init` fails and names the cause and fix, or the job works.

use crate::harness::{DEVICE, alone, alone_each, config, pass_round, ranks, rma_alone, software_gpu, window};
use ferrogin_ffi::nccl::GinConfigV14;
use ferrogin_test_support::wait::HANG_LIMIT;
use mini_nccl::rma::RmaComm;
use mini_nccl::{Bootstrap, Comm, log};
use std::process::Command;
use std::sync::Arc;

fn lines_with(part: &str) -> Vec<String> {
    log::all().into_iter().map(|line| line.text).filter(|text| text.contains(part)).collect()
}

#[test]
fn init_fails_without_hardware_counters_and_names_switch() {
    alone("init_fails_without_hardware_counters_and_names_switch", &[("SOFTEFA_FAULTS", "no_counters")], |plugin| {
        let error = Comm::probe(&plugin).expect_err("no counters").to_string();
        let lines = lines_with("FI_EFA_USE_HW_CNTR=1");
        assert_eq!(lines.len(), 1, "{error}: {:?}", log::all());
        for part in ["completion counter", "softefa0-rdm", "2.6.0", "cntr_open_ext failed"] {
            assert!(lines[0].contains(part), "{part}: {}", lines[0]);
        }
    });
}

#[test]
fn init_fails_if_counter_switch_is_off() {
    let settings = [("SOFTEFA_FAULTS", "no_counters"), ("FI_EFA_USE_HW_CNTR", "0")];
    alone("init_fails_if_counter_switch_is_off", &settings, |plugin| {
        Comm::probe(&plugin).expect_err("no counters");
        assert_eq!(lines_with("FI_EFA_USE_HW_CNTR=0 switches").len(), 1, "{:?}", log::all());
    });
}

#[test]
fn init_refuses_completion_queues_of_several_rings() {
    let test = "init_refuses_completion_queues_of_several_rings";
    alone(test, &[("SOFTEFA_FAULTS", "sub_cqs=4")], |plugin| {
        Comm::probe(&plugin).expect_err("four rings");
        let line = "card softefa0-rdm divides each completion queue into 4 rings (sub-CQs)";
        assert_eq!(lines_with(line).len(), 1, "{:?}", log::all());
    });
}

#[test]
fn init_passes_with_counters_for_smallest_context_only() {
    let test = "init_passes_with_counters_for_smallest_context_only";
    alone(test, &[("SOFTEFA_FAULTS", "cntr_budget=4")], |plugin| {
        assert_eq!(Comm::probe(&plugin).expect("enough counters"), ["softefa0-rdm"]);
        assert_eq!(Comm::probe(&plugin).expect("still enough counters"), ["softefa0-rdm"]);
    });
}

#[test]
fn queues_with_16_bit_request_ids_work_and_are_reported_once() {
    let faults = ("SOFTEFA_FAULTS", "qp_caps=0,reorder=16");
    let policies = ["combining", "locked"].map(|policy| vec![faults, ("FERROGIN_POST", policy)]);
    alone_each("queues_with_16_bit_request_ids_work_and_are_reported_once", &policies, |plugin| {
        ranks(&plugin, 2, |_, comm| {
            let (memory, window) = window(&comm, 4096);
            for backend_version in [2, 1, 2] {
                let shape = GinConfigV14 { n_contexts: 2, backend_version, ..config(2, 1) };
                let context = comm.create_context(&shape).expect("contexts");
                // More rounds than the ring has slots.
                for round in 0..80 {
                    pass_round(&comm, &context, round % 2, &window, &memory, (round % 2) as u16);
                }
            }
        });
        assert_eq!(lines_with("no 64-bit request ids").len(), 1, "{:?}", log::all());
    });
}

#[test]
fn queues_with_64_bit_request_ids_are_not_reported() {
    alone("queues_with_64_bit_request_ids_are_not_reported", &[], |plugin| {
        ranks(&plugin, 2, |_, comm| drop(comm.create_context(&config(1, 0)).expect("a context")));
        assert_eq!(lines_with("64-bit request ids"), [""; 0]);
    });
}

/// NCCL 2.31's device code, which selects backendVersion 0 or 1, reuses value slots too early. Newer code doesn't.
#[test]
fn reuse_of_value_slots_is_reported_once_and_only_with_nccl_2_31() {
    alone("reuse_of_value_slots_is_reported_once_and_only_with_nccl_2_31", &[], |plugin| {
        ranks(&plugin, 1, |_, comm| {
            let reported = |backend_version| {
                let shape = GinConfigV14 { backend_version, ..config(1, 0) };
                drop(comm.create_context(&shape).expect("a context"));
                lines_with("reuses a value slot").len()
            };
            assert_eq!([reported(2), reported(1), reported(0)], [0, 1, 1]);
        });
    });
}

/// Some libfabric versions refuse an unknown class, others ignore it. The result is the same.
#[test]
fn unknown_traffic_classes_fall_back_on_every_libfabric() {
    let test = "unknown_traffic_classes_fall_back_on_every_libfabric";
    let ways = ["seed=1", "refuse_tclass", "ignore_tclass"].map(|faults| vec![("SOFTEFA_FAULTS", faults)]);
    alone_each(test, &ways, |plugin| {
        ranks(&plugin, 1, |_, comm| {
            let reported = |dscp: i32| {
                let before = lines_with("does not support the requested traffic class").len();
                let shape = GinConfigV14 { traffic_class: dscp << 2, ..config(1, 0) };
                drop(comm.create_context(&shape).expect("a context"));
                lines_with("does not support the requested traffic class").split_off(before).join("; ")
            };
            assert!(reported(46).ends_with("traffic class 184: its queues use the low-latency class"));
            assert!(reported(26).ends_with("traffic class 104: its queues use the default class"));
        });
    });
}

fn without_cuda(test: &str, init: impl Fn()) {
    init();
    let lines = lines_with("FI_HMEM");
    assert_eq!(lines.len(), 1, "{test}: {:?}", log::all());
    assert!(lines[0].contains("built without CUDA") && lines[0].contains("FERROGIN_LIBFABRIC"), "{}", lines[0]);
}

#[test]
fn libfabric_without_cuda_is_named_as_cause() {
    let test = "libfabric_without_cuda_is_named_as_cause";
    let Some(path) = software_gpu(test) else { return };
    let settings = [("SOFTEFA_FAULTS", "no_hmem"), ("FERROGIN_DEVICE", "cuda"), ("LD_LIBRARY_PATH", &*path)];
    alone(test, &settings, |plugin| {
        without_cuda(test, || drop(Comm::probe(&plugin).expect_err("no GPU memory")));
    });
}

#[test]
fn libfabric_without_cuda_is_named_by_the_rma_plugin() {
    let test = "libfabric_without_cuda_is_named_by_the_rma_plugin";
    let Some(path) = software_gpu(test) else { return };
    let settings = vec![("SOFTEFA_FAULTS", "no_hmem"), ("FERROGIN_DEVICE", "cuda"), ("LD_LIBRARY_PATH", &*path)];
    rma_alone(test, &[settings], 16, |plugin| {
        without_cuda(test, || {
            let bootstrap = Arc::new(Bootstrap::threads(1, HANG_LIMIT).remove(0));
            RmaComm::init(&plugin, bootstrap, 0).map(drop).expect_err("no GPU memory");
        });
    });
}

/// Device memory, its registration and its mappings then come from the CUDA driver, which the software GPU replaces.
#[test]
#[ignore = "make check"]
fn all_tests_pass_with_memory_of_a_gpu() {
    let test = "all_tests_pass_with_memory_of_a_gpu";
    let Some(path) = software_gpu(test) else { return };
    let mut tests = Command::new(std::env::current_exe().expect("the path of this program"));
    tests.args(["--include-ignored", "--skip", test]).env(DEVICE, "cuda").env("LD_LIBRARY_PATH", path);
    if !ferrogin_test_support::soak() {
        // Most of what these repeat doesn't depend on the device.
        tests.envs([("FERROGIN_TEST_CYCLES", "40"), ("FERROGIN_TEST_SETUPS", "10"), ("FERROGIN_FUZZ_CALLS", "1000")]);
    }
    let output = tests.output().expect("a process for the tests");
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success() && text.contains("running "), "{text}");
    for (skipped, why) in text.lines().filter_map(|line| line.split_once("SKIP ")?.1.split_once(": ")) {
        ferrogin_test_support::skip(&format!("{test}, {skipped}"), why);
    }
}
