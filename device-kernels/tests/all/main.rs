//! Tests of the device code on the CPU.

mod c_header;
mod continuation;
mod emulated;
mod flush;
mod gin_post;
mod routing;
