//! A second process: this test binary again, which executes commands from its standard input.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

use efa_dp_direct::wqe::RemoteMem;

use super::{End, LIMIT, Rig, wait_for, write};

pub const ROLE: &str = "SOFTEFA_TEST_PEER";

/// The second process, its endpoint and its buffer.
pub struct Peer {
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
    pub name: [u8; 32],
    /// 4 MiB that may be written and read.
    pub memory: RemoteMem,
}

pub const PEER_BUFFER: usize = 4 << 20;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap()).collect()
}

impl Peer {
    /// Starts this binary's test `peer` in another process.
    pub fn start(environment: &[(&str, &str)]) -> Self {
        Self::start_with(&["--exact", "peer", "--nocapture", "--test-threads=1"], environment)
    }

    /// Starts this program, which then finds itself to be the peer, in another process.
    pub fn start_with(args: &[&str], environment: &[(&str, &str)]) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(args).env(ROLE, "1");
        for (name, value) in environment {
            command.env(name, value);
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if let Some(at) = line.find('@')
                    && sender.send(line[at + 1..].to_owned()).is_err()
                {
                    return;
                }
            }
        });
        let mut peer = Self { child, input, lines, name: [0; 32], memory: RemoteMem::default() };
        let hello = peer.answer();
        let words: Vec<&str> = hello.split(' ').collect();
        peer.name.copy_from_slice(&unhex(words[0]));
        peer.memory = RemoteMem { addr: words[1].parse().unwrap(), rkey: words[2].parse().unwrap() };
        peer
    }

    pub fn answer(&mut self) -> String {
        self.lines.recv_timeout(LIMIT).expect("the peer says nothing")
    }

    pub fn tell(&mut self, command: &str) {
        writeln!(self.input, "{command}").unwrap();
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
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Stops it, and waits until all of its threads stand still.
    pub fn stop(&self) {
        use nix::sys::signal::{Signal, kill};
        use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
        let pid = nix::unistd::Pid::from_raw(self.child.id() as i32);
        kill(pid, Signal::SIGSTOP).unwrap();
        assert_eq!(waitpid(pid, Some(WaitPidFlag::WUNTRACED)), Ok(WaitStatus::Stopped(pid, Signal::SIGSTOP)));
    }

    pub fn finish(mut self) {
        self.tell("exit");
        self.finish_without_word();
    }

    /// It has been told to end.
    pub fn finish_without_word(mut self) {
        let status = self.child.wait().unwrap();
        assert!(status.success(), "the peer failed: {status}");
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Prints the first line of the second process.
pub fn hello(name: &[u8], buffer: &super::Buffer) {
    println!("@{} {} {}", hex(name), buffer.at as u64, buffer.region.rkey);
}

/// The body of the test `peer`, which does nothing in the first process.
pub fn serve() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    assert!(super::have_libfabric("peer"));
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
                wait_for("writes", || end.remote() >= number(1));
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
            // Answers each write to word 0 with the same value at the address given, `n` times.
            "echo" => {
                let remote = RemoteMem { addr: number(1), rkey: number(2) as u32 };
                println!("@ok");
                for n in 1..=number(3) {
                    let seen = buffer.word(0);
                    super::relax_until(|| seen.load(std::sync::atomic::Ordering::Acquire) == n);
                    source.word(0).store(n, std::sync::atomic::Ordering::Release);
                    end.post(to.unwrap(), write(remote, source.sge(0, 8)));
                    posted += 1;
                }
            }
            "exit" => break,
            other => panic!("unknown command {other}"),
        }
    }
    end.close();
    buffer.close();
    source.close();
    rig.close();
}
