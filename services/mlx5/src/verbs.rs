//! ConnectX hardware, through rdma-core's libibverbs and libmlx5, both loaded at run time.
//!
//! rdma-core creates the objects and connects queue pairs. `mlx5dv_init_obj` provides the queues' memory, which this
//! crate drives. Compressed completion queues have the basic layout ([`Layout::Basic`]), the one that rdma-core
//! creates. Doorbells are plain, because rdma-core shares BlueFlame registers between queue pairs.

mod devx;
mod ffi;
mod library;

pub use devx::FirmwareCompression;

use crate::cq::{CqParts, Layout, Slots};
use crate::device::{
    Access, Caps, CqAttr, Device, DeviceError, Endpoint, Handle, Mr, Pd, QpAttr, RawCq, RawQp, RawWindow, SrqAttr,
};
use crate::mmio::{ArmRegister, BlueFlame, DoorbellRecord, DoorbellRegister, DoorbellRegisterParts};
use crate::ring::Ring;
use crate::rq::RecvParts;
use crate::sq::SendParts;
use crate::srq::SrqParts;
use crate::wire::{Cqe, MAX_24_BITS};
use crate::wqe::{Limits, Transport, WindowType};
use ffi::mask;
use library::{Api, Context, check_pointer, check_status};
use std::ffi::{c_int, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Connection settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Port, starting at 1.
    pub port: u8,
    /// Index of the source GID; on Ethernet it selects the address and the RoCE version.
    pub gid_index: u8,
    /// Time until an unanswered request is retried: 4.096 µs · 2^timeout.
    pub timeout: u8,
    /// Retries of an unanswered request, at most 7.
    pub retries: u8,
    /// Retries of a request when the peer has no receive posted; 7 means unlimited.
    pub rnr_retries: u8,
}

impl Default for Settings {
    fn default() -> Self {
        Self { port: 1, gid_index: 3, timeout: 14, retries: 7, rnr_retries: 7 }
    }
}

impl Settings {
    /// Splits a text for [`Hardware::named`] into the name and the settings.
    fn named(text: &str) -> Result<(&str, Self), DeviceError> {
        let wrong = |_: std::num::ParseIntError| DeviceError::Name { text: text.to_owned() };
        let mut parts = text.split(':');
        let name = parts.next().unwrap_or_default();
        let mut settings = Self::default();
        for field in [&mut settings.port, &mut settings.gid_index] {
            if let Some(part) = parts.next() {
                *field = part.parse().map_err(wrong)?;
            }
        }
        match parts.next() {
            None => Ok((name, settings)),
            Some(_) => Err(DeviceError::Name { text: text.to_owned() }),
        }
    }
}

/// An RDMA device in the system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceEntry {
    /// The name.
    pub name: String,
    /// Whether it is a ConnectX device that this crate can drive.
    pub mlx5: bool,
}

/// Returns the system's RDMA devices.
pub fn devices() -> Result<Vec<DeviceEntry>, DeviceError> {
    let api = Api::load()?;
    let mut all = Vec::new();
    api.find_device(|_, name, mlx5| {
        all.push(DeviceEntry { name: name.to_string(), mlx5 });
        None::<()>
    })?;
    Ok(all)
}

/// rdma-core's forms of compressed completions, by what a receive's mini completion has besides the length: `enum
/// mlx5dv_cqe_comp_res_format`. Those of a send queue have the same form in all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompressedFormat {
    /// The hash.
    Hash = 1,
    /// The checksum.
    Checksum = 2,
    /// The checksum and the index of a stride.
    ChecksumStride = 4,
}

impl CompressedFormat {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Hash, Self::Checksum, Self::ChecksumStride];
}

/// A ConnectX device.
pub struct Hardware {
    context: Arc<Context>,
    settings: Settings,
    caps: Caps,
    /// Port attributes needed to connect.
    lid: u16,
    ethernet: bool,
    mtu: c_int,
    next_psn: AtomicU32,
}

impl std::fmt::Debug for Hardware {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Hardware({})", self.caps.name)
    }
}

