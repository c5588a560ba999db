//! The ranks meet at rank 0: every other rank connects to it with a block, and gets all ranks' blocks.

use crate::claim::Claim;
use crate::dial::{Address, Dial};
use crate::error::BootstrapError;
use crate::frame::{Frame, FrameKind};
use crate::identity::Identity;
use crate::listener::{Listener, own_addresses};
use crate::stream::{InvalidFrame, Stream, wait};
use std::io::{self, Write};
use std::net::ToSocketAddrs;
use std::time::{Duration, Instant};

/// The protocol between a host program's ranks.
const DOMAIN: [u8; 8] = *b"ferroHA\x03";

/// The largest number of ranks.
const RANKS_MAX: usize = 1 << 20;

/// An exchange in which each rank contributes a block and gets all ranks' blocks. All ranks use the same address.
pub struct Exchange<'a> {
    identity: &'a Identity,
    timeout: Duration,
    /// On rank 0, if there are several ranks.
    meeting: Option<Meeting<'a>>,
}

impl<'a> Exchange<'a> {
    /// On rank 0, listens at the address. That keeps the port from being one that the system picks for this process
    /// later.
    ///
    /// # Errors
    /// The rank doesn't exist, or the address is unusable.
    pub fn open(identity: &'a Identity, timeout: Duration) -> Result<Self, BootstrapError> {
        let &Identity { rank, nranks, .. } = identity;
        if rank >= nranks || nranks > RANKS_MAX {
            return Err(BootstrapError::Environment(format!(
                "rank {rank} is not one of {nranks} ranks (at least 1, at most {RANKS_MAX})"
            )));
        }
        if nranks > 1 && rank == 0 && identity.secret.is_none() && is_tcp(&identity.address) {
            // One write, so that it doesn't mix with other processes' lines.
            let line = format!(
                "ferrogin: any process that can connect to {} can take the place of a rank: set FERROGIN_SECRET on all ranks to the output of \
                 `openssl rand -hex 16`\n",
                identity.address
            );
            let _ = std::io::stderr().write_all(line.as_bytes());
        }
        let meets = nranks > 1 && rank == 0;
        let meeting = meets.then(|| Meeting::open(identity, Instant::now(), timeout)).transpose()?;
        Ok(Self { identity, timeout, meeting })
    }

    /// Returns every rank's `block`, in rank order. Blocks may differ in size.
    ///
    /// # Errors
    /// A rank exits, or doesn't call before the timeout; on ranks other than 0, the address is unusable.
    pub fn finish(self, block: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let Self { identity, timeout, meeting } = self;
        match meeting {
            Some(meeting) => meeting.finish(block),
            None if identity.nranks == 1 => Ok(vec![block.to_vec()]),
            None => contribute(connect(identity, timeout)?, identity, block, timeout),
        }
    }
}

fn is_tcp(address: &str) -> bool {
    address.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
}

/// Returns the head for a rank's block.
fn head(rank: usize) -> Frame {
    Frame::new(FrameKind::Block, 0, 0, rank)
}

/// The ranks that have connected to rank 0.
struct Meeting<'a> {
    identity: &'a Identity,
    timeout: Duration,
    deadline: Instant,
    listener: Listener,
    /// Ranks 1, 2, …
    ranks: Vec<Option<Stream>>,
    /// Their blocks.
    blocks: Vec<Option<Vec<u8>>>,
    /// What was wrong with the last refused process.
    refused: Option<String>,
}

impl<'a> Meeting<'a> {
    fn open(identity: &'a Identity, now: Instant, timeout: Duration) -> Result<Self, BootstrapError> {
        let listener = listen(identity).map_err(|error| listen_error(identity, &error))?;
        let ranks = (1..identity.nranks).map(|_| None).collect();
        let blocks = vec![None; identity.nranks - 1];
        Ok(Self { identity, timeout, deadline: now + timeout, listener, ranks, blocks, refused: None })
    }

