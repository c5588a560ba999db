"""Arrays between processes on the software card."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import warnings
import weakref

import ferrogin
import numpy
import pytest
from conftest import EXAMPLES, HANG_LIMIT, Run


def test_ten_lines_move_an_array_between_two_processes(run: Run) -> None:
    silent, loud = run(EXAMPLES / "exchange.py")
    assert silent.stdout == ""
    assert "rank 1 received [0.00000e+00 1.00000e+00 2.00000e+00" in loud.stdout


# The process that started the tests may ignore SIGINT.
INTERRUPTED = """
import ferrogin, os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
with ferrogin.Comm.open(0, 1, lambda own: [own]):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_open_leaves_sigint_to_python(run: Run) -> None:
    (result,) = run(INTERRUPTED, ranks=1)
    assert result.stdout == "interrupted\n"


OPERATIONS = """
import ferrogin, numpy
with ferrogin.Comm.open_env() as comm:
    peer = 1 - comm.rank
    with comm.allocate(4096) as window, comm.context(signals=2, counters=1) as context:
        gin, array = context.gin(), window.numpy("float32")
        assert not array.any()
        # No rank puts before both have looked.
        comm.barrier()
        array[:8] = comm.rank + 1
        # Each rank writes its first 8 elements behind those of the peer.
        gin.put(peer, window, window, 32, dst_offset=32, signal=0, add=7, counter=0)
        gin.wait_counter(0)
        assert gin.read_counter(0) == 1
        gin.wait_signal(0, 7)
        assert gin.read_signal(0) == 7
        assert (array[8:16] == peer + 1).all(), array[8:16]
        gin.put_value(peer, window, -5 - comm.rank, dst_offset=2048)
        gin.put_value(peer, window, numpy.float32(0.5), dst_offset=2056)
        gin.put_value(peer, window, 258, 2, dst_offset=2060)
        gin.signal(peer, 1)
        request = gin.flush_async()
        request.wait()
        assert request.done()
        # The signal may overtake the values, which are there when the peer has flushed.
        gin.wait_signal(1)
        comm.barrier()
        assert window.numpy("int64")[256] == -5 - peer
        assert array[514] == 0.5
        assert window.numpy("uint16")[1030] == 258
        gin.get(peer, window, window, 32, remote_offset=0, local_offset=1024)
        gin.flush()
        assert (array[256:264] == peer + 1).all()
        gin.reset_signal(0)
        gin.reset_counter(0)
        assert gin.read_signal(0) == gin.read_counter(0) == 0
        context.check()
        comm.barrier()
        del array
print("done")
"""


def test_every_operation_between_two_processes(run: Run) -> None:
    assert [result.stdout for result in run(OPERATIONS)] == ["done\n"] * 2


LOSES_A_RANK = """
import ferrogin, os, signal, time
comm = ferrogin.Comm.open_env()
window, context = comm.allocate(64), comm.context(signals=3, on_peer_failure="isolate")
gin, other = context.gin(), 2 - comm.rank
assert context.lost_ranks() == []
comm.barrier()
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    gin.wait_signal(1)
    raise AssertionError("nobody raises this signal")
except ferrogin.GinPeerLost:
    assert context.lost_ranks() == [1]
for ranks, error in [([0, 1], "rank 0 is not lost"), ([-1], "a rank"), ([1 << 32], "a rank")]:
    try:
        context.acknowledge_lost(ranks)
    except (ferrogin.UsageError, ValueError, OverflowError) as found:
        assert error in str(found), found
    else:
        raise AssertionError(error)
try:
    gin.wait_signal(1)
    raise AssertionError("nobody raises this signal")
except ferrogin.GinPeerLost:
    pass
context.acknowledge_lost(context.lost_ranks())
try:
    gin.put_value(1, window, 7)
    raise AssertionError("the peer is lost")
except ferrogin.GinPeerLost:
    pass
gin.put_value(other, window, 7, signal=0)
gin.wait_signal(0)
assert window.numpy("int64")[0] == 7
gin.flush()
context.check()
# No rank closes while the other one may still wait for it.
gin.signal(other, 2)
gin.wait_signal(2)
print("done")
"""


def test_ranks_go_on_without_a_lost_one(run: Run) -> None:
    first, lost, last = run(LOSES_A_RANK, ranks=3, check=False)
    assert (first.stdout, lost.returncode, last.stdout) == ("done\n", -signal.SIGKILL, "done\n"), first.stderr + last.stderr


