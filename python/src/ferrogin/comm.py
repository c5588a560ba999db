"""Communicators: the calls of ferrogin/host.h as objects."""

from __future__ import annotations

import ctypes
import warnings
import weakref
from contextlib import contextmanager
from ctypes import byref, c_uint32, c_void_p
from enum import IntEnum
from typing import Any, Callable, Iterator, Optional, Sequence, TypeVar, Union

from ferrogin import _gpu, _library, errors
from ferrogin._handle import Callback, Owned, interruptible, lock, using
from ferrogin._library import NO_TIMEOUT, call, unsigned
from ferrogin.gin import Context, nanoseconds
from ferrogin.memory import Span, span_of
from ferrogin.window import Window

_Result = TypeVar("_Result")

Blocks = Union[bytes, bytearray, Sequence[bytes]]

class Memory(IntEnum):
    """The kind of memory that `Comm.allocate` allocates."""

    HOST = 1
    """Host memory; on a machine with a GPU it is pinned, and kernels can access it."""
    DEVICE = 2
    """Memory of the device that kernels run on: GPU memory, or host memory if kernels run on CPU threads."""


class Comm(Owned):
    """The connected ranks of a job. All ranks make collective calls in the same order."""

    _kind = "communicator"

    def __init__(self, handle: int) -> None:
        super().__init__(handle)
        rank, ranks = c_uint32(), c_uint32()
        call("ferrogin_rank", handle, byref(rank), byref(ranks))
        self.rank: int = rank.value
        self.ranks: int = ranks.value
        call("ferrogin_lsa_rank", handle, byref(rank), byref(ranks))
        self.lsa_rank: int = rank.value
        """The position of this rank in `lsa_ranks`."""
        self.lsa_ranks: list[int] = []
        """The ranks of this rank's node, whose kernels load from and store to each other's windows (`Window.lsa_address`)."""
        for lsa_rank in range(ranks.value):
            call("ferrogin_lsa_world_rank", handle, lsa_rank, byref(rank))
            self.lsa_ranks.append(rank.value)
        self._forgotten = weakref.finalize(self, _close_forgotten, handle)
        self._forgotten.atexit = False

    @classmethod
    def open(cls, rank: int, ranks: int, allgather: Callable[[bytes], Blocks], *, card: int = 0) -> Comm:
        """Collective: opens a communicator through the caller's allgather, which is called once.

        `allgather(own)` returns the bytes of all ranks in rank order, as a list or concatenated. mpi4py's `MPI.COMM_WORLD.allgather` works.
        """
        number, number_of_ranks = unsigned("rank", rank, 32), unsigned("ranks", ranks, 32)
        failures: list[BaseException] = []

        def exchange(_: int, own: int, out: int, nbytes: int) -> int:
            try:
                blocks = allgather(ctypes.string_at(own, nbytes))
                data = bytes(blocks) if isinstance(blocks, (bytes, bytearray, memoryview)) else b"".join(map(bytes, blocks))
                if len(data) != nbytes * number_of_ranks:
                    raise ValueError(
                        f"allgather returned {len(data)} bytes for {nbytes} bytes of each of {number_of_ranks} ranks: "
                        "return the bytes of all ranks, by rank"
                    )
                ctypes.memmove(out, data, len(data))
                return 0
            except BaseException as error:
                failures.append(error)
                return 1

        try:
            callback = Callback(exchange)
            function = _library.ALLGATHER(callback)
            return cls._opened("ferrogin_open", card, number, number_of_ranks, function, None, callback=callback)
        except errors.Error as error:
            if failures and not isinstance(failures[0], Exception):
                raise failures[0] from None
            raise error from (failures[0] if failures else None)

    @classmethod
    def open_at(cls, address: str, rank: int, ranks: int, *, card: int = 0) -> Comm:
        """Collective: the ranks meet at rank 0's `host:port`, or, on one host, at an abstract Unix socket with any other name."""
        if not isinstance(address, str) or "\0" in address:
            raise TypeError(f'address is {address!r}: pass a str such as "host:7700"')
        number, number_of_ranks = unsigned("rank", rank, 32), unsigned("ranks", ranks, 32)
        return cls._opened("ferrogin_open_at", card, address.encode(), number, number_of_ranks)

    @classmethod
    def open_env(cls, *, card: int = 0) -> Comm:
        """Collective: takes rank, number of ranks and address from mpirun, torchrun, or FERROGIN_RANK and FERROGIN_NRANKS."""
        return cls._opened("ferrogin_open_env", card)

    @classmethod
    def _opened(cls, name: str, card: int, *arguments: Any, callback: Optional[Callback] = None) -> Comm:
        options = _library.Options(ctypes.sizeof(_library.Options), unsigned("card", card, 32), 0)
        enter_gpu = _gpu.entered_here()

        def opened() -> Comm:
            out = c_void_p()
            # The library chooses the card, and the GPU for kernels, by the thread's current GPU.
            enter_gpu()
            call(name, *arguments, byref(options), byref(out))
            assert out.value is not None
            return cls(out.value)

        return interruptible(opened, callback)

    def __repr__(self) -> str:
        return f"<ferrogin.Comm, rank {self.rank} of {self.ranks}{', closed' if self.closed else ''}>"

    def barrier(self) -> None:
        """Collective: returns when all ranks have called it. It doesn't order a context's operations: flush first."""
        self._collective(lambda handle: call("ferrogin_barrier", handle))

    def _collective(self, make: Callable[[int], _Result]) -> _Result:
        """Makes a collective call with the communicator's handle, which stays open meanwhile."""

        def made() -> _Result:
            with using(self):
                return make(self._require())

        return interruptible(made)

    def allocate(self, nbytes: int, memory: Memory = Memory.HOST) -> Window:
        """Collective: allocates zeroed memory on each rank and registers it. Sizes may differ between ranks."""
        with self._or_fail_everywhere("ferrogin_window_allocate", 0, Memory.HOST):
            kind, size = Memory(memory), unsigned("nbytes", nbytes, 64)
        return self._window("ferrogin_window_allocate", (size, kind), None, size)

    def register(self, obj: object) -> Window:
        """Collective: registers the memory of an array, which the window keeps alive.

        `obj` supports the buffer protocol (numpy, bytearray), `__cuda_array_interface__` (cupy, numba, torch on a GPU) or DLPack. Its
        memory must be writable and C-contiguous; otherwise this raises TypeError or ValueError, and the call fails on the other ranks too.
        """
        with self._or_fail_everywhere("ferrogin_window_register", None, 0, Memory.HOST):
            span = span_of(obj)
        kind = Memory.DEVICE if span.on_gpu else Memory.HOST
        return self._window("ferrogin_window_register", (span.address, span.nbytes, kind), span, span.nbytes)

    def register_dma_buf(self, address: int, nbytes: int, fd: int, offset: int = 0) -> Window:
        """Collective: registers memory at the device address `address`, which is at `offset` in the dma-buf `fd`.

        The caller keeps the memory allocated until the window is freed, and may close `fd` afterwards.
        """
        with self._or_fail_everywhere("ferrogin_window_register_dma_buf", None, 0, -1, 0):
            size = unsigned("nbytes", nbytes, 64)
            place = (unsigned("address", address, 64), size, unsigned("fd", fd, 31), unsigned("offset", offset, 64))
        return self._window("ferrogin_window_register_dma_buf", place, None, size)

    @contextmanager
    def _or_fail_everywhere(self, name: str, *invalid: Any) -> Iterator[None]:
        """If the body rejects a collective call's arguments, makes the call with invalid ones, so that the other ranks don't wait."""
        self._require()
        try:
            yield
        except (TypeError, ValueError):
            self._collective(lambda handle: getattr(_library.load(), name)(handle, *invalid, byref(c_void_p())))
            raise

    def _window(self, name: str, arguments: tuple[Any, ...], span: Optional[Span], nbytes: int) -> Window:
        """Makes a collective call that returns a window."""

        def make(handle: int) -> Window:
            out = c_void_p()
            call(name, handle, *arguments, byref(out))
            assert out.value is not None
            window = Window(self, out.value, span, nbytes)
            with lock:
                self._children.add(window)
            return window

        return self._collective(make)

    def context(
        self,
        signals: int = 0,
        counters: int = 0,
        *,
        contexts: int = 1,
        depth: int = 0,
        traffic_class: int = 0,
        timeout: Optional[float] = None,
        on_peer_failure: Optional[str] = None,
    ) -> Context:
        """Collective: creates contexts, each with its own `signals`, `counters` and queues of `depth` requests (0: 1024).

        `timeout` limits each wait of a kernel or CPU thread, in seconds; 0 is no limit, and None means FERROGIN_WAIT_TIMEOUT (default 60).
        With `on_peer_failure` "isolate", a lost rank ends only the requests to it; with "abort", all waits of the context; None means
        FERROGIN_ON_PEER_FAILURE (default abort). It's the same on all ranks.
        """
        numbers = {
            "contexts": contexts,
            "signals": signals,
            "counters": counters,
            "depth": depth,
            "traffic_class": traffic_class,
        }
        options = _library.ContextOptions(size=ctypes.sizeof(_library.ContextOptions), contexts=(1 << 32) - 1)
        with self._or_fail_everywhere("ferrogin_context_create", byref(options)):
            fields = {name: unsigned(name, value, 32) for name, value in numbers.items()}
            fields["timeout_ms"] = 0 if timeout is None else _milliseconds(timeout)
            if on_peer_failure not in _ON_PEER_FAILURE:
                raise ValueError(f'on_peer_failure is {on_peer_failure!r}: pass "abort", "isolate", or None for the default')
            fields["on_peer_failure"] = _ON_PEER_FAILURE[on_peer_failure]
        for name, value in fields.items():
            setattr(options, name, value)

        def make(handle: int) -> Context:
            out = c_void_p()
            call("ferrogin_context_create", handle, byref(options), byref(out))
            assert out.value is not None
            numbers_of = (max(fields["contexts"], 1), fields["signals"], fields["counters"])
            context = Context(self, self.rank, self.ranks, out.value, *numbers_of)
            with lock:
                self._children.add(context)
            return context

        return self._collective(make)

    def close(self) -> None:
        """Closes the communicator, and its contexts and windows that are still open.

        Peers may use this rank's windows until they return from a barrier: call `barrier` first. Raises UsageError while another thread
        uses the communicator or a context, and BufferError while a view of an allocated window exists.
        """
        self._close_by("ferrogin_close")

    def _release(self) -> None:
        self._forgotten.detach()


_ON_PEER_FAILURE = {None: 0, "abort": 1, "isolate": 2}


def _milliseconds(seconds: float) -> int:
    """Converts seconds to the `timeout_ms` option."""
    ns = nanoseconds(seconds)
    return min(-(-ns // 1_000_000), NO_TIMEOUT - 1) if ns else NO_TIMEOUT


def _close_forgotten(handle: int) -> None:
    warnings.warn("a ferrogin.Comm was not closed: use it in a with block", ResourceWarning, stacklevel=2)
    _library.load().ferrogin_close(handle)
