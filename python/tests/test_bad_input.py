"""Bad input raises an exception with cause and fix, on all ranks, and nothing hangs."""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Callable

import ferrogin
import numpy
import pytest
from conftest import HANG_LIMIT, Run, wait_until


class Cuda:
    """An array that claims to be on a GPU."""

    def __init__(self, **changes: Any) -> None:
        self.__cuda_array_interface__ = {"shape": (8,), "typestr": "<f4", "data": (4096, False), "version": 3, **changes}


class Export:
    """An array that supports only DLPack."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)


class NoCapsule:
    def __dlpack__(self) -> int:
        return 5


class Raises:
    def __dlpack__(self) -> int:
        raise RuntimeError("the tensor requires a gradient")


def read_only() -> Any:
    array = numpy.zeros(8)
    array.flags.writeable = False
    return array


REGISTER = [
    ("None", lambda: None, TypeError, "NoneType has no memory for a window"),
    ("list", lambda: [1, 2], TypeError, "pass an object with the buffer protocol, DLPack"),
    ("bytes", lambda: b"abc", ValueError, "bytes is read-only"),
    ("read-only array", read_only, ValueError, "ndarray is read-only, and peers write to windows"),
    ("read-only DLPack", lambda: Export(read_only()), (TypeError, ValueError), "only"),
    ("empty array", lambda: numpy.zeros((3, 0)), ValueError, "0 bytes: pass at least one element"),
    ("empty DLPack", lambda: Export(numpy.zeros((3, 0))), ValueError, "0 bytes: pass at least one element"),
    ("every second element", lambda: numpy.zeros(8)[::2], ValueError, "with strides (16,) is not contiguous in C order"),
    ("reversed", lambda: numpy.zeros(8)[::-1], ValueError, "is not contiguous in C order"),
    ("Fortran order", lambda: numpy.zeros((2, 3), order="F"), ValueError, "numpy.ascontiguousarray"),
    ("column by DLPack", lambda: Export(numpy.zeros((4, 4))[:, 0]), ValueError, "strides (32,) is not contiguous"),
    ("objects", lambda: numpy.array([None]), TypeError, "elements of the type 'O'"),
    ("structs", lambda: numpy.zeros(2, "i4,f4"), TypeError, "the bytes (array.view"),
    ("other byte order", lambda: numpy.zeros(2, ">i4"), TypeError, "in the order of this machine"),
    ("dates", lambda: numpy.zeros(2, "M8[s]"), TypeError, "does not export its memory"),
    ("no capsule", NoCapsule, TypeError, "returned no DLPack capsule: 5"),
    ("export that raises", Raises, TypeError, "requires a gradient"),
    ("GPU memory that is not there", Cuda, ferrogin.ArgumentError, "32 bytes at 0x1000 are not mapped"),
    ("GPU array of strings", lambda: Cuda(typestr="|S4"), TypeError, "elements of the type '|S4'"),
    ("GPU array with a mask", lambda: Cuda(mask=1), TypeError, "without the mask"),
    ("read-only GPU array", lambda: Cuda(data=(4096, True)), ValueError, "read-only"),
    ("GPU array with strides", lambda: Cuda(strides=(8,)), ValueError, "not contiguous"),
    ("GPU array without a shape", lambda: Cuda(shape=None), TypeError, "is not valid"),
]


@pytest.mark.parametrize("make, kind, text", [row[1:] for row in REGISTER], ids=[row[0] for row in REGISTER])
def test_object_is_refused(comm: ferrogin.Comm, make: Callable[[], Any], kind: Any, text: str) -> None:
    with pytest.raises(kind) as error:
        comm.register(make())
    assert text in str(error.value)
    with comm.register(bytearray(8)):
        comm.barrier()


CALLS = [
    ("allocate 0", lambda comm, window, gin: comm.allocate(0), ferrogin.ArgumentError, "a window of 0 bytes"),
    ("allocate 2^40", lambda comm, window, gin: comm.allocate(1 << 40), ferrogin.ArgumentError, "pass a smaller size"),
    ("allocate -1", lambda comm, window, gin: comm.allocate(-1), ValueError, "nbytes is -1: pass a number from 0"),
    ("allocate half", lambda comm, window, gin: comm.allocate(0.5), TypeError, "nbytes is 0.5: pass an int"),
    ("allocate kind 3", lambda comm, window, gin: comm.allocate(8, 3), ValueError, "3 is not a valid Memory"),
    ("dma-buf -1", lambda comm, window, gin: comm.register_dma_buf(4096, 8, -1), ValueError, "fd is -1"),
    ("signals", lambda comm, window, gin: comm.context(signals=1 << 17), ferrogin.ArgumentError, "nSignals = 131072"),
    ("signals -1", lambda comm, window, gin: comm.context(signals=-1), ValueError, "signals is -1"),
    ("signals None", lambda comm, window, gin: comm.context(signals=None), TypeError, "signals is None"),
    ("timeout -1", lambda comm, window, gin: gin.set_timeout(-1), ValueError, "or 0 for no limit"),
    ("timeout of a context", lambda comm, window, gin: comm.context(timeout=-1), ValueError, "or 0 for no limit"),
    ("peer 1", lambda comm, window, gin: gin.put(1, window, window), ValueError, "peer is 1: there is only one rank, so it must be 0"),
    ("peer -1", lambda comm, window, gin: gin.put(-1, window, window), ValueError, "peer is -1"),
    ("put 2^40", lambda comm, window, gin: gin.put(0, window, window, 1 << 40), ValueError, "not in the window src of 64 bytes"),
    ("put -1", lambda comm, window, gin: gin.put(0, window, window, -1), ValueError, "nbytes is -1"),
    ("put behind", lambda comm, window, gin: gin.put(0, window, window, 8, src_offset=60), ValueError, "bytes 60 to 68"),
    ("put an array", lambda comm, window, gin: gin.put(0, window, bytearray(8)), TypeError, "src is a bytearray: pass a ferrogin.Window"),
    ("put of the default size", lambda comm, window, gin: gin.put(0, window, window, dst_offset=32), ValueError, "bytes 32 to 96 are not in the window dst"),
    ("put to behind", lambda comm, window, gin: gin.put(0, window, window, 8, dst_offset=1 << 40), ValueError, "window dst of 64 bytes"),
    ("value behind", lambda comm, window, gin: gin.put_value(0, window, 1, dst_offset=64), ValueError, "bytes 64 to 72"),
    ("word behind", lambda comm, window, gin: gin.signal(0, at=(window, 64)), ValueError, "window at of 64 bytes"),
    ("get of behind", lambda comm, window, gin: gin.get(0, window, window, 8, remote_offset=57), ValueError, "window remote of 64"),
    ("get to behind", lambda comm, window, gin: gin.get(0, window, window, 65), ValueError, "window local of 64 bytes"),
    ("signal 1", lambda comm, window, gin: gin.signal(0, 1), ValueError, "signal 1 does not exist, as the context has 1 signals"),
    ("counter 0", lambda comm, window, gin: gin.put(0, window, window, counter=0), ValueError, "pass counters=... to Comm.context"),
    ("wait signal 1", lambda comm, window, gin: gin.wait_signal(1), ValueError, "signal 1 does not exist"),
    ("least -1", lambda comm, window, gin: gin.wait_signal(0, -1), ValueError, "least is -1"),
    ("value of 3 bytes", lambda comm, window, gin: gin.put_value(0, window, 1, 3), ValueError, "1, 2, 4 or 8 bytes"),
    ("value too large", lambda comm, window, gin: gin.put_value(0, window, 256, 1), ValueError, "256 does not fit 1 bytes"),
    ("float", lambda comm, window, gin: gin.put_value(0, window, 1.5), TypeError, "numpy.float32(1)"),
    ("array as a value", lambda comm, window, gin: gin.put_value(0, window, numpy.zeros(4)), ValueError, "the value has 32 bytes"),
    ("numpy of a wrong size", lambda comm, window, gin: window.numpy("f8", (9,)), ValueError, "has 72 bytes, and the window 64"),
    ("numpy of a negative size", lambda comm, window, gin: window.numpy("f8", (-1,)), ValueError, "a length of shape is -1"),
    ("numpy of objects", lambda comm, window, gin: window.numpy(object), TypeError, "pass numbers"),
    ("no such context", lambda comm, window, gin: gin._context.gin(1), ferrogin.ArgumentError, "context 1 does not exist"),
    ("wait for nothing", lambda comm, window, gin: (gin.set_timeout(0.05), gin.wait_signal(0)), ferrogin.GinTimeout, "fgin_wait_signal returned FGIN_TIMEOUT: signal 0 is 0, and not 1, after 50ms"),
]


@pytest.mark.parametrize("function, kind, text", [row[1:] for row in CALLS], ids=[row[0] for row in CALLS])
def test_call_is_refused(comm: ferrogin.Comm, function: Callable[..., Any], kind: Any, text: str) -> None:
    with comm.register(bytearray(64)) as window, comm.context(signals=1) as context:
        gin = context.gin()
        with pytest.raises(kind) as error:
            function(comm, window, gin)
        assert text in str(error.value)
        # The context still works.
        gin.set_timeout(HANG_LIMIT)
        gin.put(0, window, window, 8, dst_offset=8, signal=0)
        gin.wait_signal(0)


BEHIND = """
import ferrogin
operations = [
    lambda window, gin: gin.put(1, window, window, dst_offset=32),
    lambda window, gin: gin.put(1, window, window, 8, dst_offset=44),
    lambda window, gin: gin.put(1, window, window, 8, dst_offset=1 << 40),
    lambda window, gin: gin.get(1, window, window, remote_offset=8),
    lambda window, gin: gin.put_value(1, window, 1, dst_offset=48),
    lambda window, gin: gin.signal(1, at=(window, 48)),
]
sizes = [64, 48]
with ferrogin.Comm.open_env() as comm, comm.register(bytearray(sizes[comm.rank])) as window, comm.context(signals=1) as context:
    gin, peer = context.gin(), 1 - comm.rank
    assert [window.nbytes_on(rank) for rank in range(2)] == sizes and window.nbytes == sizes[comm.rank]
    try:
        window.nbytes_on(2)
    except ferrogin.ArgumentError as error:
        print(error)
    for operation in operations if comm.rank == 0 else []:
        try:
            operation(window, gin)
        except ValueError as error:
            print(error)
    # The context still works, up to the last byte of the smaller window and of the larger one.
    gin.put(peer, window, window, 8, dst_offset=sizes[peer] - 8, signal=0)
    gin.flush()
    gin.wait_signal(0)
    context.check()
    comm.barrier()
