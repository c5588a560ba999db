"""The device API for Triton kernels, compiled into them from LLVM bitcode.

    kernel[grid](..., extern_libs=ferrogin.triton.extern_libs())

Each operation belongs to the whole program (thread block): all of its threads synchronise, one thread makes the call, and all threads get
its status, an `fgin_status`. So a program may call it anywhere except in code that only some of its warps run. Addresses of contexts and
windows are int64 (`Context.handle`, `Window.handle`). docs/python.md has an example.
"""

from __future__ import annotations

from typing import Any, Callable

import triton
import triton.language as tl
from triton.language import core

from ferrogin import paths

if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7):
    raise ImportError(f"ferrogin.triton needs Triton 3.7 or newer, and this is {triton.__version__}: its LLVM does not read the bitcode")

AGGREGATE = tl.constexpr(2)
"""The flag that leaves the doorbell to a later operation."""
STRONG = tl.constexpr(0x400)
"""The flag for an emulated signal that arrives after all earlier operations of the context to that peer."""


def extern_libs() -> dict[str, str]:
    """The `extern_libs` option for a kernel that calls functions of this module."""
    return {"ferrogin": str(paths.bitcode())}


def _function(symbol: str, *types: Any) -> Callable[..., Any]:
    """Declares a C function of the bitcode, as called by one thread. It returns an int32."""

    def function(*arguments: Any, _semantic: Any = None) -> Any:
        values = [_semantic.cast(_semantic.to_tensor(value), kind) for value, kind in zip(arguments, types)]
        return core.extern_elementwise("", "", values, {types: (symbol, core.int32)}, is_pure=False, _semantic=_semantic)

    return core.extern(function)


_i32, _i64 = core.int32, core.int64
_open = _function("fgin_open", _i64, _i32, _i64)
_put = _function("fgin_put", _i64, _i32, _i64, _i64, _i64, _i64, _i64, _i64, _i32)
_put_value = _function("fgin_put_value", _i64, _i32, _i64, _i64, _i64, _i32, _i64, _i32)
_get = _function("fgin_get", _i64, _i32, _i64, _i64, _i64, _i64, _i64, _i32)
_signal = _function("fgin_signal", _i64, _i32, _i64, _i32)
_put_signal_at = _function("fgin_put_signal_at", _i64, _i32, _i64, _i64, _i64, _i64, _i64, _i64, _i64, _i64, _i64, _i32)
_put_value_signal_at = _function("fgin_put_value_signal_at", _i64, _i32, _i64, _i64, _i64, _i32, _i64, _i64, _i64, _i32)
_signal_at = _function("fgin_signal_at", _i64, _i32, _i64, _i64, _i64, _i32)
_ring = _function("fgin_ring", _i64)
_flush = _function("fgin_flush", _i64)
_set_timeout = _function("fgin_set_timeout", _i64, _i64)
_read_signal = _function("fgin_read_signal", _i64, _i32, _i64)
_wait_signal = _function("fgin_wait_signal", _i64, _i32, _i64)
_reset_signal = _function("fgin_reset_signal", _i64, _i32)
_read_counter = _function("fgin_read_counter", _i64, _i32, _i64)
_wait_counter = _function("fgin_wait_counter", _i64, _i32, _i64)
_reset_counter = _function("fgin_reset_counter", _i64, _i32)


@triton.jit
def _is_first():
    """Waits at a barrier, then is true in thread 0 of the program. The card sends what any of its threads wrote before."""
    tl.debug_barrier()
    thread = tl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)
    return thread == 0


# A status has three bits, and a barrier with a reduction passes one on. It isn't `.aligned`: the compiler may move a
# copy of the instructions into both branches of the call.
_TO_ALL = tl.constexpr(
    """
    {
        .reg .pred bit<3>;
        .reg .b32 part<3>;
        and.b32 part0, $1, 1;
        and.b32 part1, $1, 2;
        and.b32 part2, $1, 4;
        setp.ne.b32 bit0, part0, 0;
        setp.ne.b32 bit1, part1, 0;
        setp.ne.b32 bit2, part2, 0;
        barrier.red.or.pred bit0, 0, bit0;
        barrier.red.or.pred bit1, 0, bit1;
        barrier.red.or.pred bit2, 0, bit2;
        selp.b32 part0, 1, 0, bit0;
        selp.b32 part1, 2, 0, bit1;
        selp.b32 part2, 4, 0, bit2;
        or.b32 part0, part0, part1;
        or.b32 $0, part0, part2;
    }
    """
)


