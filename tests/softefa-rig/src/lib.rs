//! Drives the provider through its own tables, as libfabric's inline functions do, and its queues as device code does.
#![allow(unsafe_code, missing_docs, clippy::multiple_unsafe_ops_per_block)]

use std::ffi::{CStr, c_void};
use std::ops::Deref;
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use efa_dp_direct::wire::{CdescCommon, CompStatus, RxDesc, TxCdesc};
use efa_dp_direct::wqe::{Destination, Geometry, Inline, Operation, RemoteMem, SendWqe, Sge, WriteData};
use ferrogin_libfabric::bindings as fi;
use ferrogin_libfabric::progress::{self, Progress, ProgressOps};

pub use ferrogin_test_support::have_libfabric;
pub use ferrogin_test_support::wait::{wait_for, wait_until};

pub mod child;
pub mod peer;
pub mod wire;

macro_rules! call {
    ($table:expr, $op:ident, $($arg:expr),*) => {{
        // SAFETY: the table belongs to an open object, and the caller passes the arguments that its entry takes.
        let rc = unsafe { ((*$table).$op.unwrap())($($arg),*) };
        assert!(rc >= 0, "{}: {}", stringify!($op), rc);
        rc
    }};
}

/// Closes an object, and returns the code.
pub fn close<F>(fid: *mut F) -> i32 {
    let fid: *mut fi::fid = fid.cast();
    // SAFETY: the tests close each open object once.
    unsafe { ((*(*fid).ops).close.unwrap())(fid) }
}

/// One of the provider's infos, which is never freed.
#[derive(Debug, Clone, Copy)]
pub struct Info(*mut fi::fi_info);

impl Info {
    pub fn as_ptr(self) -> *mut fi::fi_info {
        self.0
    }

    /// The next info in the list.
    pub fn next(self) -> Self {
        assert!(!self.next.is_null());
        Self(self.next)
    }
}

impl Deref for Info {
    type Target = fi::fi_info;

    fn deref(&self) -> &fi::fi_info {
        // SAFETY: the provider gave the info, and nothing frees or changes it.
        unsafe { &*self.0 }
    }
}

/// Calls the provider's `fi_getinfo`.
pub fn getinfo(change: impl FnOnce(&mut fi::fi_info)) -> Result<Info, i32> {
    let provider = softefa_fi::fi_prov_ini();
    let (mut tx, mut rx, mut ep) = (fi::fi_tx_attr::default(), fi::fi_rx_attr::default(), fi::fi_ep_attr::default());
    // SAFETY: the C struct consists of integers and pointers, for which zero is valid.
    let none: fi::fi_domain_attr = unsafe { std::mem::zeroed() };
    let mut domain = fi::fi_domain_attr { mr_mode: !3, ..none };
    let mut fabric = fi::fi_fabric_attr { name: c"efa-direct".as_ptr().cast_mut(), ..Default::default() };
    let mut hints = fi::fi_info {
        tx_attr: &raw mut tx,
        rx_attr: &raw mut rx,
        ep_attr: &raw mut ep,
        domain_attr: &raw mut domain,
        fabric_attr: &raw mut fabric,
        mode: fi::FI_CONTEXT2,
        ..fi::fi_info::default()
    };
    change(&mut hints);
    let mut info = ptr::null_mut();
    // SAFETY: the provider's table is static; it reads the hints, which live here, and writes one pointer.
    let rc = unsafe {
        ((*provider).getinfo.unwrap())(2 << 16 | 6, ptr::null(), ptr::null(), 0, &raw const hints, &raw mut info)
    };
    if rc == 0 { Ok(Info(info)) } else { Err(rc) }
}

/// What closes itself: objects must be closed before the domain that they are in, and all of them without an error.
macro_rules! close_on_drop {
    ($type:ty: $this:ident => $($fid:expr),*) => {
        impl Drop for $type {
            fn drop(&mut self) {
                let $this = &*self;
                if !std::thread::panicking() {
                    $(assert_eq!(close($fid), 0, "{}", stringify!($fid));)*
                }
            }
        }
    };
}

close_on_drop!(Rig: rig => rig.domain, rig.fabric);
close_on_drop!(Region: region => region.mr);
close_on_drop!(End: end => end.ep, end.counters[0], end.counters[1], end.cq, end.av);

/// A domain and its tables.
pub struct Rig {
    pub info: Info,
    pub fabric: *mut fi::fid_fabric,
    pub domain: *mut fi::fid_domain,
    pub gda: *const fi::fi_efa_ops_gda,
}

