//! The ranks meet at rank 0: it waits for the other ranks, which connect to it.

use crate::error::{BootstrapError, rank_names};
use crate::identity::Identity;
use crate::listener::{Listener, own_addresses};
use crate::place::Place;
use crate::stream::{Stream, wait};
use crate::{Address, Dial, Frame, FrameKind};
use std::io;
use std::net::ToSocketAddrs;
use std::time::{Duration, Instant};

/// The protocol between the ranks of a host program.
pub(crate) const DOMAIN: [u8; 8] = *b"ferroHA\x02";

pub(crate) fn is_tcp(address: &str) -> bool {
    address.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
}

/// The ranks that have connected to rank 0.
pub(crate) struct Meeting<'a> {
    identity: &'a Identity,
    timeout: Duration,
    deadline: Instant,
    listener: Listener,
    /// The ranks 1, 2, …
    ranks: Vec<Option<Stream>>,
    /// The last process that was refused.
    refused: Option<String>,
}

impl<'a> Meeting<'a> {
    pub fn open(identity: &'a Identity, now: Instant, timeout: Duration) -> Result<Self, BootstrapError> {
        let listener = listen(identity).map_err(|error| listen_error(identity, &error))?;
        let ranks = (1..identity.nranks).map(|_| None).collect();
        Ok(Self { identity, timeout, deadline: now + timeout, listener, ranks, refused: None })
    }

    /// Waits for all ranks, and returns their streams in order.
    pub fn finish(mut self) -> Result<Vec<Stream>, BootstrapError> {
        while !self.poll(Instant::now())? {
            wait(&mut [self.listener.interest()], self.deadline)
                .map_err(|error| listen_error(self.identity, &error))?;
        }
        Ok(self.ranks.into_iter().flatten().collect())
    }

    /// Accepts the ranks that have connected; true when all have. They get the text of an error too.
    pub fn poll(&mut self, now: Instant) -> Result<bool, BootstrapError> {
        let result = self.accept(now);
        if let Err(error) = &result {
            self.ranks.iter_mut().flatten().for_each(|rank| abort(rank, &error.to_string()));
        }
        result
    }

    fn accept(&mut self, now: Instant) -> Result<bool, BootstrapError> {
        while let Some((stream, place)) =
            self.listener.poll(now).map_err(|error| listen_error(self.identity, &error))?
        {
            self.admit(stream, place)?;
        }
        if self.ranks.iter().all(Option::is_some) {
            return Ok(true);
        }
        if now >= self.deadline { Err(self.timed_out()) } else { Ok(false) }
    }

    fn admit(&mut self, mut stream: Stream, place: Place) -> Result<(), BootstrapError> {
        let (Place { rank, nranks: n, .. }, nranks) = (place, self.identity.nranks);
        let problem = match self.ranks.get_mut(rank.wrapping_sub(1)) {
            _ if n != nranks => {
                format!("rank {rank} was started as one of {n} ranks, but rank 0 as one of {nranks}")
            }
            None => format!("a process connected as rank {rank} of {n}"),
            Some(Some(_)) => format!("two processes connected as rank {rank}"),
            Some(place) => {
                *place = Some(stream);
                return Ok(());
            }
        };
        abort(&mut stream, &problem);
        // Only this user's own process can be wrong, so all ranks end. Without a secret, anyone's can be.
        if !is_tcp(&self.identity.address) || self.identity.secret.is_some() {
            return Err(BootstrapError::Protocol { rank: 0, problem });
        }
        self.refused = Some(problem);
        Ok(())
    }

    fn timed_out(&self) -> BootstrapError {
        let missing: Vec<_> = (1..self.identity.nranks).filter(|rank| self.ranks[rank - 1].is_none()).collect();
        let mut missing = rank_names(&missing);
        if let Some(refused) = &self.refused {
            missing += &format!(" (it refused a process: {refused})");
        }
        BootstrapError::Timeout { rank: 0, step: "connect", missing, waited: self.timeout }
    }
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

/// Connects to rank 0, which may start later.
pub(crate) fn connect(identity: &Identity, timeout: Duration) -> Result<Stream, BootstrapError> {
    let &Identity { rank, nranks, ref address, .. } = identity;
    let failed = |text: String| {
        let text = format!("{text} (waited {timeout:?} for rank 0)");
        BootstrapError::Socket { rank, action: "connect to", address: address.clone(), text }
    };
    let deadline = Instant::now() + timeout;
    let addresses = match is_tcp(address) {
        true => address.to_socket_addrs().map_err(|error| failed(error.to_string()))?.map(Address::Tcp).collect(),
        false => vec![Address::Unix(address.clone())],
    };
    let place = Place { rank, nranks, called: 0 };
    let mut dial = Dial::new(addresses, DOMAIN, identity.secret.unwrap_or_default(), place);
    loop {
        let now = Instant::now();
        match dial.poll(now) {
            Ok(Some(stream)) => return Ok(stream),
            Err(error) => return Err(failed(format!("{error}; all ranks need the same FERROGIN_SECRET"))),
            Ok(None) if now >= deadline => {
                let text = match dial.is_accepted() {
                    true => "it accepted the connection, but did not answer".to_owned(),
                    false => dial.last_error().to_string(),
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
