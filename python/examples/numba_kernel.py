"""A Numba kernel that doubles an array and sends it to a peer, compiled and linked without a GPU."""

import cffi
import ferrogin.numba as gin
import ferrogin.paths
from cuda.bindings import nvjitlink
from numba import cuda, types

ffi = cffi.FFI()
ACTION = gin.signal_inc(0)


def send(array, handle, peer, window, status):
    thread = cuda.threadIdx.x
    for i in range(thread, array.size, cuda.blockDim.x):
        array[i] *= 2
    cuda.syncthreads()
    if thread == 0:
        out = cuda.local.array(1, types.uint64)
        result = gin.open(handle, 0, ffi.from_buffer(out))
        if result == 0:
            # The window begins at the array, on each rank.
            result = gin.put(out[0], peer, window, 0, window, 0, array.size * 4, ACTION, gin.DEFAULT)
            result |= gin.flush(out[0])
        status[0] = result


def compile_for(kernel, signature, capability):
    """PTX and cubin for a GPU that need not be there. A launch is `cuda.jit(kernel)[1, threads](...)`, which links by itself."""
    ptx, _ = cuda.compile_ptx(kernel, signature, cc=capability)
    linker = nvjitlink.create(1, [f"-arch=sm_{capability[0]}{capability[1]}"])
    try:
        for name, text in (("kernel", ptx.encode()), ("ferrogin", ferrogin.paths.ptx().read_bytes())):
            nvjitlink.add_data(linker, nvjitlink.InputType.PTX, text + b"\0", len(text) + 1, name)
        nvjitlink.complete(linker)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(linker))
        nvjitlink.get_linked_cubin(linker, cubin)
    finally:
        nvjitlink.destroy(linker)
    return ptx, bytes(cubin)


SIGNATURE = types.void(types.float32[::1], types.uint64, types.uint32, types.uint64, types.int32[::1])

if __name__ == "__main__":
    ptx, cubin = compile_for(send, SIGNATURE, (9, 0))
    print(f"the cubin for sm_90 has {len(cubin)} bytes")
