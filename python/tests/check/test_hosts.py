"""Ranks on two hosts, simulated as network namespaces."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import EXAMPLES, HANG_LIMIT

SECOND_HOST = Path(__file__).resolve().parents[3] / "tests/second-host.sh"
SCRIPT = """
. "$1"
there env FERROGIN_RANK=1 "${@:2}" & other=$!
FERROGIN_RANK=0 "${@:2}" && wait $other
"""


def test_example_runs_between_hosts():
    command = ["unshare", "--user", "--map-root-user", "--net", "bash", "-c", SCRIPT, "bash", str(SECOND_HOST)]
    command += [sys.executable, str(EXAMPLES / "exchange.py")]
    meeting = {"FERROGIN_NRANKS": "2", "FERROGIN_BOOTSTRAP": "192.0.2.1:7700", "FERROGIN_TIMEOUT": str(HANG_LIMIT)}
    result = subprocess.run(command, env={**os.environ, **meeting}, capture_output=True, text=True, timeout=2 * HANG_LIMIT)
    if result.returncode == 77:
        pytest.skip("this machine allows no pair of network namespaces")
    assert result.returncode == 0, result.stderr
    assert "rank 1 received" in result.stdout and "9.99999e+05" in result.stdout, result.stdout
