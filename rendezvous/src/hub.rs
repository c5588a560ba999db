//! Ranks that are processes: each rank has a connection to rank 0.
//!
//! Ranks send `Block`. Rank 0 answers with `Blocks` when it has all of them, or with `Abort` when a rank is missing.

use super::connection::{ConnectionError, Peer, connect_once, wait};
use super::identity::Identity;
use super::message::{Header, Hello, MessageKind, emit_blocks, parse_blocks};
use super::rendezvous::Rendezvous;
use crate::error::BootstrapError;
use nix::poll::PollFlags;
use std::io::ErrorKind;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// The connections of a rank: rank 0 has one to each other rank, each other rank has one to rank 0.
#[derive(Debug)]
pub struct Sockets {
    rank: usize,
    nranks: usize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    sequence: u64,
    /// On rank 0 the ranks 1, 2, …; on another rank only rank 0.
    peers: Vec<Peer>,
    /// The error of the first exchange that failed, which ended the job.
    failed: Option<BootstrapError>,
}

impl Sockets {
    /// Connects the ranks at `identity.address`.
    pub fn connect(identity: &Identity, timeout: Duration) -> Result<Sockets, BootstrapError> {
        let now = Instant::now();
        let &Identity { rank, nranks, .. } = identity;
        let peers = match rank {
            0 => Rendezvous::open(identity, now, timeout)?.finish()?,
            _ => vec![connect_to_hub(identity, now + timeout, timeout)?],
        };
        Ok(Sockets { rank, nranks, state: Mutex::new(State { sequence: 0, peers, failed: None }) })
    }

    /// See [`Bootstrap::allgather`](super::Bootstrap::allgather).
    pub fn allgather(&self, block: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        state.sequence += 1;
        let deadline = Instant::now() + timeout;
        let result = match self.rank {
            0 => self.gather(&mut state, block, deadline, timeout),
            _ => self.contribute(&mut state, block, deadline, timeout),
        };
        if let Err(error) = &result {
            state.failed = Some(error.clone());
        }
        result
    }

