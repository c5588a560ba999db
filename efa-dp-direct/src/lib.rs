//! EFA queue formats and the direct data path: rings, WQE building, posting, CQE parsing.
#![cfg_attr(not(test), no_std)]
