//! The protocol that emulates the GIN signals that EFA cards lack: strong signals, signals at an address in a window, and adds that become
//! visible in a single step. It's shared by the device code that posts a signal and the signal proxy that applies it, and does no I/O.
//!
//! ```rust
//! use ferrogin_ffi::signals::{Generation, Receiver, Route, Sender, Signal, Strength, Target, Vehicle};
//!
//! // Both sides know the generation of the receiver's context and its number of signals.
//! let generation = Generation::new(1);
//! let sender = Sender { generation, n_signals: 64, rank: 3 };
//! let receiver = Receiver { generation, n_signals: 64, nranks: 4 };
//!
//! // A weak signal travels as the immediate data of its own put.
//! let signal = Signal { target: Target::Indexed(7), add: 100 };
//! let route = sender.route(signal, Strength::Weak, true);
//! let Ok(Some(Route::WithPut(word))) = route else { panic!("{route:?}") };
//! assert_eq!(receiver.immediate(word.bits()), Ok(signal));
//!
//! // A strong one waits until the earlier puts have completed.
//! let route = sender.route(signal, Strength::Strong, true);
//! assert!(matches!(route, Ok(Some(Route::AfterCompletion(Vehicle::Write(_))))));
//! ```
//!
//! | module | what |
//! |---|---|
//! | [`signal`] | a signal, and the reasons to refuse one |
//! | [`sender`] | how the sender routes a signal |
//! | [`immediate`] | the 32-bit form, which travels with a write |
//! | [`message`] | the 32-byte form, which travels as a send |
//! | [`receiver`] | turns a completion into one add |
//! | [`receives`] | how many receives the signal proxy posts |
//!
//! The sender picks a route with [`Sender::route`]; the receiver decodes each completion with [`Receiver`] and adds once.

pub mod immediate;
pub mod message;
pub mod receiver;
pub mod receives;
pub mod sender;
pub mod signal;

pub use immediate::Immediate;
pub use message::Message;
pub use receiver::Receiver;
pub use receives::Receives;
pub use sender::{Route, Sender, Vehicle};
pub use signal::{Generation, Refusal, Region, Signal, Strength, Target};
