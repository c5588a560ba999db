"""Communicators, windows and contexts: the calls of ferrogin/host.h as objects."""

from __future__ import annotations

import ctypes
import threading
import warnings
import weakref
from contextlib import contextmanager
from ctypes import byref, c_uint32, c_void_p
from enum import IntEnum
from types import TracebackType
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator, Optional, Sequence, Type, TypeVar, Union

from ferrogin import _library, errors
from ferrogin._library import call, pointer, unsigned
from ferrogin.memory import Span, span_of

if TYPE_CHECKING:
    from ferrogin.gin import Gin

Blocks = Union[bytes, bytearray, Sequence[bytes]]
_Self = TypeVar("_Self", bound="_Owned")

# Guards the handles and the counts of uses.
_lock = threading.Lock()


class Memory(IntEnum):
    """The memory that `Comm.allocate` allocates."""

    HOST = 1
    """Host memory; beside a GPU it is pinned, and kernels can access it."""
    DEVICE = 2
    """Memory of the device that kernels run on: of a GPU, or host memory if kernels run on CPU threads."""


class _Owned:
    """A handle of the library that is closed once, and not while a thread uses it."""

    _kind = "object"
    _close_with = "close"

    def __init__(self, handle: int) -> None:
        self._handle: Optional[int] = handle
        self._uses = 0

    @property
    def closed(self) -> bool:
        """True after it was closed."""
        return self._handle is None

    def _require(self) -> int:
        if self._handle is None:
            raise errors.UsageError(
                f"the {self._kind} is closed: use it before its {self._close_with}() or the end of its with block",
                errors.Status.INVALID_USAGE,
            )
        return self._handle

    def _check_can_close(self) -> None:
        if self._uses:
            raise errors.UsageError(
                f"the {self._kind} is in use: {self._uses} calls of other threads use it; "
                f"wait for these threads before {self._close_with}()",
                errors.Status.INVALID_USAGE,
            )

    def close(self) -> None:
        """Closes it."""
        raise NotImplementedError

    def _close_by(self, name: str, owned: Iterable[_Owned]) -> None:
        """Calls a function that closes this handle, and with it `owned`. After an error they are open as before."""
        with _lock:
            handle = self._require()
            group = (self, *owned)
            for one in group:
                one._check_can_close()
            handles = [one._handle for one in group]
            for one in group:
                one._handle = None
        try:
            call(name, handle)
        except errors.Error:
            for one, value in zip(group, handles):
                one._handle = value
            raise
        for one in group:
            one._release()

    def _release(self) -> None:
        """Drops what the object kept while it was open."""

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], value: Optional[BaseException], traceback: Optional[TracebackType]
    ) -> None:
        if self._handle is None:
            return
        try:
            self.close()
        except (errors.Error, BufferError):
            # The exception that ends the block is the cause, and its traceback keeps views alive.
            if kind is None:
                raise


@contextmanager
def using(*objects: _Owned) -> Iterator[None]:
    """Keeps objects open during a call that gets addresses and no handles."""
    with _lock:
        for owned in objects:
            owned._require()
        for owned in objects:
            owned._uses += 1
    try:
        yield
    finally:
        with _lock:
            for owned in objects:
                owned._uses -= 1


