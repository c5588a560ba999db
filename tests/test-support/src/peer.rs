//! Child processes that take part in a test.
#![allow(unsafe_code)]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use super::{child, wait::HANG_LIMIT};

/// A child process with pipes for its standard input and output, killed on drop.
pub struct Peer {
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
}

impl Peer {
    /// Starts a process that runs this program's test `name`, with additional environment variables.
    ///
    /// # Panics
    /// If the process can't be started, or the program has no test `name`.
    pub fn start(name: &str, environment: &[(&str, String)]) -> Self {
        Self::spawn(child::command(name).envs(environment.iter().map(|(name, value)| (name, value))))
    }

    /// Starts `command`.
    ///
    /// # Panics
    /// If the process can't be started.
    pub fn spawn(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a child process");
        let input = child.stdin.take().expect("a pipe");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        let (sender, lines) = channel();
        std::thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        Self { child, input, lines }
    }

    /// Waits for a line of output with `word`, and returns the rest of the line.
    ///
    /// # Panics
    /// If the process ends first, or after [`HANG_LIMIT`].
    pub fn wait_for(&mut self, word: &str) -> String {
        let began = Instant::now();
        loop {
            let left = HANG_LIMIT.saturating_sub(began.elapsed());
            let line = self.lines.recv_timeout(left).unwrap_or_else(|error| panic!("no line with {word:?}: {error}"));
            if let Some((_, rest)) = line.split_once(word) {
                return rest.trim().to_owned();
            }
        }
    }

    /// Sends a line to the process's standard input.
    ///
    /// # Panics
    /// If the process has ended.
    pub fn write_line(&mut self, line: &str) {
        writeln!(self.input, "{line}").expect("the child process reads");
    }

    /// Sends a signal to the process.
    pub fn signal(&self, signal: i32) {
        // SAFETY: the process is a child that hasn't been waited for, so the ID is still its own.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    /// Stops the process, and waits until all of its threads have stopped.
    pub fn stop(&self) {
        self.signal(libc::SIGSTOP);
        let mut status = 0;
        // SAFETY: the kernel writes one int into a local variable.
        let stopped = unsafe { libc::waitpid(self.child.id() as i32, &mut status, libc::WUNTRACED) };
        assert!(
            stopped == self.child.id() as i32 && libc::WIFSTOPPED(status),
            "the process ended before it was stopped"
        );
    }

    /// Waits for the process to exit; returns whether it succeeded.
    ///
    /// # Panics
    /// If the process can't be waited for.
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

/// Decodes hexadecimal digits.
///
/// # Panics
/// If `digits` has any other character.
pub fn unhex(digits: &str) -> Vec<u8> {
    (0..digits.len() / 2).map(|at| u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).expect("hex digits")).collect()
}
