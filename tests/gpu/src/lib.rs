//! Two-rank scenarios, run on a GPU or on the CPU.
