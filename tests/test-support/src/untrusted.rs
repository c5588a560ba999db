//! Processes that aren't peers of the program under test, and belong to another user where possible.
#![allow(unsafe_code)]

use std::io::Read;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::process::Command;

use super::{child, peer::Peer, skip, soak};

const TASK: &str = "FERROGIN_TEST_UNTRUSTED";
/// Descriptors besides the connections, including those that libfabric leaves open.
const OTHERS: u64 = 1000;

/// Returns whether this process may start others as the user `nobody`; if not, reports `test` as skipped.
pub fn have_second_user(test: &str) -> bool {
    let is_root = std::fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0);
    let switch =
        || Command::new("setpriv").args(["--reuid=65534", "true"]).status().is_ok_and(|status| status.success());
    let have = is_root && switch();
    if !have {
        skip(&format!("{test} as another user"), "needs root and setpriv (apt-get install util-linux)");
    }
    have
}

/// Runs this program's test `name` in another process, as the user `nobody` if `as_nobody`. There, [`task`] returns
/// `task`.
///
/// # Panics
/// If the process can't be started.
pub fn start(name: &str, task: &str, as_nobody: bool) -> Peer {
    let mut command = child::command(name);
    if as_nobody {
        let mut switched = Command::new("setpriv");
        switched.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
        switched.arg(command.get_program()).args(command.get_args());
        command = switched;
    }
    Peer::spawn(command.env(TASK, task))
}

/// This process's task, if [`start`] started it.
pub fn task() -> Option<String> {
    std::env::var(TASK).ok()
}

/// Sets the limit on open descriptors; returns false if the system refuses it.
pub fn limit_descriptors(count: u64) -> bool {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes one struct into a local variable.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } == 0;
    limit.rlim_cur = count.min(limit.rlim_max);
    // SAFETY: the kernel reads one struct from a local variable.
    known && limit.rlim_cur == count && unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) } == 0
}

/// Starts a process that holds `count` TCP connections to `addresses`, in turn, and sends nothing. The kernel has
/// accepted them when this returns, and they last as long as the result, unless the program closes them. The program's
/// test `name` must call [`hold`].
///
/// # Panics
/// If the process can't be started or can't connect.
pub fn start_silent(name: &str, addresses: &[SocketAddr], count: usize, as_nobody: bool) -> Peer {
    let addresses: Vec<String> = addresses.iter().map(SocketAddr::to_string).collect();
    let mut process = start(name, &format!("hold {count} {}", addresses.join(" ")), as_nobody);
    assert_eq!(process.wait_for("untrusted process holds"), count.to_string());
    process
}

/// How many silent connections a test uses.
pub fn silent() -> usize {
    if soak() { 3000 } else { 1000 }
}

/// Does what [`start_silent`] asks for, if it started this process.
///
/// # Panics
/// If the connections can't be opened.
pub fn hold() {
    let Some(task) = task() else { return };
    let words: Vec<&str> = task.split(' ').collect();
    let ["hold", count, addresses @ ..] = &words[..] else { return };
    let count: usize = count.parse().expect("a number");
    assert!(limit_descriptors(count as u64 + OTHERS), "no room for {count} descriptors");
    let connect = |(_, address): (usize, &&str)| TcpStream::connect(address).expect("a connection");
    let held: Vec<TcpStream> = (0..count).zip(addresses.iter().cycle()).map(connect).collect();
    println!("untrusted process holds {}", held.len());
    let _ = std::io::stdin().read(&mut [0]);
}
