//! The GIN device API: put, putValue, get, signal, flush.
#![cfg_attr(not(feature = "host"), no_std)]