"""


def test_bytes_outside_the_window_of_another_rank_are_refused(run: Run) -> None:
    first, _ = run(BEHIND)
    pass_less = "of 48 bytes: pass a smaller offset or nbytes"
    assert first.stdout.splitlines() == [
        "ferrogin_window_size: rank 2 does not exist: pass a rank from 0 to 1",
        f"bytes 32 to 96 are not in rank 1's window dst {pass_less}",
        f"bytes 44 to 52 are not in rank 1's window dst {pass_less}",
        f"bytes 1099511627776 to 1099511627784 are not in rank 1's window dst {pass_less}",
        f"bytes 8 to 72 are not in rank 1's window remote {pass_less}",
        f"bytes 48 to 56 are not in rank 1's window dst {pass_less}",
        f"bytes 48 to 56 are not in rank 1's window at {pass_less}",
    ]


FAILED = """
import ferrogin
with ferrogin.Comm.open_env() as comm, comm.allocate(64) as window, comm.context() as context:
    gin = context.gin()
    try:
        gin.put_value(0, window, 1)
        gin.flush()
    except ferrogin.GinError as error:
        assert error.status in (ferrogin.GinStatus.CARD_ERROR, ferrogin.GinStatus.POISONED, ferrogin.GinStatus.ABORTED)
        print(error)
    # The watcher reports it a moment later.
    while True:
        try:
            context.check()
        except ferrogin.UsageError as error:
            print(error)
            break