    /// Waits for all ranks' blocks, and sends them to all ranks.
    fn finish(mut self, own: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let failed = |error: io::Error| listen_error(self.identity, &error);
        while !self.poll(Instant::now())? {
            let streams = self.ranks.iter().zip(&self.blocks).filter(|(_, block)| block.is_none());
            let streams = streams.filter_map(|(rank, _)| rank.as_ref().map(Stream::interest));
            let mut fds: Vec<_> = std::iter::once(self.listener.interest()).chain(streams).collect();
            wait(&mut fds, self.deadline).map_err(failed)?;
        }
        let blocks: Vec<_> = [own.to_vec()].into_iter().chain(self.blocks.drain(..).flatten()).collect();
        let mut peers: Vec<_> = self.ranks.iter_mut().flatten().zip(1..).collect();
        for (peer, _) in &mut peers {
            blocks.iter().enumerate().for_each(|(rank, block)| peer.queue(head(rank), block));
        }
        loop {
            let now = Instant::now();
            peers.retain_mut(|(peer, _)| !peer.flush());
            match peers.first() {
                None => return Ok(blocks),
                Some((_, rank)) if now >= self.deadline => {
                    return Err(timed_out(0, format!("rank {rank}"), self.timeout));
                }
                Some(_) => {
                    let mut fds: Vec<_> = peers.iter().map(|(peer, _)| peer.interest()).collect();
                    wait(&mut fds, self.deadline).map_err(failed)?;
                }
            }
        }
    }

    /// Reads what the ranks have sent; true once all blocks are there. On an error, the ranks get its text too.
    fn poll(&mut self, now: Instant) -> Result<bool, BootstrapError> {
        let result = self.accept(now);
        if let Err(error) = &result {
            self.ranks.iter_mut().flatten().for_each(|rank| abort(rank, &error.to_string()));
        }
        result
    }

    fn accept(&mut self, now: Instant) -> Result<bool, BootstrapError> {
        while let Some((stream, claim)) =
            self.listener.poll(now).map_err(|error| listen_error(self.identity, &error))?
        {
            self.admit(stream, claim)?;
        }
        for ((stream, block), rank) in self.ranks.iter_mut().zip(&mut self.blocks).zip(1..) {
            if let (Some(stream), None) = (stream, &block) {
                stream.fill(now);
                *block = receive(stream, 0, rank, rank)?;
            }
        }
        if self.blocks.iter().all(Option::is_some) {
            return Ok(true);
        }
        if now < self.deadline {
            return Ok(false);
        }
        let missing = (1..self.identity.nranks).filter(|rank| self.blocks[rank - 1].is_none());
        let mut missing = missing.map(|rank| format!("rank {rank}")).collect::<Vec<_>>().join(", ");
        if let Some(refused) = &self.refused {
            missing += &format!(" (it refused a process: {refused})");
        }
        Err(timed_out(0, missing, self.timeout))
    }

    fn admit(&mut self, mut stream: Stream, claim: Claim) -> Result<(), BootstrapError> {
        let (Claim { rank, nranks: n, .. }, nranks) = (claim, self.identity.nranks);
        let problem = match self.ranks.get_mut(rank.wrapping_sub(1)) {
            _ if n != nranks => {
                format!("rank {rank} was started as one of {n} ranks, but rank 0 as one of {nranks}")
            }
            None => format!("a process connected as rank {rank} of {n}"),
            Some(Some(_)) => format!("two processes connected as rank {rank}"),
            Some(slot) => {
                *slot = Some(stream);
                return Ok(());
            }
        };
        abort(&mut stream, &problem);
        // This can only be the user's own mistake, so all ranks end. Over TCP without a secret, it could be anyone's
        // process.
        if !is_tcp(&self.identity.address) || self.identity.secret.is_some() {
            return Err(BootstrapError::Protocol { rank: 0, problem });
        }
        self.refused = Some(problem);
        Ok(())
    }
}

fn timed_out(rank: usize, missing: String, waited: Duration) -> BootstrapError {
    BootstrapError::Timeout { rank, missing, waited }
}

/// Returns rank `origin`'s block that `peer` sent to `rank`, if it has arrived.
fn receive(stream: &mut Stream, rank: usize, peer: usize, origin: usize) -> Result<Option<Vec<u8>>, BootstrapError> {
    let closed = |event| Err(BootstrapError::PeerClosed { rank, event });
    let invalid = |what| Err(BootstrapError::Protocol { rank, problem: format!("rank {peer} sent {what}") });
    match stream.frame() {
        Ok(None) => match stream.ended() {
            Some(end) => closed(format!("rank {peer} ended ({end})")),
            None => Ok(None),
        },
        Ok(Some((Frame { kind: FrameKind::Abort, .. }, reason))) => {
            closed(format!("rank {peer} ended the job: {}", String::from_utf8_lossy(&reason)))
        }
        Ok(Some((seen, block))) if seen == (Frame { len: seen.len, ..head(origin) }) => Ok(Some(block)),
        Ok(Some((seen, _))) => invalid(format!("{seen:?}")),
        Err(InvalidFrame) => invalid("an invalid frame".to_owned()),
    }
}

