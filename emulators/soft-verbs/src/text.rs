//! Names, rates and sysfs files.

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::sync::OnceLock;

use crate::bindings as ib;
use crate::device;
use crate::guard::entry;

fn name(names: &[(c_uint, &'static CStr)], value: c_uint) -> *const c_char {
    names.iter().find(|(known, _)| *known == value).map_or(c"unknown", |(_, name)| name).as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn ibv_node_type_str(kind: ib::ibv_node_type) -> *const c_char {
    let names = [
        (ib::IBV_NODE_CA as c_uint, c"InfiniBand channel adapter"),
        (ib::IBV_NODE_SWITCH as c_uint, c"InfiniBand switch"),
        (ib::IBV_NODE_ROUTER as c_uint, c"InfiniBand router"),
        (ib::IBV_NODE_RNIC as c_uint, c"iWARP NIC"),
        (ib::IBV_NODE_UNSPECIFIED as c_uint, c"unspecified"),
    ];
    name(&names, kind as c_uint)
}

#[unsafe(no_mangle)]
extern "C" fn ibv_port_state_str(state: ib::ibv_port_state) -> *const c_char {
    let names = [
        (ib::IBV_PORT_NOP, c"no state change (NOP)"),
        (ib::IBV_PORT_DOWN, c"down"),
        (ib::IBV_PORT_INIT, c"init"),
        (ib::IBV_PORT_ARMED, c"armed"),
        (ib::IBV_PORT_ACTIVE, c"active"),
        (ib::IBV_PORT_ACTIVE_DEFER, c"active defer"),
    ];
    name(&names, state)
}

#[unsafe(no_mangle)]
extern "C" fn ibv_event_type_str(event: ib::ibv_event_type) -> *const c_char {
    let names = [
        (ib::IBV_EVENT_CQ_ERR, c"completion queue error"),
        (ib::IBV_EVENT_QP_FATAL, c"queue pair fatal error"),
        (ib::IBV_EVENT_DEVICE_FATAL, c"device fatal error"),
        (ib::IBV_EVENT_PORT_ACTIVE, c"port active"),
        (ib::IBV_EVENT_PORT_ERR, c"port error"),
    ];
    name(&names, event)
}

#[unsafe(no_mangle)]
extern "C" fn ibv_wc_status_str(status: ib::ibv_wc_status) -> *const c_char {
    let names = [
        (ib::IBV_WC_SUCCESS, c"success"),
        (ib::IBV_WC_LOC_LEN_ERR, c"local length error"),
        (ib::IBV_WC_LOC_QP_OP_ERR, c"local queue pair operation error"),
        (ib::IBV_WC_LOC_PROT_ERR, c"local protection error"),
        (ib::IBV_WC_WR_FLUSH_ERR, c"request flushed"),
        (ib::IBV_WC_BAD_RESP_ERR, c"bad response"),
        (ib::IBV_WC_REM_INV_REQ_ERR, c"remote invalid request"),
        (ib::IBV_WC_REM_ACCESS_ERR, c"remote access error"),
        (ib::IBV_WC_REM_OP_ERR, c"remote operation error"),
        (ib::IBV_WC_RNR_RETRY_EXC_ERR, c"receiver not ready, retries exceeded"),
        (ib::IBV_WC_REM_INV_RD_REQ_ERR, c"remote queue pair invalid"),
        (ib::IBV_WC_REM_ABORT_ERR, c"remote abort"),
        (ib::IBV_WC_RESP_TIMEOUT_ERR, c"response timeout"),
        (ib::IBV_WC_GENERAL_ERR, c"general error"),
    ];
    name(&names, status)
}

/// Static rates (`enum ibv_rate`) in Mbit/s. EFA has none, but programs print them.
const RATES: [(c_uint, c_int); 23] = [
    (2, 2_500),
    (3, 10_000),
    (4, 30_000),
    (5, 5_000),
    (6, 20_000),
    (7, 40_000),
    (8, 60_000),
    (9, 80_000),
    (10, 120_000),
    (11, 14_062),
    (12, 56_250),
    (13, 112_500),
    (14, 168_750),
    (15, 25_781),
    (16, 103_125),
    (17, 206_250),
    (18, 309_375),
    (19, 28_125),
    (20, 53_125),
    (21, 425_000),
    (22, 637_500),
    (23, 850_000),
    (24, 1_275_000),
];
/// The rate that multipliers refer to.
const BASE: c_int = 2_500;

#[unsafe(no_mangle)]
extern "C" fn ibv_rate_to_mbps(rate: ib::ibv_rate) -> c_int {
    RATES.iter().find(|(known, _)| *known == rate).map_or(-1, |(_, mbps)| *mbps)
}

#[unsafe(no_mangle)]
extern "C" fn mbps_to_ibv_rate(mbps: c_int) -> ib::ibv_rate {
    RATES.iter().find(|(_, known)| *known == mbps).map_or(0, |(rate, _)| *rate)
}

#[unsafe(no_mangle)]
extern "C" fn ibv_rate_to_mult(rate: ib::ibv_rate) -> c_int {
    match ibv_rate_to_mbps(rate) {
        -1 => -1,
        mbps => mbps / BASE,
    }
}

#[unsafe(no_mangle)]
extern "C" fn mult_to_ibv_rate(mult: c_int) -> ib::ibv_rate {
    mult.checked_mul(BASE).map_or(0, |mbps| mbps_to_ibv_rate(mbps))
}

#[unsafe(no_mangle)]
extern "C" fn ibv_get_sysfs_path() -> *const c_char {
    static PATH: OnceLock<std::ffi::CString> = OnceLock::new();
    PATH.get_or_init(|| std::ffi::CString::new(device::sysfs()).unwrap_or_default()).as_ptr()
}

/// Reads a short file without its final newline, and returns its length or -1.
///
/// # Safety
/// `dir` and `file` are NUL-terminated; `buf` has `size` writable bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_read_sysfs_file(
    dir: *const c_char,
    file: *const c_char,
    buf: *mut c_char,
    size: usize,
) -> c_int {
    entry("ibv_read_sysfs_file", -1, || {
        if dir.is_null() || file.is_null() || buf.is_null() {
            return -1;
        }
        // SAFETY: not null, and this function's caller passes NUL-terminated strings.
        let (dir, file) = (unsafe { CStr::from_ptr(dir) }, unsafe { CStr::from_ptr(file) });
        let path = format!("{}/{}", dir.to_string_lossy(), file.to_string_lossy());
        let Ok(mut text) = std::fs::read(path) else { return -1 };
        if text.last() == Some(&b'\n') {
            text.pop();
        }
        text.truncate(size.saturating_sub(1));
        // SAFETY: this function's caller gives `size` writable bytes, and the text was cut to fewer, or is empty.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), buf.cast(), text.len()) };
        if size > 0 {
            // SAFETY: the text is shorter than `size`.
            unsafe { buf.wrapping_add(text.len()).write(0) };
        }
        text.len() as c_int
    })
}

/// Would read from a device's directory; always fails, because the card has no use for path formats.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_read_ibdev_sysfs_file(_buf: *mut c_char, _size: usize) -> c_int {
    -1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_converted_both_ways() {
        for (rate, mbps) in RATES {
            assert_eq!((ibv_rate_to_mbps(rate), mbps_to_ibv_rate(mbps)), (mbps, rate));
        }
        assert_eq!((ibv_rate_to_mult(7), mult_to_ibv_rate(16)), (16, 7));
        assert_eq!((ibv_rate_to_mult(99), mult_to_ibv_rate(99), mult_to_ibv_rate(c_int::MAX)), (-1, 0, 0));
    }
}
