"""GPU memory, launches, and what NCCL would hand to the kernels of kernels.cu, through the CUDA driver API."""

import ctypes
import struct
import sys
from pathlib import Path

PROXY, GDAKI, GPI, EFA_GDA = 2, 3, 4, 5
_driver = ctypes.CDLL("libcuda.so.1")


def call(name, *arguments):
    status = getattr(_driver, name)(*arguments)
    if status:
        sys.exit(f"{name}: {status}")


def allocate(nbytes):
    """Zeroed memory."""
    address = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
    call("cuMemsetD8_v2", address, 0, ctypes.c_size_t(nbytes))
    return address


def store(address, data):
    call("cuMemcpyHtoD_v2", address, bytes(data), ctypes.c_size_t(len(data)))


def load(address, nbytes):
    out = ctypes.create_string_buffer(nbytes)
    call("cuMemcpyDtoH_v2", out, address, ctypes.c_size_t(nbytes))
    return out.raw


class Kernels:
    def __init__(self, ptx):
        primary, self.module = ctypes.c_void_p(), ctypes.c_void_p()
        call("cuInit", 0)
        call("cuDevicePrimaryCtxRetain", ctypes.byref(primary), 0)
        call("cuCtxSetCurrent", primary)
        call("cuModuleLoadData", ctypes.byref(self.module), Path(ptx).read_bytes() + b"\0")

    def launch(self, kernel, threads, *arguments):
        function = ctypes.c_void_p()
        call("cuModuleGetFunction", ctypes.byref(function), self.module, kernel.encode())
        places = (ctypes.c_void_p * len(arguments))(*[ctypes.addressof(argument) for argument in arguments])
        call("cuLaunchKernel", function, 1, 1, 1, threads, 1, 1, 0, None, places, None)
        call("cuCtxSynchronize")

    def set_up(self, rank, ranks, signals, backend, handle, window, memory):
        """A device communicator and a window."""
        given, comm, view = allocate(80), allocate(1024), allocate(1024)
        shadows, resources = allocate(8 * signals), allocate(4096)
        numbers = (rank, ranks, signals, 1, shadows.value, backend, handle, window, memory, resources.value)
        store(given, struct.pack("<10Q", *numbers))
        self.launch("set_up", 1, comm, view, given)
        return comm, view
