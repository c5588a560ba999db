"""mypy finds a type for everything."""

from __future__ import annotations

import os
import subprocess
import sys

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