impl Rig {
    pub fn open() -> Self {
        Self::with_inject(0)
    }

    /// Opens a rig, or skips `test` without libfabric.
    pub fn for_test(test: &str) -> Option<Self> {
        have_libfabric(test).then(Self::open)
    }

    pub fn with_inject(inject: usize) -> Self {
        let info = getinfo(|hints| unsafe_inject(hints, inject)).unwrap();
        Self::of(info)
    }

    pub fn of(info: Info) -> Self {
        let provider = softefa_fi::fi_prov_ini();
        let (mut fabric, mut domain) = (ptr::null_mut(), ptr::null_mut());
        call!(provider, fabric, info.fabric_attr, &raw mut fabric, ptr::null_mut());
        // SAFETY: the fabric was opened by the call above, and no other code has it.
        unsafe { (*fabric).api_version = 2 << 16 | 6 };
        call!((*fabric).ops, domain, fabric, info.as_ptr(), &raw mut domain, ptr::null_mut());
        let mut ops: *mut c_void = ptr::null_mut();
        call!((*domain).fid.ops, ops_open, domain.cast(), c"efa gda ops".as_ptr(), 0, &raw mut ops, ptr::null_mut());
        Self { info, fabric, domain, gda: ops.cast() }
    }

    /// The function that a waiting thread calls to make the card progress.
    pub fn progress(&self) -> Progress {
        let (fid, mut ops): (_, *mut c_void) = (self.domain.cast(), ptr::null_mut());
        call!((*self.domain).fid.ops, ops_open, fid, progress::OPS.as_ptr(), 0, &raw mut ops, ptr::null_mut());
        // SAFETY: `ops_open` succeeded, so this is the table of that name, which lives as long as the domain.
        let function = unsafe { (*ops.cast::<ProgressOps>()).progress }.unwrap();
        Progress { function, arg: self.domain.cast() }
    }

    pub fn domain_name(&self) -> &CStr {
        // SAFETY: the info and its strings are never freed.
        unsafe { CStr::from_ptr((*self.info.domain_attr).name) }
    }

    pub fn register(&self, addr: *mut u8, len: usize, access: u64) -> Result<Region, i32> {
        let mut mr = ptr::null_mut();
        // SAFETY: the domain is open.
        let reg = unsafe { (*(*self.domain).mr).reg.unwrap() };
        // SAFETY: the domain is open; the caller passes memory that outlives the region, or one that the provider
        // refuses.
        let rc = unsafe { reg(self.domain.cast(), addr.cast(), len, access, 0, 0, 0, &raw mut mr, ptr::null_mut()) };
        if rc == 0 { Ok(Region::of(mr, self)) } else { Err(rc) }
    }

    /// Calls `fi_mr_regattr`, closes the region and returns the code.
    pub fn register_attr(&self, attr: &fi::fi_mr_attr) -> i32 {
        self.register_with(attr, 0).err().unwrap_or(0)
    }

    /// Calls `fi_mr_regattr`.
    pub fn register_with(&self, attr: &fi::fi_mr_attr, flags: u64) -> Result<Region, i32> {
        let mut mr = ptr::null_mut();
        // SAFETY: the domain is open.
        let reg = unsafe { (*(*self.domain).mr).regattr.unwrap() };
        // SAFETY: the domain is open; the caller's attribute names memory that outlives the region, or one that the
        // provider refuses.
        let rc = unsafe { reg(self.domain.cast(), attr, flags, &raw mut mr) };
        if rc == 0 { Ok(Region::of(mr, self)) } else { Err(rc) }
    }

    pub fn buffer(&self, len: usize) -> Buffer {
        let words = vec![0u64; len.div_ceil(8)].into_boxed_slice();
        let at: *mut u8 = Box::into_raw(words).cast();
        let region = self.register(at, len.next_multiple_of(8), ALL).unwrap();
        Buffer { at, len, region }
    }

    /// A counter in the caller's memory.
    pub fn counter(&self, init: &mut fi::fi_efa_comp_cntr_init_attr) -> *mut fi::fid_cntr {
        let mut cntr = ptr::null_mut();
        call!(self.gda, cntr_open_ext, self.domain, ptr::null_mut(), &raw mut cntr, ptr::null_mut(), init);
        cntr
    }
}

pub const ALL: u64 = fi::FI_SEND | fi::FI_RECV | fi::FI_READ | fi::FI_WRITE | fi::FI_REMOTE_READ | fi::FI_REMOTE_WRITE;

pub struct Region {
    pub mr: *mut fi::fid_mr,
    pub lkey: u32,
    pub rkey: u32,
}

