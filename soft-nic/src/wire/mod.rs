//! How packets travel between cards.

pub(crate) mod packet;
pub(crate) mod ring;
pub(crate) mod shm;
