//! The host providers' convention (rdma-core, libfabric), where it differs from the device API.
//!
//! * [`post`]: lists of requests, with one 16-bit doorbell at the end of each list;
//! * [`cq_doorbell`]: the completion queue's doorbell word;
//! * [`limits`]: a queue's maximum depth, and the limits that a created queue reports.

#[allow(unsafe_code)]
pub mod post;

pub mod cq_doorbell;
pub mod limits;
