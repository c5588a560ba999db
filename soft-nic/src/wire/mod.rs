//! How packets travel between cards.

pub(crate) mod hello;
pub(crate) mod message;
pub(crate) mod packet;
pub(crate) mod ring;
pub(crate) mod shm;
