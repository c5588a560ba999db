"""Posts one operation of each kind through another backend than EFA's: other_backend.py PTX BACKEND. Prints the requests in the proxy's queue."""

import ctypes
import struct
import sys

from driver import Kernels, allocate, load

RANKS, REQUESTS, REQUEST, INLINE = 2, 8, 128, 1 << 1


def fields(request):
    """What NCCL's gin_proxy_device_host_common.h defines. The other bits of a request are never written."""
    words = struct.unpack_from("<8Q", request)
    operation = words[7] >> 8 & 0xFFFF
    source = (words[1] >> 8 & (1 << 48) - 1, words[2] >> 8 & 0xFFFF) if operation & INLINE else words[1:3]
    return [words[0] & ~0x60, operation, *source, *words[3:6], words[6] >> 8 & (1 << 48) - 1]


kernels, backend = Kernels(sys.argv[1]), int(sys.argv[2])
proxy, queues, indices = allocate(256), allocate(RANKS * REQUESTS * REQUEST), allocate(4 * 4 * RANKS)
kernels.launch("set_up_proxy", 1, proxy, queues, indices, ctypes.c_int(RANKS))
comm, window = kernels.set_up(0, RANKS, 8, backend, proxy.value, 0x123456789A, 0, 1, proxy, 1)
kernels.launch("post_each", 1, comm, window)
(posted,) = struct.unpack_from("<I", load(indices, 8), 4)
requests = load(ctypes.c_uint64(queues.value + REQUESTS * REQUEST), posted * REQUEST)
for at in range(0, posted * REQUEST, REQUEST):
    print(" ".join(f"{field:x}" for field in fields(requests[at:])))
