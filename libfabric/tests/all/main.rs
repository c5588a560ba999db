//! Tests of the bindings.

mod layout;
mod objects;
mod provider_path;
mod signal_dispositions;
