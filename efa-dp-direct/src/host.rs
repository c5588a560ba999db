//! The convention of the host providers (rdma-core, libfabric), where it differs from the device API.
//!
//! * [`post`]: lists of requests, one doorbell at the end of a list, and the doorbell carries 16 bits;
//! * [`cq_doorbell`]: the completion queue's doorbell word;
//! * [`limits`]: how deep a queue can be, and what a created one reports.

#[allow(unsafe_code)]
pub mod post;

pub mod cq_doorbell;
pub mod limits;