/// The largest limits that this driver requests; rdma-core refuses limits above the device's.
const LIMITS: Limits = Limits { max_inline: 512, max_sge: 30 };
/// Outstanding reads and atomics per queue pair.
const MAX_RD_ATOMIC: u8 = 16;
/// 0.64 ms: the time before a peer retries when no receive is posted.
const MIN_RNR_TIMER: u8 = 12;
/// The form of compressed queues: every card with compression has it, and this crate reads nothing that differs between
/// forms.
const FORMAT: CompressedFormat = CompressedFormat::Hash;
const ALL_REMOTE: u32 = Access::REMOTE_WRITE.0 | Access::REMOTE_READ.0 | Access::REMOTE_ATOMIC.0;

impl Hardware {
    /// Opens a device by name, optionally followed by the port and the index of the source GID: `mlx5_0`, `mlx5_0:1`,
    /// `mlx5_0:1:3`.
    pub fn named(text: &str) -> Result<Self, DeviceError> {
        let (name, settings) = Settings::named(text)?;
        Self::open(Some(name), settings)
    }

    /// Opens the device with that name, or without a name the first mlx5 device.
    pub fn open(name: Option<&str>, settings: Settings) -> Result<Self, DeviceError> {
        let api = Api::load()?;
        let mut others = Vec::new();
        let opened = api.find_device(|device, found, mlx5| {
            if mlx5 && name.is_none_or(|name| name == found) {
                return Some(((api.verbs.ibv_open_device)(device), found.to_string()));
            }
            others.push(found.to_string());
            None
        })?;
        let Some((object, found)) = opened else {
            return Err(DeviceError::NoDevice { name: name.unwrap_or("any mlx5 device").to_string(), others });
        };
        let object = check_pointer(object, "ibv_open_device")?;
        let context = Arc::new(Context { object, api });
        Self::query(context, found, settings)
    }

    fn query(context: Arc<Context>, name: String, settings: Settings) -> Result<Self, DeviceError> {
        let mut attr = ffi::DeviceAttr::ZERO;
        let status = (context.api.verbs.ibv_query_device)(context.object, &mut attr);
        check_status(status, "ibv_query_device")?;
        let mut port = ffi::PortAttr::default();
        let status = (context.api.verbs.ibv_query_port)(context.object, settings.port, &mut port);
        check_status(status, "ibv_query_port")?;
        let mut own = ffi::DvContext::COMPRESSION;
        check_status((context.api.dv.mlx5dv_query_device)(context.object, &mut own), "mlx5dv_query_device")?;
        let caps = Caps {
            name,
            compression: own.max_compressed != 0 && own.compressed_formats & FORMAT as u32 != 0,
            type1_windows: attr.device_cap_flags & ffi::DEVICE_MEM_WINDOW != 0,
            type2_windows: attr.device_cap_flags & ffi::DEVICE_MEM_WINDOW_TYPE_2B != 0,
            atomics: attr.atomic_cap != 0,
            blueflame: false,
            // A send ring has at most 2^15 blocks.
            max_posts: attr.max_qp_wr.clamp(0, 1 << 15) as u32,
            max_cqes: attr.max_cqe.max(0) as u32,
            limits: Limits { max_sge: LIMITS.max_sge.min(attr.max_sge.max(1) as u32), ..LIMITS },
        };
        let (lid, mtu) = (port.lid, port.active_mtu);
        let ethernet = port.link_layer == ffi::LINK_LAYER_ETHERNET;
        // Makes first packet numbers differ between processes.
        let next_psn = AtomicU32::new(std::process::id().wrapping_mul(0x9e37_79b1) & MAX_24_BITS);
        Ok(Self { context, settings, caps, lid, ethernet, mtu, next_psn })
    }

    /// Queries the memory layout of an object; `kind` is the bit of the object's kind.
    fn layout<T>(&self, kind: u64, object: *mut c_void, answer: &mut T) -> Result<(), DeviceError> {
        let mut pairs: ffi::DvObj = [ffi::DvPair { object: null_mut(), answer: null_mut() }; 8];
        let answer = std::ptr::from_mut(answer).cast();
        pairs[kind.trailing_zeros() as usize] = ffi::DvPair { object, answer };
        // SAFETY: each caller passes an object that it just created with the `kind` and the struct `T` of that object.
        let status = unsafe { (self.context.api.dv.mlx5dv_init_obj)(&raw mut pairs, kind) };
        check_status(status, "mlx5dv_init_obj")
    }

