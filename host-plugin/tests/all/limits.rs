//! A process without room for descriptors: `init` fails at once, with an error that names the limit, and passes once there is room.
#![allow(unsafe_code)]

use crate::harness::alone;
use mini_nccl::Comm;
use std::time::{Duration, Instant};

/// Far below FERROGIN_TIMEOUT, far above what a busy machine needs.
const LIMIT: Duration = Duration::from_secs(30);

/// Sets the soft limit of a resource, and returns the one before.
fn set_limit(resource: libc::__rlimit_resource_t, value: u64) -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes one struct into a local variable.
    assert_eq!(unsafe { libc::getrlimit(resource, &mut limit) }, 0);
    let before = std::mem::replace(&mut limit.rlim_cur, value);
    // SAFETY: the kernel reads one struct from a local variable.
    assert_eq!(unsafe { libc::setrlimit(resource, &limit) }, 0, "{}", std::io::Error::last_os_error());
    before
}

#[test]
fn init_without_descriptors_names_limit() {
    alone("init_without_descriptors_names_limit", &[], |plugin| {
        let used = std::fs::read_dir("/proc/self/fd").expect("descriptors").count() as u64;
        // With each descriptor more, `init` fails in a later step, until it passes.
        for more in 0..200 {
            let before = set_limit(libc::RLIMIT_NOFILE, used + more);
            let began = Instant::now();
            let result = Comm::probe(&plugin);
            let took = began.elapsed();
            set_limit(libc::RLIMIT_NOFILE, before);
            let Err(error) = result else {
                assert!(more > 3, "{more} limits were too low");
                return;
            };
            assert!(took < LIMIT, "after {took:?}: {error}");
            assert!(error.to_string().contains("raise `ulimit -n`"), "{more} more: {error}");
        }
        panic!("init never passes");
    });
}
