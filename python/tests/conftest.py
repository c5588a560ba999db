"""Ranks as processes on the software card, and results in the form that `cargo xtask test` counts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Callable, Iterator

import ferrogin
import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

os.environ["FERROGIN_PROVIDER"] = "softefa"
os.environ["FERROGIN_DEVICE"] = "cpu"
for name in ("FERROGIN_RANK", "FERROGIN_NRANKS", "FERROGIN_BOOTSTRAP", "SOFTEFA_FAULTS"):
    os.environ.pop(name, None)

# How long a test waits for an event, in seconds: it only ends runs that would otherwise hang.
HANG_LIMIT = 240

Run = Callable[..., "list[subprocess.CompletedProcess[str]]"]


def wait_until(ready: Callable[[], bool]) -> None:
    """Calls `ready` until it returns True."""
    began = time.monotonic()
    while not ready():
        assert time.monotonic() < began + HANG_LIMIT, "nothing happens"
        time.sleep(0.001)


@pytest.fixture
def run() -> Iterator[Run]:
    """Runs a program, or a program's text, as two ranks, and returns when all have exited."""
    processes: list[subprocess.Popen[str]] = []

    def ranks(program: Path | str, ranks: int = 2, check: bool = True, **settings: str):
        command = [sys.executable, "-X", "faulthandler", *([str(program)] if isinstance(program, Path) else ["-c", program])]
        meeting = {"FERROGIN_NRANKS": str(ranks), "FERROGIN_BOOTSTRAP": f"ferrogin-python-{uuid.uuid4()}", "FERROGIN_TIMEOUT": str(HANG_LIMIT)}
        for rank in range(ranks):
            environment = {**os.environ, **meeting, "FERROGIN_RANK": str(rank), **settings}
            processes.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
        results = []
        for process in processes:
            out, err = process.communicate(timeout=2 * HANG_LIMIT)
            results.append(subprocess.CompletedProcess(command, process.returncode, out, err))
        if check:
            for rank, result in enumerate(results):
                assert result.returncode == 0, f"rank {rank} ended with {result.returncode}: {result.stderr}"
        return results

    yield ranks
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture
def comm() -> Iterator[ferrogin.Comm]:
    """A communicator of one rank."""
    comm = ferrogin.Comm.open(0, 1, lambda own: [own])
    yield comm
    if not comm.closed:
        comm.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    stats = terminalreporter.stats
    for kind, word in (("passed", "PASS"), ("failed", "FAIL"), ("error", "FAIL"), ("skipped", "SKIP")):
        for report in stats.get(kind, []):
            why = ""
            if word == "SKIP":
                why = ": " + str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
            terminalreporter.write_line(f"{word} {report.nodeid.split('/')[-1]}{why.replace('Skipped: ', '')}")
    passed, skipped = (len(stats.get(kind, [])) for kind in ("passed", "skipped"))
    failed = len(stats.get("failed", [])) + len(stats.get("error", []))
    terminalreporter.write_line(f"python: {passed} passed, {failed} failed, {skipped} skipped")