    fn pd<'h>(&self, pd: &'h Pd) -> Result<&'h library::Pd, DeviceError> {
        let own = pd.handle.get::<library::Pd>();
        own.filter(|pd| Arc::ptr_eq(&pd.context, &self.context))
            .ok_or(DeviceError::Foreign { what: "protection domain" })
    }

    fn cq<'h>(&self, cq: &'h Handle) -> Result<&'h library::Cq, DeviceError> {
        let own = cq.get::<library::Cq>();
        own.filter(|cq| Arc::ptr_eq(&cq.context, &self.context))
            .ok_or(DeviceError::Foreign { what: "completion queue" })
    }

    fn qp<'h>(&self, qp: &'h Handle) -> Result<&'h library::Qp, DeviceError> {
        let own = qp.get::<library::Qp>();
        own.filter(|qp| Arc::ptr_eq(&qp.context, &self.context)).ok_or(DeviceError::Foreign { what: "queue pair" })
    }

    fn modify(&self, qp: &library::Qp, mut attr: ffi::QpAttr, mask: c_int) -> Result<(), DeviceError> {
        let status = (self.context.api.verbs.ibv_modify_qp)(qp.object, &mut attr, mask);
        check_status(status, "ibv_modify_qp")
    }

    /// Returns what the firmware says about compressed queues, including the enhanced layout, which this crate reads
    /// and rdma-core does not create.
    pub fn firmware_compression(&self) -> Result<FirmwareCompression, DeviceError> {
        devx::compression(&self.context.api, &self.caps.name)
    }

    /// Creates a compressed queue of this form; [`Device::create_cq`] creates those of [`CompressedFormat::Hash`].
    pub fn create_compressed_cq(&self, entries: u32, format: CompressedFormat) -> Result<RawCq, DeviceError> {
        let create = self.context.api.dv.mlx5dv_create_cq;
        let mut attr = ffi::CqInitAttrEx::of(entries);
        let mut dv = ffi::DvCqInitAttr::compressed(format as u8);
        let object = create(self.context.object, &mut attr, &mut dv);
        self.completions(check_pointer(object, "mlx5dv_create_cq")?, Layout::Basic)
    }

    /// Returns the parts of a newly created queue.
    fn completions(&self, object: ffi::Ptr<ffi::Cq>, layout: Layout) -> Result<RawCq, DeviceError> {
        let handle = Handle::new(library::Cq { object, context: self.context.clone() });
        let mut cq = ffi::DvCq {
            buf: null_mut(),
            dbrec: null_mut(),
            cqe_cnt: 0,
            cqe_size: 0,
            cq_uar: null_mut(),
            cqn: 0,
            comp_mask: 0,
        };
        self.layout(ffi::DV_CQ, object.cast(), &mut cq)?;
        if cq.cqe_size as usize != size_of::<Cqe>() {
            let why = format!("completions of {} bytes; unset MLX5_CQE_SIZE", cq.cqe_size);
            return Err(DeviceError::Library { library: "libmlx5.so.1", why });
        }
        let page: NonNull<u8> = non_null(cq.cq_uar, "user page")?;
        let arm = NonNull::new(page.as_ptr().wrapping_add(ffi::CQ_DOORBELL)).unwrap_or(page);
        // SAFETY: the library mapped and initialised the slots for this queue; the handle in the parts keeps them
        // mapped.
        let slots = unsafe { Slots::new(non_null(cq.buf, "slots")?, log2(cq.cqe_cnt, "the number of completions")?) };
        // SAFETY: `CQ_DOORBELL` is an aligned offset inside the user page, which the handle in the parts keeps mapped.
        let arm = unsafe { ArmRegister::new(arm.cast()) };
        let parts = CqParts {
            slots,
            record: record(cq.dbrec, 0)?,
            arm_record: record(cq.dbrec, 1)?,
            arm,
            cqn: cq.cqn,
            layout,
            start_index: 0,
            keep_alive: handle.clone(),
        };
        Ok(RawCq { handle, parts })
    }

    fn initialise(&self, qp: &library::Qp, qkey: u32) -> Result<(), DeviceError> {
        let attr = ffi::QpAttr {
            qp_state: ffi::QPS_INIT,
            qp_access_flags: ALL_REMOTE,
            qkey,
            port_num: self.settings.port,
            ..Default::default()
        };
        let own = if qp.datagram { mask::QKEY } else { mask::ACCESS_FLAGS };
        self.modify(qp, attr, mask::STATE | mask::PKEY_INDEX | mask::PORT | own)
    }
}

