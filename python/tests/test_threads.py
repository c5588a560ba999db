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


# Nothing ends a wait but the signal, which arrives once the wait has begun.
INTERRUPT = """
import ferrogin, os, signal, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)
def waiting():
    return sum(thread.name == "ferrogin-wait" for thread in threading.enumerate())
def interrupted(wait):
    before, over = waiting(), threading.Event()
    def interrupt():
        while waiting() <= before and not over.is_set():
            time.sleep(0.001)
        if not over.is_set():
            os.kill(os.getpid(), signal.SIGINT)
    thread = threading.Thread(target=interrupt)
    try:
        thread.start()
        wait()
    except KeyboardInterrupt:
        print("interrupted" if waiting() > before else "too late", flush=True)
    except Exception as error:
        print(error, flush=True)
    over.set()
    thread.join()
"""

# Rank 1 takes part in nothing.
INTERRUPTED = (
    INTERRUPT
    + """
comm = ferrogin.Comm.open_env()
context = comm.context(signals=1, counters=1, timeout=0)
gin = context.gin()
if comm.rank == 0:
    interrupted(lambda: gin.wait_signal(0))
    interrupted(lambda: gin.wait_counter(0))
    interrupted(comm.barrier)
    interrupted(lambda: comm.allocate(64))
    interrupted(lambda: comm.register(bytearray(64)))
    interrupted(lambda: comm.register_dma_buf(4096, 4096, 0))
    interrupted(comm.context)
    interrupted(lambda: comm.context(signals=-1))
    os._exit(0)
try:
    gin.wait_signal(0)
except ferrogin.GinError:
    pass
"""
)


def test_waits_and_collective_calls_give_way_to_ctrl_c(run: Run) -> None:
    first, _ = run(INTERRUPTED, check=False)
    assert first.stdout == "interrupted\n" * 8, first.stderr


# The peer's card answers nothing while its process is stopped.
STOPPED = (
    INTERRUPT
    + """
comm = ferrogin.Comm.open_env()
window, word, contexts = comm.allocate(64), comm.allocate(8), [comm.context(signals=2, timeout=0) for _ in range(3)]
pids = comm.register(bytearray(8))
gin = contexts[0].gin()
if comm.rank == 1:
    gin.put_value(0, pids, os.getpid(), signal=0)
    signal.pause()
gin.wait_signal(0)
peer = int.from_bytes(pids.view(), "little")
os.kill(peer, signal.SIGSTOP)
interrupted(lambda: gin.put(1, window, window, signal=1, strong=True))
interrupted(lambda: gin.put_value(1, window, 1, signal=1, strong=True))
interrupted(lambda: gin.put(1, window, window, at=(word, 0)))
interrupted(lambda: gin.put_value(1, window, 1, at=(word, 0)))
interrupted(lambda: gin.signal(1, 1, strong=True))
interrupted(lambda: gin.signal(1, at=(word, 0), strong=True))
for context in contexts[1:]:
    context.gin().put(1, window, window)
interrupted(contexts[1].destroy)
print(contexts[1].closed, contexts[2].closed, flush=True)
os.kill(peer, signal.SIGKILL)
os._exit(0)
"""
)


def test_strong_operations_and_destroy_give_way_to_ctrl_c(run: Run) -> None:
    first, _ = run(STOPPED, check=False, FERROGIN_SIGNALS="emulated")
    assert first.stdout == "interrupted\n" * 7 + "True False\n", first.stderr


CLOSED = (
    INTERRUPT
    + """
comm = ferrogin.Comm.open_env()
window, context = comm.allocate(64), comm.context(signals=1, timeout=0)
pids = comm.register(bytearray(8))
if comm.rank == 1:
    context.gin().put_value(0, pids, os.getpid(), signal=0)
    signal.pause()
context.gin().wait_signal(0)
peer = int.from_bytes(pids.view(), "little")
os.kill(peer, signal.SIGSTOP)
context.gin().put(1, window, window)
interrupted(comm.close)
print(comm.closed, window.closed, context.closed, flush=True)
os.kill(peer, signal.SIGKILL)
os._exit(0)
"""
)


def test_close_gives_way_to_ctrl_c(run: Run) -> None:
    first, _ = run(CLOSED, check=False)
    assert first.stdout == "interrupted\nTrue True True\n", first.stderr


# The other rank never comes.
OPENED = (
    INTERRUPT
    + """
address = os.environ["FERROGIN_BOOTSTRAP"] + "-2"
# While libfabric loads its providers, signals are theirs.
ferrogin.Comm.open(0, 1, lambda own: [own]).close()
interrupted(ferrogin.Comm.open_env)
interrupted(lambda: ferrogin.Comm.open_at(address, 0, 2))
def allgather(own):
    if threading.current_thread() is threading.main_thread():
        print("on the main thread", flush=True)
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(300)
try:
    ferrogin.Comm.open(0, 2, allgather)
except KeyboardInterrupt:
    print("interrupted", flush=True)
os._exit(0)
"""
)


def test_open_gives_way_to_ctrl_c_and_gathers_on_the_callers_thread(run: Run) -> None:
    (result,) = run(OPENED, ranks=1, FERROGIN_NRANKS="2")
    assert result.stdout == "interrupted\n" * 2 + "on the main thread\ninterrupted\n", result.stderr


def test_calls_work_where_no_thread_can_start(comm: ferrogin.Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    comm.barrier()
    comm.allocate(64).free()
    comm.close()
    ferrogin.Comm.open(0, 1, lambda own: [own]).close()


# Two GPUs; that of the caller is the second one.
SECOND_GPU = """
import ctypes, ferrogin
driver = ctypes.CDLL("libcuda.so.1")
context, device = ctypes.c_void_p(), ctypes.c_int(-1)
assert driver.cuInit(0) == 0 and driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 1) == 0
assert driver.cuCtxSetCurrent(context) == 0
ORDINAL = 9
with ferrogin.Comm.open(0, 1, lambda own: [own]) as comm, comm.allocate(4096, ferrogin.Memory.DEVICE) as window:
    assert driver.cuPointerGetAttribute(ctypes.byref(device), ORDINAL, ctypes.c_uint64(window.address)) == 0
    print("memory of GPU", device.value)
"""


def test_open_finds_the_gpu_of_the_callers_thread(run: Run) -> None:
    gpu = ferrogin.paths.lib() / "ferrogin" / "gpu"
    (result,) = run(SECOND_GPU, ranks=1, LD_LIBRARY_PATH=str(gpu), SOFTGPU_DEVICES="2", FERROGIN_DEVICE="cuda")
    assert result.stdout == "memory of GPU 1\n", result.stderr
