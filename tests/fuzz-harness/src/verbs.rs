//! Arbitrary sequences of verbs with arbitrary attributes.
//!
//! Pointers are null or point to open objects, and memory is mapped or refused: anything else is up to the program to
//! get right.
#![allow(unsafe_code)]
// Calling through a table reads the table and calls the function.
#![allow(clippy::multiple_unsafe_ops_per_block)]

use std::ffi::{c_int, c_uint, c_void};
use std::marker::PhantomData;
use std::os::fd::IntoRawFd;
use std::ptr;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use ferrogin_test_support::Input;

use soft_verbs::fuzzing as ib;

/// A call's parameter or result: null, or an object that stays open until [`Run`] destroys it. Only the calls create
/// non-null ones.
#[repr(transparent)]
struct Open<T>(*mut T);

impl<T> Clone for Open<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Open<T> {}

impl<T> Open<T> {
    const NULL: Self = Self(ptr::null_mut());

    /// The object's struct, as the program sees it.
    fn get(&self) -> Option<&T> {
        // SAFETY: null or open. The fields that the program reads don't change.
        unsafe { self.0.as_ref() }
    }
}

/// The size that the program states for a struct: that of a `T`, or less.
#[repr(transparent)]
struct Size<T>(u32, PhantomData<T>);

impl<T> Size<T> {
    fn whole() -> Self {
        Self(size_of::<T>() as u32, PhantomData)
    }
}

// The calls as C programs see them. The safe ones take null, open objects, and structs of the size that they are told.
unsafe extern "C" {
    safe fn ibv_get_device_list(count: Option<&mut c_int>) -> *mut *mut ib::ibv_device;
    fn ibv_open_device(device: *mut ib::ibv_device) -> Open<ib::ibv_context>;
    safe fn ibv_alloc_pd(context: Open<ib::ibv_context>) -> Open<ib::ibv_pd>;
    fn ibv_reg_mr_iova2(
        pd: Open<ib::ibv_pd>,
        addr: *mut c_void,
        len: usize,
        iova: u64,
        access: c_uint,
    ) -> Open<ib::ibv_mr>;
    safe fn ibv_reg_dmabuf_mr(
        pd: Open<ib::ibv_pd>,
        at: u64,
        len: usize,
        iova: u64,
        fd: c_int,
        access: c_int,
    ) -> Open<ib::ibv_mr>;
    safe fn ibv_create_ah(pd: Open<ib::ibv_pd>, attr: &mut ib::ibv_ah_attr) -> Open<ib::ibv_ah>;
    safe fn ibv_create_comp_channel(context: Open<ib::ibv_context>) -> Open<ib::ibv_comp_channel>;
    safe fn ibv_get_cq_event(
        channel: Open<ib::ibv_comp_channel>,
        cq: &mut Open<ib::ibv_cq>,
        context: &mut *mut c_void,
    ) -> c_int;
    safe fn ibv_ack_cq_events(cq: Open<ib::ibv_cq>, count: c_uint);
    fn ibv_create_qp(pd: Open<ib::ibv_pd>, attr: &mut ib::ibv_qp_init_attr) -> Open<ib::ibv_qp>;
    safe fn ibv_modify_qp(qp: Open<ib::ibv_qp>, attr: &mut ib::ibv_qp_attr, mask: c_int) -> c_int;
    safe fn ibv_query_qp(
        qp: Open<ib::ibv_qp>,
        attr: &mut ib::ibv_qp_attr,
        mask: c_int,
        init: &mut ib::ibv_qp_init_attr,
    ) -> c_int;
    safe fn ibv_qp_to_qp_ex(qp: Open<ib::ibv_qp>) -> Open<ib::ibv_qp_ex>;
    safe fn ibv_set_comp_cntr(cntr: Open<ib::ibv_comp_cntr>, value: u64) -> c_int;
    safe fn ibv_inc_err_comp_cntr(cntr: Open<ib::ibv_comp_cntr>, value: u64) -> c_int;
    safe fn ibv_read_comp_cntr(cntr: Open<ib::ibv_comp_cntr>, value: &mut u64) -> c_int;
    safe fn ibv_qp_attach_comp_cntr(
        qp: Open<ib::ibv_qp>,
        cntr: Open<ib::ibv_comp_cntr>,
        attr: &mut ib::ibv_qp_attach_comp_cntr_attr,
    ) -> c_int;
    safe fn ibv_query_gid(context: Open<ib::ibv_context>, port: u8, index: c_int, gid: &mut ib::ibv_gid) -> c_int;
    fn efadv_create_cq(
        context: Open<ib::ibv_context>,
        attr: &mut ib::ibv_cq_init_attr_ex,
        dv: &mut ib::efadv_cq_init_attr,
        size: Size<ib::efadv_cq_init_attr>,
    ) -> Open<ib::ibv_cq_ex>;
    safe fn efadv_query_cq(cq: Open<ib::ibv_cq>, attr: &mut ib::efadv_cq_attr, size: Size<ib::efadv_cq_attr>) -> c_int;
    fn efadv_create_qp_ex(
        context: Open<ib::ibv_context>,
        attr: &mut ib::ibv_qp_init_attr_ex,
        dv: &mut ib::efadv_qp_init_attr,
        size: Size<ib::efadv_qp_init_attr>,
    ) -> Open<ib::ibv_qp>;
    safe fn efadv_query_qp_wqs(
        qp: Open<ib::ibv_qp>,
        send: &mut ib::efadv_wq_attr,
        recv: &mut ib::efadv_wq_attr,
        size: Size<ib::efadv_wq_attr>,
    ) -> c_int;
    fn efadv_create_comp_cntr(
        context: Open<ib::ibv_context>,
        attr: &mut ib::ibv_comp_cntr_init_attr,
        dv: &mut ib::efadv_comp_cntr_init_attr,
        size: Size<ib::efadv_comp_cntr_init_attr>,
    ) -> Open<ib::ibv_comp_cntr>;
    safe fn efadv_query_device(
        context: Open<ib::ibv_context>,
        attr: &mut ib::efadv_device_attr,
        size: Size<ib::efadv_device_attr>,
    ) -> c_int;
    safe fn efadv_query_ah(ah: Open<ib::ibv_ah>, attr: &mut ib::efadv_ah_attr, size: Size<ib::efadv_ah_attr>) -> c_int;
    safe fn efadv_get_max_sq_depth(
        context: Open<ib::ibv_context>,
        attr: &mut ib::efadv_sq_depth_attr,
        size: Size<ib::efadv_sq_depth_attr>,
    ) -> c_int;
    safe fn efadv_get_max_rq_depth(
        context: Open<ib::ibv_context>,
        attr: &mut ib::efadv_rq_depth_attr,
        size: Size<ib::efadv_rq_depth_attr>,
    ) -> c_int;
    // Each of these ends its object's life.
    fn ibv_dealloc_pd(pd: *mut ib::ibv_pd) -> c_int;
    fn ibv_dereg_mr(mr: *mut ib::ibv_mr) -> c_int;
    fn ibv_destroy_ah(ah: *mut ib::ibv_ah) -> c_int;
    fn ibv_destroy_comp_channel(channel: *mut ib::ibv_comp_channel) -> c_int;
    fn ibv_destroy_cq(cq: *mut ib::ibv_cq) -> c_int;
    fn ibv_destroy_qp(qp: *mut ib::ibv_qp) -> c_int;
    fn ibv_destroy_comp_cntr(cntr: *mut ib::ibv_comp_cntr) -> c_int;
}