/// Checks that a pointer from the library isn't null.
fn non_null<T>(pointer: *mut c_void, what: &'static str) -> Result<NonNull<T>, DeviceError> {
    let missing =
        || DeviceError::Library { library: "libmlx5.so.1", why: format!("mlx5dv_init_obj returned no {what}") };
    NonNull::new(pointer.cast()).ok_or_else(missing)
}

/// Returns the binary logarithm of a size, which must be a power of two.
fn log2(size: u32, what: &'static str) -> Result<u32, DeviceError> {
    let odd = || DeviceError::Library {
        library: "libmlx5.so.1",
        why: format!("{what} is {size}, which is not a power of two"),
    };
    size.is_power_of_two().then(|| size.trailing_zeros()).ok_or_else(odd)
}

/// Returns a ring as `mlx5dv` describes it.
fn ring(queue: &ffi::DvQueue) -> Result<Ring, DeviceError> {
    let (entries, entry) =
        (log2(queue.wqe_cnt, "the number of requests")?, log2(queue.stride, "the size of a request")?);
    // SAFETY: the library mapped the ring for this queue, and the handle in the parts keeps it mapped; this driver is
    // the only one that posts to it.
    Ok(unsafe { Ring::new(non_null(queue.buf, "ring")?, entries, entry) })
}

/// Returns one of the two words of a doorbell record.
fn record(words: *mut u32, at: usize) -> Result<DoorbellRecord, DeviceError> {
    let words: NonNull<u32> = non_null(words.cast(), "doorbell record")?;
    let word = NonNull::new(words.as_ptr().wrapping_add(at)).unwrap_or(words);
    // SAFETY: the library maps doorbell records of 8 aligned bytes, and the handle in the parts keeps them mapped.
    Ok(unsafe { DoorbellRecord::new(word) })
}

impl Device for Hardware {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn alloc_pd(&self) -> Result<Pd, DeviceError> {
        let object = check_pointer((self.context.api.verbs.ibv_alloc_pd)(self.context.object), "ibv_alloc_pd")?;
        Ok(Pd { handle: Handle::new(library::Pd { object, context: self.context.clone() }) })
    }

    unsafe fn register(&self, pd: &Pd, addr: NonNull<u8>, length: usize, access: Access) -> Result<Mr, DeviceError> {
        let own = self.pd(pd)?;
        let at = addr.as_ptr().cast();
        // SAFETY: `own` owns the protection domain; the caller of `register` keeps the range mapped.
        let object = unsafe { (self.context.api.verbs.ibv_reg_mr)(own.object, at, length, access.0 as c_int) };
        let object = check_pointer(object, "ibv_reg_mr")?;
        let (lkey, rkey) = (object.get().lkey, object.get().rkey);
        let handle = Handle::new(library::Mr { object, context: self.context.clone(), _pd: pd.handle.clone() });
        Ok(Mr { handle, pd: pd.clone(), addr: at as u64, length: length as u64, access, lkey, rkey })
    }

    fn alloc_window(&self, pd: &Pd, window: WindowType) -> Result<RawWindow, DeviceError> {
        let own = self.pd(pd)?;
        let kind = match window {
            WindowType::Type1 => ffi::MW_TYPE_1,
            WindowType::Type2 => ffi::MW_TYPE_2,
        };
        let alloc = self.context.object.get().alloc_mw.ok_or(DeviceError::Unsupported { what: "memory windows" })?;
        let object = check_pointer(alloc(own.object, kind), "ibv_alloc_mw")?;
        let rkey = object.get().rkey;
        let handle = Handle::new(library::Mw { object, context: self.context.clone(), _pd: pd.handle.clone() });
        Ok(RawWindow { handle, pd: pd.clone(), window, rkey })
    }

    fn create_cq(&self, attr: &CqAttr) -> Result<RawCq, DeviceError> {
        if attr.compression {
            return if self.caps.compression {
                self.create_compressed_cq(attr.entries, FORMAT)
            } else {
                Err(DeviceError::Unsupported { what: "compressed completion queues" })
            };
        }
        let entries = c_int::try_from(attr.entries).unwrap_or(c_int::MAX);
        let create = self.context.api.verbs.ibv_create_cq;
        let object = create(self.context.object, entries, null_mut(), None, 0);
        self.completions(check_pointer(object, "ibv_create_cq")?, Layout::Plain)
    }

