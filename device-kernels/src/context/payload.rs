//! The bytes of an operation.

use super::Span;
use super::tables::Tables;
use crate::endpoint::{Remote, Sge};
use crate::status::Status;

/// The bytes of an operation.
#[derive(Clone, Copy)]
pub(super) enum Payload {
    None,
    /// At least one byte.
    Put {
        remote: Remote,
        local: Sge,
        bytes: u64,
    },
    Value {
        remote: Remote,
        value: u64,
        bytes: u32,
    },
}

impl Payload {
    /// A put to that peer, which exists; one without bytes has no payload.
    pub(super) fn put(tables: Tables<'_>, peer: u32, dst: Span, src: Span, bytes: u64) -> Result<Self, Status> {
        match bytes {
            0 => Ok(Payload::None),
            _ if dst.is_null() || src.is_null() => Err(Status::InvalidArgument),
            _ => Ok(Payload::put_at(tables.remote(dst, peer, true), tables.local(src, true, 0), bytes)),
        }
    }

    /// A put between these places.
    pub(super) fn put_at(remote: Remote, local: Sge, bytes: u64) -> Self {
        if bytes == 0 { Payload::None } else { Payload::Put { remote, local, bytes } }
    }

    /// A value to that peer, which exists.
    pub(super) fn value(tables: Tables<'_>, peer: u32, dst: Span, value: u64, bytes: u32) -> Result<Self, Status> {
        if dst.is_null() {
            return Err(Status::InvalidArgument);
        }
        Ok(Payload::Value { remote: tables.remote(dst, peer, true), value, bytes })
    }
}
