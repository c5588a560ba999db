//! Attributes of addresses.

use std::ffi::{c_int, c_void};

use crate::code::{Code, Outcome};
use crate::context;
use crate::device;
use crate::guard::{In, Out};
use crate::space::{self, Entry, Kind};

/// Memory types: host and device.
const HOST: u32 = 1;
const DEVICE: u32 = 2;

/// Writes attribute `number` of a range, in the type that the reference specifies.
fn give(entry: &Entry, address: u64, number: c_int, out: Out<c_void>) -> Outcome {
    let (on_host, mapped) = (entry.on_host(), matches!(entry.kind, Kind::Mapped(_)));
    match number {
        // This is 0 for cuMemMap mappings, which belong to no context.
        1 => out.cast::<usize>().set(entry.context),
        2 => out.cast::<u32>().set(if on_host { HOST } else { DEVICE }),
        3 => out.cast::<u64>().set(address),
        4 if on_host || device::is_coherent() => out.cast::<u64>().set(address),
        4 | 5 => Err(Code::INVALID_VALUE),
        6 => out.cast::<u32>().set(u32::from(entry.synchronous)),
        7 | 20 => out.cast::<u64>().set(entry.id),
        8 => out.cast::<u32>().set(0),
        9 => out.cast::<c_int>().set(entry.device as c_int),
        10 => out.cast::<u32>().set(u32::from(matches!(entry.kind, Kind::Heap))),
        11 | 19 => out.cast::<u64>().set(entry.start),
        12 | 18 => out.cast::<usize>().set(entry.len as usize),
        13 => out.cast::<u32>().set(1),
        14 => out.cast::<u64>().set(match &entry.kind {
            Kind::Mapped(physical) => physical.handle_types as u64,
            _ => 0,
        }),
        15 => out.cast::<u32>().set(match &entry.kind {
            Kind::Mapped(physical) => u32::from(physical.rdma),
            kind => u32::from(matches!(kind, Kind::Heap)),
        }),
        16 => {
            let writable = !mapped || entry.writers != 0;
            let readable = !mapped || entry.readers != 0;
            out.cast::<u64>().set(if writable { 3 } else { u64::from(readable) })
        }
        17 => out.cast::<usize>().set(match &entry.kind {
            Kind::Pooled(pool) => *pool,
            _ => 0,
        }),
        _ => Err(Code::INVALID_VALUE),
    }
}

/// Writes what cuPointerGetAttributes writes for an address unknown to the driver.
fn give_nothing(number: c_int, out: Out<c_void>) -> Outcome {
    match number {
        9 => out.cast::<c_int>().set(-2),
        2 | 6 | 8 | 10 | 13 | 15 => out.cast::<u32>().set(0),
        1 | 3 | 4 | 7 | 11 | 12 | 14 | 16..=20 => out.cast::<u64>().set(0),
        _ => Err(Code::INVALID_VALUE),
    }
}

/// Returns the range that contains the address, or the pages of an allocation.
fn known(address: u64) -> Option<Entry> {
    space::find(address).or_else(|| space::heap_around(address, 1))
}

api! {
    cuPointerGetAttribute(out: Out<c_void>, number: c_int, address: u64) {
        device::started()?;
        out.present()?;
        give(&known(address).ok_or(Code::INVALID_VALUE)?, address, number, out)
    }

    cuPointerGetAttributes(count: u32, numbers: In<c_int>, outs: In<Out<c_void>>, address: u64) {
        device::started()?;
        let entry = known(address);
        for index in 0..count as usize {
            let (number, out) = (numbers.at(index)?, outs.at(index)?);
            match &entry {
                // An attribute that the range doesn't have reads as 0 here.
                Some(entry) => give(entry, address, number, out).or_else(|_| give_nothing(number, out))?,
                None => give_nothing(number, out)?,
            }
        }
        Ok(())
    }

    /// Only synchronous memory operations can be set, with no effect: copies here are never out of order with the card.
    /// Memory from cuMemCreate and pools doesn't have the attribute.
    cuPointerSetAttribute(value: In<u32>, number: c_int, address: u64) {
        device::started()?;
        let synchronous = value.get()? != 0;
        let entry = known(address).ok_or(Code::INVALID_VALUE)?;
        if number != 6 {
            return Err(Code::INVALID_VALUE);
        }
        match entry.kind {
            Kind::Mapped(_) | Kind::Pooled(_) => Err(Code::NOT_SUPPORTED),
            _ if entry.on_host() => Err(Code::INVALID_VALUE),
            _ => {
                space::update_all(|range| range.id == entry.id, |range| range.synchronous = synchronous);
                Ok(())
            }
        }
    }

    cuMemGetAddressRange_v2(base: Out<u64>, size: Out<usize>, address: u64) {
        context::current()?;
        let found = space::find(address).filter(|entry| entry.on_device() || matches!(entry.kind, Kind::Mapped(_)));
        let entry = found.ok_or(Code::NOT_FOUND)?;
        base.set_at(0, entry.start);
        size.set_at(0, entry.len as usize);
        Ok(())
    }
}