    fn create_srq(&self, pd: &Pd, attr: &SrqAttr) -> Result<SrqParts, DeviceError> {
        let own = self.pd(pd)?;
        let mut init =
            ffi::SrqInitAttr { srq_context: null_mut(), max_wr: attr.entries, max_sge: attr.max_sge, srq_limit: 0 };
        let object = (self.context.api.verbs.ibv_create_srq)(own.object, &mut init);
        let object = check_pointer(object, "ibv_create_srq")?;
        let keep_alive = Handle::new(library::Srq { object, context: self.context.clone(), _pd: pd.handle.clone() });
        let mut srq = ffi::DvSrq {
            buf: null_mut(),
            dbrec: null_mut(),
            stride: 0,
            head: 0,
            tail: 0,
            comp_mask: ffi::DV_SRQ_MASK_SRQN,
            srqn: 0,
        };
        self.layout(ffi::DV_SRQ, object.cast(), &mut srq)?;
        // A new queue's list leads from the head through all descriptors to the tail.
        let queue = ffi::DvQueue { buf: srq.buf, wqe_cnt: srq.tail + 1 - srq.head, stride: srq.stride };
        Ok(SrqParts { ring: ring(&queue)?, record: record(srq.dbrec, 0)?, srqn: srq.srqn, keep_alive })
    }

    fn create_qp(&self, pd: &Pd, attr: &QpAttr) -> Result<RawQp, DeviceError> {
        let own = self.pd(pd)?;
        let mut on = vec![pd.handle.clone(), attr.send_cq.clone(), attr.recv_cq.clone()];
        let srq = match &attr.srq {
            None => None,
            Some(srq) => {
                on.push(srq.clone());
                let own = srq.get::<library::Srq>().ok_or(DeviceError::Foreign { what: "shared receive queue" })?;
                Some(own.object)
            }
        };
        let datagram = attr.transport == Transport::Ud;
        // rdma-core sizes the ring by its own largest request; a bind takes three blocks.
        let mut init = ffi::QpInitAttr {
            qp_context: null_mut(),
            send_cq: self.cq(&attr.send_cq)?.object,
            recv_cq: self.cq(&attr.recv_cq)?.object,
            srq,
            cap: ffi::QpCap {
                max_send_wr: attr.max_send,
                max_recv_wr: if attr.srq.is_some() { 0 } else { attr.max_recv },
                max_send_sge: attr.limits.max_sge,
                max_recv_sge: if attr.srq.is_some() { 0 } else { attr.max_recv_sge },
                max_inline_data: attr.limits.max_inline,
            },
            qp_type: if datagram { ffi::QPT_UD } else { ffi::QPT_RC },
            sq_sig_all: attr.signal_all as c_int,
        };
        let object = (self.context.api.verbs.ibv_create_qp)(own.object, &mut init);
        let object = check_pointer(object, "ibv_create_qp")?;
        let psn = self.next_psn.fetch_add(0x1_0001, Ordering::Relaxed) & MAX_24_BITS;
        let handle = Handle::new(library::Qp { object, context: self.context.clone(), datagram, psn, _on: on });
        let qpn = object.get().qp_num;
        let none = ffi::DvQueue { buf: null_mut(), wqe_cnt: 0, stride: 0 };
        let mut qp = ffi::DvQp {
            dbrec: null_mut(),
            sq: none,
            rq: none,
            bf_reg: null_mut(),
            bf_size: 0,
            comp_mask: 0,
            rest: [0; 4],
        };
        self.layout(ffi::DV_QP, object.cast(), &mut qp)?;
        self.initialise(self.qp(&handle)?, 0)?;
        let register = DoorbellRegisterParts {
            register: non_null(qp.bf_reg, "register")?,
            buf_size: 0,
            blueflame: BlueFlame::Never,
        };
        let send = SendParts {
            ring: ring(&qp.sq)?,
            record: record(qp.dbrec, 1)?,
            // SAFETY: the library maps the register, and the handle in the parts keeps it mapped. Queue pairs may share
            // it, because a plain doorbell is one store.
            register: unsafe { DoorbellRegister::new(register) },
            qpn,
            transport: attr.transport,
            limits: attr.limits,
            max_posts: init.cap.max_send_wr,
            signal_all: attr.signal_all,
            start_index: 0,
            keep_alive: handle.clone(),
        };
        let recv = match attr.srq {
            Some(_) => None,
            None => Some(RecvParts { ring: ring(&qp.rq)?, record: record(qp.dbrec, 0)?, keep_alive: handle.clone() }),
        };
        Ok(RawQp { handle, pd: pd.clone(), send, recv })
    }

