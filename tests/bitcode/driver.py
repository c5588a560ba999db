"""GPU memory, launches, and what NCCL would hand to the kernels of kernels.cu, through the CUDA driver API."""

import ctypes
import os
import socket
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


def allocate_flat(rank, ranks, barrier):
    """Memory of each rank of a node: rank i's is at the address that's returned, plus i times 4 GiB."""
    nbytes, device, posix_fd, read_write = 2 << 20, 1, 1, 3
    size, handle, base, fd = ctypes.c_size_t(nbytes), ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_int(-1)
    call("cuMemAddressReserve", ctypes.byref(base), ctypes.c_size_t(ranks << 32), ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0))
    call("cuMemCreate", ctypes.byref(handle), size, struct.pack("<4IQQ", 1, posix_fd, device, 0, 0, 0), ctypes.c_uint64(0))
    call("cuMemExportToShareableHandle", ctypes.byref(fd), handle, posix_fd, ctypes.c_uint64(0))
    # All ranks have the same parent.
    node, name = rank - rank % ranks, f"\0ferrogin-bitcode-{os.getppid()}-"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
        own.bind(name + str(rank))
        barrier()
        for peer in set(range(node, node + ranks)) - {rank}:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.connect(name + str(peer))
                socket.send_fds(sender, [struct.pack("<I", rank)], [fd.value])
        handles = {rank: handle}
        while len(handles) < ranks:
            message, (received,), _, _ = socket.recv_fds(own, 4, 1)
            handles[struct.unpack("<I", message)[0]] = imported = ctypes.c_uint64()
            call("cuMemImportFromShareableHandle", ctypes.byref(imported), ctypes.c_void_p(received), posix_fd)
        barrier()
    for peer, imported in handles.items():
        at = ctypes.c_uint64(base.value + ((peer - node) << 32))
        call("cuMemMap", at, size, ctypes.c_size_t(0), imported, ctypes.c_uint64(0))
        call("cuMemSetAccess", at, size, struct.pack("<3I", device, 0, read_write), ctypes.c_size_t(1))
    call("cuMemsetD8_v2", ctypes.c_uint64(base.value + ((rank - node) << 32)), 0, size)
    barrier()
    return base


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

    def set_up(self, rank, ranks, signals, backend, handle, window, memory, lsa_ranks, resources, stride):
        """A device communicator and a window; `resources` is `allocate_flat`'s."""
        given, comm, view, shadows = allocate(104), allocate(1024), allocate(1024), allocate(8 * signals)
        numbers = (rank, ranks, signals, 1, shadows.value, backend, handle, window, memory, rank % lsa_ranks, lsa_ranks, resources.value, stride)
        store(given, struct.pack("<13Q", *numbers))
        self.launch("set_up", 1, comm, view, given)
        return comm, view
