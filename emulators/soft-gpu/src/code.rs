//! The codes that calls return (`CUresult`), with their names and descriptions.

use std::ffi::{CStr, c_int};
use std::sync::atomic::{AtomicI32, Ordering};

/// The result of a call, numbered as in cuda.h.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Code(pub c_int);

pub(crate) type Outcome<T = ()> = Result<T, Code>;

impl Code {
    pub(crate) const SUCCESS: Self = Self(0);
}

/// The error left by a kernel or copy, which later calls on the context return.
#[derive(Debug, Default)]
pub(crate) struct Fault(AtomicI32);

impl Fault {
    /// Records an error, unless there already is one.
    pub(crate) fn set(&self, code: Code) {
        let _ = self.0.compare_exchange(0, code.0, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// # Errors
    /// The context's sticky error.
    pub(crate) fn check(&self) -> Outcome {
        match self.0.load(Ordering::SeqCst) {
            0 => Ok(()),
            code => Err(Code(code)),
        }
    }
}

/// The description of codes that no call of this library returns.
const ELSEWHERE: &CStr = c"an error that the software GPU does not return";

const fn c(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("the text ends with its only NUL"),
    }
}

macro_rules! codes {
    ($($number:literal $name:ident = $text:expr;)*) => {
        #[allow(dead_code)]
        impl Code {
            $(pub(crate) const $name: Self = Self($number);)*
        }

        /// All codes in cuda.h with their names and descriptions.
        const CODES: &[(c_int, &CStr, &CStr)] = &[
            (0, c"CUDA_SUCCESS", c"no error"),
            $(($number, c(concat!("CUDA_ERROR_", stringify!($name), "\0")), $text)),*
        ];
    };
}

codes! {
    1 INVALID_VALUE = c"invalid argument";
    2 OUT_OF_MEMORY = c"out of memory";
    3 NOT_INITIALIZED = c"the driver is not initialized: call cuInit";
    4 DEINITIALIZED = c"the driver is shutting down";
    5 PROFILER_DISABLED = ELSEWHERE;
    6 PROFILER_NOT_INITIALIZED = ELSEWHERE;
    7 PROFILER_ALREADY_STARTED = ELSEWHERE;
    8 PROFILER_ALREADY_STOPPED = ELSEWHERE;
    34 STUB_LIBRARY = c"the library is a stub";
    36 CALL_REQUIRES_NEWER_DRIVER = c"the call needs a newer driver";
    46 DEVICE_UNAVAILABLE = c"the device is unavailable";
    47 MULTICAST_RESOURCE_FULL = ELSEWHERE;
    100 NO_DEVICE = c"no CUDA-capable device is detected";
    101 INVALID_DEVICE = c"invalid device ordinal";
    102 DEVICE_NOT_LICENSED = ELSEWHERE;
    200 INVALID_IMAGE = c"the image of the kernel is invalid";
    201 INVALID_CONTEXT = c"invalid device context";
    202 CONTEXT_ALREADY_CURRENT = ELSEWHERE;
    205 MAP_FAILED = c"mapping failed";
    206 UNMAP_FAILED = c"unmapping failed";
    207 ARRAY_IS_MAPPED = ELSEWHERE;
    208 ALREADY_MAPPED = c"already mapped";
    209 NO_BINARY_FOR_GPU = c"there is no image of the kernel for this device";
    210 ALREADY_ACQUIRED = ELSEWHERE;
    211 NOT_MAPPED = c"not mapped";
    212 NOT_MAPPED_AS_ARRAY = ELSEWHERE;
    213 NOT_MAPPED_AS_POINTER = ELSEWHERE;
    214 ECC_UNCORRECTABLE = ELSEWHERE;
    215 UNSUPPORTED_LIMIT = c"the limit is not supported";
    216 CONTEXT_ALREADY_IN_USE = c"the context is in use";
    217 PEER_ACCESS_UNSUPPORTED = c"peer access between the two devices is not supported";
    218 INVALID_PTX = c"the PTX is invalid";
    219 INVALID_GRAPHICS_CONTEXT = ELSEWHERE;
    220 NVLINK_UNCORRECTABLE = ELSEWHERE;
    221 JIT_COMPILER_NOT_FOUND = c"no PTX compiler is found";
    222 UNSUPPORTED_PTX_VERSION = c"the PTX has a version that is not supported";
    223 JIT_COMPILATION_DISABLED = ELSEWHERE;
    224 UNSUPPORTED_EXEC_AFFINITY = ELSEWHERE;
    225 UNSUPPORTED_DEVSIDE_SYNC = ELSEWHERE;
    226 CONTAINED = ELSEWHERE;
    227 INSUFFICIENT_LOADER_VERSION = ELSEWHERE;
    300 INVALID_SOURCE = c"the source is invalid";
    301 FILE_NOT_FOUND = c"the file is not found";
    302 SHARED_OBJECT_SYMBOL_NOT_FOUND = c"a symbol of a shared object is not found";
    303 SHARED_OBJECT_INIT_FAILED = c"the initialization of a shared object failed";
    304 OPERATING_SYSTEM = c"a system call failed";
    400 INVALID_HANDLE = c"invalid resource handle";
    401 ILLEGAL_STATE = c"a resource is in the wrong state for the call";
    402 LOSSY_QUERY = ELSEWHERE;
    500 NOT_FOUND = c"the named symbol is not found";
    600 NOT_READY = c"the work is not finished";
    700 ILLEGAL_ADDRESS = c"a kernel accessed memory that it may not access";
    701 LAUNCH_OUT_OF_RESOURCES = c"the launch needs more resources than the device has";
    702 LAUNCH_TIMEOUT = c"the kernel ran longer than the watchdog allows";
    703 LAUNCH_INCOMPATIBLE_TEXTURING = ELSEWHERE;
    704 PEER_ACCESS_ALREADY_ENABLED = c"peer access is already enabled";
    705 PEER_ACCESS_NOT_ENABLED = c"peer access is not enabled";
    708 PRIMARY_CONTEXT_ACTIVE = c"the primary context is active";
    709 CONTEXT_IS_DESTROYED = c"the context is destroyed";
    710 ASSERT = c"an assertion of a kernel failed";
    711 TOO_MANY_PEERS = c"peer access is enabled to too many devices";
    712 HOST_MEMORY_ALREADY_REGISTERED = c"the host memory is already registered";
    713 HOST_MEMORY_NOT_REGISTERED = c"the host memory is not registered";
    714 HARDWARE_STACK_ERROR = c"a kernel's call stack is corrupt";
    715 ILLEGAL_INSTRUCTION = c"a kernel executed an illegal instruction";
    716 MISALIGNED_ADDRESS = c"a kernel used a misaligned address";
    717 INVALID_ADDRESS_SPACE = c"a kernel used an address outside the instruction's address space";
    718 INVALID_PC = c"a kernel's program counter is invalid";
    719 LAUNCH_FAILED = c"a kernel ended with an exception";
    720 COOPERATIVE_LAUNCH_TOO_LARGE = c"the cooperative launch has more blocks than the device holds at once";
    721 TENSOR_MEMORY_LEAK = ELSEWHERE;
    800 NOT_PERMITTED = c"the operation is not permitted";
    801 NOT_SUPPORTED = c"the operation is not supported";
    802 SYSTEM_NOT_READY = ELSEWHERE;
    803 SYSTEM_DRIVER_MISMATCH = ELSEWHERE;
    804 COMPAT_NOT_SUPPORTED_ON_DEVICE = ELSEWHERE;
    805 MPS_CONNECTION_FAILED = ELSEWHERE;
    806 MPS_RPC_FAILURE = ELSEWHERE;
    807 MPS_SERVER_NOT_READY = ELSEWHERE;
    808 MPS_MAX_CLIENTS_REACHED = ELSEWHERE;
    809 MPS_MAX_CONNECTIONS_REACHED = ELSEWHERE;
    810 MPS_CLIENT_TERMINATED = ELSEWHERE;
    811 CDP_NOT_SUPPORTED = ELSEWHERE;
    812 CDP_VERSION_MISMATCH = ELSEWHERE;
    900 STREAM_CAPTURE_UNSUPPORTED = c"the operation is not permitted while a stream is captured";
    901 STREAM_CAPTURE_INVALIDATED = ELSEWHERE;
    902 STREAM_CAPTURE_MERGE = ELSEWHERE;
    903 STREAM_CAPTURE_UNMATCHED = ELSEWHERE;
    904 STREAM_CAPTURE_UNJOINED = ELSEWHERE;
    905 STREAM_CAPTURE_ISOLATION = ELSEWHERE;
    906 STREAM_CAPTURE_IMPLICIT = ELSEWHERE;
    907 CAPTURED_EVENT = ELSEWHERE;
    908 STREAM_CAPTURE_WRONG_THREAD = ELSEWHERE;
    909 TIMEOUT = c"the wait timed out";
    910 GRAPH_EXEC_UPDATE_FAILURE = ELSEWHERE;
    911 EXTERNAL_DEVICE = ELSEWHERE;
    912 INVALID_CLUSTER_SIZE = c"the grid can't have clusters of this size";
    913 FUNCTION_NOT_LOADED = ELSEWHERE;
    914 INVALID_RESOURCE_TYPE = ELSEWHERE;
    915 INVALID_RESOURCE_CONFIGURATION = ELSEWHERE;
    916 KEY_ROTATION = ELSEWHERE;
    917 STREAM_DETACHED = ELSEWHERE;
    918 GRAPH_RECAPTURE_FAILURE = ELSEWHERE;
    919 FABRIC_NOT_READY = ELSEWHERE;
    999 UNKNOWN = c"unknown error";
}

/// Returns a code's number, name and description.
pub(crate) fn find(code: c_int) -> Option<&'static (c_int, &'static CStr, &'static CStr)> {
    CODES.iter().find(|entry| entry.0 == code)
}

impl std::fmt::Display for Code {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match find(self.0) {
            Some((_, name, _)) => f.write_str(&name.to_string_lossy()),
            None => write!(f, "CUDA error {}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_have_names() {
        assert!(CODES.is_sorted_by_key(|entry| entry.0));
        assert_eq!(Code::ILLEGAL_ADDRESS.to_string(), "CUDA_ERROR_ILLEGAL_ADDRESS");
        assert_eq!(Code(12345).to_string(), "CUDA error 12345");
    }
}
