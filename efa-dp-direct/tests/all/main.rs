//! Tests of the formats and queues.

mod common;
mod cq;
mod host;
mod init;
mod layout;
mod properties;
mod rq;
mod rules;
mod sq;
mod wqe;
