"""A rank of a job on the software GPU: rank 0's kernel sends an array to rank 1, whose kernel waits for it. Both are linked by llvmlite."""

import ctypes
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "python/examples"))
import ferrogin  # noqa: E402
import ferrogin.paths  # noqa: E402
import llvmlite_kernel  # noqa: E402

NBYTES = 4096
RECEIVE = """
declare i32 @fgin_wait_signal(ptr, i32, i64)

define ptx_kernel void @receive(ptr %handle, ptr %status) {
  %context = alloca ptr
  %opened = call i32 @fgin_open(ptr %handle, i32 0, ptr %context)
  %at = load ptr, ptr %context
  %waited = call i32 @fgin_wait_signal(ptr %at, i32 0, i64 1)
  %both = or i32 %opened, %waited
  store i32 %both, ptr %status
  ret void
}
"""
driver = ctypes.CDLL("libcuda.so.1")


def call(name, *arguments):
    status = getattr(driver, name)(*arguments)
    if status:
        sys.exit(f"{name}: {status}")


def launch(ptx, kernel, arguments):
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), ptx.encode() + b"\0")
    call("cuModuleGetFunction", ctypes.byref(function), module, kernel)
    places = (ctypes.c_void_p * len(arguments))(*[ctypes.addressof(argument) for argument in arguments])
    call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, None, places, None)
    call("cuCtxSynchronize")


primary, status = ctypes.c_void_p(), ctypes.c_uint64()
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(primary), 0)
call("cuCtxSetCurrent", primary)
call("cuMemAlloc_v2", ctypes.byref(status), ctypes.c_size_t(4))
ptx = llvmlite_kernel.compile_for(llvmlite_kernel.SEND + RECEIVE, ferrogin.paths.bitcode().read_bytes(), "sm_90")
sent = bytes((7 * i + 1) % 251 for i in range(NBYTES))
with ferrogin.Comm.open_env() as comm, comm.allocate(NBYTES, ferrogin.Memory.DEVICE) as window, comm.context(signals=1) as context:
    array = ctypes.c_uint64(window.__cuda_array_interface__["data"][0])
    handle = ctypes.c_uint64(context.handle)
    call("cuMemcpyHtoD_v2", array, sent if comm.rank == 0 else bytes(NBYTES), ctypes.c_size_t(NBYTES))
    comm.barrier()
    if comm.rank == 0:
        launch(ptx, b"send", [handle, ctypes.c_uint32(1), ctypes.c_uint64(window.handle), ctypes.c_uint64(NBYTES), status])
    else:
        launch(ptx, b"receive", [handle, status])
    result, received = ctypes.c_int32(-1), ctypes.create_string_buffer(NBYTES)
    call("cuMemcpyDtoH_v2", ctypes.byref(result), status, ctypes.c_size_t(4))
    call("cuMemcpyDtoH_v2", received, array, ctypes.c_size_t(NBYTES))
    comm.barrier()
    if result.value or received.raw != sent:
        sys.exit(f"rank {comm.rank}: status {result.value}, {sum(a != b for a, b in zip(received.raw, sent))} bytes are wrong")
