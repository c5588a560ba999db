//! Tests of the C ABI.

mod layout;
mod signals;
