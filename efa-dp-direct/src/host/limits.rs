//! A send queue's maximum depth, and the limits that a created queue reports (`efadv_get_max_sq_depth`, `efadv_query_qp_wqs`).

use crate::queue::WQ_CAPS_64_BIT_REQ_ID;
use crate::wqe::WqeSize;

/// More inline data than a request can carry: this many bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InlineTooLong(pub u32);

impl InlineTooLong {
    /// Returns the negative errno that the host provider returns.
    pub const fn errno(self) -> i32 {
        -22
    }
}

impl core::fmt::Display for InlineTooLong {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{} inline bytes: a request carries at most {}", self.0, WqeSize::Wide.max_inline())
    }
}

impl core::error::Error for InlineTooLong {}

/// Returns the size of a queue's requests: wide if they carry more inline data than narrow ones can, or any in a write.
///
/// # Errors
/// More inline data than wide requests can carry.
pub const fn wqe_size(max_inline_data: u32, inline_write: bool) -> Result<WqeSize, InlineTooLong> {
    if max_inline_data as usize > WqeSize::Wide.max_inline() {
        Err(InlineTooLong(max_inline_data))
    } else if inline_write || max_inline_data as usize > WqeSize::Narrow.max_inline() {
        Ok(WqeSize::Wide)
    } else {
        Ok(WqeSize::Narrow)
    }
}

/// Returns a send queue's maximum depth if the card has `max_llq_size` bytes for it: a power of two, or 0.
///
/// # Errors
/// As [`wqe_size`].
pub const fn max_sq_depth(max_llq_size: u32, max_inline_data: u32, inline_write: bool) -> Result<u32, InlineTooLong> {
    match wqe_size(max_inline_data, inline_write) {
        Ok(size) => match (max_llq_size / size.bytes() as u32).checked_ilog2() {
            Some(log) => Ok(1 << log),
            None => Ok(0),
        },
        Err(error) => Err(error),
    }
}

/// A card's limits for its send queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CardLimits {
    /// Units of 64 bytes that may be written but not yet rung; 0 means any number.
    pub max_tx_batch: u16,
    /// Minimum depth of a send queue; if not 0, it also means that a batch must not fill the queue.
    pub min_sq_wr: u16,
}

/// The limits that a created send queue reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SqReport {
    /// Size of the requests.
    pub wqe_size: WqeSize,
    /// Depth.
    pub num_entries: u32,
    /// Requests that may be written but not yet rung.
    pub max_batch: u32,
    /// Capabilities; request ids are always 64-bit.
    pub caps: u32,
}

impl SqReport {
    /// Returns the queue created for `max_send_wr` requests with that much inline data.
    ///
    /// A batch limit below one wide request becomes 0, as in the host provider: such a queue can't post.
    ///
    /// # Errors
    /// As [`wqe_size`].
    pub fn new(
        card: CardLimits,
        max_send_wr: u16,
        max_inline_data: u32,
        inline_write: bool,
    ) -> Result<Self, InlineTooLong> {
        const UNIT: u32 = WqeSize::Narrow.bytes() as u32;
        let wqe_size = wqe_size(max_inline_data, inline_write)?;
        let num_entries = u32::from(max_send_wr.max(card.min_sq_wr)).next_power_of_two();
        let by_card = match card.max_tx_batch {
            0 => u32::from(u16::MAX),
            units => u32::from(units) * UNIT / wqe_size.bytes() as u32,
        };
        let max_batch = if card.min_sq_wr == 0 { by_card } else { by_card.min(num_entries - 1) };
        Ok(Self { wqe_size, num_entries, max_batch, caps: WQ_CAPS_64_BIT_REQ_ID })
    }
}