impl Region {
    fn of(mr: *mut fi::fid_mr, rig: &Rig) -> Self {
        // SAFETY: the region and the domain of the table are open.
        let lkey = unsafe { ((*rig.gda).get_mr_lkey.unwrap())(mr) } as u32;
        // SAFETY: the region is open.
        let rkey = unsafe { (*mr).key } as u32;
        Self { mr, lkey, rkey }
    }
}

/// Registered memory.
pub struct Buffer {
    pub at: *mut u8,
    pub len: usize,
    pub region: Region,
}

impl Buffer {
    pub fn word(&self, index: usize) -> &AtomicU64 {
        assert!((index + 1) * 8 <= self.len.next_multiple_of(8));
        // SAFETY: the assertion keeps the word in the buffer, which is never freed; the card and the tests access it
        // atomically.
        unsafe { AtomicU64::from_ptr(self.at.cast::<u64>().add(index)) }
    }

    pub fn fill(&self, seed: u64) {
        for i in 0..self.len / 8 {
            self.word(i).store(seed.wrapping_mul(0x9e37_79b9).wrapping_add(i as u64), Ordering::Relaxed);
        }
    }

    pub fn matches(&self, seed: u64) -> bool {
        (0..self.len / 8)
            .all(|i| self.word(i).load(Ordering::Relaxed) == seed.wrapping_mul(0x9e37_79b9).wrapping_add(i as u64))
    }

    pub fn remote(&self, offset: u64) -> RemoteMem {
        RemoteMem { addr: self.at as u64 + offset, rkey: self.region.rkey }
    }

    pub fn sge(&self, offset: u64, length: u32) -> Sge {
        Sge { addr: self.at as u64 + offset, length, lkey: self.region.lkey }
    }
}

/// Counter memory: completions, errors, remote writes, in the caller's memory.
#[derive(Default)]
pub struct Counts {
    pub local: AtomicU64,
    pub errors: AtomicU64,
    pub remote: AtomicU64,
}

/// An endpoint with everything bound to it, and the producer side of its queue.
pub struct End {
    pub ep: *mut fi::fid_ep,
    pub av: *mut fi::fid_av,
    pub cq: *mut fi::fid_cq,
    pub counters: [*mut fi::fid_cntr; 2],
    pub counts: Box<Counts>,
    pub sq: fi::fi_efa_wq_attr,
    pub rq: fi::fi_efa_wq_attr,
    pub rq_pc: u32,
    pub geometry: Geometry,
    pub pc: u32,
    cq_memory: fi::fi_efa_cq_attr,
    cq_seen: u32,
    gda: *const fi::fi_efa_ops_gda,
}

/// An endpoint that is open and not enabled yet.
pub struct NotEnabled(*mut fi::fid_ep);

impl NotEnabled {
    /// Sets `FI_OPT_EFA_RNR_RETRY`.
    pub fn set_retries(&self, times: usize) -> i32 {
        // SAFETY: the endpoint is open.
        let set = unsafe { (*(*self.0).ops).setopt.unwrap() };
        let (level, name) = (fi::FI_OPT_ENDPOINT as i32, fi::FI_OPT_EFA_RNR_RETRY);
        // SAFETY: the endpoint is open, and the provider reads a number of that size.
        unsafe { set(self.0.cast(), level, name, (&raw const times).cast(), size_of::<usize>()) }
    }
}

fn va(word: &AtomicU64) -> fi::fi_efa_memory_location {
    fi::fi_efa_memory_location { ptr: word.as_ptr().cast(), ..Default::default() }
}

impl End {
    pub fn open(rig: &Rig) -> Self {
        Self::open_after(rig, |_| {})
    }