const SIZE: usize = 64 << 10;
/// The most objects that are open at a time.
const MAX: usize = 40;

/// The masks that the state changes on the way to RTS require.
const TO_INIT: u32 = ib::IBV_QP_STATE | ib::IBV_QP_PKEY_INDEX | ib::IBV_QP_PORT | ib::IBV_QP_QKEY;
const TO_RTR: u32 = ib::IBV_QP_STATE;
const TO_RTS: u32 = ib::IBV_QP_STATE | ib::IBV_QP_SQ_PSN;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Pd,
    Td,
    Mr,
    Ah,
    Channel,
    Cq,
    Qp,
    Cntr,
}

/// An open object, and those that it uses.
struct Object {
    kind: Kind,
    at: *mut c_void,
    uses: Vec<*mut c_void>,
}

/// A device that stays open, and memory between two inaccessible pages.
struct Device {
    context: Open<ib::ibv_context>,
    memory: *mut u8,
    fd: c_int,
    gid: [u8; 16],
}

// SAFETY: the device is used under the mutex below.
unsafe impl Send for Device {}

static DEVICE: Mutex<Option<Device>> = Mutex::new(None);

impl Device {
    fn open() -> Self {
        // SAFETY: no other thread reads the environment now, as this is the first call of a fuzzer or its test.
        unsafe { std::env::set_var("SOFTEFA_WIRE", "shm") };
        // SAFETY: the list has a device, and is never freed.
        let device = unsafe { *ibv_get_device_list(None) };
        // SAFETY: an entry from the list.
        let context = unsafe { ibv_open_device(device) };
        assert!(!context.0.is_null());
        let (private, page) = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, soft_nic::memory::page_size());
        // SAFETY: the kernel chooses a free address.
        let whole = unsafe { libc::mmap(ptr::null_mut(), SIZE + 2 * page, libc::PROT_NONE, private, -1, 0) };
        assert_ne!(whole, libc::MAP_FAILED);
        let memory: *mut u8 = whole.cast::<u8>().wrapping_add(page);
        // SAFETY: the range is within the mapping.
        assert_eq!(unsafe { libc::mprotect(memory.cast(), SIZE, libc::PROT_READ | libc::PROT_WRITE) }, 0);
        let fd = soft_nic::memory::sealed_memfd("fuzz", SIZE).expect("a memory file").into_raw_fd();
        let mut gid = ib::ibv_gid { raw: [0; 16] };
        assert_eq!(ibv_query_gid(context, 1, 0, &mut gid), 0);
        // SAFETY: all bytes of the union are a GID's.
        Self { context, memory, fd, gid: unsafe { gid.raw } }
    }
}

