//! `tests/verbs.c`, compiled against the system's headers: layouts, all operations, and what is refused.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use ferrogin_test_support::own_host;

use crate::{Running, have, libraries, on_card, run};

/// Compiles `tests/NAME.c`; returns `None` without a compiler or headers.
pub fn compiled(test: &str, name: &'static str) -> Option<PathBuf> {
    static PROGRAMS: Mutex<BTreeMap<&str, PathBuf>> = Mutex::new(BTreeMap::new());
    if !Path::new("/usr/include/infiniband/efadv.h").is_file() {
        ferrogin_test_support::skip(test, "the headers of rdma-core are not installed (Debian: libibverbs-dev)");
        return None;
    }
    let mut programs = PROGRAMS.lock().unwrap_or_else(PoisonError::into_inner);
    let program = programs.entry(name).or_insert_with(|| {
        let out = libraries().join(name);
        if out.is_file() {
            return out;
        }
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(format!("{name}.c"));
        let mut compile = Command::new("cc");
        compile.args(["-O1", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&out).arg(source);
        compile.arg(libraries().join("libibverbs.so.1"));
        assert!(compile.status().is_ok_and(|status| status.success()), "tests/{name}.c does not compile");
        out
    });
    Some(program.clone())
}

pub fn program(test: &str) -> Option<PathBuf> {
    compiled(test, "verbs")
}

fn part(test: &str, name: &str, faults: &str) {
    if let Some(program) = program(test) {
        let mut command = on_card(program);
        command.arg(name).env("SOFTEFA_FAULTS", faults);
        let text = run(command);
        assert!(text.contains(&format!("{name}: good")), "{text}");
    }
}

#[test]
fn srd_sends_writes_and_reads() {
    part("srd_sends_writes_and_reads", "srd", "seed=2");
    part("srd_sends_writes_and_reads", "srd", "seed=2,reorder=32,qp_caps=0");
}

#[test]
fn ud_drops_without_receive_and_leaves_room_for_the_header() {
    part("ud_drops_without_receive_and_leaves_room_for_the_header", "ud", "seed=2");
}

#[test]
fn datagram_that_nobody_takes_is_complete_when_sent() {
    part("datagram_that_nobody_takes_is_complete_when_sent", "unanswered", "seed=2");
    part("datagram_that_nobody_takes_is_complete_when_sent", "unanswered", "seed=2,reorder=8");
}

#[test]
fn number_of_a_destroyed_queue_pair_is_used_next() {
    part("number_of_a_destroyed_queue_pair_is_used_next", "numbers", "seed=2");
    part("number_of_a_destroyed_queue_pair_is_used_next", "numbers", "seed=2,old_qpns");
}

#[test]
fn probe_for_a_type_of_queue_pair_logs_nothing() {
    let Some(program) = program("probe_for_a_type_of_queue_pair_logs_nothing") else { return };
    let mut command = on_card(program);
    command.arg("types");
    assert_eq!(run(command), "types: good\n");
}

#[test]
fn forked_child_has_a_card_of_its_own() {
    part("forked_child_has_a_card_of_its_own", "fork", "seed=2");
}

/// UCX's valgrind stage requires this.
#[test]
#[ignore = "make check"]
fn nothing_is_lost_at_the_end_of_a_program() {
    let test = "nothing_is_lost_at_the_end_of_a_program";
    let Some(program) = program(test).filter(|_| have(test, "valgrind", "valgrind")) else { return };
    for part in ["srd", "numbers"] {
        let mut command = on_card("valgrind");
        command.args([
            "--quiet",
            "--leak-check=full",
            "--errors-for-leak-kinds=definite,possible",
            "--error-exitcode=9",
        ]);
        command.arg(&program).arg(part);
        let text = run(command);
        assert!(text.contains(&format!("{part}: good")), "{text}");
    }
}

#[test]
fn cards_of_all_processes_count_in_sysfs() {
    let Some(program) = program("cards_of_all_processes_count_in_sysfs") else { return };
    let sysfs = ferrogin_test_support::of_process(env!("CARGO_TARGET_TMPDIR"), "hw_counters");
    let counters = sysfs.join("class/infiniband/rdmap0s0/ports/1/hw_counters");
    std::fs::create_dir_all(&counters).unwrap();
    let names = ["tx_bytes", "send_wrs", "recv_bytes", "rdma_write_wrs", "rdma_read_bytes"];
    for name in names {
        std::fs::write(counters.join(name), "0\n").unwrap();
    }
    let counted = || {
        let mut command = on_card(&program);
        command.arg("srd").env("SYSFS_PATH", &sysfs);
        run(command);
        names.map(|name| std::fs::read_to_string(counters.join(name)).unwrap().trim().parse::<u64>().unwrap())
    };
    let (first, second) = (counted(), counted());
    std::fs::remove_dir_all(sysfs).unwrap();
    assert!(first.iter().all(|number| *number > 0), "{first:?}");
    // The byte count on the wire depends on retries.
    assert_eq!(first[1..].iter().map(|number| 2 * number).collect::<Vec<_>>(), second[1..], "{second:?}");
}

#[test]
fn events_tell_the_completion_queue() {
    part("events_tell_the_completion_queue", "events", "seed=2");
}

#[test]
fn sends_wait_while_the_queue_drains() {
    part("sends_wait_while_the_queue_drains", "states", "seed=2");
}

#[test]
fn handles_belong_to_domains_and_parent_domains_hold_them() {
    part("handles_belong_to_domains_and_parent_domains_hold_them", "domains", "seed=2");
}

#[test]
fn nothing_listens_for_other_hosts_before_a_queue_pair_may_receive() {
    let test = "nothing_listens_for_other_hosts_before_a_queue_pair_may_receive";
    if let Some(program) = program(test) {
        let mut command = on_card(program);
        // This test has its own address: at the usual one, another process may be listening on the same port.
        command.arg("port").env("SOFTEFA_WIRE", "tcp").env("SOFTEFA_IFADDR", own_host().to_string());
        let text = run(command);
        assert!(text.contains("port: good"), "{text}");
    }
}

#[test]
fn bad_input_is_refused_as_on_hardware() {
    part("bad_input_is_refused_as_on_hardware", "refused", "seed=2");
    part("bad_input_is_refused_as_on_hardware", "table", "seed=2");
}

#[test]
fn object_destroyed_twice_is_named_and_refused() {
    let Some(program) = program("object_destroyed_twice_is_named_and_refused") else { return };
    let mut command = on_card(program);
    command.arg("destroyed");
    let text = run(command);
    assert!(text.contains("destroyed: good"), "{text}");
    let named = |call: &str, kind: &str| {
        text.lines().any(|line| line.contains(&format!("{call}: ")) && line.contains(&format!("not an open {kind}")))
    };
    for (call, kind) in [
        ("ibv_destroy_qp", "queue pair"),
        ("ibv_destroy_cq", "completion queue"),
        ("ibv_destroy_comp_channel", "completion channel"),
        ("ibv_destroy_comp_cntr", "completion counter"),
        ("ibv_dereg_mr", "memory region"),
        ("ibv_destroy_ah", "address handle"),
        ("ibv_dealloc_pd", "protection domain"),
        ("ibv_dealloc_td", "thread domain"),
        ("ibv_close_device", "device"),
        ("ibv_free_device_list", "device list"),
    ] {
        assert!(named(call, kind), "{call}, {kind}: {text}");
    }
}

#[test]
fn counters_count_in_memory_of_the_program() {
    part("counters_count_in_memory_of_the_program", "counters", "seed=2");
}

#[test]
fn queues_in_a_dma_buf_are_driven_by_the_program() {
    part("queues_in_a_dma_buf_are_driven_by_the_program", "gda", "seed=2");
}

/// The software GPU exports part of its memory as a dma-buf.
#[test]
fn memory_of_a_gpu_is_registered_by_its_dma_buf() {
    let test = "memory_of_a_gpu_is_registered_by_its_dma_buf";
    let Some(program) = program(test) else { return };
    let Some(gpu) = ferrogin_test_support::software_gpu(test) else { return };
    let libraries = std::env::join_paths([libraries(), gpu.as_ref()]).expect("two directories");
    for access in ["yes", "no"] {
        let mut command = on_card(&program);
        command.arg("gpu").env("SOFTEFA_FAULTS", "seed=2,reorder=8").env("LD_LIBRARY_PATH", &libraries);
        command.env("SOFTGPU_CPU_ACCESS", access);
        let text = run(command);
        assert!(text.contains("gpu: good"), "{text}");
    }
}

#[test]
fn address_of_another_host_is_an_error() {
    let Some(program) = program("address_of_another_host_is_an_error") else { return };
    let mut command = on_card(&program);
    command.arg("srd").env("SOFTEFA_IFADDR", "203.0.113.9");
    let output = Running::start(command).output();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("must be an address of this host"), "{text}");
}