    /// Opens an endpoint; `first` runs before it is enabled.
    pub fn open_after(rig: &Rig, first: impl FnOnce(&NotEnabled)) -> Self {
        let counts: Box<Counts> = Box::default();
        let (mut ep, mut av, mut cq) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
        let none: *mut c_void = ptr::null_mut();
        // SAFETY: the domain is open.
        let ops = unsafe { (*rig.domain).ops };
        call!(ops, endpoint, rig.domain, rig.info.as_ptr(), &raw mut ep, none);
        let mut av_attr = fi::fi_av_attr::default();
        call!(ops, av_open, rig.domain, &raw mut av_attr, &raw mut av, none);
        let mut cq_attr = fi::fi_cq_attr { size: 256, ..Default::default() };
        call!(ops, cq_open, rig.domain, &raw mut cq_attr, &raw mut cq, none);
        let counter = |value: &AtomicU64, errors: Option<&AtomicU64>| {
            let mut init = fi::fi_efa_comp_cntr_init_attr {
                flags: 1 | if errors.is_some() { 2 } else { 0 },
                comp_cntr_ext_mem: va(value),
                err_cntr_ext_mem: errors.map(va).unwrap_or_default(),
                ..Default::default()
            };
            rig.counter(&mut init)
        };
        let counters = [counter(&counts.local, Some(&counts.errors)), counter(&counts.remote, None)];
        let bind = |fid: *mut fi::fid, flags: u64| {
            call!((*ep).fid.ops, bind, ep.cast(), fid, flags);
        };
        bind(av.cast(), 0);
        bind(cq.cast(), fi::FI_TRANSMIT | fi::FI_RECV);
        bind(counters[0].cast(), fi::FI_SEND | fi::FI_WRITE | fi::FI_READ);
        bind(counters[1].cast(), fi::FI_REMOTE_WRITE);
        first(&NotEnabled(ep));
        call!((*ep).fid.ops, control, ep.cast(), fi::FI_ENABLE, none);
        let (mut sq, mut rq) = (fi::fi_efa_wq_attr::default(), fi::fi_efa_wq_attr::default());
        call!(rig.gda, query_qp_wqs, ep, &raw mut sq, &raw mut rq);
        let mut cq_memory = fi::fi_efa_cq_attr::default();
        call!(rig.gda, query_cq, cq, &raw mut cq_memory);
        let geometry = if sq.entry_size == 128 { Geometry::WIDE } else { Geometry::NARROW };
        let pc = counts.local.load(Ordering::Acquire) as u32;
        Self { ep, av, cq, counters, counts, sq, rq, rq_pc: 0, geometry, pc, cq_memory, cq_seen: 0, gda: rig.gda }
    }

    pub fn name(&self) -> [u8; 32] {
        let mut name = [0u8; 32];
        let mut len = name.len();
        call!((*self.ep).cm, getname, self.ep.cast(), name.as_mut_ptr().cast(), &raw mut len);
        assert_eq!(len, 32);
        name
    }

    /// Inserts a name; returns the count and the number.
    pub fn insert(&self, name: &[u8; 32]) -> (i32, u64) {
        let mut addr = 0;
        let rc = call!((*self.av).ops, insert, self.av, name.as_ptr().cast(), 1, &raw mut addr, 0, ptr::null_mut());
        (rc, addr)
    }

    pub fn connect(&self, name: &[u8; 32]) -> Destination {
        let (inserted, addr) = self.insert(name);
        assert_eq!(inserted, 1);
        let mut to = Destination::default();
        call!(self.gda, query_addr, self.ep, addr, &raw mut to.ah, &raw mut to.qpn, &raw mut to.qkey);
        to
    }

    /// Sets `FI_OPT_EFA_RNR_RETRY`.
    pub fn set_retries(&self, times: usize) -> i32 {
        NotEnabled(self.ep).set_retries(times)
    }

    pub fn doorbell(&self) -> &AtomicU32 {
        // SAFETY: the provider gave the doorbell, which lives as long as the endpoint.
        unsafe { AtomicU32::from_ptr(self.sq.doorbell) }
    }

    /// Bytes of a request for the next slot.
    pub fn bytes(&self, dest: Destination, op: Operation) -> Vec<u8> {
        let mut wqe = SendWqe::new(u64::from(self.pc), dest, op);
        wqe.phase = self.pc & self.sq.num_entries != 0;
        let mut bytes = vec![0; self.geometry.wqe_size.bytes()];
        wqe.emit(&self.geometry, &mut bytes).unwrap();
        bytes
    }

    /// Writes bytes into the next slot.
    pub fn place(&mut self, bytes: &[u8]) {
        let slot = (self.pc & (self.sq.num_entries - 1)) as usize * self.sq.entry_size as usize;
        for (i, word) in bytes.chunks_exact(8).enumerate() {
            // SAFETY: the slot lies in the ring, which lives as long as the endpoint; the card reads it atomically.
            let at = unsafe { AtomicU64::from_ptr(self.sq.buffer.add(slot + 8 * i).cast()) };
            at.store(u64::from_ne_bytes(word.try_into().unwrap()), Ordering::Relaxed);
        }
        self.pc = self.pc.wrapping_add(1);
    }

    pub fn ring(&self) {
        fence(Ordering::Release);
        self.doorbell().store(self.pc, Ordering::Release);
    }