/// Sends this rank's block to rank 0, and waits for all ranks' blocks.
fn contribute(
    mut hub: Stream,
    identity: &Identity,
    block: &[u8],
    timeout: Duration,
) -> Result<Vec<Vec<u8>>, BootstrapError> {
    let &Identity { rank, nranks, .. } = identity;
    // Rank 0 knows which ranks are missing, so its report gets two more seconds.
    let deadline = Instant::now() + timeout + Duration::from_secs(2);
    let mut blocks = Vec::new();
    hub.queue(head(rank), block);
    while blocks.len() < nranks {
        let now = Instant::now();
        hub.flush();
        hub.fill(now);
        match receive(&mut hub, rank, 0, blocks.len())? {
            Some(block) => blocks.push(block),
            None if now >= deadline => return Err(timed_out(rank, "rank 0".to_owned(), timeout)),
            None => wait(&mut [hub.interest()], deadline).map_err(|error| connect_error(identity, &error))?,
        }
    }
    Ok(blocks)
}

fn abort(stream: &mut Stream, reason: &str) {
    stream.send(Frame::new(FrameKind::Abort, 0, 0, 0), reason.as_bytes());
}

fn listen(identity: &Identity) -> io::Result<Listener> {
    let (address, secret) = (&identity.address, identity.secret.unwrap_or_default());
    if !is_tcp(address) {
        return Listener::bind_unix(address, DOMAIN, secret);
    }
    let mut result = Err(io::Error::from(io::ErrorKind::AddrNotAvailable));
    for addresses in own_addresses(address)? {
        result = Listener::bind(&addresses, DOMAIN, secret).map(|(listener, _)| listener).map_err(|(_, error)| error);
        if result.is_ok() {
            break;
        }
    }
    result
}

fn listen_error(identity: &Identity, error: &dyn std::fmt::Display) -> BootstrapError {
    let address = identity.address.clone();
    BootstrapError::Socket { rank: 0, action: "listen on", address, text: error.to_string() }
}

fn connect_error(identity: &Identity, error: &dyn std::fmt::Display) -> BootstrapError {
    let (rank, address) = (identity.rank, identity.address.clone());
    BootstrapError::Socket { rank, action: "connect to", address, text: error.to_string() }
}

/// Connects to rank 0, which may start later.
fn connect(identity: &Identity, timeout: Duration) -> Result<Stream, BootstrapError> {
    let &Identity { rank, nranks, ref address, .. } = identity;
    let failed = |text: String| connect_error(identity, &format!("{text} (waited {timeout:?} for rank 0)"));
    let deadline = Instant::now() + timeout;
    let addresses = if is_tcp(address) {
        address.to_socket_addrs().map_err(|error| failed(error.to_string()))?.map(Address::Tcp).collect()
    } else {
        vec![Address::Unix(address.clone())]
    };
    let claim = Claim { rank, nranks, called: 0 };
    let mut dial = Dial::new(addresses, DOMAIN, identity.secret.unwrap_or_default(), claim);
    loop {
        let now = Instant::now();
        match dial.poll(now) {
            Ok(Some(stream)) => return Ok(stream),
            Err(error) => return Err(failed(format!("{error}; all ranks need the same FERROGIN_SECRET"))),
            Ok(None) if now >= deadline => {
                let text = if dial.is_accepted() {
                    "it accepted the connection, but did not answer".to_owned()
                } else {
                    dial.last_error().to_string()
                };
                return Err(failed(text));
            }
            Ok(None) => {}
        }
        let until = dial.wakes().map_or(deadline, |wakes| wakes.min(deadline));
        let mut fds: Vec<_> = dial.interest().into_iter().collect();
        wait(&mut fds, until).map_err(|error| failed(error.to_string()))?;
    }
}

#[cfg(test)]
mod tests;
