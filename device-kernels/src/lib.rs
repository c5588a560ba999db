//! The GIN device API: put, putValue, get, signal, flush.
#![cfg_attr(not(test), no_std)]
