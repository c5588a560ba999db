//! An application's hints, borrowed for one call of `fi_getinfo`.
//!
//! libfabric copies hints of an older ABI into its own layout before it calls a provider. So each part has the layout
//! of the loaded libfabric, which may be older than the one that this provider was built for.

use std::ffi::{CStr, c_char, c_void};
use std::mem::offset_of;

use ferrogin_libfabric::bindings as fi;

use super::super::entry::{Arg, Call};
use super::super::guard::Code;
use super::super::library::{Library, text, version};
use super::layout::{DomainAttr, EpAttr, same_offsets};
use soft_nic::address::ADDRESS_LEN;

/// `fi_tx_attr` as ABI 1.0 has it. ABI 1.3, which came with libfabric 1.9, added `tclass`.
#[repr(C)]
pub(crate) struct TxAttr {
    pub caps: u64,
    pub mode: u64,
    pub op_flags: u64,
    pub msg_order: u64,
    pub comp_order: u64,
    pub inject_size: usize,
    pub size: usize,
    pub iov_limit: usize,
    pub rma_iov_limit: usize,
}
same_offsets!(TxAttr, fi::fi_tx_attr: caps, mode, op_flags, msg_order, comp_order, inject_size, size, iov_limit,
    rma_iov_limit);
const _: () = assert!(size_of::<TxAttr>() == offset_of!(fi::fi_tx_attr, tclass));

/// Borrowed hints.
#[derive(Clone, Copy)]
pub(crate) struct RawHints<'a> {
    pub info: &'a fi::fi_info,
    /// Version of the loaded libfabric.
    core: u32,
}

impl<'a> RawHints<'a> {
    /// Borrows hints; `None` if there are none.
    ///
    /// # Safety
    /// `hints` is null or a `fi_info` in the layout of libfabric `core`. Its pointers are null or valid in that layout,
    /// names are terminated, and addresses have their stated length. All of it stays alive and unchanged for `'a`.
    pub(crate) unsafe fn borrow(hints: *const fi::fi_info, core: u32) -> Option<Self> {
        // SAFETY: the caller promises null or a valid `fi_info`, whose fields up to `nic` exist since libfabric 1.7.
        let info = unsafe { hints.as_ref() }?;
        Some(Self { info, core })
    }

    /// Returns the part at `at`, which is one of the hints' pointers.
    fn part<T>(self, at: *const T) -> Option<&'a T> {
        // SAFETY: the caller of `borrow` promised that pointers of the hints are null or valid for `'a`, and each `T`
        // here is no longer than the part in any layout.
        unsafe { at.as_ref() }
    }

    /// Returns the name at `at`, which is one of the hints' pointers.
    fn name(self, at: *const c_char) -> Option<&'a CStr> {
        // SAFETY: the caller of `borrow` promised that names are null or terminated, and live for `'a`.
        unsafe { text(at) }
    }

    /// Returns the address at `at`, which is one of the hints' pointers, if it has the length of an EFA address.
    fn address(self, at: *const c_void, len: usize) -> Option<[u8; ADDRESS_LEN]> {
        (len == ADDRESS_LEN).then(|| self.part(at.cast::<[u8; ADDRESS_LEN]>()).copied()).flatten()
    }

    /// Returns the destination: `None` without one, `Some(None)` if it is not an EFA address.
    pub(crate) fn destination(self) -> Option<Option<[u8; ADDRESS_LEN]>> {
        let Self { info, .. } = self;
        (!info.dest_addr.is_null()).then(|| self.address(info.dest_addr, info.dest_addrlen))
    }

    /// Returns the source, in the form of [`destination`](Self::destination).
    pub(crate) fn source(self) -> Option<Option<[u8; ADDRESS_LEN]>> {
        let Self { info, .. } = self;
        (!info.src_addr.is_null()).then(|| self.address(info.src_addr, info.src_addrlen))
    }

    pub(crate) fn tx(self) -> Option<&'a TxAttr> {
        self.part(self.info.tx_attr.cast())
    }

    /// Returns the traffic class, which is unspecified if libfabric is older than the field.
    pub(crate) fn tclass(self) -> u32 {
        let tx = self.info.tx_attr.cast_const();
        if self.core < version(1, 9) || tx.is_null() {
            return fi::FI_TC_UNSPEC;
        }
        self.part(tx.wrapping_byte_add(offset_of!(fi::fi_tx_attr, tclass)).cast()).copied().unwrap_or(fi::FI_TC_UNSPEC)
    }

    pub(crate) fn rx(self) -> Option<&'a fi::fi_rx_attr> {
        self.part(self.info.rx_attr)
    }

    pub(crate) fn ep(self) -> Option<&'a EpAttr> {
        self.part(self.info.ep_attr.cast())
    }

    pub(crate) fn domain(self) -> Option<&'a DomainAttr> {
        self.part(self.info.domain_attr.cast())
    }

    pub(crate) fn domain_name(self) -> Option<&'a CStr> {
        self.name(self.domain()?.name)
    }

    pub(crate) fn fabric_name(self) -> Option<&'a CStr> {
        self.name(self.fabric()?.name)
    }

    pub(crate) fn provider_name(self) -> Option<&'a CStr> {
        self.name(self.fabric()?.prov_name)
    }

    fn fabric(self) -> Option<&'a fi::fi_fabric_attr> {
        self.part(self.info.fabric_attr)
    }
}

impl<'a> Arg<'a, *const fi::fi_info> for Option<RawHints<'a>> {
    unsafe fn of(raw: *const fi::fi_info, _: &'a Call) -> Result<Self, Code> {
        // SAFETY: libfabric gives hints and infos in its own layout.
        Ok(unsafe { RawHints::borrow(raw, Library::get().map_or(0, |library| library.version)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traffic_class_is_ignored_before_abi_1_3() {
        let tx = fi::fi_tx_attr { tclass: fi::FI_TC_LOW_LATENCY, size: 7, ..Default::default() };
        let info = fi::fi_info { tx_attr: (&raw const tx).cast_mut(), ..fi::fi_info::default() };
        // SAFETY: local values in the newest layout, which contains the older ones; all other pointers are null.
        let given = |core| unsafe { RawHints::borrow(&raw const info, core) }.unwrap();
        assert_eq!(given(version(1, 17)).tclass(), fi::FI_TC_LOW_LATENCY);
        assert_eq!(given(version(1, 8)).tclass(), fi::FI_TC_UNSPEC);
        assert_eq!(given(version(1, 8)).tx().map(|tx| tx.size), Some(7));
        assert!(given(version(2, 6)).rx().is_none() && given(version(2, 6)).provider_name().is_none());
    }
}
