//! Attributes for the provider's calls: any values that an application can pass without breaking memory safety.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_void};
use std::ptr;
use std::sync::Mutex;

use ferrogin_libfabric::bindings as fi;

use ferrogin_test_support::Input;

/// A domain that stays open, with memory that attributes may name.
struct Fixture {
    domain: *mut fi::fid_domain,
    gda: *const fi::fi_efa_ops_gda,
    info: *mut fi::fi_info,
    memory: *mut u64,
}

// SAFETY: the provider's objects are used under the mutex below.
unsafe impl Send for Fixture {}

const WORDS: usize = 1024;

/// `None` if libfabric isn't installed. The wire is shared memory, because TCP would open sockets.
static FIXTURE: Mutex<Option<Fixture>> = Mutex::new(None);

macro_rules! call {
    ($table:expr, $op:ident, $($arg:expr),*) => {{
        // SAFETY: the table is the provider's and the object is open; the caller passes arguments of the types that the
        // function takes.
        match unsafe { (*$table).$op } {
            // SAFETY: the table is the provider's and the object is open; the caller passes arguments of the types that
            // the function takes.
            Some(op) => unsafe { op($($arg),*) },
            None => -fi::FI_ENOSYS,
        }
    }};
}

fn fixture() -> Option<Fixture> {
    // SAFETY: loading libfabric runs its constructors, which only register providers.
    let core = unsafe { libc::dlopen(c"libfabric.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if core.is_null() {
        return None;
    }
    if std::env::var_os("SOFTEFA_WIRE").is_none() {
        // SAFETY: no other thread reads the environment now, as this is a fuzzer's first call. The test sets the
        // variable itself.
        unsafe { std::env::set_var("SOFTEFA_WIRE", "shm") };
    }
    let provider = softefa_fi::fi_prov_ini();
    let (mut info, mut fabric, mut domain) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
    let none = ptr::null_mut::<c_void>();
    let api = 2 << 16 | 6;
    if call!(provider, getinfo, api, ptr::null(), ptr::null(), 0, ptr::null(), &raw mut info) != 0 {
        return None;
    }
    // SAFETY: an info from the list that getinfo returned.
    let fabric_attr = unsafe { (*info).fabric_attr };
    assert_eq!(call!(provider, fabric, fabric_attr, &raw mut fabric, none), 0);
    // SAFETY: a field of the open fabric, which the core sets after `fi_fabric` returns.
    unsafe { (*fabric).api_version = api };
    // SAFETY: an open fabric.
    let ops = unsafe { (*fabric).ops };
    assert_eq!(call!(ops, domain, fabric, info, &raw mut domain, none), 0);
    let mut gda: *mut c_void = ptr::null_mut();
    // SAFETY: an open domain.
    let ops = unsafe { (*domain).fid.ops };
    call!(ops, ops_open, domain.cast(), c"efa gda ops".as_ptr(), 0, &raw mut gda, none);
    let memory = Box::leak(vec![0u64; WORDS].into_boxed_slice()).as_mut_ptr();
    Some(Fixture { domain, gda: gda.cast_const().cast(), info, memory })
}

/// A string for an attribute, or null.
fn name(input: &mut Input<'_>) -> *mut c_char {
    let names = [c"", c"softefa", c"efa", c"efa-direct", c"softefa0-rdm", c"softefa0-dgrm", c"x"];
    match input.u8() {
        n if n % 3 == 0 => ptr::null_mut(),
        _ => input.of(&names).as_ptr().cast_mut(),
    }
}

impl Fixture {
    /// An address in the fixture's memory, or in none.
    fn address(&self, input: &mut Input<'_>) -> *mut u8 {
        match input.u8() % 8 {
            0 => ptr::null_mut(),
            1 => ptr::without_provenance_mut(usize::from(input.u8())),
            2 => ptr::without_provenance_mut(1 << 63 | usize::from(input.u16()) << 12),
            n => self.memory.cast::<u8>().wrapping_add((usize::from(input.u16()) % (WORDS * 8)) & !usize::from(n & 7)),
        }
    }

    fn getinfo(&self, input: &mut Input<'_>) {
        let (mut tx, mut rx) = (fi::fi_tx_attr::default(), fi::fi_rx_attr::default());
        let (mut ep, mut fabric) = (fi::fi_ep_attr::default(), fi::fi_fabric_attr::default());
        let mut domain = fi::fi_domain_attr::default();
        (tx.caps, tx.mode, tx.op_flags) = (input.edge(), input.edge(), input.edge());
        (tx.inject_size, tx.size, tx.iov_limit) = (input.edge() as usize, input.edge() as usize, input.edge() as usize);
        (tx.msg_order, tx.comp_order, tx.rma_iov_limit) = (input.edge(), input.edge(), input.edge() as usize);
        (rx.caps, rx.mode, rx.size, rx.msg_order) = (input.edge(), input.edge(), input.edge() as usize, input.edge());
        (rx.iov_limit, rx.op_flags) = (input.edge() as usize, input.edge());
        (ep.type_, ep.protocol) = (input.edge() as u32 % 5, input.edge() as u32);
        (ep.max_msg_size, ep.tx_ctx_cnt, ep.rx_ctx_cnt) =
            (input.edge() as usize, input.edge() as usize, input.edge() as usize);
        (domain.mr_mode, domain.threading) = (input.edge() as i32, input.edge() as u32 % 8);
        domain.__bindgen_anon_1.data_progress = input.edge() as u32 % 4;
        domain.control_progress = input.edge() as u32 % 4;
        (domain.av_type, domain.caps, domain.mode) = (input.edge() as u32 % 4, input.edge(), input.edge());
        (domain.name, domain.mr_key_size, domain.cq_data_size) =
            (name(input), input.edge() as usize, input.edge() as usize);
        (fabric.name, fabric.prov_name) = (name(input), name(input));
        let which = input.u8();
        let or_null = |bit: u8| which & 1 << bit == 0;
        let mut hints = fi::fi_info { caps: input.edge(), mode: input.edge(), ..fi::fi_info::default() };
        hints.addr_format = input.edge() as u32 % 20;
        hints.tx_attr = if or_null(0) { &raw mut tx } else { ptr::null_mut() };
        hints.rx_attr = if or_null(1) { &raw mut rx } else { ptr::null_mut() };
        hints.ep_attr = if or_null(2) { &raw mut ep } else { ptr::null_mut() };
        hints.domain_attr = if or_null(3) { &raw mut domain } else { ptr::null_mut() };
        hints.fabric_attr = if or_null(4) { &raw mut fabric } else { ptr::null_mut() };
        let (mut info, api) = (ptr::null_mut(), input.of(&[0u32, 1 << 16, 1 << 16 | 17, 2 << 16 | 6, u32::MAX]));
        let (node, service, flags) = (name(input), name(input), input.edge());
        let provider = softefa_fi::fi_prov_ini();
        let rc = call!(provider, getinfo, api, node, service, flags, &raw const hints, &raw mut info);
        assert_eq!(rc == 0, !info.is_null(), "a list is given with success and only then");
        if !info.is_null() {
            // SAFETY: the function is libfabric's own, loaded with the fixture.
            let free = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"fi_freeinfo".as_ptr()) };
            if !free.is_null() {
                // SAFETY: libfabric's headers declare the function with this type.
                let free: unsafe extern "C" fn(*mut fi::fi_info) = unsafe { std::mem::transmute(free) };
                // SAFETY: getinfo returned the list, and this is its last use.
                unsafe { free(info) };
            }
        }
    }

    /// Opens one object; returns null if that is refused.
    fn open(&self, input: &mut Input<'_>) -> *mut fi::fid {
        let none = ptr::null_mut::<c_void>();
        // SAFETY: an open domain.
        let domain = unsafe { &*self.domain };
        let (ops, mr) = (domain.ops, domain.mr);
        let mut fid: *mut fi::fid = ptr::null_mut();
        let out = (&raw mut fid).cast::<c_void>();
        let rc = match input.u8() % 8 {
            0 => {
                let mut attr =
                    fi::fi_cq_attr { size: input.edge() as usize, flags: input.edge(), ..fi::fi_cq_attr::default() };
                (attr.format, attr.wait_obj) = (input.edge() as u32 % 7, input.edge() as u32 % 8);
                attr.wait_cond = input.edge() as u32 % 3;
                call!(ops, cq_open, self.domain, &raw mut attr, out.cast(), none)
            }
            1 => {
                let mut attr =
                    fi::fi_av_attr { count: input.edge() as usize, flags: input.edge(), ..fi::fi_av_attr::default() };
                (attr.type_, attr.rx_ctx_bits) = (input.edge() as u32 % 5, input.edge() as i32);
                attr.name = name(input);
                call!(ops, av_open, self.domain, &raw mut attr, out.cast(), none)
            }
            2 => {
                let mut attr = fi::fi_cntr_attr { flags: input.edge(), ..fi::fi_cntr_attr::default() };
                (attr.events, attr.wait_obj) = (input.edge() as u32 % 3, input.edge() as u32 % 8);
                call!(ops, cntr_open, self.domain, &raw mut attr, out.cast(), none)
            }
            3 => {
                let at: *const c_void = self.address(input).cast();
                let (len, access, flags) = (input.edge() as usize, input.edge(), input.edge());
                call!(mr, reg, self.domain.cast(), at, len, access, input.edge(), input.edge(), flags, out.cast(), none)
            }
            4 => {
                let iov = fi::iovec { iov_base: self.address(input).cast(), iov_len: input.edge() as usize };
                let dmabuf = fi::fi_mr_dmabuf {
                    fd: input.of(&[-1, 0, 9999]),
                    offset: input.edge(),
                    len: input.edge() as usize,
                    base_addr: self.address(input).cast(),
                };
                let mut attr = fi::fi_mr_attr { access: input.edge(), ..fi::fi_mr_attr::default() };
                let flags = input.of(&[0, fi::FI_MR_DMABUF, u64::MAX, 1]);
                attr.__bindgen_anon_1 = if flags & fi::FI_MR_DMABUF != 0 {
                    fi::fi_mr_attr__bindgen_ty_1 { dmabuf: &raw const dmabuf }
                } else {
                    fi::fi_mr_attr__bindgen_ty_1 { mr_iov: &raw const iov }
                };
                (attr.iov_count, attr.iface) = (usize::from(input.u8() % 2), input.edge() as u32 % 10);
                call!(mr, regattr, self.domain.cast(), &raw const attr, flags, out.cast())
            }
            5 => {
                let location = |input: &mut Input<'_>| fi::fi_efa_memory_location {
                    ptr: self.address(input),
                    dmabuf: fi::fi_efa_memory_location__bindgen_ty_1 {
                        offset: input.edge(),
                        fd: input.of(&[-1, 0, 9999]),
                        ..Default::default()
                    },
                    type_: input.u8() % 4,
                    ..Default::default()
                };
                let mut init = fi::fi_efa_comp_cntr_init_attr {
                    comp_mask: input.edge() & 3,
                    flags: input.edge() as u32 & 7,
                    reserved: u32::from(input.u8() & 1),
                    comp_cntr_ext_mem: location(input),
                    err_cntr_ext_mem: location(input),
                };
                call!(self.gda, cntr_open_ext, self.domain, ptr::null_mut(), out.cast(), none, &raw mut init)
            }
            6 => {
                let mut attr = fi::fi_cq_attr { size: input.edge() as usize, ..fi::fi_cq_attr::default() };
                let mut init = fi::fi_efa_cq_init_attr { flags: input.edge() & 3, ..Default::default() };
                init.ext_mem_dmabuf.buffer = self.address(input);
                (init.ext_mem_dmabuf.length, init.ext_mem_dmabuf.offset) = (input.edge(), input.edge());
                init.ext_mem_dmabuf.fd = input.edge() as u32;
                call!(self.gda, cq_open_ext, self.domain, &raw mut attr, &raw mut init, out.cast(), none)
            }
            _ => call!(ops, endpoint, self.domain, self.info, out.cast(), none),
        };
        assert!(rc <= 0, "{rc}");
        assert_eq!(rc == 0, !fid.is_null(), "an object is given with success and only then");
        fid
    }
}

