"""Numba kernels linked with the PTX, without a GPU."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
from conftest import EXAMPLES
from test_package import declarations

cuda = pytest.importorskip("numba.cuda")
pytest.importorskip("cuda.bindings.nvjitlink")
sys.path.insert(0, str(EXAMPLES))

import ferrogin.numba as gin  # noqa: E402
import ferrogin.paths  # noqa: E402
import numba_kernel  # noqa: E402
from numba import types  # noqa: E402


def check(kernel: Any, signature: Any, functions: set[str]) -> None:
    ptx, cubin = numba_kernel.compile_for(kernel, signature, (9, 0))
    assert re.search(r"\.target sm_90\b", ptx)
    assert set(re.findall(r"\.extern \.func .*? (\w+)\s*\n?\(", ptx)) == functions
    assert cubin.startswith(b"\x7fELF") and all(name.encode() in cubin for name in functions)


def test_kernel_compiles_and_links_for_sm_90() -> None:
    check(numba_kernel.send, numba_kernel.SIGNATURE, {"fgin_open", "fgin_put", "fgin_flush"})


def every_function(context, peer, window, statuses):  # type: ignore[no-untyped-def]
    out = cuda.local.array(2, types.uint64)
    request = cuda.local.array(32, types.uint32)
    done = cuda.local.array(1, types.int32)
    pointer, words = numba_kernel.ffi.from_buffer(out), numba_kernel.ffi.from_buffer(request)
    statuses[0] = gin.put_value(context, peer, window, 0, 5, 8, numba_kernel.ACTION, gin.AGGREGATE)
    statuses[1] = gin.get(context, peer, window, 0, window, 8, 8, gin.DEFAULT)
    statuses[2] = gin.signal(context, peer, numba_kernel.ACTION, gin.DEFAULT)
    statuses[3] = gin.flush_part(context, 0, 1)
    statuses[4] = gin.flush_async(context, words)
    statuses[5] = gin.test_request(context, words, numba_kernel.ffi.from_buffer(done))
    statuses[6] = gin.wait_request(context, words)
    statuses[7] = gin.set_timeout(context, 5)
    statuses[8] = gin.read_signal(context, 0, pointer)
    statuses[9] = gin.wait_signal(context, 0, 1)
    statuses[10] = gin.reset_signal(context, 0)
    statuses[11] = gin.read_counter(context, 0, pointer)
    statuses[12] = gin.wait_counter(context, 0, 1)
    statuses[13] = gin.reset_counter(context, 0)
    lanes = types.uint32(1)
    statuses[14] = gin.warp_put(context, lanes, peer, window, 0, window, 8, 8, numba_kernel.ACTION, gin.DEFAULT)
    statuses[15] = gin.warp_put_value(context, lanes, peer, window, 0, 5, 8, numba_kernel.ACTION, gin.AGGREGATE)
    statuses[16] = gin.warp_signal(context, lanes, peer, numba_kernel.ACTION, gin.DEFAULT)
    statuses[17] = gin.ring(context)
    statuses[18] = gin.put_signal_at(context, peer, window, 0, window, 8, 8, window, 16, 5, 0, gin.STRONG)
    statuses[19] = gin.put_value_signal_at(context, peer, window, 0, 5, 8, window, 16, 5, gin.DEFAULT)
    statuses[20] = gin.signal_at(context, peer, window, 16, 5, gin.DEFAULT)
    statuses[21] = gin.settle(context)


def test_every_function_compiles_and_links() -> None:
    signature = types.void(types.uint64, types.uint32, types.uint64, types.int32[::1])
    names = set(declarations("gin.h")) - {"fgin_open", "fgin_put", "fgin_flush", "fgin_status_name"}
    check(every_function, signature, names)


def test_declarations_are_those_of_the_header() -> None:
    with open(gin.__file__) as file:
        source = file.read()
    found = {symbol: arguments.count(", ") + 1 for symbol, arguments in re.findall(r'_function\("(\w+)", (.*)\)\n', source)}
    # Status names are for host programs.
    assert {**found, "fgin_status_name": 1} == declarations("gin.h")
    assert (gin.signal_add(3, 7), gin.signal_inc(0), gin.counter_inc(2)) == (7 << 32 | 4, 1 << 32 | 1, 3 << 16)
    assert gin.signal_inc(65533) == 1 << 32 | 65534
    for wrong in (lambda: gin.signal_inc(65534), lambda: gin.signal_add(0, 1 << 32), lambda: gin.counter_inc(1 << 16)):
        with pytest.raises(ValueError, match="pass"):
            wrong()


def test_kernel_without_the_module_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import nvjitlink

    # Some other PTX instead of the module.
    monkeypatch.setattr(ferrogin.paths, "ptx", lambda: numba_kernel_without_functions)
    with pytest.raises(nvjitlink.nvJitLinkError):
        numba_kernel.compile_for(numba_kernel.send, numba_kernel.SIGNATURE, (9, 0))


class _Text:
    def read_bytes(self) -> bytes:
        return b".version 8.2\n.target sm_70\n.address_size 64\n"


numba_kernel_without_functions = _Text()