class Window(_Owned):
    """Memory that the kernels of all ranks can name. `Comm.allocate` and `Comm.register` make it."""

    _kind = "window"
    _close_with = "free"

    def __init__(self, comm: Comm, handle: int, span: Optional[Span], nbytes: int) -> None:
        super().__init__(handle)
        self._comm = comm
        self._span = span
        self._view: Optional[weakref.ref[Any]] = None
        self.nbytes = nbytes
        self.handle: int = pointer("ferrogin_window_handle", handle)
        """The window for kernels: the `fgin_window` of ferrogin/gin.h."""
        self.address: int = pointer("ferrogin_window_address", handle)
        """The address of the first byte for kernels."""

    @property
    def dtype(self) -> str:
        """The type of the elements of a registered array; "uint8" of allocated memory."""
        return self._span.dtype if self._span else "uint8"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a registered array."""
        return self._span.shape if self._span else (self.nbytes,)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self._span.itemsize if self._span else 1

    @property
    def host_address(self) -> int:
        """The address of the first byte for the host. UsageError for memory of a GPU."""
        return pointer("ferrogin_window_host_address", self._require())

    def view(self) -> memoryview:
        """The bytes of the window, without a copy. UsageError for memory of a GPU.

        While a view of allocated memory lives, the window cannot be freed.
        """
        address = self.host_address
        buffer = self._view() if self._view else None
        if buffer is None:
            kind: Any = ctypes.c_ubyte * self.nbytes
            buffer = kind.from_address(address)
            # The view keeps the registered memory, or the window that allocated it.
            buffer.owner = self if self._span is None else self._span
            self._view = weakref.ref(buffer)
        return memoryview(buffer).cast("B")

    def numpy(self, dtype: Any = None, shape: Union[int, Sequence[int], None] = None) -> Any:
        """The window as a numpy array, without a copy. UsageError for memory of a GPU.

        `dtype` and `shape` are by default those of the registered array, or bytes. ValueError if they do not fit the window.
        """
        import numpy

        kind = numpy.dtype(self.dtype if dtype is None else dtype)
        if kind.hasobject or kind.itemsize == 0:
            raise TypeError(f"dtype {kind} has references or no size: pass numbers")
        if shape is None:
            shape = self.shape if dtype is None else (self.nbytes // kind.itemsize,)
        lengths = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
        wanted = kind.itemsize
        for length in lengths:
            wanted *= unsigned("a length of shape", length, 63)
        if wanted != self.nbytes:
            raise ValueError(
                f"an array of {kind} and shape {lengths} has {wanted} bytes, and the window {self.nbytes}: pass a shape that fills the window"
            )
        return numpy.frombuffer(self.view(), dtype=kind).reshape(lengths)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The bytes of a window in GPU memory, for cupy, torch and numba; they must not be used after free()."""
        handle = self._require()
        if _library.load().ferrogin_window_host_address(handle) is not None:
            raise AttributeError("the window is in host memory: use numpy() or view()")
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3, "strides": None}

    def _check_can_close(self) -> None:
        super()._check_can_close()
        if self._span is None and self._view is not None and self._view() is not None:
            raise BufferError(
                f"the window of {self.nbytes} bytes has views (view(), numpy()) that are alive: delete them (del array) before the window "
                "is freed, or register an array of your own"
            )

    def _release(self) -> None:
        if self._span is not None:
            self._span = self._span._replace(owner=None)

    def free(self) -> None:
        """Deregisters the window, and frees memory that `Comm.allocate` allocated.

        UsageError, and the window stays open, while requests of the communicator's contexts are not complete, or while another
        thread uses it; BufferError while a view of allocated memory lives.
        """
        self._close_by("ferrogin_window_free", ())
        self._comm._children.discard(self)

    close = free

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"at {self.address:#x}"
        return f"<ferrogin.Window of {self.nbytes} bytes, {self.dtype}{list(self.shape)}, {state}>"