"""


def test_failed_request_fails_the_context(run: Run) -> None:
    (result,) = run(FAILED, ranks=1, SOFTEFA_FAULTS="error_every=1")
    assert "destroy the context on all ranks and create it again" in result.stdout, result.stdout
    assert "a request of this context failed" in result.stdout, result.stdout


def test_put_of_no_bytes_is_an_operation(comm: ferrogin.Comm) -> None:
    with comm.register(bytearray(8)) as window, comm.context(signals=1) as context:
        gin = context.gin()
        gin.put(0, window, window, 0, signal=0)
        gin.wait_signal(0)


OPEN = [
    (lambda: ferrogin.Comm.open(2, 2, lambda own: [own] * 2), ferrogin.ArgumentError, "rank 2 is not one of 2 ranks"),
    (lambda: ferrogin.Comm.open(-1, 2, lambda own: [own] * 2), ValueError, "rank is -1"),
    (lambda: ferrogin.Comm.open(0, 1, None), ferrogin.RemoteError, "the function returned 1"),  # type: ignore[arg-type]
    (lambda: ferrogin.Comm.open(0, 1, lambda own: [own], card=9), ferrogin.ArgumentError, "card 9 does not exist"),
    (lambda: ferrogin.Comm.open_at("127.0.0.1:1", 1, 2), ferrogin.SystemCallError, "cannot connect to 127.0.0.1:1: Connection refused"),
    (lambda: ferrogin.Comm.open_at("a\0b", 1, 2), TypeError, 'pass a str such as "host:7700"'),
    (lambda: ferrogin.Comm.open_env(), ferrogin.UsageError, "set FERROGIN_RANK, FERROGIN_NRANKS"),
]


@pytest.mark.parametrize("function, kind, text", OPEN)
def test_open_is_refused(monkeypatch: pytest.MonkeyPatch, function: Callable[[], Any], kind: Any, text: str) -> None:
    monkeypatch.setenv("FERROGIN_TIMEOUT", "2")
    with pytest.raises(kind) as error:
        function()
    assert text in str(error.value)


def test_missing_rank_is_reported(run: Run) -> None:
    program = "import ferrogin; ferrogin.Comm.open_env()"
    (result,) = run(program, ranks=1, check=False, FERROGIN_NRANKS="2", FERROGIN_TIMEOUT="2")
    assert "ferrogin.errors.RemoteError: ferrogin_open_env: " in result.stderr and "rank 1" in result.stderr


def test_ranks_that_disagree_on_their_number_are_told(run: Run) -> None:
    program = """
