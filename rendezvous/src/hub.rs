//! The allgather of ranks of which each has a stream to rank 0.
//!
//! Ranks send their blocks. Rank 0 answers with the blocks of all, in order, or with `Abort` when a rank is missing.

use crate::error::{BootstrapError, rank_names};
use crate::stream::{InvalidFrame, Stream, wait};
use crate::{Frame, FrameKind};
use std::io;
use std::time::{Duration, Instant};

/// The streams of a rank: rank 0 has one to each other rank, each other rank has one to rank 0.
#[derive(Debug)]
pub(crate) struct Hub {
    rank: usize,
    nranks: usize,
    sequence: u32,
    /// On rank 0 the ranks 1, 2, …; on another rank only rank 0.
    peers: Vec<Stream>,
    /// The error of the first allgather that failed, which ended the job.
    failed: Option<BootstrapError>,
}

impl Hub {
    pub fn new(rank: usize, nranks: usize, peers: Vec<Stream>) -> Self {
        Self { rank, nranks, sequence: 0, peers, failed: None }
    }

    /// One for each of `n` ranks of this process.
    pub fn threads(n: usize) -> io::Result<Vec<Self>> {
        let pairs = (1..n).map(|_| Stream::pair()).collect::<io::Result<Vec<_>>>()?;
        let (to_ranks, to_hub): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        let others = to_hub.into_iter().zip(1..).map(|(stream, rank)| Self::new(rank, n, vec![stream]));
        Ok([Self::new(0, n, to_ranks)].into_iter().chain(others).collect())
    }

    /// See [`Bootstrap::allgather`](super::Bootstrap::allgather).
    pub fn allgather(&mut self, block: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>, BootstrapError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        self.sequence = self.sequence.wrapping_add(1);
        let deadline = Instant::now() + timeout;
        let result = match self.rank {
            0 => self.gather(block, deadline, timeout),
            _ => self.contribute(block, deadline, timeout),
        };
        if let Err(error) = &result {
            self.failed = Some(error.clone());
        }
        result
    }

    /// The head of the block of rank `origin`.
    fn head(&self, origin: usize) -> Frame {
        Frame::new(FrameKind::Block, 0, self.sequence, origin)
    }

    fn gather(&mut self, block: &[u8], deadline: Instant, timeout: Duration) -> Result<Vec<Vec<u8>>, BootstrapError> {
        match self.gather_blocks(block, deadline, timeout) {
            Ok(blocks) => {
                let heads: Vec<_> = (0..self.nranks).map(|rank| self.head(rank)).collect();
                for peer in &mut self.peers {
                    heads.iter().zip(&blocks).for_each(|(head, block)| peer.queue(*head, block));
                }
                self.send_all(deadline).map_err(|peer| self.timed_out(&[peer + 1], timeout))?;
                Ok(blocks)
            }
            Err(error) => {
                // Best effort: the rank that ended receives nothing.
                let head = Frame::new(FrameKind::Abort, 0, self.sequence, 0);
                self.peers.iter_mut().for_each(|peer| peer.queue(head, error.to_string().as_bytes()));
                let _ = self.send_all(Instant::now() + Duration::from_secs(1));
                Err(error)
            }
        }
    }

    fn gather_blocks(
        &mut self,
        block: &[u8],
        deadline: Instant,
        timeout: Duration,
    ) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let mut blocks: Vec<Option<Vec<u8>>> = vec![None; self.nranks];
        blocks[0] = Some(block.to_vec());
        let mut missing: Vec<usize> = (1..self.nranks).collect();
        loop {
            let now = Instant::now();
            for &rank in &missing {
                let expected = self.head(rank);
                let peer = &mut self.peers[rank - 1];
                peer.fill(now);
                blocks[rank] = receive(peer, 0, rank, expected)?;
            }
            missing.retain(|&rank| blocks[rank].is_none());
            if missing.is_empty() {
                return Ok(blocks.into_iter().flatten().collect());
            }
            if now >= deadline {
                return Err(self.timed_out(&missing, timeout));
            }
            let mut fds: Vec<_> = missing.iter().map(|rank| self.peers[rank - 1].interest()).collect();
            wait(&mut fds, deadline).map_err(|error| self.failed_wait(&error))?;
        }
    }

    /// Sends what the streams have to send, or returns the place of one that did not take it before the deadline.
    fn send_all(&mut self, deadline: Instant) -> Result<(), usize> {
        loop {
            let now = Instant::now();
            let unsent: Vec<usize> = (0..self.peers.len()).filter(|at| !self.peers[*at].flush()).collect();
            match unsent.first() {
                None => return Ok(()),
                Some(first) if now >= deadline => return Err(*first),
                Some(_) => {
                    let mut fds: Vec<_> = unsent.iter().map(|at| self.peers[*at].sending()).collect();
                    // The deadline ends a wait that fails each time.
                    let _ = wait(&mut fds, deadline);
                }
            }
        }
    }

    fn contribute(
        &mut self,
        block: &[u8],
        deadline: Instant,
        timeout: Duration,
    ) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let mut blocks = Vec::with_capacity(self.nranks);
        // Rank 0 has the same deadline and knows the missing ranks, so its report gets two seconds more.
        let deadline = deadline + Duration::from_secs(2);
        let head = self.head(self.rank);
        self.peers[0].queue(head, block);
        while blocks.len() < self.nranks {
            let now = Instant::now();
            let expected = self.head(blocks.len());
            let hub = &mut self.peers[0];
            hub.flush();
            hub.fill(now);
            match receive(hub, self.rank, 0, expected)? {
                Some(block) => blocks.push(block),
                None if now >= deadline => return Err(self.timed_out(&[0], timeout)),
                None => wait(&mut [hub.interest()], deadline).map_err(|error| self.failed_wait(&error))?,
            }
        }
        Ok(blocks)
    }

    fn timed_out(&self, missing: &[usize], waited: Duration) -> BootstrapError {
        BootstrapError::Timeout { rank: self.rank, step: "allgather", missing: rank_names(missing), waited }
    }

    fn failed_wait(&self, error: &io::Error) -> BootstrapError {
        BootstrapError::PeerClosed { rank: self.rank, event: format!("poll failed: {error}"), step: "allgather" }
    }
}

/// The block that `peer` has sent to `rank` with the head `expected`, if it has arrived.
fn receive(stream: &mut Stream, rank: usize, peer: usize, expected: Frame) -> Result<Option<Vec<u8>>, BootstrapError> {
    let closed = |event| Err(BootstrapError::PeerClosed { rank, event, step: "allgather" });
    match stream.frame() {
        Ok(None) => match stream.ended() {
            Some(end) => closed(format!("rank {peer} ended ({end})")),
            None => Ok(None),
        },
        Ok(Some((Frame { kind: FrameKind::Abort, .. }, reason))) => {
            closed(format!("rank {peer} ended the job: {}", String::from_utf8_lossy(&reason)))
        }
        Ok(Some((head, block))) if head == (Frame { len: head.len, ..expected }) => Ok(Some(block)),
        Ok(Some((head, _))) => {
            let problem = format!("rank {peer} sent {head:?} in allgather {}", expected.sequence);
            Err(BootstrapError::Protocol { rank, problem })
        }
        Err(InvalidFrame) => {
            Err(BootstrapError::Protocol { rank, problem: format!("rank {peer} sent an invalid frame") })
        }
    }
}
