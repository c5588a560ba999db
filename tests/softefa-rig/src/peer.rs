//! A second process: this test binary again, executing commands from its standard input.

use std::process::Command;

use efa_dp_direct::wqe::RemoteMem;
use ferrogin_test_support::child;
use ferrogin_test_support::peer::{Peer as Process, hex, unhex};

use crate::{End, Rig, wait_until, write};

pub const ROLE: &str = "SOFTEFA_TEST_PEER";

/// The second process, its endpoint and its buffer.
pub struct Peer {
    process: Process,
    pub name: [u8; 32],
    /// 4 MiB that peers may write and read.
    pub memory: RemoteMem,
}

pub const PEER_BUFFER: usize = 4 << 20;

impl Peer {
    /// Starts this program's `peer` test in another process.
    pub fn start(environment: &[(&str, &str)]) -> Self {
        Self::start_test("peer", environment)
    }

    /// Starts this program's test `test` in another process.
    pub fn start_test(test: &str, environment: &[(&str, &str)]) -> Self {
        Self::spawn(child::command(test).envs(environment.iter().copied()))
    }

    /// Starts `command`, whose environment tells it that it is the peer.
    pub fn spawn(command: &mut Command) -> Self {
        let mut process = Process::spawn(command.env(ROLE, "1"));
        let hello = process.wait_for("@");
        let words: Vec<&str> = hello.split(' ').collect();
        let memory = RemoteMem { addr: words[1].parse().unwrap(), rkey: words[2].parse().unwrap() };
        Self { process, name: unhex(words[0]).try_into().unwrap(), memory }
    }

    pub fn tell(&mut self, command: &str) {
        self.process.write_line(command);
    }

    pub fn answer(&mut self) -> String {
        self.process.wait_for("@")
    }

    pub fn ask(&mut self, command: &str) -> String {
        self.tell(command);
        self.answer()
    }

    pub fn connect(&mut self, name: &[u8; 32]) {
        let command = format!("connect {}", hex(name));
        assert_eq!(self.ask(&command), "ok");
    }

    pub fn kill(&mut self) {
        self.process.signal(libc::SIGKILL);
        assert!(!self.process.succeeds());
    }

    /// Stops the process, and waits until all of its threads have stopped.
    pub fn stop(&self) {
        self.process.stop();
    }

    pub fn finish(mut self) {
        self.tell("exit");
        self.finish_without_word();
    }

    /// Waits for a process that has already been told to exit.
    pub fn finish_without_word(mut self) {
        assert!(self.process.succeeds(), "the peer failed");
    }
}

/// Prints the second process's first line.
pub fn hello(name: &[u8], buffer: &crate::Buffer) {
    println!("@{} {} {}", hex(name), buffer.at as u64, buffer.region.rkey);
}

/// The body of the test `peer`, which does nothing in the first process.
pub fn serve() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    assert!(crate::have_libfabric("peer"));
    let rig = Rig::open();
    let mut end = End::open(&rig);
    let (buffer, source) = (rig.buffer(PEER_BUFFER), rig.buffer(PEER_BUFFER));
    hello(&end.name(), &buffer);
    let mut to = None;
    let mut posted = 0;
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let number = |i: usize| words[i].parse::<u64>().unwrap();
        match words[0] {
            "connect" => {
                to = Some(end.connect(&unhex(words[1]).try_into().unwrap()));
                println!("@ok");
            }
            "remote" => {
                wait_until("writes", || end.remote() >= number(1));
                println!("@{}", end.remote());
            }
            "matches" => println!("@{}", buffer.matches(number(1))),
            "word" => println!("@{}", buffer.word(number(1) as usize).load(std::sync::atomic::Ordering::Acquire)),
            "fill" => {
                buffer.fill(number(1));
                println!("@ok");
            }
            // addr rkey len seed
            "write" => {
                source.fill(number(4));
                let remote = RemoteMem { addr: number(1), rkey: number(2) as u32 };
                posted += 1;
                end.post(to.unwrap(), write(remote, source.sge(0, number(3) as u32)));
                end.wait_done(posted);
                println!("@{} {}", end.local(), end.errors());
            }
            // Exits as soon as it has been written to.
            "exit_after" => {
                println!("@ok");
                wait_until("writes", || end.remote() >= number(1));
                break;
            }
            "exit" => break,
            other => panic!("unknown command {other}"),
        }
    }
}
