//! A card without an engine, for the harness of the fuzz targets.

use std::io;
use std::time::Instant;

use super::core::{Core, Listeners};
use crate::address::Gid;
use crate::config::Config;
use crate::wire::packet::Header;
use crate::wire::shm::Listener;

impl Core {
    /// A card that logs nothing.
    ///
    /// # Errors
    /// The system has no descriptor left.
    pub fn silent(gid: Gid, config: Config, listener: Option<Listener>) -> io::Result<Self> {
        let mut core = Self::new(0, gid, config, Listeners { shm: listener, tcp: None })?;
        core.mute_log();
        Ok(core)
    }

    /// One pass over doorbells and wires.
    pub fn pass(&mut self, now: Instant) {
        self.poll(now, true);
    }

    /// The requests of a queue pair that wait for one of the first connections.
    pub fn waiting(&self, qpn: u16) -> Vec<u64> {
        let qp = self.qps.get(u32::from(qpn));
        qp.into_iter().flat_map(|qp| (0..8).flat_map(|at| qp.tokens_on(at))).map(|token| token.0).collect()
    }

    /// A packet arrives on a connection.
    pub fn arrive(&mut self, connection: u32, header: &Header, payload: &[u8]) {
        self.receive(connection, header, payload.as_ptr());
    }
}
