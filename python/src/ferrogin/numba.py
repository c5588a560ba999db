"""The device API for Numba kernels: the functions of ferrogin/gin.h, linked from PTX.

Each function is a call of one thread and returns an `fgin_status`. Addresses of contexts and windows are uint64 (`Context.handle`,
`Window.handle`). An output is a pointer: `ffi.from_buffer(array)` of cffi. docs/python.md has an example.
"""

from __future__ import annotations

import inspect
from typing import Any

from numba import cuda, types

from ferrogin import paths

if "abi" not in inspect.signature(cuda.declare_device).parameters:
    raise ImportError("ferrogin.numba needs numba-cuda 0.28 or newer, which declares functions of the C ABI: pip install numba-cuda")

DEFAULT = 0
AGGREGATE = 2
"""The flag that leaves the doorbell to a later operation."""

_u32, _u64 = types.uint32, types.uint64
_out = types.CPointer(types.uint64)
_request = types.CPointer(types.uint32)


def _function(symbol: str, *arguments: Any) -> Any:
    return cuda.declare_device(symbol, types.int32(*arguments), link=[str(paths.ptx())], abi="c")


open = _function("fgin_open", _u64, _u32, _out)
put = _function("fgin_put", _u64, _u32, _u64, _u64, _u64, _u64, _u64, _u64, _u32)
put_value = _function("fgin_put_value", _u64, _u32, _u64, _u64, _u64, _u32, _u64, _u32)
get = _function("fgin_get", _u64, _u32, _u64, _u64, _u64, _u64, _u64, _u32)
signal = _function("fgin_signal", _u64, _u32, _u64, _u32)
warp_put = _function("fgin_warp_put", _u64, _u32, _u32, _u64, _u64, _u64, _u64, _u64, _u64, _u32)
warp_put_value = _function("fgin_warp_put_value", _u64, _u32, _u32, _u64, _u64, _u64, _u32, _u64, _u32)
warp_signal = _function("fgin_warp_signal", _u64, _u32, _u32, _u64, _u32)
ring = _function("fgin_ring", _u64)
flush = _function("fgin_flush", _u64)
flush_part = _function("fgin_flush_part", _u64, _u32, _u32)
flush_async = _function("fgin_flush_async", _u64, _request)
wait_request = _function("fgin_wait_request", _u64, _request)
test_request = _function("fgin_test_request", _u64, _request, types.CPointer(types.int32))
set_timeout = _function("fgin_set_timeout", _u64, _u64)
read_signal = _function("fgin_read_signal", _u64, _u32, _out)
wait_signal = _function("fgin_wait_signal", _u64, _u32, _u64)
reset_signal = _function("fgin_reset_signal", _u64, _u32)
read_counter = _function("fgin_read_counter", _u64, _u32, _out)
wait_counter = _function("fgin_wait_counter", _u64, _u32, _u64)
reset_counter = _function("fgin_reset_counter", _u64, _u32)


def signal_add(signal: int, add: int) -> int:
    """The action that raises a signal of the peer by `add`. Actions are combined with |. Kernels get the number as an argument."""
    return add << 32 | signal + 1


def signal_inc(signal: int) -> int:
    """The action that raises a signal of the peer by one."""
    return signal_add(signal, 1)


def counter_inc(counter: int) -> int:
    """The action that raises a counter of this rank by one."""
    return (counter + 1) << 16
