//! Which ranks have gone, for a ring that goes on without them.

use super::handle::Handle;
use super::step::Step;
use super::time_limits::Wait;
use crate::frame::{Frame, FrameKind};
use crate::listener::Listener;
use crate::stream::Stream;
use std::collections::BTreeMap;
use std::time::Instant;

/// How a rank has gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Departure {
    /// It has ended without a word, was stopped for FERROGIN_TIMEOUT, or a card found it gone.
    Lost,
    /// It has closed its communicator, or doesn't listen any more. A rank that hears more says [`Lost`](Self::Lost).
    Closed,
}

/// The state of a ring that goes on.
#[derive(Debug)]
pub(super) struct Survivors {
    pub listener: Listener,
    pub handles: Vec<Handle>,
    /// By rank, with the time at which this rank learned of it.
    pub gone: BTreeMap<usize, (Departure, Instant)>,
    /// The ranks at the ends of the streams.
    pub neighbours: [usize; 2],
    /// A new previous rank, until this one knows that the ranks in between have gone.
    pub candidate: Option<(usize, Stream)>,
    /// Since when the next rank is being called.
    pub called: Instant,
    pub silence: Wait,
}

impl Survivors {
    pub fn has_gone(&self, rank: usize) -> bool {
        self.gone.contains_key(&rank)
    }

    /// Returns the rank that went first, as far as this rank knows.
    pub fn first(&self) -> Option<usize> {
        self.gone.iter().min_by_key(|(_, (_, at))| *at).map(|(rank, _)| *rank)
    }

    /// Returns the frames that tell another rank of all of them.
    pub fn news(&self) -> impl Iterator<Item = Frame> {
        self.gone.iter().map(|(rank, (departure, _))| news(*rank, *departure))
    }
}

/// Returns the frame that tells another rank of this one.
pub(super) fn news(rank: usize, departure: Departure) -> Frame {
    let kind = if departure == Departure::Lost { FrameKind::Lost } else { FrameKind::Left };
    Frame::new(kind, Step::Barrier as u16, 0, rank)
}