import ferrogin, os
rank = int(os.environ["FERROGIN_RANK"])
ferrogin.Comm.open_at(os.environ["FERROGIN_BOOTSTRAP"], rank, 2 + rank)
"""
    results = run(program, check=False)
    for result in results:
        assert "ferrogin.errors." in result.stderr and "2" in result.stderr and "3" in result.stderr, result.stderr


REFUSED_ON_ONE_RANK = """
import ferrogin, numpy, sys
with ferrogin.Comm.open_env() as comm:
    for right, wrong in [
        (lambda: comm.register(numpy.zeros(8)), lambda: comm.register(numpy.zeros(8)[::2])),
        (lambda: comm.allocate(64), lambda: comm.allocate("64")),
        (lambda: comm.context(signals=1), lambda: comm.context(signals=-1)),
        (lambda: comm.register(bytearray(8)), lambda: comm.register_dma_buf(-1, 8, 3)),
    ]:
        try:
            (wrong if comm.rank == 0 else right)()
        except (TypeError, ValueError, ferrogin.Error) as error:
            print(type(error).__name__)
            print(error, file=sys.stderr)
        else:
            raise AssertionError("no error")
    comm.barrier()
"""


def test_arguments_that_one_rank_refuses_fail_on_all_ranks_at_once(run: Run) -> None:
    first, second = run(REFUSED_ON_ONE_RANK)
    assert first.stdout.split() == ["ValueError", "TypeError", "ValueError", "ValueError"]
    assert second.stdout.split() == ["RemoteError"] * 4
    # Told by rank 0, not by a time limit.
    assert second.stderr.count("rank 0 failed in") == 4, second.stderr


WINDOW_IN_USE = """
import ferrogin
comm = ferrogin.Comm.open(0, 1, lambda own: [own])
window, context = comm.register(bytearray(64)), comm.context()
gin = context.gin()
# The request waits for the flush.
gin.put(0, window, window, 8, dst_offset=8, aggregate=True)
try:
    window.free()
except ferrogin.UsageError as error:
    print(error)
