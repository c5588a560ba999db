//! Timers: limits on everything a peer must do, and pings to quiet peers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Engine, find};
use crate::proto::carrier::transfer_time;
use crate::proto::channel_state::Phase;
use crate::proto::wire::Kind;
use crate::{ChannelError, Reason};

impl Engine {
    /// Returns how soon [`Engine::poll`] must be given the time again.
    pub fn timer_interval(&self) -> Duration {
        self.config.timer_interval()
    }

    /// Pings quiet peers, gives up peers that don't answer, and ends everything that is past its limit.
    pub(super) fn timers(&mut self, now: Instant) {
        // After a long pause of this thread, an answer may be waiting unread, so deadlines start again.
        let away = now.duration_since(self.last_timers) >= self.config.lost_after / 2;
        (self.now, self.last_timers) = (now, now);
        let (ping_after, lost_after) = (self.config.ping_after, self.config.lost_after);
        for channel in 0..self.channels.len() as u32 {
            let Some(state) = find(&mut self.channels, channel).filter(|state| state.is_live()) else { continue };
            let (peer, addr) = (Arc::clone(&state.peer), state.addr);
            if away {
                self.carrier.restart_deadlines(addr);
                state.pinged_at = state.pinged_at.map(|_| now);
            }
            let progress = self.carrier.progress(addr);
            if progress.last_heard > state.last_heard {
                (state.last_heard, state.pinged_at) = (progress.last_heard, None);
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
                && let Some(violation) = self.carrier.overdue(addr, now, lost_after)
            {
                self.protocol_violation(channel, violation);
                continue;
            }
            if let Some((end, since)) = state.remote_close {
                // The limit counts while something waits and nothing arrives. The reader may take its time before it
                // asks for more.
                let waits = !away && (state.incoming.has_reads() || !state.outgoing.is_idle());
                let since = if waits { since.max(state.last_heard) } else { now };
                state.remote_close = Some((end, since));
                if late(since, lost_after + transfer_time(progress.reading)) {
                    let error = state.closed_by_remote();
                    self.end(channel, error);
                }
                continue;
            }
            match state.pinged_at {
                Some(pinged_at) => {
                    let bytes = progress.reading.saturating_add(progress.writing);
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
