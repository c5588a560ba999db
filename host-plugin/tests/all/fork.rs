//! A forked child process gets an error for each call, and its parent carries on.
#![allow(unsafe_code)]

use crate::harness::{alone, config, pass_round, ranks, window};
use ferrogin_test_support::wait::HANG_LIMIT;
use mini_nccl::Comm;

#[test]
fn calls_after_fork_fail_in_child_and_pass_in_parent() {
    alone("calls_after_fork_fail_in_child_and_pass_in_parent", &[], |plugin| {
        let loaded = plugin.clone();
        ranks(&plugin, 2, move |rank, comm| {
            let (memory, window) = window(&comm, 4096);
            let context = comm.create_context(&config(1, 1)).expect("a context");
            // The other rank's thread waits in the barrier, so it holds no lock of the test at the fork.
            comm.barrier().expect("all ranks");
            if rank == 0 {
                // SAFETY: the child only runs code of this test and of the plugin, and ends with `_exit`.
                let child = unsafe { libc::fork() };
                assert!(child >= 0, "fork: {}", std::io::Error::last_os_error());
                if child == 0 {
                    // SAFETY: `alarm` takes a number. Its signal kills a child that hangs.
                    unsafe { libc::alarm(HANG_LIMIT.as_secs() as u32) };
                    let errors = [
                        ("init", Comm::probe(&loaded).map(drop)),
                        ("queryLastError", context.query_last_error().map(drop)),
                        ("regMrSym", comm.register(&memory, 0).map(drop)),
                        ("createContext", comm.create_context(&config(1, 1)).map(drop)),
                        ("deregMrSym", window.deregister()),
                        ("destroyContext", context.destroy()),
                    ];
                    let wrong = errors.into_iter().find_map(|(call, result)| {
                        let text = result.err().map_or_else(|| "no error".to_owned(), |error| error.to_string());
                        let right =
                            text.contains("is a fork() of process") && text.contains("process that called init");
                        (!right).then(|| format!("{call}: {text}"))
                    });
                    if let Some(wrong) = &wrong {
                        eprintln!("{wrong}");
                    }
                    // SAFETY: `_exit` runs none of the parent's destructors and exit handlers.
                    unsafe { libc::_exit(i32::from(wrong.is_some())) }
                }
                assert_eq!(end_of(child), Some(0), "the child's calls fail with the right message");
            }
            comm.barrier().expect("all ranks");
            pass_round(&comm, &context, 0, &window, &memory, 0);
            assert!(!context.query_last_error().expect("a query"));
        });
    });
}

/// Returns a child's exit code; `None` if a signal killed it.
fn end_of(child: i32) -> Option<i32> {
    let mut status = 0;
    // SAFETY: the kernel writes one int into a local variable.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status))
}
