"""Threads that use, view and close the same objects, and signals that arrive during a wait."""

from __future__ import annotations

import threading
from typing import Any, Callable

import ferrogin
import pytest
from conftest import Run, wait_until
from ferrogin import _handle


class Meeting:
    """Runs `other` on a thread when the main thread reads a window's address, until it has ended or waits for the lock of all handles.

    This is that lock meanwhile.
    """

    def __init__(self, patch: pytest.MonkeyPatch, other: Callable[[], Any]) -> None:
        self.results: list[Any] = []
        self._is_waiting, self._lock = threading.Event(), _handle.lock
        self._thread = threading.Thread(target=lambda: self.results.append(self._caught(other)))
        real_pointer = ferrogin.window.pointer

        def pointer(name: str, handle: int) -> int:
            address = real_pointer(name, handle)
            if threading.current_thread() is threading.main_thread() and not self._thread.ident:
                self._thread.start()
                wait_until(lambda: self._is_waiting.is_set() or bool(self.results))
            return address

        for module in (_handle, ferrogin.window):
            patch.setattr(module, "lock", self)
        patch.setattr(ferrogin.window, "pointer", pointer)

    def __enter__(self) -> None:
        if threading.current_thread() is self._thread:
            self._is_waiting.set()
        self._lock.acquire()

    def __exit__(self, *ignored: object) -> None:
        self._lock.release()

    def _caught(self, other: Callable[[], Any]) -> Any:
        try:
            return other()
        except Exception as error:
            return error

    def result(self) -> Any:
        self._thread.join()
        return self.results[0]


def test_window_is_not_freed_while_its_view_is_made(comm: ferrogin.Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    window = comm.allocate(64)
    meeting = Meeting(monkeypatch, window.free)
    view = window.view()
    assert isinstance(meeting.result(), BufferError) and not window.closed
    view[0] = 1
    assert window.view()[0] == 1
    del view
    window.free()


def test_threads_that_take_a_view_at_once_get_the_same(comm: ferrogin.Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    window = comm.allocate(64)
    meeting = Meeting(monkeypatch, window.view)
    view = window.view()
    other = meeting.result()
    assert view.obj is other.obj
    # Either view keeps the window.
    del view
    with pytest.raises(BufferError):
        window.free()


def test_communicator_is_not_closed_during_a_call(comm: ferrogin.Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    real_call = ferrogin.comm.call
    refused = []

    def call(name: str, *arguments: Any) -> None:
        with pytest.raises(ferrogin.UsageError, match="the communicator is in use by 1 call of other threads"):
            comm.close()
        refused.append(name)
        real_call(name, *arguments)

    monkeypatch.setattr(ferrogin.comm, "call", call)
    comm.barrier()
    windows = [comm.allocate(64), comm.register(bytearray(64))]
    context = comm.context()
    assert refused == ["ferrogin_barrier", "ferrogin_window_allocate", "ferrogin_window_register", "ferrogin_context_create"]
    monkeypatch.undo()
    comm.close()
    assert all(one.closed for one in (*windows, context))


# A view that is refused, or a window that isn't freed, is right; a crash isn't.
RACE = """
import ferrogin, sys, threading
sys.setswitchinterval(1e-6)
with ferrogin.Comm.open(0, 1, lambda own: [own]) as comm:
    for make in (lambda: comm.allocate(1 << 16), lambda: comm.register(bytearray(1 << 16))):
        windows, over = [make()], threading.Event()
        def write():
            while not over.is_set():
                window = windows[-1]
                try:
                    window.view()[:] = bytes(window.nbytes)
                except (ferrogin.Error, BufferError):
                    pass
        threads = [threading.Thread(target=write) for _ in range(3)]
        [thread.start() for thread in threads]
        for _ in range(100):
            windows.append(make())
            while not windows[0].closed:
                try:
                    windows[0].free()
                except (ferrogin.Error, BufferError):
                    pass
            del windows[0]
        over.set()
        [thread.join() for thread in threads]
"""


def test_views_and_frees_of_many_threads_do_not_crash(run: Run) -> None:
    run(RACE, ranks=1)


# Nothing ends these waits but the signal, which arrives once the wait has begun.
INTERRUPTED = """
import ferrogin, os, signal, threading
signal.signal(signal.SIGINT, signal.default_int_handler)
def waiting():
    return sum(thread.name == "ferrogin-wait" for thread in threading.enumerate())
def interrupt(before):
    while waiting() == before:
        pass
    os.kill(os.getpid(), signal.SIGINT)
comm = ferrogin.Comm.open_env()
context = comm.context(signals=1, counters=1, timeout=0)
gin = context.gin()
for wait in (lambda: gin.wait_signal(0), lambda: gin.wait_counter(0), comm.barrier):
    if comm.rank == 0:
        try:
            threading.Thread(target=interrupt, args=(waiting(),)).start()
            wait()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
if comm.rank == 0:
    os._exit(0)
try:
    gin.wait_signal(0)
except ferrogin.GinError:
    pass
"""


def test_waits_give_way_to_ctrl_c(run: Run) -> None:
    interrupted, _ = run(INTERRUPTED, check=False)
    assert interrupted.stdout == "interrupted\n" * 3, interrupted.stderr