EMULATED = """
import ferrogin, numpy, time
with ferrogin.Comm.open_env() as comm:
    peer = 1 - comm.rank
    with comm.allocate(4096) as window, comm.allocate(64) as words, comm.context(signals=2, counters=1) as context:
        gin, array, word = context.gin(), window.numpy("uint64"), words.numpy("uint64")

        def wait(i, least):
            began = time.monotonic()
            while word[i] < least:
                assert time.monotonic() < began + 240, f"word {i} is {word[i]}, and {least} is awaited"
                time.sleep(0.001)

        assert not array.any() and not word.any()
        # No rank puts before both have looked.
        comm.barrier()
        for i in range(128):
            gin.put_value(peer, window, 1000 + i, dst_offset=8 * i)
        # More than a signal of the card adds in one step, and after all values.
        gin.signal(peer, 1, 5000, strong=True)
        gin.wait_signal(1, 5000)
        assert (array[:128] == 1000 + numpy.arange(128)).all(), array[:128]
        gin.put(peer, window, window, 64, dst_offset=2048, at=(words, 8), add=1 << 40, counter=0)
        wait(1, 1 << 40)
        assert (array[256:264] == array[:8]).all()
        gin.wait_counter(0)
        gin.put_value(peer, window, 7, dst_offset=3072, at=(words, 16), strong=True)
        wait(2, 1)
        assert array[384] == 7
        gin.signal(peer, at=(words, 24), add=3)
        gin.put(peer, window, window, 8, dst_offset=3080, signal=0, strong=True)
        wait(3, 3)
        gin.wait_signal(0)
        assert array[385] == 1000
        for call, error in [
            (lambda: gin.signal(peer, at=(words, 4)), ValueError),
            (lambda: gin.signal(peer, 0, at=(words, 8)), ValueError),
            (lambda: gin.signal(peer, at=words), TypeError),
            (lambda: gin.signal(peer), TypeError),
            (lambda: gin.put(peer, window, window, 8, strong=True), ValueError),
        ]:
            try:
                call()
            except error:
                pass
            else:
                raise AssertionError(error)
        assert word.tolist() == [0, 1 << 40, 1, 3, 0, 0, 0, 0]
        comm.barrier()
        del array, word
print("done")
"""


def test_emulated_signals_are_strong_or_in_windows(run: Run) -> None:
    settings = {"FERROGIN_SIGNALS": "emulated", "SOFTEFA_FAULTS": "seed=3,reorder=64,delay_us=0..50"}
    assert [result.stdout for result in run(EMULATED, **settings)] == ["done\n"] * 2


def test_signals_of_the_card_are_neither_strong_nor_in_windows(comm: ferrogin.Comm) -> None:
    with comm.register(bytearray(64)) as window, comm.context(signals=1) as context:
        gin = context.gin()
        for call in (lambda: gin.signal(0, 0, strong=True), lambda: gin.signal(0, at=(window, 8))):
            with pytest.raises(ferrogin.GinError, match="FERROGIN_SIGNALS=emulated") as caught:
                call()
            assert caught.value.status == 2

EXPORTS = """
import ferrogin, numpy
{}
array = numpy.zeros((4, 8), "int16")
with ferrogin.Comm.open_env() as comm, comm.register(Export(array)) as window, comm.context(signals=1) as context:
    assert (window.dtype, window.shape, window.itemsize, window.nbytes) == ("int16", (4, 8), 2, 64), window
    assert window.host_address == array.ctypes.data
    if comm.rank == 0:
        array[:] = numpy.arange(32).reshape(4, 8)
        context.gin().put(1, window, window, signal=0)
        context.gin().flush()
    else:
        context.gin().wait_signal(0)
        assert (array == numpy.arange(32).reshape(4, 8)).all(), array
        assert (window.numpy() == array).all()
    comm.barrier()
print("done")
"""

OLD_DLPACK = """
class Export:
    def __init__(self, array): self.array = array
    def __dlpack__(self, stream=None): return self.array.__dlpack__()
    def __dlpack_device__(self): return self.array.__dlpack_device__()
"""

NEW_DLPACK = """
class Export:
    def __init__(self, array): self.array = array
    def __dlpack__(self, **options): return self.array.__dlpack__(**options)
    def __dlpack_device__(self): return self.array.__dlpack_device__()
"""

BUFFER = "Export = memoryview"


@pytest.mark.parametrize("export", [OLD_DLPACK, NEW_DLPACK, BUFFER], ids=["dlpack", "versioned dlpack", "buffer"])
def test_exported_memory_moves_between_two_processes(run: Run, export: str) -> None:
    assert [result.stdout for result in run(EXPORTS.format(export))] == ["done\n"] * 2


NEIGHBOURS = """
import ctypes, ferrogin
with ferrogin.Comm.open_env() as comm:
    assert (comm.lsa_rank, comm.lsa_ranks) == (comm.rank, [0, 1])
    with comm.allocate(64, memory=ferrogin.Memory.DEVICE) as window:
        # A store into the other rank's window.
        ctypes.c_uint64.from_address(window.lsa_address(1 - comm.rank)).value = comm.rank + 7
        comm.barrier()
        assert window.numpy("uint64")[0] == 1 - comm.rank + 7
        try:
            window.lsa_address(2)
        except ferrogin.UsageError as error:
            print(error)
        comm.barrier()
"""


