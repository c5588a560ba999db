//! Tests of the software ConnectX card.

mod card;
mod cq_random;
mod windows;