gin.flush()
window.free()
"""


def test_window_in_use_is_not_freed(run: Run) -> None:
    (result,) = run(WINDOW_IN_USE, ranks=1)
    assert "have 1 request outstanding" in result.stdout and "Flush the contexts" in result.stdout


def test_objects_in_a_call_of_another_thread_are_not_closed(comm: ferrogin.Comm) -> None:
    context = comm.context(signals=1)
    gin = context.gin()
    waits = threading.Thread(target=gin.wait_signal, args=(0,))
    waits.start()
    wait_until(lambda: bool(context._uses))
    for close in (context.destroy, comm.close):
        with pytest.raises(ferrogin.UsageError, match="in use by 1 call of other threads"):
            close()
    gin.signal(0, 0)
    waits.join()
    comm.close()


def test_closed_objects_are_refused(comm: ferrogin.Comm) -> None:
    window, context = comm.allocate(64), comm.context(signals=1)
    assert not hasattr(window, "__cuda_array_interface__"), "it is host memory"
    other = ferrogin.Comm.open(0, 1, lambda own: [own])
    foreign = other.allocate(8)
    gin = context.gin()
    with pytest.raises(ValueError, match="belongs to another communicator"):
        gin.put(0, foreign, foreign)
    other.close()
    window.free()
    with pytest.raises(ferrogin.UsageError, match="the window is closed"):
        gin.put(0, window, window)
    for call in (window.free, window.view, window.numpy, lambda: window.host_address):
        with pytest.raises(ferrogin.UsageError, match="the window is closed"):
            call()
    comm.close()
    for function in (gin.flush, context.gin, context.check, context.destroy):
        with pytest.raises(ferrogin.UsageError, match="the context is closed"):
            function()
    for function in (comm.barrier, comm.close, comm.context, lambda: comm.allocate(8), lambda: comm.register(bytearray(8))):
        with pytest.raises(ferrogin.UsageError, match="the communicator is closed"):
            function()
    assert window.closed and context.closed and comm.closed
    with pytest.raises(ferrogin.UsageError, match="the window is closed"):
        foreign.__cuda_array_interface__


def test_closed_objects_are_refused_while_their_places_are_in_use() -> None:
    closed = ferrogin.Comm.open(0, 1, lambda own: [own])
    window, context = closed.allocate(64), closed.context(signals=1)
    gin = context.gin()
    closed.close()
    refused: list[int] = []

    def run() -> None:
        with ferrogin.Comm.open(0, 1, lambda own: [own]) as comm:
            own = (comm.allocate(64), comm.context(signals=1))
            for call in (closed.barrier, window.view, gin.flush, context.check):
                with pytest.raises(ferrogin.UsageError, match="is closed"):
                    call()
            refused.append(len(own))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refused == [2, 2]


FORK = """
import ferrogin, os
comm = ferrogin.Comm.open(0, 1, lambda own: [own])
child = os.fork()
if child == 0:
    try:
        comm.barrier()
    except ferrogin.UsageError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
comm.barrier()
"""


def test_fork_cannot_use_a_communicator(run: Run) -> None:
    (result,) = run(FORK, ranks=1)
    assert "fork" in result.stdout


def test_errors_are_of_the_kinds_of_python() -> None:
    for kind, base in [
        (ferrogin.ArgumentError, ValueError),
        (ferrogin.UsageError, RuntimeError),
        (ferrogin.RemoteError, ConnectionError),
        (ferrogin.SystemCallError, OSError),
        (ferrogin.GinTimeout, TimeoutError),
    ]:
        error = kind("text", 4)
        assert isinstance(error, base) and isinstance(error, ferrogin.Error)
        assert str(error) == "text" and error.status == 4


def test_unknown_dlpack_is_refused() -> None:
    from ferrogin.memory import span_of

    class Strange:
        def __init__(self, flags: int = 0, major: int = 1, **fields: int) -> None:
            from ferrogin import memory

            self.data = (ctypes.c_float * 4)()
            self.shape = (ctypes.c_int64 * 1)(4)
            values = {"device_type": 1, "ndim": 1, "code": 2, "bits": 32, "lanes": 1, **fields}
            tensor = memory._DLTensor(data=ctypes.addressof(self.data), shape=self.shape, **values)
            self.versioned = memory._Versioned(major=major, flags=flags, tensor=tensor)

        def __dlpack__(self, max_version: Any = None) -> Any:
            make = ctypes.pythonapi.PyCapsule_New
            make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
            return make(ctypes.addressof(self.versioned), b"dltensor_versioned", None)

    assert span_of(Strange()).dtype == "float32"
    assert span_of(Strange(code=4, bits=16)).dtype == "bfloat16"
    assert span_of(Strange(device_type=2)).on_gpu
    for strange, text in [
        (Strange(major=2), "exports DLPack 2.0"),
        (Strange(flags=2), "a copy of its memory"),
        (Strange(flags=1), "read-only"),
        (Strange(device_type=10), "DLPack device 10"),
        (Strange(code=3), "DLPack type 3"),
        (Strange(bits=4), "with 4 bits"),
        (Strange(lanes=4), "4 lanes"),
    ]:
        with pytest.raises((TypeError, ValueError), match=text):
            span_of(strange)
