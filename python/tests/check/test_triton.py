"""Triton kernels compiled with the bitcode, without a GPU."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import EXAMPLES
from test_package import declarations

# Triton's own default, without its warning.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
triton = pytest.importorskip("triton", minversion="3.7")
sys.path.insert(0, str(EXAMPLES))

import ferrogin.triton as gin  # noqa: E402
import triton.language as tl  # noqa: E402
import triton_kernel  # noqa: E402

TYPES = {"array": "*fp32", "handle": "i64", "scratch": "*i64", "peer": "i32", "window": "i64", "statuses": "*i32"}


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def check(compiled: Any, architecture: str) -> str:
    """Checks that all functions are in the module, with the fast path of a post. Returns the kernel's PTX."""
    ptx = compiled.asm["ptx"]
    assert re.search(rf"\.target {architecture}a?\b", ptx)
    assert ".extern .func" not in ptx and ".visible .func" not in ptx
    (kernel,) = re.findall(r"\.visible \.entry (?:.|\n)*?\n}\n", ptx)
    assert "st.mmio.relaxed.sys.global" in ptx, "the kernel writes no work request"
    # ptxas has resolved the kernel's calls.
    assert compiled.asm["cubin"].startswith(b"\x7fELF")
    return kernel


def test_kernel_compiles_for_sm_90_with_the_posts_inlined() -> None:
    compiled = triton_kernel.compile_for(triton_kernel.send, {**TYPES, "BLOCK": "constexpr"}, 90, BLOCK=1024)
    kernel = check(compiled, "sm_90")
    assert "st.mmio.relaxed.sys.global" in kernel, "the put is a call"
    # One thread posts, and all threads get the status of open, put and flush, each in three bits.
    assert kernel.count("%tid.x") >= 1 and kernel.count("barrier.red.or.pred") >= 9


@pytest.mark.parametrize("capability", [80, 120])
def test_kernel_compiles_for_other_gpus(capability: int) -> None:
    types = {"context": "i64", "peer": "i32", "window": "i64", "value": "i64", "statuses": "*i32"}
    check(triton_kernel.compile_for(triton_kernel.announce, types, capability), f"sm_{capability}")


@triton.jit
def every_function(handle, scratch, peer, window, out, statuses):
    context = gin.open(handle, 1, scratch)
    action = gin.signal_add(3, 7) | gin.counter_inc(2)
    status = gin.set_timeout(context, 1_000_000_000)
    status |= gin.put(context, peer, window, 0, window, 64, 64, action, gin.AGGREGATE)
    status |= gin.put_value(context, peer, window, 8, 5, 4, gin.signal_inc(1))
    status |= gin.get(context, peer, window, 0, window, 128, 64)
    status |= gin.signal(context, peer, gin.signal_inc(1))
    status |= gin.put_signal_at(context, peer, window, 0, window, 64, 64, window, 16, 5, 0, gin.STRONG)
    status |= gin.put_value_signal_at(context, peer, window, 8, 5, 4, window, 16, 5)
    status |= gin.signal_at(context, peer, window, 16, 5)
    status |= gin.wait_signal(context, 3, 7)
    status |= gin.wait_counter(context, 2, 1)
    status |= gin.read_signal(context, 3, out)
    status |= gin.read_counter(context, 2, out + 1)
    status |= gin.reset_signal(context, 3)
    status |= gin.reset_counter(context, 2)
    tl.store(statuses, status | gin.flush(context))


def test_every_function_compiles() -> None:
    types = {"handle": "i64", "scratch": "*i64", "peer": "i32", "window": "i64", "out": "*i64", "statuses": "*i32"}
    kernel = check(triton_kernel.compile_for(every_function, types, 90), "sm_90")
    # 16 functions pass on their status, in three bits each. A call whose type differs from its function's would end the
    # kernel.
    assert kernel.count("barrier.red.or.pred") == 3 * 16


@triton.jit
def no_status(context, peer, window):
    gin.put_value(context, peer, window, 0, 7)


def test_operation_whose_status_is_ignored_is_posted() -> None:
    types = {"context": "i64", "peer": "i32", "window": "i64"}
    check(triton_kernel.compile_for(no_status, types, 90), "sm_90")


def test_module_has_the_functions_of_the_header() -> None:
    headers = declarations("gin.h")
    source = Path(gin.__file__).read_text()
    found = {symbol: types.count(",") + 1 for symbol, types in re.findall(r'_function\("(\w+)", (.*?)\)', source)}
    assert len(found) >= 13
    assert found == {name: headers[name] for name in found}
    # A flush by one thread is enough for a program; requests make no sense in one, and lanes have no operations of
    # their own. A Triton program that isolates peers acknowledges the loss and flushes again.
    of_threads = {"fgin_settle", "fgin_flush_part", "fgin_flush_async", "fgin_wait_request", "fgin_test_request"}
    of_lanes = {"fgin_warp_put", "fgin_warp_put_value", "fgin_warp_signal"}
    assert headers.keys() - found.keys() == of_threads | of_lanes | {"fgin_status_name"}


def test_kernel_without_the_bitcode_is_refused() -> None:
    types = {"context": "i64", "peer": "i32", "window": "i64", "value": "i64", "statuses": "*i32"}
    source = triton.compiler.ASTSource(triton_kernel.announce, types)
    with pytest.raises(Exception, match="fgin_put_value|PTX"):
        triton.compile(source, target=triton.backends.compiler.GPUTarget("cuda", 90, 32))