def test_ranks_of_one_node_store_to_each_others_windows(run: Run) -> None:
    for result in run(NEIGHBOURS):
        assert "LSA rank 2 does not exist: this rank's node has 2 ranks" in result.stdout


def test_ranks_meet_at_a_port(run: Run) -> None:
    # Below Linux's ephemeral ports.
    port = 20_000 + os.getpid() % 10_000
    run(
        f"""
import ferrogin, os
with ferrogin.Comm.open_at("127.0.0.1:{port}", int(os.environ["FERROGIN_RANK"]), 2) as comm:
    assert (comm.rank, comm.ranks) == (int(os.environ["FERROGIN_RANK"]), 2)
    comm.barrier()
"""
    )


def test_ranks_meet_by_mpi4py() -> None:
    pytest.importorskip("mpi4py")
    if not shutil.which("mpirun"):
        pytest.skip("there is no mpirun")
    command = ["mpirun", "--oversubscribe", "-np", "2", sys.executable, str(EXAMPLES / "mpi.py")]
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=2 * HANG_LIMIT)
    assert result.returncode == 0, result.stderr
    # mpirun may print one rank's line end after another's text.
    assert sorted(re.findall(r"rank . of 2 received \d\.\d", result.stdout)) == ["rank 0 of 2 received 1.5", "rank 1 of 2 received 0.5"]


ALLGATHER = """
import ferrogin, multiprocessing, sys
if __name__ == "__main__":
    ours, theirs = multiprocessing.Pipe()

    def rank(number, pipe, join):
        def allgather(own):
            pipe.send_bytes(own)
            blocks = [own, pipe.recv_bytes()]
            blocks = blocks if number == 0 else blocks[::-1]
            return b"".join(blocks) if join else blocks

        with ferrogin.Comm.open(number, 2, allgather) as comm:
            comm.barrier()

    child = multiprocessing.get_context("fork").Process(target=rank, args=(1, theirs, True))
    child.start()
    rank(0, ours, False)
    child.join()
    sys.exit(child.exitcode)
"""


def test_ranks_meet_by_an_allgather(run: Run) -> None:
    run(ALLGATHER, ranks=1)


def test_allgather_that_raises_is_the_cause_of_the_error() -> None:
    def allgather(own: bytes) -> bytes:
        raise KeyError("the network of the caller")

    with pytest.raises(ferrogin.RemoteError, match="the function returned 1") as error:
        ferrogin.Comm.open(0, 1, allgather)
    assert isinstance(error.value.__cause__, KeyError)
    with pytest.raises(ferrogin.RemoteError) as error:
        ferrogin.Comm.open(0, 1, lambda own: [own, own])
    assert "bytes of all ranks, by rank" in str(error.value.__cause__)


def test_window_keeps_its_memory(comm: ferrogin.Comm) -> None:
    class Array(numpy.ndarray):
        pass

    array = numpy.zeros(512).view(Array)
    gone = weakref.ref(array)
    window = comm.register(array)
    del array
    gc.collect()
    assert gone() is not None
    view = window.view()
    window.free()
    # A view of registered memory keeps the memory alive, but not the registration.
    gc.collect()
    assert gone() is not None and view[0] == 0
    del view
    gc.collect()
    assert gone() is None
    growing = bytearray(64)
    with comm.register(growing):
        with pytest.raises(BufferError):
            growing.extend(b"more")
    growing.extend(b"more")


def test_views_of_allocated_memory_hold_the_window(comm: ferrogin.Comm) -> None:
    window = comm.allocate(64)
    array = window.numpy("int64")
    assert array.shape == (8,) and window.view().nbytes == 64
    for close in (window.free, comm.close):
        with pytest.raises(BufferError, match="delete them"):
            close()
    array[0] = 3
    del array
    window.free()
    with pytest.raises(ZeroDivisionError):
        with comm.allocate(64) as window:
            array = window.numpy()
            1 / 0
    assert not window.closed


def test_threads_share_a_context(comm: ferrogin.Comm) -> None:
    array = numpy.zeros(800, "int64")
    with comm.register(array) as window, comm.context(signals=1) as context:
        gin = context.gin()

        def post(thread: int) -> None:
            for i in range(100):
                gin.put_value(0, window, 100 * thread + i, dst_offset=8 * (100 * thread + i), signal=0)

        threads = [threading.Thread(target=post, args=(thread,)) for thread in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        gin.flush()
        gin.wait_signal(0, 800)
    assert (array == numpy.arange(800)).all()


def test_forgotten_communicator_is_closed_with_a_warning() -> None:
    comm = ferrogin.Comm.open(0, 1, lambda own: [own])
    comm.allocate(64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del comm
        gc.collect()
    assert any(warning.category is ResourceWarning and "with block" in str(warning.message) for warning in caught)


def test_ctypes_memory_is_a_buffer(comm: ferrogin.Comm) -> None:
    with comm.register((ctypes.c_float * 16)()) as window:
        assert (window.dtype, window.nbytes) == ("float32", 64)
