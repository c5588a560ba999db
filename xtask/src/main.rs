//! Chores of the ferrogin repository.
fn main() {}
