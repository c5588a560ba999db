//! Sharing modes: which threads may use an endpoint while a call lasts. The fewer they are, the cheaper the shared words.
//!
//! Every mode keeps the same words in the same state, so calls in different modes may follow one another. Only calls at the
//! same time must use one mode. The caller orders calls of different modes, as it orders any use of memory by two threads.

/// The threads with which a call shares the endpoint that it posts on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sharing {
    /// All threads of the device, or of the process on a CPU.
    #[default]
    Gpu,
    /// The threads of one CTA.
    Cta,
    /// No other thread.
    Thread,
}