@triton.jit
def _to_all(status):
    """The status of thread 0, in all threads."""
    return tl.inline_asm_elementwise(_TO_ALL, "=r,r", [status], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _by_one_thread(function, arguments):
    """Calls the function in thread 0, and returns its status in all threads."""
    status = 0
    if _is_first():
        status = function(*arguments)
    return _to_all(status)


@triton.jit
def signal_add(signal, add):
    """The action that raises a peer's signal by `add`, below 2^32. Combine actions with |. Operations refuse ids above 65533."""
    return (tl.cast(add, tl.int64) << 32) | tl.minimum(tl.cast(signal, tl.int64) + 1, 65535)


@triton.jit
def signal_inc(signal):
    """The action that raises a peer's signal by one."""
    return signal_add(signal, 1)


@triton.jit
def counter_inc(counter):
    """The action that raises one of this rank's counters by one."""
    return tl.minimum(tl.cast(counter, tl.int64) + 1, 65535) << 16


@triton.jit
def open(handle, context_id, scratch):
    """Returns the address of context `context_id`, which the other functions take, or 0 if there is no such context.

    `handle` is `Context.handle`; `scratch` is a pointer to an int64 in GPU memory that starts as 0 and that no other handle uses.
    """
    _by_one_thread(_open, (handle, context_id, scratch))
    return tl.load(scratch, volatile=True)


@triton.jit
def put(context, peer, dst, dst_offset, src, src_offset, nbytes, action=0, flags=0):
    """Writes bytes from this rank's window `src` to `peer`'s window `dst`."""
    return _by_one_thread(_put, (context, peer, dst, dst_offset, src, src_offset, nbytes, action, flags))


@triton.jit
def put_value(context, peer, dst, dst_offset, value, nbytes=8, action=0, flags=0):
    """Writes the low 1, 2, 4 or 8 bytes of the integer `value` to `peer`'s window `dst`; `action` names no counter."""
    return _by_one_thread(_put_value, (context, peer, dst, dst_offset, value, nbytes, action, flags))


@triton.jit
def get(context, peer, remote, remote_offset, local, local_offset, nbytes, flags=0):
    """Reads bytes from `peer`'s window `remote` into this rank's window `local`; they have arrived after `flush`."""
    return _by_one_thread(_get, (context, peer, remote, remote_offset, local, local_offset, nbytes, flags))


@triton.jit
def signal(context, peer, action, flags=0):
    """Performs `action` on `peer`, without sending bytes."""
    return _by_one_thread(_signal, (context, peer, action, flags))


@triton.jit
def put_signal_at(context, peer, dst, dst_offset, src, src_offset, nbytes, word, word_offset, add, counter=0, flags=0):
    """Does a `put`, then adds `add` to the 8 bytes at `word_offset` in `peer`'s window `word`; `counter` is an action or 0."""
    return _by_one_thread(_put_signal_at, (context, peer, dst, dst_offset, src, src_offset, nbytes, word, word_offset, add, counter, flags))


@triton.jit
def put_value_signal_at(context, peer, dst, dst_offset, value, nbytes, word, word_offset, add, flags=0):
    """Does a `put_value`, then adds `add` to the 8 bytes at `word_offset` in `peer`'s window `word`."""
    return _by_one_thread(_put_value_signal_at, (context, peer, dst, dst_offset, value, nbytes, word, word_offset, add, flags))


@triton.jit
def signal_at(context, peer, word, word_offset, add, flags=0):
    """Adds `add` to the 8 bytes at `word_offset` in `peer`'s window `word`."""
    return _by_one_thread(_signal_at, (context, peer, word, word_offset, add, flags))


@triton.jit
def ring(context):
    """Rings the doorbells that operations with the aggregate flag left, on all queues, and doesn't wait."""
    return _by_one_thread(_ring, (context,))


@triton.jit
def flush(context):
    """Waits until every earlier operation on the context has completed."""
    return _by_one_thread(_flush, (context,))


@triton.jit
def set_timeout(context, ns):
    """Makes later waits on the context fail after `ns` nanoseconds; 0 is no limit."""
    return _by_one_thread(_set_timeout, (context, ns))


@triton.jit
def read_signal(context, number, out):
    """Writes a signal's count to the int64 that `out` points to."""
    return _by_one_thread(_read_signal, (context, number, out))


@triton.jit
def wait_signal(context, number, least):
    """Waits until a signal's count is at least `least`, modulo 2^31, or 2^64 for an emulated signal."""
    return _by_one_thread(_wait_signal, (context, number, least))


@triton.jit
def reset_signal(context, number):
    """Sets a signal's count to 0."""
    return _by_one_thread(_reset_signal, (context, number))


@triton.jit
def read_counter(context, number, out):
    """Writes a counter's count to the int64 that `out` points to."""
    return _by_one_thread(_read_counter, (context, number, out))


@triton.jit
def wait_counter(context, number, least):
    """Waits until a counter's count is at least `least`, modulo 2^31."""
    return _by_one_thread(_wait_counter, (context, number, least))


@triton.jit
def reset_counter(context, number):
    """Sets a counter's count to 0."""
    return _by_one_thread(_reset_counter, (context, number))