/// Opens, binds and closes objects with the attributes that the bytes select.
pub fn attributes(data: &[u8]) {
    let mut slot = FIXTURE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if slot.is_none() {
        *slot = fixture();
    }
    let Some(fixture) = &*slot else { return };
    let mut input = Input(data);
    let mut open: Vec<*mut fi::fid> = Vec::new();
    while !input.is_empty() && open.len() < 16 {
        match input.u8() % 4 {
            0 => fixture.getinfo(&mut input),
            1 | 2 => {
                let fid = fixture.open(&mut input);
                open.extend((!fid.is_null()).then_some(fid));
            }
            _ => {
                let pick = |input: &mut Input<'_>| open.get(usize::from(input.u8()) % open.len().max(1)).copied();
                let (Some(a), Some(b)) = (pick(&mut input), pick(&mut input)) else { continue };
                // SAFETY: an open object of the provider.
                let head = unsafe { &*a };
                let (ops, class) = (head.ops, head.fclass);
                match input.u8() % 3 {
                    0 => drop(call!(ops, bind, a, b, input.edge())),
                    1 => drop(call!(ops, control, a, fi::FI_ENABLE, ptr::null_mut())),
                    _ if class == fi::FI_CLASS_AV as usize => {
                        let mut name = [0u8; 64];
                        let bytes = input.bytes(64);
                        name[..bytes.len()].copy_from_slice(bytes);
                        let mut addrs = [0u64; 2];
                        let av: *mut fi::fid_av = a.cast();
                        // SAFETY: the object's class says that it is an address vector.
                        let ops = unsafe { (*av).ops };
                        let flags = input.of(&[0, 1, u64::MAX]);
                        call!(
                            ops,
                            insert,
                            av,
                            name.as_ptr().cast(),
                            usize::from(input.u8() % 3),
                            addrs.as_mut_ptr(),
                            flags,
                            ptr::null_mut()
                        );
                    }
                    _ => {}
                }
            }
        }
    }
    // An object closes only after those that use it, so the loop runs once per object.
    for _ in 0..open.len() + 1 {
        open.retain(|fid| {
            // SAFETY: one of the provider's objects that is still open.
            let ops = unsafe { (**fid).ops };
            call!(ops, close, *fid) != 0
        });
    }
    assert!(open.is_empty(), "{} objects cannot be closed", open.len());
}
