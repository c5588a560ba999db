//! Calls between the CPUs of ranks 0 and 1, with `host-rpc` over the card.

use super::error::Error;
use super::job::Job;
use super::operation::Operation;
use super::report::Row;
use super::statistics::mops;
use ferrogin_channel::{Address, Config, Reactor};
use ferrogin_device::platform::clock_ns;
use host_rpc::{Body, Call, Client, RpcError, Server, ServerHandle, Settings};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// The method, which answers a call with the call's body.
const ECHO: u32 = 1;
/// Most bytes that one thread's open calls may have.
const OPEN_BYTES: u64 = 64 << 20;

/// A rank's end of the connection.
pub struct Rpc {
    client: Option<Client>,
    server: Option<ServerHandle>,
    reactor: Option<Reactor>,
}

impl Rpc {
    /// Collective: rank 1 serves, and rank 0 connects to it.
    ///
    /// # Errors
    /// libfabric fails; a rank was lost.
    pub fn open(job: &Job) -> Result<Self, Error> {
        let rank = job.rank();
        let failed = |error: &dyn std::fmt::Display| Error::Rpc { rank, text: error.to_string() };
        let perf = &job.settings;
        // The server grants as many calls as all threads can have open.
        let settings = Settings { workers: 0, credits: perf.depth * perf.threads, ..Settings::default() };
        let mut rpc = Self { client: None, server: None, reactor: None };
        let mut own = Vec::new();
        if rank <= 1 {
            let config = Config { provider: job.about().provider, source: None, ..Config::default() };
            let reactor = Reactor::open(&config).map_err(|error| failed(&error))?;
            if rank == 1 {
                let listener = reactor.listen().map_err(|error| failed(&error))?;
                let server = Server::new(settings.clone()).method(ECHO, |_, body| Ok(body.into_vec().into())).start();
                own = server.listen(listener).to_bytes();
                rpc.server = Some(server);
            }
            rpc.reactor = Some(reactor);
        }
        let addresses = job.allgather(&own)?;
        if let (0, Some(reactor)) = (rank, &rpc.reactor) {
            let address = Address::parse(&addresses[1]).map_err(|error| failed(&error))?;
            let channel = reactor.connect(&address).wait().map_err(|error| failed(&error))?;
            rpc.client = Some(Client::new(channel, settings));
        }
        Ok(rpc)
    }

    /// Collective: measures calls with bodies of `bytes`, one after another and then several at a time; rank 0 gets the
    /// figures.
    ///
    /// # Errors
    /// A call failed or returned a different body; a rank was lost.
    pub fn measure(&self, job: &Job, bytes: u64) -> Result<Option<Row>, Error> {
        let body: Arc<Vec<u8>> = Arc::new((0..bytes).map(|at| (at % 251) as u8).collect());
        let (rank, settings, limit) = (job.rank(), &job.settings, job.wait_limit());
        let calls = Calls { rank, settings, limit, client: self.client.as_ref(), body };
        job.barrier()?;
        let samples = job.threads(|_| calls.one_by_one())?.concat();
        job.barrier()?;
        let times = job.threads(|_| calls.overlapping())?;
        job.barrier()?;
        if job.rank() != 0 {
            return Ok(None);
        }
        let begin = times.iter().map(|time| time.start).min().unwrap_or(0);
        let end = times.iter().map(|time| time.end).max().unwrap_or(0);
        let rate = mops(samples.len() as u64, end - begin);
        Ok(Some(Row::new(Operation::Rpc, (bytes, 1), job.settings.threads, samples, rate)))
    }

    /// Collective: closes the connection.
    ///
    /// # Errors
    /// A rank was lost.
    pub fn close(self, job: &Job) -> Result<(), Error> {
        if let Some(client) = &self.client {
            client.close();
        }
        job.barrier()?;
        if let Some(server) = self.server {
            server.shutdown(job.wait_limit());
        }
        if let Some(reactor) = self.reactor {
            reactor.shutdown(job.wait_limit());
        }
        Ok(())
    }
}

/// A thread's calls, with bodies of one size. Only the client makes any.
struct Calls<'a> {
    rank: usize,
    settings: &'a super::settings::Settings,
    limit: Duration,
    client: Option<&'a Client>,
    body: Arc<Vec<u8>>,
}

impl Calls<'_> {
    /// Returns the latency of each call after the warm-up.
    fn one_by_one(&self) -> Result<Vec<u64>, Error> {
        let Some(client) = self.client else { return Ok(Vec::new()) };
        let iterations = self.settings.iterations(self.body.len() as u64);
        let mut samples = Vec::with_capacity(iterations.measured as usize);
        for round in 0..iterations.all() {
            let begin = clock_ns();
            let answer = self.call(client).wait();
            if round >= iterations.warmup {
                samples.push(clock_ns().wrapping_sub(begin));
            }
            self.check(answer)?;
        }
        Ok(samples)
    }

    /// Returns the start and end of calls with `depth` open at a time.
    fn overlapping(&self) -> Result<Range<u64>, Error> {
        let Some(client) = self.client else { return Ok(0..0) };
        let bytes = self.body.len() as u64;
        let iterations = self.settings.iterations(bytes).measured;
        let open = u64::from(self.settings.depth).min((OPEN_BYTES / bytes).max(1));
        let mut calls = VecDeque::new();
        let begin = clock_ns();
        for _ in 0..iterations {
            if calls.len() as u64 >= open
                && let Some(oldest) = calls.pop_front()
            {
                self.check(Call::wait(oldest))?;
            }
            calls.push_back(self.call(client));
        }
        calls.into_iter().try_for_each(|call| self.check(call.wait()))?;
        Ok(begin..clock_ns())
    }

    fn call(&self, client: &Client) -> Call {
        client.call(ECHO, Arc::clone(&self.body), self.limit)
    }

    fn check(&self, answer: Result<Body, RpcError>) -> Result<(), Error> {
        let rank = self.rank;
        let answer = answer.map_err(|error| Error::Rpc { rank, text: error.to_string() })?;
        if self.settings.verify && *answer.bytes() != self.body[..] {
            let what = "the answer is not the request".to_owned();
            return Err(Error::WrongData {
                rank,
                operation: Operation::Rpc.name(),
                bytes: self.body.len() as u64,
                what,
            });
        }
        Ok(())
    }
}
