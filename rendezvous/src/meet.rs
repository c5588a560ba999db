//! Rank 0 waits for the connections of the other ranks.

use super::connection::{ConnectionError, Listener, Peer, wait};
use super::identity::Identity;
use super::message::{Hello, MessageKind};
use crate::error::BootstrapError;
use nix::poll::PollFlags;
use std::collections::VecDeque;
use std::io::ErrorKind::{ConnectionAborted, Interrupted, PermissionDenied, WouldBlock};
use std::time::{Duration, Instant};

/// Connections without a hello that rank 0 keeps, in addition to one for each rank.
const SILENT_MAX: usize = 256;

/// The ranks that have connected to rank 0, and the connections that may be of ranks.
pub(super) struct Rendezvous<'a> {
    identity: &'a Identity,
    timeout: Duration,
    deadline: Instant,
    listener: Listener,
    /// Connections whose hello is not complete, the oldest first.
    silent: VecDeque<Peer>,
    /// The ranks 1, 2, …
    ranks: Vec<Option<Peer>>,
    /// The last hello that was refused.
    refused: Option<String>,
}

impl<'a> Rendezvous<'a> {
    pub fn open(identity: &'a Identity, now: Instant, timeout: Duration) -> Result<Self, BootstrapError> {
        let listener = Listener::bind(&identity.address).map_err(|error| listen_error(identity, &error))?;
        let ranks = (1..identity.nranks).map(|_| None).collect();
        let deadline = now + timeout;
        Ok(Self { identity, timeout, deadline, listener, silent: VecDeque::new(), ranks, refused: None })
    }

    /// Waits for all ranks, and returns their connections in order.
    pub fn finish(mut self) -> Result<Vec<Peer>, BootstrapError> {
        while !self.poll(Instant::now())? {
            let fds = self.silent.iter().map(|peer| peer.stream.fd()).chain([self.listener.fd()]);
            if let Err(ConnectionError::Closed(error)) = wait(fds, PollFlags::POLLIN, self.deadline) {
                return Err(listen_error(self.identity, &error));
            }
        }
        Ok(self.ranks.into_iter().flatten().collect())
    }

    /// Accepts at most one connection and reads the hellos that have arrived; true when all ranks are connected. A connection that
    /// sends no valid hello is of no rank of this job: it neither ends nor delays the rendezvous.
    pub fn poll(&mut self, now: Instant) -> Result<bool, BootstrapError> {
        if now >= self.deadline {
            return Err(self.timed_out());
        }
        match self.listener.accept() {
            Ok(stream) => {
                if self.silent.len() == self.ranks.len() + SILENT_MAX {
                    self.silent.pop_front();
                }
                self.silent.extend(Peer::new(stream));
            }
            Err(error) if matches!(error.kind(), WouldBlock | Interrupted | ConnectionAborted | PermissionDenied) => {}
            // This process has no descriptor left, for example: the oldest silent connection makes room.
            Err(error) if self.silent.pop_front().is_none() => return Err(listen_error(self.identity, &error)),
            Err(_) => {}
        }
        for mut peer in std::mem::take(&mut self.silent) {
            match peer.try_receive_hello() {
                Ok(None) => self.silent.push_back(peer),
                Ok(Some(hello)) => self.admit(peer, hello)?,
                Err(_) => {}
            }
        }
        Ok(self.ranks.iter().all(Option::is_some))
    }

    fn admit(&mut self, mut peer: Peer, hello: Hello) -> Result<(), BootstrapError> {
        let (rank, n, nranks) = (hello.rank.get(), hello.nranks.get(), self.identity.nranks);
        let problem = match self.ranks.get_mut((rank as usize).wrapping_sub(1)) {
            _ if n != nranks as u64 => {
                format!("rank {rank} was started as one of {n} ranks, but rank 0 as one of {nranks}")
            }
            None => format!("a process connected as rank {rank} of {n}"),
            Some(Some(_)) => format!("two processes connected as rank {rank}"),
            Some(place) => {
                *place = Some(peer);
                return Ok(());
            }
        };
        let abort = |peer: &mut Peer| {
            // A new connection has room for the message, so this does not wait.
            let _ = peer.send(MessageKind::Abort, 0, problem.as_bytes(), Instant::now());
        };
        abort(&mut peer);
        if self.listener.checks_user() {
            self.ranks.iter_mut().flatten().for_each(abort);
            return Err(BootstrapError::Protocol { rank: 0, problem });
        }
        self.refused = Some(problem);
        Ok(())
    }

    fn timed_out(&self) -> BootstrapError {
        let missing = (1..self.identity.nranks).filter(|rank| self.ranks[rank - 1].is_none());
        let mut missing = missing.map(|rank| format!("rank {rank}")).collect::<Vec<_>>().join(", ");
        if let Some(refused) = &self.refused {
            missing += &format!(" (it refused a process: {refused})");
        }
        BootstrapError::Timeout { rank: 0, step: "connect", missing, waited: self.timeout }
    }
}

fn listen_error(identity: &Identity, error: &dyn std::fmt::Display) -> BootstrapError {
    let address = identity.address.clone();
    BootstrapError::Socket { rank: 0, action: "listen on", address, text: error.to_string() }
}

#[cfg(test)]
mod tests;
