//! An open device, and the queries about it.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::mem::offset_of;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::ptr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use nix::fcntl::OFlag;
use soft_nic::address::Gid;
use soft_nic::card::{Card, MAX_SEND_SIZE};
use soft_nic::fault::MAX_SQ_SIZE;
use soft_nic::process::{self, Process, Uses};

use crate::bindings as ib;
use crate::device::{self, Device};
use crate::guard::{Errno, entry, status};
use crate::objects::{self, Object, Open, verbs_object};
use crate::params::{Size, Struct};
use crate::queues::Queues;

/// The inline bytes that 64-byte and 128-byte work requests hold.
pub(crate) const NARROW_INLINE: u32 = 32;
pub(crate) const WIDE_INLINE: u32 = 80;
/// Maximum buffers per send or receive.
pub(crate) const MAX_SGE: u32 = 2;
/// Maximum entries in a receive queue and in a completion queue.
pub(crate) const MAX_RQ: u32 = 16384;
pub(crate) const MAX_CQE: u32 = 65536;
/// Completion vectors. The card's one thread raises the events of all of them.
pub(crate) const VECTORS: c_int = 32;
/// The only port.
pub(crate) const PORT: u8 = 1;
const MAX_OBJECTS: c_int = 65535;
/// Fewer, because fabtests open all that there are, and libfabric allocates more than a megabyte for each.
const MAX_CQ: c_int = 1024;

/// An open device. `ibv_context` is the last field of `verbs_context`.
#[repr(C)]
pub(crate) struct Context {
    raw: ib::verbs_context,
    card: Arc<Card>,
    pub(crate) number: u32,
    /// The card's GID.
    gid: Gid,
    /// The card of a forked child that uses its parent's device, and that child.
    card_of_child: OnceLock<(Process, Arc<Card>)>,
    /// Open queue pairs, by number.
    pub(crate) queue_pairs: RwLock<HashMap<u16, Arc<Queues>>>,
    /// Asynchronous events. The card raises none; closing the device ends any waits for them.
    events: Mutex<Option<(Arc<OwnedFd>, OwnedFd)>>,
    uses: Uses,
}

verbs_object!(Context { raw.context: ib::ibv_context }, "device", { const SHARED_WITH_CHILDREN: bool = true; });

impl Context {
    /// Opens a device; `raw` holds its tables of calls.
    pub(crate) fn open(device: &Device, mut raw: ib::verbs_context) -> Result<*mut ib::ibv_context, Errno> {
        let card = card_of(device.number, "ibv_open_device")?;
        let gid = card.lock().gid;
        let (reader, writer) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
        raw.sz = size_of::<ib::verbs_context>();
        raw.context = ib::ibv_context {
            device: (&raw const device.raw).cast_mut(),
            cmd_fd: -1,
            async_fd: reader.as_raw_fd(),
            num_comp_vectors: VECTORS,
            // `__VERBS_ABI_IS_EXTENDED`
            abi_compat: ptr::without_provenance_mut::<c_void>(usize::MAX),
            ..raw.context
        };
        Ok(objects::give(Box::new(Self {
            raw,
            card,
            number: device.number,
            gid,
            card_of_child: OnceLock::new(),
            queue_pairs: RwLock::default(),
            events: Mutex::new(Some((Arc::new(reader), writer))),
            uses: Uses::default(),
        })))
    }

    /// Returns this process's card: a child that was forked after the device was opened has its own.
    ///
    /// # Errors
    /// There are no sockets or no memory for the child's card, or two forks lie between the process that opened the
    /// device and this one.
    pub(crate) fn card(&self) -> Result<&Card, Errno> {
        if !self.uses.are_inherited() {
            return Ok(&self.card);
        }
        if self.card_of_child.get().is_none() {
            let card = card_of(self.number, "fork")?;
            card.replace_inherited(&self.card, self.gid);
            // Another thread's is the same card.
            let _ = self.card_of_child.set((Process::current(), card));
        }
        match self.card_of_child.get() {
            Some((process, card)) if process.is_current() => Ok(card),
            _ => {
                process::log_inherited(Self::KIND);
                Err(Errno::PERM)
            }
        }
    }

    /// Returns an open queue pair's work queues.
    pub(crate) fn queues(&self, qpn: u16) -> Option<Arc<Queues>> {
        self.queue_pairs.read().unwrap_or_else(PoisonError::into_inner).get(&qpn).cloned()
    }
}

