"""The device API for Numba kernels: the functions of ferrogin/gin.h, linked from PTX.

Each function is called by one thread and returns an `fgin_status`. Addresses of contexts and windows are uint64 (`Context.handle`,
`Window.handle`). Outputs are passed as pointers: cffi's `ffi.from_buffer(array)`. python/examples/numba_kernel.py is an example.
"""

from __future__ import annotations

import inspect
from typing import Any

from numba import cuda, types

from ferrogin import paths
from ferrogin._library import LAST_ID, unsigned

if "abi" not in inspect.signature(cuda.declare_device).parameters:
    raise ImportError("ferrogin.numba needs numba-cuda 0.28 or newer, which declares functions of the C ABI: pip install numba-cuda")

DEFAULT = 0
AGGREGATE = 2
"""The flag that leaves the doorbell to a later operation."""
STRONG = 0x400
"""The flag for an emulated signal that arrives after all earlier operations of the context to that peer."""

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
put_signal_at = _function("fgin_put_signal_at", _u64, _u32, _u64, _u64, _u64, _u64, _u64, _u64, _u64, _u64, _u64, _u32)
put_value_signal_at = _function("fgin_put_value_signal_at", _u64, _u32, _u64, _u64, _u64, _u32, _u64, _u64, _u64, _u32)
signal_at = _function("fgin_signal_at", _u64, _u32, _u64, _u64, _u64, _u32)
warp_put = _function("fgin_warp_put", _u64, _u32, _u32, _u64, _u64, _u64, _u64, _u64, _u64, _u32)
warp_put_value = _function("fgin_warp_put_value", _u64, _u32, _u32, _u64, _u64, _u64, _u32, _u64, _u32)
warp_signal = _function("fgin_warp_signal", _u64, _u32, _u32, _u64, _u32)
ring = _function("fgin_ring", _u64)
flush = _function("fgin_flush", _u64)
settle = _function("fgin_settle", _u64)
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
    """The action that raises a peer's signal by `add`. Combine actions with |. Kernels take the number as an argument.

    Raises `ValueError` for an id above 65533 or an `add` of more than 32 bits."""
    return unsigned("add", add, 32) << 32 | _slot("signal", signal)


def signal_inc(signal: int) -> int:
    """The action that raises a peer's signal by one."""
    return signal_add(signal, 1)


def counter_inc(counter: int) -> int:
    """The action that raises one of this rank's counters by one. Raises `ValueError` for an id above 65533."""
    return _slot("counter", counter) << 16


def _slot(kind: str, value: int) -> int:
    number = unsigned(kind, value, 16)
    if number > LAST_ID:
        raise ValueError(f"{kind} is {number}: pass at most {LAST_ID}")
    return number + 1
