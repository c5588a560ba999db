//! The tests of the message layer.

mod message;
