//! Instruction counts and rates, each beside its baseline.