    pub fn post(&mut self, dest: Destination, op: Operation) {
        let bytes = self.bytes(dest, op);
        self.place(&bytes);
        self.ring();
    }

    /// Posts the receive descriptors and rings once.
    pub fn post_receives(&mut self, descs: &[RxDesc]) {
        for desc in descs {
            let slot = (self.rq_pc & (self.rq.num_entries - 1)) as usize * size_of::<RxDesc>();
            for (i, word) in desc.to_words().into_iter().enumerate() {
                // SAFETY: the slot lies in the ring, which lives as long as the endpoint; the card reads it atomically.
                let at = unsafe { AtomicU64::from_ptr(self.rq.buffer.add(slot + 8 * i).cast()) };
                at.store(word, Ordering::Relaxed);
            }
            self.rq_pc = self.rq_pc.wrapping_add(1);
        }
        self.ring_receives(self.rq_pc);
    }

    pub fn ring_receives(&self, pc: u32) {
        fence(Ordering::Release);
        // SAFETY: the provider gave the doorbell, which lives as long as the endpoint.
        unsafe { AtomicU32::from_ptr(self.rq.doorbell) }.store(pc, Ordering::Release);
    }

    /// Waits until `n` requests have completed since the start, with any status.
    pub fn wait_done(&self, n: u64) {
        wait_until("completions", || self.local() + self.errors() >= n);
    }

    pub fn local(&self) -> u64 {
        self.counts.local.load(Ordering::Acquire)
    }

    pub fn errors(&self) -> u64 {
        self.counts.errors.load(Ordering::Acquire)
    }

    pub fn remote(&self) -> u64 {
        self.counts.remote.load(Ordering::Acquire)
    }

    /// The next completion entry, read as a send queue's.
    pub fn poll_cq(&mut self) -> Option<TxCdesc> {
        let bytes = self.poll_entry()?;
        Some(TxCdesc::from_bytes(bytes[..16].try_into().unwrap()))
    }

    /// The next completion entry, as it lies in memory.
    pub fn poll_entry(&mut self) -> Option<[u8; 32]> {
        let memory = self.cq_memory;
        let slot = (self.cq_seen & (memory.num_entries - 1)) as usize * memory.entry_size as usize;
        let mut bytes = [0; 32];
        for (i, eight) in bytes.chunks_exact_mut(8).enumerate() {
            // SAFETY: the slot lies in the ring, which lives as long as the queue; the card writes it atomically.
            let word = unsafe { AtomicU64::from_ptr(memory.buffer.add(slot + 8 * i).cast()) };
            eight.copy_from_slice(&word.load(Ordering::Acquire).to_ne_bytes());
        }
        let entry = TxCdesc::from_bytes(bytes[..16].try_into().unwrap());
        let expected = self.cq_seen & memory.num_entries == 0;
        (entry.common.flags.phase() == expected).then(|| {
            self.cq_seen = self.cq_seen.wrapping_add(1);
            bytes
        })
    }

    pub fn next_status(&mut self) -> (CdescCommon, CompStatus) {
        let common = wait_for("completion entry", || self.poll_cq()).common;
        (common, CompStatus::from_raw(common.status).unwrap())
    }
}

pub fn write(remote: RemoteMem, sge: Sge) -> Operation {
    Operation::Write { remote, data: WriteData::One(sge), imm: None }
}

pub fn write_inline(remote: RemoteMem, data: &[u8]) -> Operation {
    Operation::Write { remote, data: WriteData::Inline(Inline::new(data).unwrap()), imm: None }
}

pub fn write_nothing(remote: RemoteMem) -> Operation {
    Operation::Write { remote, data: WriteData::Empty, imm: None }
}

pub fn read(remote: RemoteMem, sge: Sge) -> Operation {
    Operation::Read { remote, into: Some(sge) }
}

pub fn unsafe_inject(hints: &mut fi::fi_info, inject: usize) {
    // SAFETY: `getinfo` gives hints with attributes that live while `change` runs.
    unsafe { (*hints.tx_attr).inject_size = inject };
}

pub fn open_counter(rig: &Rig) -> Result<*mut fi::fid_cntr, i32> {
    let mut cntr = ptr::null_mut();
    // SAFETY: the domain is open.
    let open = unsafe { (*(*rig.domain).ops).cntr_open.unwrap() };
    // SAFETY: the domain is open, and the provider writes one pointer.
    let rc = unsafe { open(rig.domain, ptr::null_mut(), &raw mut cntr, ptr::null_mut()) };
    if rc == 0 { Ok(cntr) } else { Err(rc) }
}
