//! A listener inside the engine.

use std::collections::VecDeque;

use super::callback::{Callback, OpenDone};
use crate::ChannelError;

#[derive(Default)]
pub(crate) struct Listening {
    /// Channels that opened and haven't been accepted yet.
    pub arrived: VecDeque<u32>,
    /// Accepts waiting for a channel, with their tickets.
    pub waiting: VecDeque<(u64, OpenDone)>,
}

impl Listening {
    /// Ends all accepts with `error`.
    pub fn fail(&mut self, error: &ChannelError, callbacks: &mut Vec<Callback>) {
        callbacks.extend(self.waiting.drain(..).map(|(_, done)| Callback::Open(done, Err(error.clone()))));
    }

    /// Drops an ended channel; true if it hadn't been accepted yet.
    pub fn drop_channel(&mut self, channel: u32) -> bool {
        let before = self.arrived.len();
        self.arrived.retain(|arrived| *arrived != channel);
        self.arrived.len() < before
    }
}