/// Runs a sequence of calls.
pub fn verbs(data: &[u8]) {
    ib::QUIET.store(true, Ordering::Relaxed);
    let mut device = DEVICE.lock().unwrap_or_else(PoisonError::into_inner);
    let device = device.get_or_insert_with(Device::open);
    let mut run = Run { device, input: Input(data), objects: Vec::new() };
    while !run.input.is_empty() {
        run.step();
    }
    run.close();
}

struct Run<'a> {
    device: &'a Device,
    input: Input<'a>,
    objects: Vec<Object>,
}

impl Run<'_> {
    /// Mostly the usual value, sometimes any other.
    fn mostly(&mut self, usual: u64) -> u64 {
        if self.input.u8() < 230 { usual } else { self.input.edge() }
    }

    /// The size that the program states for a struct: the whole, or less.
    fn size<T>(&mut self) -> Size<T> {
        let whole = size_of::<T>() as u64;
        Size((self.mostly(whole) % (whole + 1)) as u32, PhantomData)
    }

    fn all(&self, kind: Kind) -> impl Iterator<Item = &Object> {
        self.objects.iter().filter(move |object| object.kind == kind)
    }

    /// An open object of this kind, or rarely null.
    fn pick<T>(&mut self, kind: Kind) -> Open<T> {
        let (number, count) = (self.input.u8(), self.all(kind).count());
        if count == 0 || number > 250 {
            return Open::NULL;
        }
        self.all(kind).nth(usize::from(number) % count).map_or(Open::NULL, |object| Open(object.at.cast()))
    }

    fn keep<T>(&mut self, kind: Kind, Open(at): Open<T>, uses: &[*mut c_void]) {
        if !at.is_null() {
            let uses = uses.iter().copied().filter(|at| !at.is_null()).collect();
            self.objects.push(Object { kind, at: at.cast(), uses });
        }
    }

    fn ops(&self) -> ib::ibv_context_ops {
        self.device.context.get().expect("the context is open").ops
    }

    fn address(&mut self) -> *mut u8 {
        match self.input.u8() {
            0 => ptr::null_mut(),
            1 => ptr::without_provenance_mut(1 << 63 | usize::from(self.input.u16()) << 12),
            n => self.device.memory.wrapping_add((usize::from(self.input.u16()) % SIZE) & !usize::from(n & 7)),
        }
    }

    fn len(&mut self) -> u64 {
        match self.input.u8() {
            n if n < 200 => u64::from(n) * 8,
            _ => self.input.edge(),
        }
    }

    fn fd(&mut self) -> c_int {
        let fd = self.device.fd;
        if self.input.u8() < 240 { fd } else { -1 }
    }

    fn step(&mut self) {
        let op = self.input.u8() % 22;
        if self.objects.len() >= MAX && op < 10 {
            return self.destroy();
        }
        match op {
            0 => {
                let pd = ibv_alloc_pd(self.device.context);
                self.keep(Kind::Pd, pd, &[]);
            }
            1 => self.register(),
            2 => self.create_handle(),
            3 => self.create_channel(),
            4 => self.create_cq(),
            5 | 6 => self.create_srd(),
            7 => self.create_ud(),
            8 => self.create_counter(),
            9 => self.create_domains(),
            10 | 11 => self.modify(),
            12 | 13 => self.post_session(),
            14 => self.post_plain(),
            15 => self.receive(),
            16 | 17 => self.poll(),
            18 => self.count(),
            19 => self.events(),
            20 => self.query(),
            _ => self.destroy(),
        }
    }

    fn register(&mut self) {
        let (pd, access) = (self.pick(Kind::Pd), self.mostly(7) as u32);
        let (addr, len, iova) = (self.address(), self.len() as usize, self.input.edge());
        let mr = if self.input.u8().is_multiple_of(3) {
            let (fd, at) = (self.fd(), self.len());
            ibv_reg_dmabuf_mr(pd, at, len, iova, fd, access as c_int)
        } else {
            let iova = if iova % 2 == 0 { addr as u64 } else { iova };
            // SAFETY: the domain is null or open. Inaccessible pages surround the memory, so only the device's own can
            // be registered.
            unsafe { ibv_reg_mr_iova2(pd, addr.cast(), len, iova, access) }
        };
        self.keep(Kind::Mr, mr, &[pd.0.cast()]);
    }

    fn create_handle(&mut self) {
        let pd = self.pick(Kind::Pd);
        let mut raw = self.device.gid;
        if self.input.u8() > 200 {
            raw[usize::from(self.input.u8()) % 16] ^= self.input.u8();
        }
        let mut attr = ib::ibv_ah_attr { port_num: self.mostly(1) as u8, ..ib::ibv_ah_attr::default() };
        attr.grh.dgid = ib::ibv_gid { raw };
        let ah = ibv_create_ah(pd, &mut attr);
        self.keep(Kind::Ah, ah, &[pd.0.cast()]);
    }

    fn create_channel(&mut self) {
        let channel = ibv_create_comp_channel(self.device.context);
        if let Some(channel) = channel.get() {
            // SAFETY: the channel is open, and its descriptor too.
            assert_ne!(unsafe { libc::fcntl(channel.fd, libc::F_SETFL, libc::O_NONBLOCK) }, -1);
        }
        self.keep(Kind::Channel, channel, &[]);
    }

    fn create_cq(&mut self) {
        let mut attr = ib::ibv_cq_init_attr_ex {
            cqe: self.mostly(16) as u32,
            comp_vector: self.mostly(0) as u32,
            wc_flags: self.mostly(0x7f),
            comp_mask: self.mostly(0) as u32,
            flags: self.mostly(0) as u32,
            ..ib::ibv_cq_init_attr_ex::default()
        };
        if self.input.u8() > 128 {
            attr.channel = self.pick(Kind::Channel).0;
        }
        attr.parent_domain = self.pick(Kind::Pd).0;
        let mut dv = ib::efadv_cq_init_attr {
            comp_mask: self.mostly(0),
            wc_flags: self.mostly(3),
            flags: u64::from(self.input.u8() > 200),
            ..ib::efadv_cq_init_attr::default()
        };
        (dv.ext_mem_dmabuf.fd, dv.ext_mem_dmabuf.length, dv.ext_mem_dmabuf.offset) =
            (self.fd(), self.len(), self.len());
        let size = self.size::<ib::efadv_cq_init_attr>();
        // SAFETY: the context is open, the objects are null or open, and the attributes are local variables of at least
        // that size.
        let cq = unsafe { efadv_create_cq(self.device.context, &mut attr, &mut dv, size) };
        let parent =
            if attr.comp_mask & ib::IBV_CQ_INIT_ATTR_MASK_PD != 0 { attr.parent_domain } else { ptr::null_mut() };
        self.keep(Kind::Cq, cq, &[attr.channel.cast(), parent.cast()]);
    }

    fn cap(&mut self) -> ib::ibv_qp_cap {
        ib::ibv_qp_cap {
            max_send_wr: self.mostly(8) as u32,
            max_recv_wr: self.mostly(8) as u32,
            max_send_sge: self.mostly(2) as u32,
            max_recv_sge: self.mostly(2) as u32,
            max_inline_data: self.mostly(32) as u32,
        }
    }

    fn create_srd(&mut self) {
        let mut attr = ib::ibv_qp_init_attr_ex {
            pd: self.pick(Kind::Pd).0,
            send_cq: self.pick(Kind::Cq).0,
            recv_cq: self.pick(Kind::Cq).0,
            cap: self.cap(),
            qp_type: self.mostly(ib::IBV_QPT_DRIVER.into()) as u32,
            sq_sig_all: c_int::from(self.input.u8() % 2),
            comp_mask: self.mostly((ib::IBV_QP_INIT_ATTR_PD | ib::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS).into()) as u32,
            send_ops_flags: self.mostly(0x1f),
            ..ib::ibv_qp_init_attr_ex::default()
        };
        let mut dv = ib::efadv_qp_init_attr {
            comp_mask: self.mostly(0),
            driver_qp_type: self.mostly(0) as u32,
            flags: u16::from(self.input.u8() % 4),
            sl: self.input.u8(),
            wr_flags: self.mostly(0),
            ..ib::efadv_qp_init_attr::default()
        };
        let size = self.size::<ib::efadv_qp_init_attr>();
        let wanted = attr.comp_mask & ib::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS != 0;
        // SAFETY: the context is open, the objects are null or open, and the attributes are local variables of at least
        // that size.
        let qp = unsafe { efadv_create_qp_ex(self.device.context, &mut attr, &mut dv, size) };
        assert_eq!(ibv_qp_to_qp_ex(qp).0.is_null(), qp.0.is_null() || !wanted);
        self.keep(Kind::Qp, qp, &[attr.pd.cast(), attr.send_cq.cast(), attr.recv_cq.cast()]);
    }

    fn create_ud(&mut self) {
        let pd = self.pick(Kind::Pd);
        let mut attr = ib::ibv_qp_init_attr {
            send_cq: self.pick(Kind::Cq).0,
            recv_cq: self.pick(Kind::Cq).0,
            cap: self.cap(),
            qp_type: self.mostly(ib::IBV_QPT_UD.into()) as u32,
            ..ib::ibv_qp_init_attr::default()
        };
        // SAFETY: the objects are null or open, and the attributes are a local variable.
        let qp = unsafe { ibv_create_qp(pd, &mut attr) };
        self.keep(Kind::Qp, qp, &[pd.0.cast(), attr.send_cq.cast(), attr.recv_cq.cast()]);
    }

    fn create_counter(&mut self) {
        let mut attr = ib::ibv_comp_cntr_init_attr { flags: self.mostly(0) as u32, ..Default::default() };
        let mut dv = ib::efadv_comp_cntr_init_attr { flags: u32::from(self.input.u8() % 5), ..Default::default() };
        for location in [&mut dv.comp_cntr_ext_mem, &mut dv.err_cntr_ext_mem] {
            location.type_ = self.input.u8() % 3;
            (location.ptr, location.dmabuf.fd, location.dmabuf.offset) = (self.address(), self.fd(), self.len());
        }
        let size = self.size::<ib::efadv_comp_cntr_init_attr>();
        // SAFETY: the context is open, and the attributes are local variables of at least that size. The device's
        // memory stays mapped.
        let cntr = unsafe { efadv_create_comp_cntr(self.device.context, &mut attr, &mut dv, size) };
        self.keep(Kind::Cntr, cntr, &[]);
    }

    /// Thread domains and parent domains.
    fn create_domains(&mut self) {
        // SAFETY: `ibv_context` is the last field of `verbs_context`.
        let table: *mut ib::verbs_context =
            self.device.context.0.wrapping_byte_sub(std::mem::offset_of!(ib::verbs_context, context)).cast();
        // SAFETY: the context is open, and its table has both calls.
        let (td, parent) = unsafe { ((*table).alloc_td.unwrap(), (*table).alloc_parent_domain.unwrap()) };
        let mut init = ib::ibv_td_init_attr { comp_mask: self.mostly(0) as u32 };
        // SAFETY: the context is open, and the attributes are a local variable.
        let made = unsafe { td(self.device.context.0, &mut init) };
        self.keep(Kind::Td, Open(made), &[]);
        let mut attr = ib::ibv_parent_domain_init_attr {
            pd: self.pick(Kind::Pd).0,
            td: self.pick(Kind::Td).0,
            comp_mask: self.mostly(0) as u32,
            ..Default::default()
        };
        // SAFETY: the context is open, the objects are null or open, and the attributes are a local variable.
        let made = unsafe { parent(self.device.context.0, &mut attr) };
        self.keep(Kind::Pd, Open(made), &[attr.pd.cast(), attr.td.cast()]);
    }

    /// Takes a queue pair to RTS, or changes its state arbitrarily.
    fn modify(&mut self) {
        let qp = self.pick(Kind::Qp);
        if self.input.u8() < 128 {
            self.change(qp, ib::IBV_QPS_INIT, TO_INIT);
            self.change(qp, ib::IBV_QPS_RTR, TO_RTR);
            self.change(qp, ib::IBV_QPS_RTS, TO_RTS);
        } else {
            let (state, usual) = (u32::from(self.input.u8() % 8), self.input.of(&[TO_RTR, TO_INIT, TO_RTS]));
            let mask = self.mostly(usual.into()) as u32;
            self.change(qp, state, mask);
        }
    }

    fn change(&mut self, qp: Open<ib::ibv_qp>, state: u32, mask: u32) {
        let mut attr = ib::ibv_qp_attr {
            qp_state: state,
            cur_qp_state: u32::from(self.input.u8() % 8),
            port_num: self.mostly(1) as u8,
            pkey_index: self.mostly(0) as u16,
            qkey: 7,
            rnr_retry: self.input.u8() % 9,
            ..ib::ibv_qp_attr::default()
        };
        ibv_modify_qp(qp, &mut attr, mask as c_int);
    }

    fn sge(&mut self) -> ib::ibv_sge {
        let lkey = self.pick(Kind::Mr).get().map_or(0, |mr: &ib::ibv_mr| mr.lkey);
        ib::ibv_sge { addr: self.address() as u64, length: self.len() as u32, lkey: self.mostly(lkey.into()) as u32 }
    }

    fn remote(&mut self) -> (u32, u64) {
        let rkey = self.pick(Kind::Mr).get().map_or(0, |mr: &ib::ibv_mr| mr.rkey);
        (rkey, self.address() as u64)
    }

    fn qpn(&mut self) -> u32 {
        let number = self.pick(Kind::Qp).get().map_or(0, |qp: &ib::ibv_qp| qp.qp_num);
        self.mostly(number.into()) as u32
    }

    /// Posts in one `ibv_wr_*` session.
    fn post_session(&mut self) {
        let open = ibv_qp_to_qp_ex(self.pick(Kind::Qp));
        let (Some(calls), ex) = (open.get(), open.0) else { return };
        let (start, complete, abort) = (calls.wr_start.unwrap(), calls.wr_complete.unwrap(), calls.wr_abort.unwrap());
        // SAFETY: the queue pair is open.
        unsafe { start(ex) };
        for _ in 0..self.input.u8() % 5 {
            // SAFETY: the program writes the field of its open queue pair.
            unsafe { (*ex).wr_id = self.input.u64() };
            // SAFETY: the program writes the field of its open queue pair.
            unsafe { (*ex).wr_flags = self.mostly(ib::IBV_SEND_SIGNALED.into()) as u32 };
            let ((rkey, addr), imm) = (self.remote(), self.input.u32());
            let pick = self.input.u8() % 5;
            // SAFETY: the queue pair is open and in a session; functions that it lacks are null.
            unsafe {
                match pick {
                    0 => calls.wr_send.map(|call| call(ex)),
                    1 => calls.wr_send_imm.map(|call| call(ex, imm)),
                    2 => calls.wr_rdma_read.map(|call| call(ex, rkey, addr)),
                    3 => calls.wr_rdma_write.map(|call| call(ex, rkey, addr)),
                    _ => calls.wr_rdma_write_imm.map(|call| call(ex, rkey, addr, imm)),
                };
            }
            let sges = [self.sge(), self.sge(), self.sge()];
            let from = self.device.memory.wrapping_add(usize::from(self.input.u8()));
            let (pick, count, len) =
                (self.input.u8() % 6, usize::from(self.input.u8() % 4), self.len() as usize % SIZE / 2);
            // SAFETY: the queue pair is open and in a session, lists have that many entries, and inline data is the
            // device's memory.
            unsafe {
                match pick {
                    0 | 1 => calls.wr_set_sge.unwrap()(ex, sges[0].lkey, sges[0].addr, sges[0].length),
                    2 | 3 => calls.wr_set_sge_list.unwrap()(ex, count, sges.as_ptr()),
                    4 => calls.wr_set_inline_data.unwrap()(ex, from.cast(), len),
                    _ => {}
                }
            }
            let (ah, qpn, qkey) = (self.pick(Kind::Ah).0, self.qpn(), self.mostly(7) as u32);
            // SAFETY: the queue pair is open and in a session, and the handle is null or open.
            unsafe { calls.wr_set_ud_addr.unwrap()(ex, ah, qpn, qkey) };
        }
        if self.input.u8() < 240 {
            // SAFETY: the queue pair is open and in a session.
            unsafe { complete(ex) };
        } else {
            // SAFETY: the queue pair is open and in a session.
            unsafe { abort(ex) };
        }
    }

    fn post_plain(&mut self) {
        let qp: Open<ib::ibv_qp> = self.pick(Kind::Qp);
        let mut sges = [self.sge(), self.sge(), self.sge()];
        for sge in &mut sges {
            // Inline data is read from the device's memory.
            sge.addr = self.device.memory as u64;
            sge.length %= SIZE as u32;
        }
        let mut wr = ib::ibv_send_wr {
            wr_id: self.input.u64(),
            sg_list: if self.input.u8() > 250 { ptr::null_mut() } else { sges.as_mut_ptr() },
            num_sge: c_int::from(self.input.u8() % 5) - 1,
            opcode: self.mostly(ib::IBV_WR_SEND.into()) as u32,
            send_flags: self.mostly(ib::IBV_SEND_SIGNALED.into()) as u32,
            ..ib::ibv_send_wr::default()
        };
        (wr.wr.ud.ah, wr.wr.ud.remote_qpn, wr.wr.ud.remote_qkey) =
            (self.pick(Kind::Ah).0, self.qpn(), self.mostly(7) as u32);
        let mut bad = ptr::null_mut();
        let post = self.ops().post_send.unwrap();
        // SAFETY: the queue pair is null or open, and the list is local.
        unsafe { post(qp.0, &mut wr, &mut bad) };
    }

    fn receive(&mut self) {
        let qp: Open<ib::ibv_qp> = self.pick(Kind::Qp);
        let mut sges = [self.sge(), self.sge(), self.sge()];
        let mut wr = ib::ibv_recv_wr {
            wr_id: self.input.u64(),
            sg_list: sges.as_mut_ptr(),
            num_sge: c_int::from(self.input.u8() % 5) - 1,
            ..ib::ibv_recv_wr::default()
        };
        let mut bad = ptr::null_mut();
        let post = self.ops().post_recv.unwrap();
        // SAFETY: the queue pair is null or open, and the list is local.
        unsafe { post(qp.0, &mut wr, &mut bad) };
    }

    fn poll(&mut self) {
        let open: Open<ib::ibv_cq_ex> = self.pick(Kind::Cq);
        if self.input.u8().is_multiple_of(2) {
            let poll = self.ops().poll_cq.unwrap();
            let mut wcs = [ib::ibv_wc::default(); 4];
            let count = c_int::from(self.input.u8() % 6) - 1;
            // SAFETY: the queue is null or open, and there is room for that many completions.
            let got = unsafe { poll(open.0.cast(), count, wcs.as_mut_ptr()) };
            assert!(got <= count.max(0), "{got} of {count}");
            return;
        }
        let (Some(calls), cq) = (open.get(), open.0) else { return };
        let mut attr = ib::ibv_poll_cq_attr { comp_mask: self.mostly(0) as u32 };
        // SAFETY: the queue is open, and the attributes are a local variable.
        if unsafe { calls.start_poll.unwrap()(cq, &mut attr) } != 0 {
            return;
        }
        for _ in 0..self.input.u8() % 4 {
            // SAFETY: the queue is open and being polled; functions that it lacks are null.
            unsafe {
                calls.read_opcode.unwrap()(cq);
                calls.read_vendor_err.unwrap()(cq);
                calls.read_wc_flags.unwrap()(cq);
                let _ = calls.read_byte_len.map(|read| read(cq));
                let _ = calls.read_imm_data.map(|read| read(cq));
                let _ = calls.read_slid.map(|read| read(cq));
            }
            // SAFETY: the queue is open and being polled.
            if unsafe { calls.next_poll.unwrap()(cq) } != 0 {
                break;
            }
        }
        // SAFETY: the queue is open and being polled.
        unsafe { calls.end_poll.unwrap()(cq) };
    }

    fn count(&mut self) {
        let (cntr, qp): (Open<ib::ibv_comp_cntr>, Open<ib::ibv_qp>) = (self.pick(Kind::Cntr), self.pick(Kind::Qp));
        let (mut value, number) = (0, self.input.edge());
        match self.input.u8() % 5 {
            0 => _ = ibv_set_comp_cntr(cntr, number),
            1 => _ = ibv_inc_err_comp_cntr(cntr, number),
            2 => _ = ibv_read_comp_cntr(cntr, &mut value),
            _ => {
                let mut attr = ib::ibv_qp_attach_comp_cntr_attr {
                    op_mask: self.mostly(1) as u32,
                    comp_mask: self.mostly(0) as u32,
                };
                if ibv_qp_attach_comp_cntr(qp, cntr, &mut attr) == 0 {
                    let owner =
                        self.objects.iter_mut().find(|object| object.at == qp.0.cast()).expect("an open queue pair");
                    owner.uses.push(cntr.0.cast());
                }
            }
        }
    }

    fn events(&mut self) {
        let cq: Open<ib::ibv_cq> = self.pick(Kind::Cq);
        let notify = self.ops().req_notify_cq.unwrap();
        // SAFETY: the queue is null or open.
        unsafe { notify(cq.0, c_int::from(self.input.u8() > 250)) };
        let mut attr = ib::efadv_cq_attr::default();
        let size = self.size::<ib::efadv_cq_attr>();
        let whole = size.0 as usize == size_of_val(&attr);
        let known = efadv_query_cq(cq, &mut attr, size) == 0 && whole;
        if known && !attr.doorbell.is_null() {
            let value = self.input.u32();
            // SAFETY: the doorbell belongs to the open queue.
            unsafe { attr.doorbell.write_volatile(value) };
        }
        let channel: Open<ib::ibv_comp_channel> = self.pick(Kind::Channel);
        let (mut cq, mut context) = (Open::NULL, ptr::null_mut());
        if ibv_get_cq_event(channel, &mut cq, &mut context) == 0 {
            assert!(self.all(Kind::Cq).any(|object| object.at == cq.0.cast()), "an event of a closed queue");
            ibv_ack_cq_events(cq, 1);
        }
    }

    /// Makes queries, and writes bytes directly into the rings, as a program may.
    fn query(&mut self) {
        let qp: Open<ib::ibv_qp> = self.pick(Kind::Qp);
        let (mut attr, mut init) = (ib::ibv_qp_attr::default(), ib::ibv_qp_init_attr::default());
        ibv_query_qp(qp, &mut attr, self.mostly(1) as c_int, &mut init);
        let (mut send, mut recv) = (ib::efadv_wq_attr::default(), ib::efadv_wq_attr::default());
        let size = self.size::<ib::efadv_wq_attr>();
        if efadv_query_qp_wqs(qp, &mut send, &mut recv, size) == 0 {
            let wq = if self.input.u8().is_multiple_of(2) { &send } else { &recv };
            for at in 0..self.input.u8() % 65 {
                let len = wq.num_entries as usize * wq.entry_size as usize;
                // SAFETY: the byte lies in the ring of the open queue pair.
                unsafe { wq.buffer.wrapping_add(usize::from(at) % len).write_volatile(self.input.u8()) };
            }
            let rung = self.mostly(1) as u32;
            // SAFETY: the doorbell belongs to the open queue pair.
            unsafe { wq.doorbell.write_volatile(rung) };
        }
        let mut device = ib::efadv_device_attr::default();
        let size = self.size::<ib::efadv_device_attr>();
        efadv_query_device(self.device.context, &mut device, size);
        let mut ah = ib::efadv_ah_attr::default();
        let size = self.size::<ib::efadv_ah_attr>();
        efadv_query_ah(self.pick(Kind::Ah), &mut ah, size);
        let mut depth = ib::efadv_sq_depth_attr { max_inline_data: self.input.edge() as u32, ..Default::default() };
        efadv_get_max_sq_depth(self.device.context, &mut depth, Size::whole());
        let mut depth = ib::efadv_rq_depth_attr { max_recv_sge: self.input.edge() as u32, ..Default::default() };
        efadv_get_max_rq_depth(self.device.context, &mut depth, Size::whole());
    }

    /// Destroys an object, which must fail exactly when another one uses it.
    fn destroy(&mut self) {
        if self.objects.is_empty() {
            return;
        }
        let at = usize::from(self.input.u8()) % self.objects.len();
        self.destroy_at(at);
    }

    fn destroy_at(&mut self, at: usize) {
        let Object { kind, at: object, .. } = self.objects[at];
        let in_use = self.objects.iter().any(|other| other.uses.contains(&object));
        // SAFETY: the object is open and of this kind.
        let rc = unsafe {
            match kind {
                Kind::Pd => ibv_dealloc_pd(object.cast()),
                Kind::Td => {
                    let table =
                        self.device.context.0.wrapping_byte_sub(std::mem::offset_of!(ib::verbs_context, context));
                    (*table.cast::<ib::verbs_context>()).dealloc_td.unwrap()(object.cast())
                }
                Kind::Mr => ibv_dereg_mr(object.cast()),
                Kind::Ah => ibv_destroy_ah(object.cast()),
                Kind::Channel => ibv_destroy_comp_channel(object.cast()),
                Kind::Cq => ibv_destroy_cq(object.cast()),
                Kind::Qp => ibv_destroy_qp(object.cast()),
                Kind::Cntr => ibv_destroy_comp_cntr(object.cast()),
            }
        };
        assert_eq!(rc, if in_use { libc::EBUSY } else { 0 }, "{kind:?}");
        if !in_use {
            self.objects.remove(at);
        }
    }

    /// Destroys everything: queue pairs first, as they may use counters created later.
    fn close(&mut self) {
        while let Some(at) = self.objects.iter().rposition(|object| object.kind == Kind::Qp) {
            self.destroy_at(at);
        }
        while !self.objects.is_empty() {
            self.destroy_at(self.objects.len() - 1);
        }
    }
}