class Context(_Owned):
    """The queues, signals and counters that kernels post on. `Comm.context` makes it."""

    _kind = "context"
    _close_with = "destroy"

    def __init__(self, comm: Comm, handle: int, contexts: int, signals: int, counters: int, timeout: Optional[float]) -> None:
        super().__init__(handle)
        self._comm = comm
        self.contexts = contexts
        self.signals = signals
        self.counters = counters
        self.timeout = timeout
        self.handle: int = pointer("ferrogin_context_handle", handle)
        """The handle for kernels: the first argument of `fgin_open`."""

    def gin(self, context: int = 0) -> Gin:
        """The operations of context number `context` for CPU threads. UsageError if kernels run on a GPU."""
        from ferrogin.gin import Gin

        number = unsigned("context", context, 32)
        out = c_void_p()
        call("ferrogin_context_device", self._require(), number, byref(out))
        assert out.value is not None
        return Gin(self, out.value, self.timeout)

    def check(self) -> None:
        """UsageError after a request of the context has failed."""
        call("ferrogin_context_check", self._require())

    def destroy(self) -> None:
        """Destroys the context, which no kernel uses any more. UsageError while another thread uses it."""
        self._close_by("ferrogin_context_destroy", ())
        self._comm._children.discard(self)

    close = destroy


