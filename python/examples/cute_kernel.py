"""A CuTe kernel that sends an array to a peer, linked with the bitcode and compiled without a GPU."""

import os
import sys

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90")
import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_ptr

# The argument is what `python -m ferrogin bitcode` prints.
DEVICE_CODE = cute.BitCode(sys.argv[1])
# An action is {signal + 1, counter + 1, add} in 16, 16 and 32 bits: this one raises signal 0 by 1.
RAISE_SIGNAL_0 = 1 << 32 | 1


@cute.extern(name="fgin_open", source=DEVICE_CODE)
def fgin_open(handle: cute.Pointer, context: cutlass.Int32, out: cute.Pointer) -> cutlass.Int32: ...


@cute.extern(name="fgin_put", source=DEVICE_CODE)
def fgin_put(
    context: cute.Pointer,
    peer: cutlass.Int32,
    dst: cute.Pointer,
    dst_offset: cutlass.Int64,
    src: cute.Pointer,
    src_offset: cutlass.Int64,
    nbytes: cutlass.Int64,
    action: cutlass.Int64,
    flags: cutlass.Int32,
) -> cutlass.Int32: ...


@cute.extern(name="fgin_flush", source=DEVICE_CODE)
def fgin_flush(context: cute.Pointer) -> cutlass.Int32: ...


@cute.kernel
def send(handle: cute.Pointer, out: cute.Pointer, peer: cutlass.Int32, window: cute.Pointer, nbytes: cutlass.Int64, status: cute.Pointer):
    # One thread. `out` is an int64 in GPU memory.
    result = cute.make_tensor(status, 1)
    result[0] = fgin_open(handle, cutlass.Int32(0), out)
    if result[0] == 0:
        context = cute.make_ptr(cutlass.Int8, cute.make_tensor(out, 1)[0], cute.AddressSpace.generic)
        start = cutlass.Int64(0)
        posted = fgin_put(context, peer, window, start, window, start, nbytes, cutlass.Int64(RAISE_SIGNAL_0), cutlass.Int32(0))
        result[0] = posted | fgin_flush(context)


@cute.jit
def launch(handle: cute.Pointer, out: cute.Pointer, peer: cutlass.Int32, window: cute.Pointer, nbytes: cutlass.Int64, status: cute.Pointer):
    send(handle, out, peer, window, nbytes, status).launch(grid=[1, 1, 1], block=[1, 1, 1])


if __name__ == "__main__":
    # The addresses of a launch: `context.handle`, `window.handle`, and two of GPU memory.
    byte, word, number = (make_ptr(of, 0, cute.AddressSpace.generic) for of in (cutlass.Int8, cutlass.Int64, cutlass.Int32))
    cute.compile(launch, byte, word, cutlass.Int32(0), byte, cutlass.Int64(0), number)
    print(f"compiled for {os.environ['CUTE_DSL_ARCH']}")
