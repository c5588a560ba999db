//! The completion queue doorbell (`efa_io_regs_defs.h`, `EFA_REGS_CQ_DB`).

use crate::wire::CqDoorbell;

/// Returns the word that tells the card the host's consumer count and whether it wants an event for the next entry.
///
/// `cmd_sn` counts the events that the host has seen; only two bits of it are sent.
pub const fn word(consumer_counter: u16, cmd_sn: u32, arm: bool) -> u32 {
    CqDoorbell(0).with_consumer_index(consumer_counter as u32).with_cmd_sn(cmd_sn).with_arm(arm).0
}
