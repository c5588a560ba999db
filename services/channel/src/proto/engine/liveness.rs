//! Timers: limits on everything a peer must do, and pings to quiet peers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Engine;
use crate::proto::channel_state::Phase;
use crate::proto::wire::Kind;
use crate::{ChannelError, Reason};

/// The slowest transfer that doesn't count as stalled, in bytes per second.
const SLOWEST: u64 = 4 << 20;

/// The time allowed beyond a limit while `bytes` bytes are in flight.
fn transfer_time(bytes: usize) -> Duration {
    Duration::from_millis((bytes as u64).saturating_mul(1000) / SLOWEST)
}

impl Engine {
    /// How soon [`Engine::poll`] must be given the time again.
    pub fn timer_interval(&self) -> Duration {
        (self.config.ping_after / 4).min(self.config.lost_after / 8).max(Duration::from_millis(1))
    }

    /// Pings quiet peers, gives up peers that don't answer, and ends everything that is past its limit.
    pub(super) fn timers(&mut self, now: Instant) {
        // After a long pause of this thread, an answer may be waiting unread, so deadlines start again.
        let away = now.duration_since(self.last_timers) >= self.config.lost_after / 2;
        if now.duration_since(self.last_peek) >= self.timer_interval() {
            self.last_peek = now;
            self.peek_unknown_tags();
        }
        (self.now, self.last_timers) = (now, now);
        self.repeat_challenges();
        let (ping_after, lost_after) = (self.config.ping_after, self.config.lost_after);
        for channel in 0..self.channels.len() as u32 {
            let Some(state) = self.state_of(channel).filter(|state| state.is_live()) else { continue };
            let peer = Arc::clone(&state.peer);
            if away {
                state.incoming.restart_deadlines();
                state.pinged_at = state.pinged_at.map(|_| now);
            }
            let late = |since: Instant, limit: Duration| now.duration_since(since) >= limit;
            if let Phase::Connecting { deadline, limit, .. } = state.phase {
                if now >= deadline {
                    let error = ChannelError::Timeout { peer, what: "answer the connect", limit };
                    self.end(channel, error);
                }
                continue;
            }
            if let Some(closing) = &state.closing
                && now >= closing.deadline
            {
                let limit = closing.limit;
                let error = ChannelError::Timeout { peer, what: "take all messages and confirm the close", limit };
                self.abort_with(channel, error, Reason::Stopped);
                continue;
            }
            if state.pinged_at.is_none()
                && let Some(violation) = state.incoming.overdue(now, |bytes| lost_after + transfer_time(bytes))
            {
                self.protocol_violation(channel, violation);
                continue;
            }
            if let Some((end, since)) = state.remote_close {
                // The limit counts while something waits and nothing arrives. The reader may take its time before it asks for more.
                let waits = !away && (state.incoming.has_reads() || !state.outgoing.is_idle());
                let since = if waits { since.max(state.last_heard) } else { now };
                state.remote_close = Some((end, since));
                if late(since, lost_after + transfer_time(state.incoming.bytes_in_flight())) {
                    let error = state.closed_by_remote();
                    self.end(channel, error);
                }
                continue;
            }
            if state.incoming.is_waiting() && late(state.last_payload_peek, ping_after) {
                state.last_payload_peek = now;
                self.peek_payload(channel);
            }
            let Some(state) = self.state_of(channel) else { continue };
            match state.pinged_at {
                Some(pinged_at) => {
                    let bytes = state.incoming.bytes_in_flight().saturating_add(state.outgoing.bytes_in_flight());
                    if late(pinged_at, lost_after + transfer_time(bytes)) {
                        let silent = now.duration_since(state.last_heard);
                        self.abort_with(channel, ChannelError::Silent { peer, silent }, Reason::Stopped);
                    }
                }
                None if late(state.last_heard, ping_after) => {
                    state.pinged_at = Some(now);
                    self.send_control(channel, Kind::Ping, 0, 0);
                }
                None => {}
            }
        }
    }
}
