//! Child processes that play a role in a test of several processes.
#![allow(unsafe_code)]

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// A child process that runs the test named `child` of the same program. It is killed when this is dropped.
pub struct Peer {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Peer {
    /// Starts the process with additional environment variables.
    ///
    /// # Panics
    /// The process cannot be started.
    pub fn start(environment: &[(&str, String)]) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("the path of the test's program"))
            .args(["--exact", "child", "--nocapture", "--test-threads=1"])
            .envs(environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a child process");
        let input = child.stdin.take().expect("a pipe");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        Self { child, input, output }
    }

    /// Waits for a line of output with `word`, and returns the rest of the line.
    ///
    /// # Panics
    /// The process ended before.
    pub fn wait_for(&mut self, word: &str) -> String {
        let mut lines = self.output.by_ref().lines().map(|line| line.expect("readable output"));
        let line = lines.find(|line| line.contains(word)).expect("the child process printed the word");
        line.split(word).nth(1).unwrap_or_default().trim().to_owned()
    }

    /// Sends an empty line to the standard input of the process.
    ///
    /// # Panics
    /// The process ended before.
    pub fn send_line(&mut self) {
        self.input.write_all(b"\n").expect("the child process reads");
    }

    /// Sends a signal to the process.
    pub fn signal(&self, signal: i32) {
        // SAFETY: the process is a child that was not waited for, so its id belongs to it.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    /// Waits for the end of the process; true if it succeeded.
    ///
    /// # Panics
    /// The process cannot be waited for.
    pub fn succeeds(&mut self) -> bool {
        self.child.wait().expect("a child process").success()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Bytes as hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The bytes of hexadecimal digits.
///
/// # Panics
/// `digits` has another character.
pub fn unhex(digits: &str) -> Vec<u8> {
    (0..digits.len() / 2).map(|at| u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).expect("hex digits")).collect()
}