    fn gather(
        &self,
        state: &mut State,
        block: &[u8],
        deadline: Instant,
        timeout: Duration,
    ) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let sequence = state.sequence;
        match self.gather_blocks(state, block, deadline, timeout) {
            Ok(blocks) => {
                let payload = emit_blocks(&blocks);
                for (index, peer) in state.peers.iter_mut().enumerate() {
                    peer.send(MessageKind::Blocks, sequence, &payload, deadline)
                        .map_err(|error| self.error(error, index + 1, timeout))?;
                }
                Ok(blocks)
            }
            Err(error) => {
                // Best effort: the rank that ended receives nothing.
                let soon = Instant::now() + Duration::from_secs(1);
                for peer in &mut state.peers {
                    let _ = peer.send(MessageKind::Abort, sequence, error.to_string().as_bytes(), soon);
                }
                Err(error)
            }
        }
    }

    fn gather_blocks(
        &self,
        state: &mut State,
        block: &[u8],
        deadline: Instant,
        timeout: Duration,
    ) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let mut blocks: Vec<Option<Vec<u8>>> = vec![None; self.nranks];
        blocks[0] = Some(block.to_vec());
        loop {
            for (index, peer) in
                state.peers.iter_mut().enumerate().filter(|(index, _)| blocks[index + 1].is_none()).collect::<Vec<_>>()
            {
                let rank = index + 1;
                match peer.try_receive().map_err(|error| self.error(error, rank, timeout))? {
                    None => {}
                    Some((Header { kind: MessageKind::Block, sequence, .. }, payload))
                        if sequence == state.sequence =>
                    {
                        blocks[rank] = Some(payload);
                    }
                    Some((header, _)) => {
                        let problem = format!("rank {rank} sent {header:?} in step {}", state.sequence);
                        return Err(BootstrapError::Protocol { rank: 0, problem });
                    }
                }
            }
            let missing: Vec<usize> = (1..self.nranks).filter(|&rank| blocks[rank].is_none()).collect();
            if missing.is_empty() {
                return Ok(blocks.into_iter().flatten().collect());
            }
            let fds = missing.iter().map(|rank| state.peers[rank - 1].stream.fd());
            match wait(fds, PollFlags::POLLIN, deadline) {
                Ok(()) => {}
                Err(ConnectionError::Timeout) => {
                    let missing = missing.iter().map(|rank| format!("rank {rank}")).collect::<Vec<_>>().join(", ");
                    return Err(BootstrapError::Timeout { rank: 0, step: "allgather", missing, waited: timeout });
                }
                Err(error) => return Err(self.error(error, missing[0], timeout)),
            }
        }
    }

    fn contribute(
        &self,
        state: &mut State,
        block: &[u8],
        deadline: Instant,
        timeout: Duration,
    ) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let sequence = state.sequence;
        // Rank 0 has the same deadline and knows the missing ranks, so its report gets two seconds more.
        let later = deadline + Duration::from_secs(2);
        let hub = &mut state.peers[0];
        let sent = hub.send(MessageKind::Block, sequence, block, deadline);
        let answer = match sent {
            // Rank 0 may have sent an abort before it closed the connection.
            Err(ConnectionError::Closed(text)) => hub.receive(later).map_err(|_| ConnectionError::Closed(text)),
            Err(error) => Err(error),
            Ok(()) => hub.receive(later),
        };
        let (header, payload) = answer.map_err(|error| self.error(error, 0, timeout))?;
        match header.kind {
            MessageKind::Blocks if header.sequence == sequence => {
                parse_blocks(&payload, self.nranks).ok_or_else(|| BootstrapError::Protocol {
                    rank: self.rank,
                    problem: "rank 0 sent an invalid list of blocks".into(),
                })
            }
            MessageKind::Abort => {
                let event = format!("rank 0 ended the job: {}", String::from_utf8_lossy(&payload));
                Err(BootstrapError::PeerClosed { rank: self.rank, event, step: "allgather" })
            }
            _ => Err(BootstrapError::Protocol { rank: self.rank, problem: format!("rank 0 sent {header:?}") }),
        }
    }

    fn error(&self, error: ConnectionError, peer: usize, timeout: Duration) -> BootstrapError {
        explain(error, self.rank, peer, "allgather", timeout)
    }
}

fn explain(error: ConnectionError, rank: usize, peer: usize, step: &'static str, waited: Duration) -> BootstrapError {
    match error {
        ConnectionError::Timeout => BootstrapError::Timeout { rank, step, missing: format!("rank {peer}"), waited },
        ConnectionError::Closed(text) => {
            BootstrapError::PeerClosed { rank, event: format!("rank {peer} ended ({text})"), step }
        }
        ConnectionError::InvalidMessage(problem) => BootstrapError::Protocol { rank, problem },
    }
}

pub(super) fn connect_to_hub(
    identity: &Identity,
    deadline: Instant,
    timeout: Duration,
) -> Result<Peer, BootstrapError> {
    let &Identity { rank, nranks, ref address } = identity;
    let socket_error = |text: String| BootstrapError::Socket {
        rank,
        action: "connect to",
        address: address.clone(),
        text: format!("{text} (waited {timeout:?} for rank 0)"),
    };
    let mut pause = Duration::from_millis(1);
    let stream = loop {
        let attempt = connect_once(address, deadline);
        match attempt {
            Ok(stream) => break stream,
            Err(error) if matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::PermissionDenied) => {
                return Err(socket_error(error.to_string()));
            }
            Err(error) if Instant::now() + pause >= deadline => return Err(socket_error(error.to_string())),
            Err(_) => std::thread::sleep(pause),
        }
        pause = (pause * 2).min(Duration::from_millis(100));
    };
    let mut peer = Peer::new(stream).map_err(|error| socket_error(error.to_string()))?;
    let hello = Hello { rank: (rank as u64).into(), nranks: (nranks as u64).into() };
    peer.send(MessageKind::Hello, 0, hello.as_bytes(), deadline)
        .map_err(|error| explain(error, rank, 0, "connect", timeout))?;
    Ok(peer)
}