/// Returns this process's card with this number, and starts it.
fn card_of(number: u32, call: &str) -> Result<Arc<Card>, Errno> {
    let card = Card::open(number, &device::settings(call)?)?;
    card.start(Some(&PathBuf::from(device::card_directory(number)).join("ports/1/hw_counters")))?;
    Ok(card)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_close_device(raw: *mut ib::ibv_context) -> c_int {
    status("ibv_close_device", || {
        if objects::is_inherited::<Context>(raw) {
            return Ok(());
        }
        let open = objects::take::<Context>("ibv_close_device", raw)?;
        // Like the kernel, remove what is still open. The memory stays, because the program may still call the
        // destructors.
        for qpn in open.queue_pairs.read().unwrap_or_else(PoisonError::into_inner).keys() {
            open.card.close_qp(*qpn);
        }
        drop(open.events.lock().unwrap_or_else(PoisonError::into_inner).take());
        open.free();
        Ok(())
    })
}

fn device_attributes(open: &Context) -> Result<ib::ibv_device_attr, Errno> {
    let device = open.card()?.lock().config.faults.device.into();
    let mut attr = ib::ibv_device_attr {
        node_guid: device::guid(open.number),
        max_mr_size: 1 << 48,
        page_size_cap: 0xffff_f000,
        vendor_id: 0x1d0f,
        vendor_part_id: device,
        hw_ver: device,
        max_qp: MAX_OBJECTS,
        max_qp_wr: MAX_SQ_SIZE as c_int,
        max_sge: MAX_SGE as c_int,
        max_sge_rd: 1,
        max_cq: MAX_CQ,
        max_cqe: MAX_CQE as c_int,
        max_mr: MAX_OBJECTS,
        max_pd: MAX_OBJECTS,
        max_ah: MAX_OBJECTS,
        max_pkeys: 1,
        phys_port_cnt: PORT,
        ..ib::ibv_device_attr::default()
    };
    for (to, from) in attr.fw_ver.iter_mut().zip(env!("CARGO_PKG_VERSION").bytes()) {
        *to = from as _;
    }
    Ok(attr)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_device(raw: Open<Context>, attr: Option<&mut ib::ibv_device_attr>) -> c_int {
    status("ibv_query_device", || {
        let open = raw.get()?;
        *attr.ok_or(Errno::INVAL)? = device_attributes(open)?;
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn query_device_ex(
    raw: Open<Context>,
    input: Option<&ib::ibv_query_device_ex_input>,
    attr: Struct<ib::ibv_device_attr_ex>,
    size: Size<usize>,
) -> c_int {
    status("ibv_query_device_ex", || {
        let open = raw.get()?;
        if input.is_some_and(|input| input.comp_mask != 0) || size.bytes() < size_of::<ib::ibv_device_attr>() {
            return Err(Errno::INVAL);
        }
        let whole = ib::ibv_device_attr_ex {
            orig_attr: device_attributes(open)?,
            phys_port_cnt_ex: PORT.into(),
            ..ib::ibv_device_attr_ex::default()
        };
        attr.fill(&whole, size)
    })
}

fn port_attributes(port: u8) -> Result<ib::ibv_port_attr, Errno> {
    check_port(port.into(), 0)?;
    Ok(ib::ibv_port_attr {
        state: ib::IBV_PORT_ACTIVE,
        max_mtu: ib::IBV_MTU_4096,
        active_mtu: ib::IBV_MTU_4096,
        gid_tbl_len: 1,
        // One packet, as the driver reports; RDMA has its own limit (`efadv_query_device`).
        max_msg_sz: MAX_SEND_SIZE,
        pkey_tbl_len: 1,
        max_vl_num: 1,
        // Four lanes at 25 Gbit/s: the link speed that softefa reports.
        active_width: 2,
        active_speed: 32,
        active_speed_ex: 32,
        phys_state: 5,
        link_layer: ib::IBV_LINK_LAYER_UNSPECIFIED as u8,
        ..ib::ibv_port_attr::default()
    })
}

pub(crate) unsafe extern "C" fn query_port(
    _raw: *mut ib::ibv_context,
    port: u8,
    attr: Struct<ib::ibv_port_attr>,
    size: Size<usize>,
) -> c_int {
    status("ibv_query_port", || attr.fill(&port_attributes(port)?, size))
}

/// Serves programs built before the struct had a size; theirs ends with the field `flags`.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_port(_raw: *mut ib::ibv_context, port: u8, attr: Struct<ib::ibv_port_attr>) -> c_int {
    const OLD_SIZE: usize = offset_of!(ib::ibv_port_attr, port_cap_flags2);
    // SAFETY: the old struct is the new one up to `port_cap_flags2`.
    status("ibv_query_port", || unsafe { attr.fill_bytes(&port_attributes(port)?, OLD_SIZE) })
}

/// Reports the port's total speed, in units of 100 Mbit/s.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_port_speed(_raw: *mut ib::ibv_context, port: u32, speed: Option<&mut u64>) -> c_int {
    status("ibv_query_port_speed", || {
        check_port(port, 0)?;
        *speed.ok_or(Errno::INVAL)? = 1000;
        Ok(())
    })
}

fn check_port(port: u32, index: u32) -> Result<(), Errno> {
    if port == u32::from(PORT) && index == 0 { Ok(()) } else { Err(Errno::INVAL) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_gid(raw: Open<Context>, port: u8, index: c_int, gid: Option<&mut ib::ibv_gid>) -> c_int {
    let done = status("ibv_query_gid", || {
        let open = raw.get()?;
        check_port(port.into(), index as u32)?;
        gid.ok_or(Errno::INVAL)?.raw = open.card()?.lock().gid.to_bytes();
        Ok(())
    });
    if done == 0 { 0 } else { -1 }
}

fn gid_entry(open: &Context) -> Result<ib::ibv_gid_entry, Errno> {
    Ok(ib::ibv_gid_entry {
        gid: ib::ibv_gid { raw: open.card()?.lock().gid.to_bytes() },
        gid_index: 0,
        port_num: PORT.into(),
        gid_type: ib::IBV_GID_TYPE_IB,
        ndev_ifindex: 0,
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn _ibv_query_gid_ex(
    raw: Open<Context>,
    port: u32,
    index: u32,
    to: Struct<ib::ibv_gid_entry>,
    flags: u32,
    size: Size<usize>,
) -> c_int {
    status("ibv_query_gid_ex", || {
        let open = raw.get()?;
        check_port(port, index)?;
        if flags != 0 {
            return Err(Errno::UNSUPPORTED);
        }
        to.fill(&gid_entry(open)?, size)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn _ibv_query_gid_table(
    raw: Open<Context>,
    to: Struct<ib::ibv_gid_entry>,
    most: usize,
    flags: u32,
    size: Size<usize>,
) -> isize {
    entry("ibv_query_gid_table", -(libc::EIO as isize), || {
        if flags != 0 || most == 0 {
            return -(libc::EINVAL as isize);
        }
        let Ok(open) = raw.get() else { return -(libc::EINVAL as isize) };
        match gid_entry(open).and_then(|entry| to.fill(&entry, size)) {
            Ok(()) => 1,
            Err(errno) => -(errno.0 as isize),
        }
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_query_gid_type(
    _: *mut ib::ibv_context,
    port: u8,
    index: u32,
    kind: Option<&mut c_int>,
) -> c_int {
    let done = status("ibv_query_gid_type", || {
        check_port(port.into(), index)?;
        *kind.ok_or(Errno::INVAL)? = 0;
        Ok(())
    });
    if done == 0 { 0 } else { -1 }
}

/// The default partition, in network byte order.
const PKEY: u16 = 0xffff;

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_pkey(_: *mut ib::ibv_context, port: u8, index: c_int, pkey: Option<&mut u16>) -> c_int {
    let done = status("ibv_query_pkey", || {
        check_port(port.into(), index as u32)?;
        *pkey.ok_or(Errno::INVAL)? = PKEY;
        Ok(())
    });
    if done == 0 { 0 } else { -1 }
}

#[unsafe(no_mangle)]
extern "C" fn ibv_get_pkey_index(_: *mut ib::ibv_context, port: u8, pkey: u16) -> c_int {
    if port == PORT && pkey == PKEY { 0 } else { -1 }
}

/// Waits for an asynchronous event. The card raises none, so the call returns when the device is closed, or at once
/// with `EAGAIN` if the program made the descriptor non-blocking.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_async_event(raw: Open<Context>, _event: *mut ib::ibv_async_event) -> c_int {
    let body = || {
        let open = raw.get()?;
        let reader = {
            let events = open.events.lock().unwrap_or_else(PoisonError::into_inner);
            events.as_ref().map(|(reader, _)| reader.clone()).ok_or(Errno(libc::ENODEV))?
        };
        nix::unistd::read(&reader, &mut [0; 1])?;
        Err(Errno(libc::ENODEV))
    };
    status("ibv_get_async_event", body);
    -1
}

#[unsafe(no_mangle)]
extern "C" fn ibv_ack_async_event(_event: *mut ib::ibv_async_event) {}

/// Says that forking is safe: registered pages are never pinned.
#[unsafe(no_mangle)]
extern "C" fn ibv_fork_init() -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn ibv_is_fork_initialized() -> ib::ibv_fork_status {
    ib::IBV_FORK_UNNEEDED
}

#[unsafe(no_mangle)]
extern "C" fn ibv_dontfork_range(_base: *mut c_void, _size: usize) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn ibv_dofork_range(_base: *mut c_void, _size: usize) -> c_int {
    0
}