class Comm(_Owned):
    """The ranks of a job, connected. Collective calls are made by all ranks in the same order."""

    _kind = "communicator"

    def __init__(self, handle: int) -> None:
        super().__init__(handle)
        rank, ranks = c_uint32(), c_uint32()
        call("ferrogin_rank", handle, byref(rank), byref(ranks))
        self.rank: int = rank.value
        self.ranks: int = ranks.value
        # A window stays registered, and its memory allocated, until it is freed or the communicator is closed.
        self._children: set[Union[Window, Context]] = set()
        self._forgotten = weakref.finalize(self, _close_forgotten, handle)
        self._forgotten.atexit = False

    @classmethod
    def open(cls, rank: int, ranks: int, allgather: Callable[[bytes], Blocks], *, card: int = 0) -> Comm:
        """Collective: opens a communicator with the caller's exchange, which is called once.

        `allgather(own)` returns the bytes of all ranks by rank, as a list or joined. mpi4py's `MPI.COMM_WORLD.allgather` is one.
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
            function = _library.ALLGATHER(exchange)
            return cls._opened("ferrogin_open", card, number, number_of_ranks, function, None)
        except errors.Error as error:
            if failures and not isinstance(failures[0], Exception):
                raise failures[0] from None
            raise error from (failures[0] if failures else None)

    @classmethod
    def open_at(cls, address: str, rank: int, ranks: int, *, card: int = 0) -> Comm:
        """Collective: the ranks meet at `host:port` of rank 0, or on one host at an abstract Unix socket with any other name."""
        if not isinstance(address, str) or "\0" in address:
            raise TypeError(f'address is {address!r}: pass a str such as "host:7700"')
        number, number_of_ranks = unsigned("rank", rank, 32), unsigned("ranks", ranks, 32)
        return cls._opened("ferrogin_open_at", card, address.encode(), number, number_of_ranks)

    @classmethod
    def open_env(cls, *, card: int = 0) -> Comm:
        """Collective: rank, number of ranks and address come from mpirun, torchrun, or FERROGIN_RANK and FERROGIN_NRANKS."""
        return cls._opened("ferrogin_open_env", card)

    @classmethod
    def _opened(cls, name: str, card: int, *arguments: Any) -> Comm:
        options = _library.Options(ctypes.sizeof(_library.Options), unsigned("card", card, 32), 0)
        out = c_void_p()
        call(name, *arguments, byref(options), byref(out))
        assert out.value is not None
        return cls(out.value)

    def barrier(self) -> None:
        """Collective: returns when all ranks have called it. It orders no operation of a context: flush before."""
        call("ferrogin_barrier", self._require())

    def allocate(self, nbytes: int, memory: Memory = Memory.HOST) -> Window:
        """Collective: allocates zeroed memory on each rank, and registers it. Ranks may allocate different sizes."""
        out = c_void_p()
        with self._or_fail_everywhere("ferrogin_window_allocate", 0, Memory.HOST, byref(out)) as handle:
            kind, size = Memory(memory), unsigned("nbytes", nbytes, 64)
        call("ferrogin_window_allocate", handle, size, kind, byref(out))
        return self._window(out, None, size)

    def register(self, obj: object) -> Window:
        """Collective: registers the memory of an array, which the window keeps alive.

        `obj` has the buffer protocol (numpy, bytearray), `__cuda_array_interface__` (cupy, numba, torch on a GPU) or DLPack. Its memory
        is writable and contiguous in C order; otherwise TypeError or ValueError, and the call fails on the other ranks too.
        """
        out = c_void_p()
        with self._or_fail_everywhere("ferrogin_window_register", None, 0, Memory.HOST, byref(out)) as handle:
            span = span_of(obj)
        kind = Memory.DEVICE if span.on_gpu else Memory.HOST
        call("ferrogin_window_register", handle, span.address, span.nbytes, kind, byref(out))
        return self._window(out, span, span.nbytes)

    def register_dma_buf(self, address: int, nbytes: int, fd: int, offset: int = 0) -> Window:
        """Collective: registers memory at the device address `address`, which is at `offset` in the dma-buf `fd`.

        The caller keeps the memory allocated until the window is freed, and may close `fd` afterwards.
        """
        out = c_void_p()
        with self._or_fail_everywhere("ferrogin_window_register_dma_buf", None, 0, -1, 0, byref(out)) as handle:
            size = unsigned("nbytes", nbytes, 64)
            place = (unsigned("address", address, 64), size, unsigned("fd", fd, 31), unsigned("offset", offset, 64))
        call("ferrogin_window_register_dma_buf", handle, *place, byref(out))
        return self._window(out, None, size)

    @contextmanager
    def _or_fail_everywhere(self, name: str, *invalid: Any) -> Iterator[int]:
        """If the body refuses the arguments of a collective call, makes the call with invalid ones, so that the other ranks do not wait."""
        handle = self._require()
        try:
            yield handle
        except (TypeError, ValueError):
            getattr(_library.load(), name)(handle, *invalid)
            raise

    def _window(self, out: c_void_p, span: Optional[Span], nbytes: int) -> Window:
        assert out.value is not None
        window = Window(self, out.value, span, nbytes)
        self._children.add(window)
        return window

    def context(
        self,
        signals: int = 0,
        counters: int = 0,
        *,
        contexts: int = 1,
        depth: int = 0,
        traffic_class: int = 0,
        timeout: Optional[float] = 60.0,
    ) -> Context:
        """Collective: creates contexts, each with `signals`, `counters` and queues of `depth` requests (0: 1024) of its own.

        `timeout` is the limit in seconds of the waits of CPU threads (`Context.gin`); None is no limit.
        """
        numbers = {
            "contexts": contexts,
            "signals": signals,
            "counters": counters,
            "depth": depth,
            "traffic_class": traffic_class,
        }
        out = c_void_p()
        options = _library.ContextOptions(size=ctypes.sizeof(_library.ContextOptions), contexts=(1 << 32) - 1)
        with self._or_fail_everywhere("ferrogin_context_create", byref(options), byref(out)) as handle:
            fields = {name: unsigned(name, value, 32) for name, value in numbers.items()}
        for name, value in fields.items():
            setattr(options, name, value)
        call("ferrogin_context_create", handle, byref(options), byref(out))
        assert out.value is not None
        context = Context(self, out.value, max(fields["contexts"], 1), fields["signals"], fields["counters"], timeout)
        self._children.add(context)
        return context

    def close(self) -> None:
        """Closes the contexts and windows that are still open, and the communicator.

        Peers may use this rank's windows until they return from a barrier: call `barrier` before. UsageError while another thread uses
        a context; BufferError while a view of an allocated window lives.
        """
        self._close_by("ferrogin_close", tuple(self._children))
        self._children.clear()
        self._forgotten.detach()


def _close_forgotten(handle: int) -> None:
    warnings.warn("a ferrogin.Comm was not closed: use it in a with block", ResourceWarning, stacklevel=2)
    _library.load().ferrogin_close(handle)
