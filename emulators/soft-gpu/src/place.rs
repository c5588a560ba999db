//! Where memory is: on a device, on the host, or on one of its NUMA nodes.

use std::ffi::c_int;

use crate::code::{Code, Outcome};
use crate::device;

/// `CUmemLocationType`: a device, the host, and one of its NUMA nodes.
pub(crate) const ON_DEVICE: c_int = 1;
pub(crate) const ON_HOST: c_int = 2;
pub(crate) const ON_NODE: c_int = 3;
/// The CPU's bit in a range's `readers` and `writers`, where devices have the bits of their ordinals.
pub(crate) const CPU: u64 = 1 << 63;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) kind: c_int,
    pub(crate) id: c_int,
}

impl Place {
    pub(crate) fn is_host(&self) -> bool {
        self.kind != ON_DEVICE
    }

    /// Returns the bit of the device or CPU that accesses memory from here.
    pub(crate) fn accessor(&self) -> Outcome<u64> {
        if matches!(self.kind, ON_HOST | ON_NODE) { Ok(CPU) } else { Ok(1 << self.device()?) }
    }

    /// Whether `accessor` can be given access to memory here: the CPU reaches host memory, and as a node only that of
    /// nodes.
    pub(crate) fn is_open_to(&self, accessor: &Self) -> bool {
        match accessor.kind {
            ON_HOST => self.is_host() || device::is_coherent(),
            ON_NODE => self.kind == ON_NODE,
            _ => true,
        }
    }

    pub(crate) fn device(&self) -> Outcome<usize> {
        match self.kind {
            ON_DEVICE => Ok(device::by_number(self.id)?.ordinal),
            // Memory on the host and its NUMA nodes.
            2..=4 => Err(Code::NOT_SUPPORTED),
            _ => Err(Code::INVALID_VALUE),
        }
    }
}
