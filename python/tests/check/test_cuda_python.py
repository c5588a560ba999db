"""A program that uses NVIDIA's Python bindings of the driver API runs on the software GPU: it loads PTX, copies and launches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import HANG_LIMIT

pytest.importorskip("cuda.bindings.driver")

ROOT = Path(__file__).resolve().parents[3]
GPU = Path(os.environ.get("FERROGIN_DIST", ROOT / "dist")) / "gpu"

PROGRAM = """
import ctypes, sys
from cuda.bindings import driver

def call(function, *arguments):
    code, *results = function(*arguments)
    assert code == driver.CUresult.CUDA_SUCCESS, f"{function.__name__}: {code}"
    return results[0] if len(results) == 1 else results

call(driver.cuInit, 0)
device = call(driver.cuDeviceGet, 0)
print(call(driver.cuDeviceGetName, 64, device).split(b"\\0")[0].decode())
call(driver.cuCtxSetCurrent, call(driver.cuDevicePrimaryCtxRetain, device))
library = call(driver.cuLibraryLoadFromFile, sys.argv[1].encode(), [], [], 0, [], [], 0)
kernel = call(driver.cuKernelGetFunction, call(driver.cuLibraryGetKernel, library, b"scale"))
stream = call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
count = 1000
numbers, results = (ctypes.c_uint32 * count)(*range(count)), (ctypes.c_uint32 * count)()
to, source = (call(driver.cuMemAllocAsync, 4 * count, stream) for _ in range(2))
call(driver.cuMemcpyHtoDAsync, source, ctypes.addressof(numbers), 4 * count, stream)
parameters = ((to, source, count), (None, None, ctypes.c_uint32))
call(driver.cuLaunchKernel, kernel, 8, 1, 1, 128, 1, 1, 0, stream, parameters, 0)
call(driver.cuMemcpyDtoHAsync, ctypes.addressof(results), to, 4 * count, stream)
call(driver.cuMemFreeAsync, to, stream)
call(driver.cuMemFreeAsync, source, stream)
call(driver.cuStreamSynchronize, stream)
call(driver.cuLibraryUnload, library)
print(sum(results[i] == 4 * i for i in range(count)), "right")
"""


def test_program_of_cuda_python_runs_on_software_gpu():
    if not (GPU / "libcuda.so.1").exists():
        pytest.skip(f"{GPU} lacks libcuda.so.1: run make build")
    settings = {**os.environ, "LD_LIBRARY_PATH": str(GPU), "SOFTGPU_NAME": "a GPU of this test"}
    command = [sys.executable, "-c", PROGRAM, str(ROOT / "emulators/soft-gpu/tests/kernels.ptx")]
    result = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=2 * HANG_LIMIT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["a GPU of this test", "1000 right"], result.stderr