    fn endpoint(&self, qp: &Handle) -> Result<Endpoint, DeviceError> {
        let qp = self.qp(qp)?;
        let mut gid = [0; 16];
        let (port, index) = (self.settings.port, self.settings.gid_index as c_int);
        if self.ethernet {
            let status = (self.context.api.verbs.ibv_query_gid)(self.context.object, port, index, &mut gid);
            check_status(status, "ibv_query_gid")?;
        }
        let qpn = qp.object.get().qp_num;
        Ok(Endpoint { qpn, psn: qp.psn, lid: self.lid, gid })
    }

    fn connect(&self, qp: &Handle, peer: &Endpoint) -> Result<(), DeviceError> {
        let qp = self.qp(qp)?;
        let halves = |half: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&peer.gid[half * 8..half * 8 + 8]);
            u64::from_ne_bytes(bytes)
        };
        let grh = ffi::GlobalRoute {
            dgid: [halves(0), halves(1)],
            sgid_index: self.settings.gid_index,
            hop_limit: 64,
            ..Default::default()
        };
        let ah_attr = ffi::AhAttr {
            grh,
            dlid: peer.lid,
            is_global: self.ethernet as u8,
            port_num: self.settings.port,
            ..Default::default()
        };
        let ready_to_receive = ffi::QpAttr {
            qp_state: ffi::QPS_RTR,
            path_mtu: self.mtu,
            rq_psn: peer.psn,
            dest_qp_num: peer.qpn,
            ah_attr,
            max_dest_rd_atomic: MAX_RD_ATOMIC,
            min_rnr_timer: MIN_RNR_TIMER,
            ..Default::default()
        };
        let what = mask::STATE | mask::AV | mask::PATH_MTU | mask::DEST_QPN | mask::RQ_PSN;
        self.modify(qp, ready_to_receive, what | mask::MAX_DEST_RD_ATOMIC | mask::MIN_RNR_TIMER)?;
        let ready_to_send = ffi::QpAttr {
            qp_state: ffi::QPS_RTS,
            sq_psn: qp.psn,
            timeout: self.settings.timeout,
            retry_cnt: self.settings.retries,
            rnr_retry: self.settings.rnr_retries,
            max_rd_atomic: MAX_RD_ATOMIC,
            ..Default::default()
        };
        let what = mask::STATE | mask::TIMEOUT | mask::RETRY_CNT | mask::RNR_RETRY | mask::SQ_PSN;
        self.modify(qp, ready_to_send, what | mask::MAX_RD_ATOMIC)
    }

    fn open_datagrams(&self, qp: &Handle, qkey: u32) -> Result<(), DeviceError> {
        let qp = self.qp(qp)?;
        self.initialise(qp, qkey)?;
        self.modify(qp, ffi::QpAttr { qp_state: ffi::QPS_RTR, ..Default::default() }, mask::STATE)?;
        let ready = ffi::QpAttr { qp_state: ffi::QPS_RTS, sq_psn: qp.psn, ..Default::default() };
        self.modify(qp, ready, mask::STATE | mask::SQ_PSN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_may_have_port_and_gid() {
        let usual = Settings::default();
        assert_eq!(Settings::named("mlx5_0"), Ok(("mlx5_0", usual)));
        assert_eq!(Settings::named("mlx5_1:2"), Ok(("mlx5_1", Settings { port: 2, ..usual })));
        assert_eq!(Settings::named("mlx5_1:2:0"), Ok(("mlx5_1", Settings { port: 2, gid_index: 0, ..usual })));
        for text in ["mlx5_0:x", "mlx5_0:", "mlx5_0:1:256", "mlx5_0:1:3:4"] {
            assert_eq!(Settings::named(text), Err(DeviceError::Name { text: text.into() }));
        }
    }
}
