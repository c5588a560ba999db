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
    pub(crate) const INVALID_VALUE: Self = Self(1);
    pub(crate) const OUT_OF_MEMORY: Self = Self(2);
    pub(crate) const NOT_INITIALIZED: Self = Self(3);
    pub(crate) const DEINITIALIZED: Self = Self(4);
    pub(crate) const NO_DEVICE: Self = Self(100);
    pub(crate) const INVALID_DEVICE: Self = Self(101);
    pub(crate) const INVALID_IMAGE: Self = Self(200);
    pub(crate) const INVALID_CONTEXT: Self = Self(201);
    pub(crate) const MAP_FAILED: Self = Self(205);
    pub(crate) const UNSUPPORTED_LIMIT: Self = Self(215);
    pub(crate) const INVALID_PTX: Self = Self(218);
    pub(crate) const NO_BINARY_FOR_GPU: Self = Self(209);
    pub(crate) const UNSUPPORTED_PTX_VERSION: Self = Self(222);
    pub(crate) const FILE_NOT_FOUND: Self = Self(301);
    pub(crate) const OPERATING_SYSTEM: Self = Self(304);
    pub(crate) const INVALID_HANDLE: Self = Self(400);
    pub(crate) const NOT_FOUND: Self = Self(500);
    pub(crate) const NOT_READY: Self = Self(600);
    pub(crate) const ILLEGAL_ADDRESS: Self = Self(700);
    pub(crate) const LAUNCH_OUT_OF_RESOURCES: Self = Self(701);
    pub(crate) const LAUNCH_TIMEOUT: Self = Self(702);
    pub(crate) const PEER_ACCESS_ALREADY_ENABLED: Self = Self(704);
    pub(crate) const PEER_ACCESS_NOT_ENABLED: Self = Self(705);
    pub(crate) const CONTEXT_IS_DESTROYED: Self = Self(709);
    pub(crate) const HOST_MEMORY_ALREADY_REGISTERED: Self = Self(712);
    pub(crate) const HOST_MEMORY_NOT_REGISTERED: Self = Self(713);
    pub(crate) const MISALIGNED_ADDRESS: Self = Self(716);
    pub(crate) const INVALID_ADDRESS_SPACE: Self = Self(717);
    pub(crate) const LAUNCH_FAILED: Self = Self(719);
    pub(crate) const COOPERATIVE_LAUNCH_TOO_LARGE: Self = Self(720);
    pub(crate) const NOT_PERMITTED: Self = Self(800);
    pub(crate) const NOT_SUPPORTED: Self = Self(801);
    pub(crate) const INVALID_CLUSTER_SIZE: Self = Self(912);
    pub(crate) const UNKNOWN: Self = Self(999);
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

