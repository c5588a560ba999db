"""Windows: memory that the kernels of all ranks can access."""

from __future__ import annotations

import ctypes
import weakref
from ctypes import byref, c_size_t
from typing import TYPE_CHECKING, Any, Optional, Sequence, TypeVar, Union, overload

from ferrogin import _library
from ferrogin._handle import Owned, lock, using
from ferrogin._library import call, pointer, unsigned
from ferrogin.memory import Span

if TYPE_CHECKING:
    from numpy import generic
    from numpy.typing import NDArray

_Scalar = TypeVar("_Scalar", bound="generic")


class Window(Owned):
    """Memory that the kernels of all ranks can access. Created by `Comm.allocate` and `Comm.register`."""

    _kind = "window"
    _close_with = "free"

    def __init__(self, comm: Owned, handle: int, span: Optional[Span], nbytes: int) -> None:
        super().__init__(handle, comm)
        self._span = span
        self._view: Optional[weakref.ref[Any]] = None
        self.nbytes = nbytes
        self._sizes: dict[int, int] = {}
        self.handle: int = pointer("ferrogin_window_handle", handle)
        """The handle for kernels: the `fgin_window` of ferrogin/gin.h."""
        self.address: int = pointer("ferrogin_window_address", handle)
        """The address of the first byte, as kernels see it."""

    @property
    def dtype(self) -> str:
        """The element type of a registered array; "uint8" for allocated memory."""
        return self._span.dtype if self._span else "uint8"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a registered array."""
        return self._span.shape if self._span else (self.nbytes,)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self._span.itemsize if self._span else 1

    def nbytes_on(self, rank: int) -> int:
        """Returns the bytes of the window on `rank`, which may differ from `nbytes`."""
        number = unsigned("rank", rank, 32)
        if number not in self._sizes:
            size = c_size_t()
            with using(self):
                call("ferrogin_window_size", self._handle, number, byref(size))
            self._sizes[number] = size.value
        return self._sizes[number]

    @property
    def host_address(self) -> int:
        """The address of the first byte, as the host sees it. Raises UsageError for GPU memory."""
        with lock:
            return pointer("ferrogin_window_host_address", self._require())

    def lsa_address(self, lsa_rank: int) -> int:
        """Returns the address at which kernels load from and store to the window of rank `Comm.lsa_ranks[lsa_rank]`.

        A host address, if kernels run on CPU threads. Addresses of consecutive ranks have equal distances. Raises UsageError unless all of
        these ranks allocated the window, in memory of their devices, and their GPUs have peer access to each other.
        """
        with lock:
            return pointer("ferrogin_window_lsa_address", self._require(), unsigned("lsa_rank", lsa_rank, 32))

    def view(self) -> memoryview:
        """Returns the window's bytes, without a copy. Raises UsageError for GPU memory.

        A window of allocated memory cannot be freed while it has views.
        """
        # Until the view is recorded, the window must not be freed, and no other thread may make another view.
        with lock:
            address = self.host_address
            buffer = self._view() if self._view else None
            if buffer is None:
                kind: Any = ctypes.c_ubyte * self.nbytes
                buffer = kind.from_address(address)
                # The view keeps the registered memory alive, or the window that allocated it.
                buffer.owner = self if self._span is None else self._span
                self._view = weakref.ref(buffer)
            return memoryview(buffer).cast("B")

    @overload
    def numpy(self, dtype: type[_Scalar], shape: Union[int, Sequence[int], None] = None) -> NDArray[_Scalar]: ...

    @overload
    def numpy(self, dtype: Any = None, shape: Union[int, Sequence[int], None] = None) -> NDArray[Any]: ...

    def numpy(self, dtype: Any = None, shape: Union[int, Sequence[int], None] = None) -> NDArray[Any]:
        """Returns the window as a numpy array, without a copy. Raises UsageError for GPU memory.

        `dtype` and `shape` default to those of the registered array, or to bytes. Raises ValueError if they don't fit the window.
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
        """The bytes of a window in GPU memory, for cupy, torch and numba; don't use them after free()."""
        with lock:
            if _library.load().ferrogin_window_host_address(self._require()) is not None:
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

        Raises UsageError, and leaves the window open, while requests of the communicator's contexts are incomplete or another thread uses
        it; raises BufferError while a view of allocated memory exists.
        """
        self._close_by("ferrogin_window_free")

    close = free

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"at {self.address:#x}"
        return f"<ferrogin.Window of {self.nbytes} bytes, {self.dtype}{list(self.shape)}, {state}>"
