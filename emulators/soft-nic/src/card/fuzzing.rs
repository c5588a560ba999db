//! A card without an engine, for the fuzz targets' harness.

use std::io;
use std::time::Instant;

use super::core::{Core, Listeners};
use crate::address::Gid;
use crate::config::Config;
use crate::wire::packet::Header;
use crate::wire::shm::Listener;

impl Core {
    /// Creates a card that logs nothing.
    ///
    /// # Errors
    /// The system is out of file descriptors.
    pub fn silent(gid: Gid, config: Config, listener: Option<Listener>) -> io::Result<Self> {
        let mut core = Self::new(0, gid, config, Listeners { shm: listener, tcp: None })?;
        core.mute_log();
        Ok(core)
    }

    /// Polls the doorbells and wires once.
    pub fn pass(&mut self, now: Instant) {
        self.poll(now, true);
    }

    /// Returns the tokens of a queue pair's requests that wait on one of the first eight connections.
    pub fn waiting(&self, qpn: u16) -> Vec<u64> {
        let qp = self.qps.get(u32::from(qpn));
        qp.into_iter().flat_map(|qp| (0..8).flat_map(|at| qp.tokens_on(at))).map(|token| token.0).collect()
    }

    /// Delivers a packet on a connection.
    pub fn arrive(&mut self, connection: u32, header: &Header, payload: &[u8]) {
        self.receive(connection, header, payload.as_ptr());
    }
}