/// All codes in cuda.h with their names and descriptions.
const CODES: &[(c_int, &CStr, &CStr)] = &[
    (0, c"CUDA_SUCCESS", c"no error"),
    (1, c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
    (2, c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
    (3, c"CUDA_ERROR_NOT_INITIALIZED", c"the driver is not initialized: call cuInit"),
    (4, c"CUDA_ERROR_DEINITIALIZED", c"the driver is shutting down"),
    (5, c"CUDA_ERROR_PROFILER_DISABLED", ELSEWHERE),
    (6, c"CUDA_ERROR_PROFILER_NOT_INITIALIZED", ELSEWHERE),
    (7, c"CUDA_ERROR_PROFILER_ALREADY_STARTED", ELSEWHERE),
    (8, c"CUDA_ERROR_PROFILER_ALREADY_STOPPED", ELSEWHERE),
    (34, c"CUDA_ERROR_STUB_LIBRARY", c"the library is a stub"),
    (36, c"CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER", c"the call needs a newer driver"),
    (46, c"CUDA_ERROR_DEVICE_UNAVAILABLE", c"the device is unavailable"),
    (47, c"CUDA_ERROR_MULTICAST_RESOURCE_FULL", ELSEWHERE),
    (100, c"CUDA_ERROR_NO_DEVICE", c"no CUDA-capable device is detected"),
    (101, c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
    (102, c"CUDA_ERROR_DEVICE_NOT_LICENSED", ELSEWHERE),
    (200, c"CUDA_ERROR_INVALID_IMAGE", c"the image of the kernel is invalid"),
    (201, c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
    (202, c"CUDA_ERROR_CONTEXT_ALREADY_CURRENT", ELSEWHERE),
    (205, c"CUDA_ERROR_MAP_FAILED", c"mapping failed"),
    (206, c"CUDA_ERROR_UNMAP_FAILED", c"unmapping failed"),
    (207, c"CUDA_ERROR_ARRAY_IS_MAPPED", ELSEWHERE),
    (208, c"CUDA_ERROR_ALREADY_MAPPED", c"already mapped"),
    (209, c"CUDA_ERROR_NO_BINARY_FOR_GPU", c"there is no image of the kernel for this device"),
    (210, c"CUDA_ERROR_ALREADY_ACQUIRED", ELSEWHERE),
    (211, c"CUDA_ERROR_NOT_MAPPED", c"not mapped"),
    (212, c"CUDA_ERROR_NOT_MAPPED_AS_ARRAY", ELSEWHERE),
    (213, c"CUDA_ERROR_NOT_MAPPED_AS_POINTER", ELSEWHERE),
    (214, c"CUDA_ERROR_ECC_UNCORRECTABLE", ELSEWHERE),
    (215, c"CUDA_ERROR_UNSUPPORTED_LIMIT", c"the limit is not supported"),
    (216, c"CUDA_ERROR_CONTEXT_ALREADY_IN_USE", c"the context is in use"),
    (217, c"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", c"peer access between the two devices is not supported"),
    (218, c"CUDA_ERROR_INVALID_PTX", c"the PTX is invalid"),
    (219, c"CUDA_ERROR_INVALID_GRAPHICS_CONTEXT", ELSEWHERE),
    (220, c"CUDA_ERROR_NVLINK_UNCORRECTABLE", ELSEWHERE),
    (221, c"CUDA_ERROR_JIT_COMPILER_NOT_FOUND", c"no PTX compiler is found"),
    (222, c"CUDA_ERROR_UNSUPPORTED_PTX_VERSION", c"the PTX has a version that is not supported"),
    (223, c"CUDA_ERROR_JIT_COMPILATION_DISABLED", ELSEWHERE),
    (224, c"CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY", ELSEWHERE),
    (225, c"CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC", ELSEWHERE),
    (226, c"CUDA_ERROR_CONTAINED", ELSEWHERE),
    (227, c"CUDA_ERROR_INSUFFICIENT_LOADER_VERSION", ELSEWHERE),
    (300, c"CUDA_ERROR_INVALID_SOURCE", c"the source is invalid"),
    (301, c"CUDA_ERROR_FILE_NOT_FOUND", c"the file is not found"),
    (302, c"CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND", c"a symbol of a shared object is not found"),
    (303, c"CUDA_ERROR_SHARED_OBJECT_INIT_FAILED", c"the initialization of a shared object failed"),
    (304, c"CUDA_ERROR_OPERATING_SYSTEM", c"a system call failed"),
    (400, c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
    (401, c"CUDA_ERROR_ILLEGAL_STATE", c"a resource is in the wrong state for the call"),
    (402, c"CUDA_ERROR_LOSSY_QUERY", ELSEWHERE),
    (500, c"CUDA_ERROR_NOT_FOUND", c"the named symbol is not found"),
    (600, c"CUDA_ERROR_NOT_READY", c"the work is not finished"),
    (700, c"CUDA_ERROR_ILLEGAL_ADDRESS", c"a kernel accessed memory that it may not access"),
    (701, c"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", c"the launch needs more resources than the device has"),
    (702, c"CUDA_ERROR_LAUNCH_TIMEOUT", c"the kernel ran longer than the watchdog allows"),
    (703, c"CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING", ELSEWHERE),
    (704, c"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", c"peer access is already enabled"),
    (705, c"CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", c"peer access is not enabled"),
    (708, c"CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE", c"the primary context is active"),
    (709, c"CUDA_ERROR_CONTEXT_IS_DESTROYED", c"the context is destroyed"),
    (710, c"CUDA_ERROR_ASSERT", c"an assertion of a kernel failed"),
    (711, c"CUDA_ERROR_TOO_MANY_PEERS", c"peer access is enabled to too many devices"),
    (712, c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", c"the host memory is already registered"),
    (713, c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", c"the host memory is not registered"),
    (714, c"CUDA_ERROR_HARDWARE_STACK_ERROR", c"a kernel's call stack is corrupt"),
    (715, c"CUDA_ERROR_ILLEGAL_INSTRUCTION", c"a kernel executed an illegal instruction"),
    (716, c"CUDA_ERROR_MISALIGNED_ADDRESS", c"a kernel used a misaligned address"),
    (717, c"CUDA_ERROR_INVALID_ADDRESS_SPACE", c"a kernel used an address outside the instruction's address space"),
    (718, c"CUDA_ERROR_INVALID_PC", c"a kernel's program counter is invalid"),
    (719, c"CUDA_ERROR_LAUNCH_FAILED", c"a kernel ended with an exception"),
    (
        720,
        c"CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE",
        c"the cooperative launch has more blocks than the device holds at once",
    ),
    (721, c"CUDA_ERROR_TENSOR_MEMORY_LEAK", ELSEWHERE),
    (800, c"CUDA_ERROR_NOT_PERMITTED", c"the operation is not permitted"),
    (801, c"CUDA_ERROR_NOT_SUPPORTED", c"the operation is not supported"),
    (802, c"CUDA_ERROR_SYSTEM_NOT_READY", ELSEWHERE),
    (803, c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", ELSEWHERE),
    (804, c"CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", ELSEWHERE),
    (805, c"CUDA_ERROR_MPS_CONNECTION_FAILED", ELSEWHERE),
    (806, c"CUDA_ERROR_MPS_RPC_FAILURE", ELSEWHERE),
    (807, c"CUDA_ERROR_MPS_SERVER_NOT_READY", ELSEWHERE),
    (808, c"CUDA_ERROR_MPS_MAX_CLIENTS_REACHED", ELSEWHERE),
    (809, c"CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED", ELSEWHERE),
    (810, c"CUDA_ERROR_MPS_CLIENT_TERMINATED", ELSEWHERE),
    (811, c"CUDA_ERROR_CDP_NOT_SUPPORTED", ELSEWHERE),
    (812, c"CUDA_ERROR_CDP_VERSION_MISMATCH", ELSEWHERE),
    (900, c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", c"the operation is not permitted while a stream is captured"),
    (901, c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", ELSEWHERE),
    (902, c"CUDA_ERROR_STREAM_CAPTURE_MERGE", ELSEWHERE),
    (903, c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", ELSEWHERE),
    (904, c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED", ELSEWHERE),
    (905, c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION", ELSEWHERE),
    (906, c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", ELSEWHERE),
    (907, c"CUDA_ERROR_CAPTURED_EVENT", ELSEWHERE),
    (908, c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", ELSEWHERE),
    (909, c"CUDA_ERROR_TIMEOUT", c"the wait timed out"),
    (910, c"CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE", ELSEWHERE),
    (911, c"CUDA_ERROR_EXTERNAL_DEVICE", ELSEWHERE),
    (912, c"CUDA_ERROR_INVALID_CLUSTER_SIZE", c"the grid can't have clusters of this size"),
    (913, c"CUDA_ERROR_FUNCTION_NOT_LOADED", ELSEWHERE),
    (914, c"CUDA_ERROR_INVALID_RESOURCE_TYPE", ELSEWHERE),
    (915, c"CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION", ELSEWHERE),
    (916, c"CUDA_ERROR_KEY_ROTATION", ELSEWHERE),
    (917, c"CUDA_ERROR_STREAM_DETACHED", ELSEWHERE),
    (918, c"CUDA_ERROR_GRAPH_RECAPTURE_FAILURE", ELSEWHERE),
    (919, c"CUDA_ERROR_FABRIC_NOT_READY", ELSEWHERE),
    (999, c"CUDA_ERROR_UNKNOWN", c"unknown error"),
];

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
