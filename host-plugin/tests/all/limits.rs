//! A process at one of its limits: each set-up call fails with an error that names the limit and its fix, and passes
//! once there's room.
#![allow(unsafe_code)]

use crate::harness::{REPORT, alone_each, config, pass_round, ranks};
use ferrogin_test_support::address_space;
use ferrogin_test_support::wait::HANG_LIMIT;
use mini_nccl::{Bootstrap, Comm, DeviceMemory, Error, log};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Barrier};

/// Fixes for other causes.
const WRONG: [&str; 5] =
    ["install", "NCCL_SOCKET_IFNAME", "kernel's log", "check or unset", "initialised libfabric first"];

/// A limit: its resource, how much of it the process uses now, the smallest step worth trying, and the fix.
struct Limit {
    name: &'static str,
    resource: libc::__rlimit_resource_t,
    used: fn() -> u64,
    step: u64,
    fix: &'static str,
}

const LIMITS: [Limit; 3] = [
    Limit { name: "open files", resource: libc::RLIMIT_NOFILE, used: open_files, step: 1, fix: "raise `ulimit -n`" },
    Limit {
        name: "memory",
        resource: libc::RLIMIT_AS,
        used: || address_space() as u64,
        step: 256 << 10,
        fix: "`ulimit -v`",
    },
    Limit { name: "file size", resource: libc::RLIMIT_FSIZE, used: || 0, step: 4 << 10, fix: "raise `ulimit -f`" },
];

/// Returns the lowest free descriptor: the limit applies to descriptor numbers.
fn open_files() -> u64 {
    std::fs::File::open("/dev/null").expect("a descriptor").as_raw_fd() as u64
}

impl Limit {
    /// Returns the limit that this process's environment names.
    fn of_environment() -> &'static Self {
        let name = std::env::var("LIMIT").expect("set");
        LIMITS.iter().find(|limit| limit.name == name).expect("a limit")
    }

    /// Sets the soft limit, and returns the previous one.
    fn set(&self, value: u64) -> u64 {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the kernel writes one struct into a local variable.
        assert_eq!(unsafe { libc::getrlimit(self.resource, &mut limit) }, 0);
        let before = std::mem::replace(&mut limit.rlim_cur, value.min(limit.rlim_max));
        // SAFETY: the kernel reads one struct from a local variable.
        assert_eq!(unsafe { libc::setrlimit(self.resource, &limit) }, 0, "{}", std::io::Error::last_os_error());
        before
    }

    /// Makes a call on several ranks at once, with room for `more`, and checks that a failure names the limit. Each
    /// rank gets one element of `prepared`.
    fn passes<T: Send>(
        &self,
        what: &str,
        more: u64,
        prepared: Vec<T>,
        call: impl Fn(T) -> Result<(), Error> + Sync,
    ) -> bool {
        let [ready, start] = [(); 2].map(|()| Barrier::new(prepared.len() + 1));
        let run = &|rank: T| {
            ready.wait();
            start.wait();
            call(rank)
        };
        log::take();
        let passed = std::thread::scope(|scope| {
            let threads: Vec<_> = prepared.into_iter().map(|rank| scope.spawn(move || run(rank))).collect();
            ready.wait();
            let before = self.set((self.used)() + more);
            start.wait();
            let results: Vec<_> = threads.into_iter().map(|thread| thread.join().expect("no panic")).collect();
            self.set(before);
            results.iter().all(Result::is_ok)
        });
        let lines: Vec<_> = log::take().into_iter().filter(|line| line.is_warn()).map(|line| line.text).collect();
        let wrong = |line: &String| WRONG.iter().any(|fix| line.contains(fix));
        assert!(
            passed || lines.iter().any(|line| line.contains(self.fix)) && !lines.iter().any(wrong),
            "{what} with {more} more of {}: {lines:#?}",
            self.name
        );
        passed
    }

    /// Repeats [`Limit::passes`] with more and more room, until the call passes.
    fn sweep<T: Send>(&self, what: &str, prepare: impl Fn() -> Vec<T>, call: impl Fn(T) -> Result<(), Error> + Sync) {
        let (mut more, mut failures) = (0, 0);
        while !self.passes(what, more, prepare(), &call) {
            failures += 1;
            assert!(failures < 100, "{what} never passes");
            more = (more + self.step).max(more * 3 / 2);
        }
        println!("{REPORT}{what} at the limit of {}: {failures} failures", self.name);
    }
}

/// Returns a child process's settings for each limit.
fn settings() -> Vec<Vec<(&'static str, &'static str)>> {
    LIMITS.iter().map(|limit| vec![("LIMIT", limit.name), ("FERROGIN_TIMEOUT", "60")]).collect()
}

#[test]
fn init_at_limit_names_it() {
    alone_each("init_at_limit_names_it", &settings(), |plugin| {
        let limit = Limit::of_environment();
        if limit.resource != libc::RLIMIT_AS {
            limit.sweep("init", || vec![()], |()| Comm::probe(&plugin).map(drop));
        }
    });
}

/// libfabric loads its providers once: if that fails for lack of memory, the process never gets them. So each step is
/// its own process.
#[test]
fn init_without_memory_names_limit() {
    let test = "init_without_memory_names_limit";
    let mebibytes = ["0", "1", "2", "3", "4", "5", "6", "7", "64"];
    let settings = mebibytes.map(|more| vec![("LIMIT", "memory"), ("MORE", more)]);
    alone_each(test, &settings, |plugin| {
        let more: u64 = std::env::var("MORE").expect("set").parse().expect("a number");
        let limit = Limit::of_environment();
        let passes = limit.passes("init", more << 20, vec![()], |()| Comm::probe(&plugin).map(drop));
        assert!(passes || more < 64, "64 MiB are enough");
        assert!(!passes || more > 0, "without room it fails");
        println!("{REPORT}init with {more} MiB: passes: {passes}");
    });
}

#[test]
fn set_up_at_limit_names_it() {
    alone_each("set_up_at_limit_names_it", &settings(), |plugin| {
        let limit = Limit::of_environment();
        Comm::probe(&plugin).expect("room");
        let connect = |bootstrap| Comm::init(&plugin, Arc::new(bootstrap), 0).map(drop);
        limit.sweep("connect", || Bootstrap::threads(2, HANG_LIMIT), connect);
        let both = ranks(&plugin, 2, |_, comm| (comm, Arc::new(DeviceMemory::alloc(4 << 20).expect("memory"))));
        let all = || both.iter().collect::<Vec<_>>();
        limit.sweep("regMrSym", all, |(comm, memory)| comm.register(memory, 0).map(drop));
        limit.sweep("createContext", all, |(comm, _)| comm.create_context(&config(4, 2)).map(drop));
        // The communicator still works after all these failures.
        let round = |(comm, memory): &(Comm, Arc<DeviceMemory>)| {
            let window = comm.register(memory, 0).expect("a window");
            let context = comm.create_context(&config(1, 0)).expect("a context");
            pass_round(comm, &context, 0, &window, memory, 0);
        };
        std::thread::scope(|scope| both.iter().for_each(|rank| drop(scope.spawn(|| round(rank)))));
    });
}
