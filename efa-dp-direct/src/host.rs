//! The convention of the host providers (rdma-core, libfabric), where it differs from the device API.
//!
//! * [`post`]: lists of requests, one doorbell at the end of a list, and the doorbell carries 16 bits;
//! * [`cq_doorbell`]: the completion queue's doorbell word;
//! * [`limits`]: the greatest depth of a queue, and the limits that a created queue reports.

#[allow(unsafe_code)]
pub mod post;

pub mod cq_doorbell;
pub mod limits;
