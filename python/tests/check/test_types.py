"""mypy finds a type for everything in the package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import EXAMPLES
from ferrogin import paths

SOURCE = EXAMPLES.parent / "src" / "ferrogin"


def test_types_are_complete() -> None:
    pytest.importorskip("mypy")
    assert (paths.include().parent / "py.typed").exists()
    modules = [str(file) for file in sorted(SOURCE.glob("*.py")) if file.name not in ("triton.py", "numba.py")]
    environment = {**os.environ, "MYPY_CACHE_DIR": os.devnull}
    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *modules], cwd=SOURCE.parent, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert result.returncode == 0, result.stdout


def test_array_of_a_window_has_the_type_of_its_elements(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text("import ferrogin, numpy\ndef f(window: ferrogin.Window) -> None:\n    reveal_type(window.numpy(numpy.float32))\n")
    command = [sys.executable, "-m", "mypy", str(program)]
    result = subprocess.run(command, cwd=SOURCE.parent, env={**os.environ, "MYPY_CACHE_DIR": os.devnull}, stdout=subprocess.PIPE, text=True)
    assert "_32Bit" in result.stdout or "float32" in result.stdout, result.stdout
