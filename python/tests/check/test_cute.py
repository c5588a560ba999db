"""A CuTe kernel compiled with the bitcode, without a GPU. It's only compiled: CuTe's licence allows its output on NVIDIA's GPUs alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ferrogin.paths
import pytest
from conftest import EXAMPLES

pytest.importorskip("cutlass.cute")


def compile_with(bitcode: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "cute_kernel.py"), str(bitcode)]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_kernel_compiles_for_sm_90() -> None:
    result = compile_with(ferrogin.paths.bitcode())
    assert result.returncode == 0 and result.stdout.endswith("compiled for sm_90\n"), result.stdout


def test_kernel_without_the_functions_is_refused(tmp_path: Path) -> None:
    # An empty module in LLVM's text form.
    empty = tmp_path / "empty.bc"
    empty.write_text('target triple = "nvptx64-nvidia-cuda"\n')
    result = compile_with(empty)
    assert result.returncode != 0 and "fgin_open" in result.stdout, result.stdout
