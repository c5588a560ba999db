"""Contexts, and the kernel operations for CPU threads: ferrogin/gin.h.

A put or get is complete after a flush; a peer's data has arrived once its signal has. A failed operation raises GinError.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_uint32, c_uint64, c_void_p
from typing import Any, Callable, Iterable, Optional, SupportsIndex, Union

from ferrogin import _library, errors
from ferrogin._handle import Owned, interruptible, runs_signal_handlers, using
from ferrogin._library import LAST_ID, call, pointer, unsigned
from ferrogin.window import Window

# How often a wait looks whether it is over before it needs a thread.
_POLLS = 100
_AGGREGATE = 2
_STRONG = 0x400


def nanoseconds(seconds: float) -> int:
    """Converts a time limit for the library; 0 is no limit."""
    if not 0 <= seconds < 1e9:
        raise ValueError(f"the timeout is {seconds}: pass seconds, or 0 for no limit")
    return max(1, int(seconds * 1e9)) if seconds else 0


def _inside(window: str, nbytes: int, start: int, size: int) -> int:
    """Returns `start`, if `size` bytes from there on are in a window of `nbytes` bytes."""
    if start > nbytes or size > nbytes - start:
        raise ValueError(f"bytes {start} to {start + size} are not in {window} of {nbytes} bytes: pass a smaller offset or nbytes")
    return start


class Context(Owned):
    """The queues, signals and counters that kernels use. Created by `Comm.context`."""

    _kind = "context"
    _close_with = "destroy"

    def __init__(
        self, comm: Owned, rank: int, ranks: int, handle: int, contexts: int, signals: int, counters: int
    ) -> None:
        super().__init__(handle, comm)
        self._rank, self._ranks = rank, ranks
        self.contexts = contexts
        self.signals = signals
        self.counters = counters
        self.handle: int = pointer("ferrogin_context_handle", handle)
        """The handle for kernels: the first argument of `fgin_open`."""

    def gin(self, context: int = 0) -> Gin:
        """Returns the operations of context number `context`, for CPU threads. Raises UsageError if kernels run on a GPU."""
        number = unsigned("context", context, 32)
        out = c_void_p()
        with using(self):
            call("ferrogin_context_device", self._handle, number, byref(out))
        assert out.value is not None
        return Gin(self, out.value)

    def check(self) -> None:
        """Raises UsageError if one of the context's requests has failed."""
        with using(self):
            call("ferrogin_context_check", self._handle)

    def lost_ranks(self) -> list[int]:
        """Returns the ranks that the context goes on without, in order; none unless it isolates peers."""
        found = c_uint32()
        ranks = (c_uint32 * self._ranks)()
        with using(self):
            call("ferrogin_lost_ranks", self._handle, ranks, self._ranks, byref(found))
        return ranks[: found.value]

    def acknowledge_lost(self, ranks: Iterable[int]) -> None:
        """Acknowledges the loss of `ranks`. Waits raise GinPeerLost until all losses are acknowledged; posts to a lost rank always do."""
        numbers = [unsigned("a rank", rank, 32) for rank in ranks]
        with using(self):
            call("ferrogin_acknowledge_lost", self._handle, (c_uint32 * len(numbers))(*numbers), len(numbers))

    def destroy(self) -> None:
        """Delivers what kernels have posted, and destroys the context, which no kernel may still be using.

        Raises UsageError while another thread uses it.
        """
        self._close_by("ferrogin_context_destroy")

    close = destroy

    def __repr__(self) -> str:
        numbers = f"{self.signals} signals, {self.counters} counters"
        many = f"{self.contexts} contexts of " if self.contexts != 1 else ""
        return f"<ferrogin.Context of {many}{numbers}, {'closed' if self.closed else f'at {self.handle:#x}'}>"


class Gin:
    """One context, for CPU threads. Created by `Context.gin`; any thread may call any method."""

    def __init__(self, context: Context, address: int) -> None:
        self._context = context
        self._address = address
        self._library = _library.load()

    def __repr__(self) -> str:
        return f"<ferrogin.Gin of {self._context!r}>"

    def _call(self, name: str, *arguments: Any, windows: tuple[Window, ...] = ()) -> None:
        """Calls a function on this context, and keeps `windows` open during the call."""
        with using(self._context, *windows):
            status = getattr(self._library, name)(self._address, *arguments)
        if status != 0:
            raise errors.of_gin_status(status, _library.last_error())

    def _wait(self, is_over: Callable[[], bool], name: str, *arguments: Any) -> None:
        """Like `_call`, for a wait, which Ctrl-C ends. `is_over` tells whether the wait would end at once."""
        if not runs_signal_handlers() or any(is_over() for _ in range(_POLLS)):
            self._call(name, *arguments)
        else:
            interruptible(lambda: self._call(name, *arguments))

    def _post(self, waits: bool, name: str, *arguments: Any, windows: tuple[Window, ...] = ()) -> None:
        """Like `_call`, for an operation. Ctrl-C ends one that waits for earlier operations or for its own bytes."""
        if waits:
            interruptible(lambda: self._call(name, *arguments, windows=windows))
        else:
            self._call(name, *arguments, windows=windows)

    def set_timeout(self, seconds: float) -> None:
        """Makes later waits on this context raise GinTimeout after `seconds`; 0 is no limit."""
        self._call("fgin_set_timeout", nanoseconds(seconds))

    def _peer(self, peer: SupportsIndex) -> int:
        number = unsigned("peer", peer, 32)
        ranks = self._context._ranks
        if number >= ranks:
            allowed = "there is only one rank, so it must be 0" if ranks == 1 else f"pass a rank from 0 to {ranks - 1}"
            raise ValueError(f"peer is {number}: {allowed}")
        return number

    def _window(self, name: str, window: Window) -> Window:
        if not isinstance(window, Window):
            raise TypeError(f"{name} is a {type(window).__name__}: pass a ferrogin.Window, such as Comm.register(array) gives")
        if window._owner is not self._context._owner:
            raise ValueError(f"{name} belongs to another communicator than the context: use a window of the same one")
        return window

    def _id(self, kind: str, value: SupportsIndex, number_of: int) -> int:
        number = unsigned(kind, value, 32)
        if number >= number_of:
            raise ValueError(
                f"{kind} {number} does not exist, as the context has {number_of} {kind}s: pass {kind}s=... to Comm.context"
            )
        if number > LAST_ID:
            raise ValueError(f"{kind} is {number}: pass at most {LAST_ID}, or a word of a window as at=(window, offset)")
        return number

    def _action(self, signal: Optional[int], add: int, counter: Optional[int] = None) -> int:
        action = 0
        if signal is not None:
            action |= unsigned("add", add, 32) << 32 | self._id("signal", signal, self._context.signals) + 1
        if counter is not None:
            action |= (self._id("counter", counter, self._context.counters) + 1) << 16
        return action

    def _flags(self, aggregate: bool, strong: bool, has_signal: bool) -> int:
        if strong and not has_signal:
            raise ValueError("strong is True without a signal: pass signal=... or at=(window, offset)")
        return (_AGGREGATE if aggregate else 0) | (_STRONG if strong else 0)

    def _word(self, peer: int, at: tuple[Window, SupportsIndex], signal: Optional[int]) -> tuple[Window, int]:
        """The window and offset of `peer`'s signal that is a word in a window."""
        if signal is not None:
            raise ValueError(f"signal is {signal}, and at names a word in a window: pass only one of them")
        if not isinstance(at, tuple) or len(at) != 2:
            raise TypeError(f"at is a {type(at).__name__}: pass a tuple of a ferrogin.Window and an offset")
        window, offset = self._window("at", at[0]), unsigned("the offset of at", at[1], 64)
        if offset % 8:
            raise ValueError(f"the offset of at is {offset}: pass a multiple of 8, the bytes of a signal")
        return window, self._place("at", peer, window, offset, 8)

    def _part(self, name: str, window: Window, offset: SupportsIndex, nbytes: Optional[SupportsIndex]) -> tuple[int, int]:
        """The offset and size of a part of one of this rank's windows."""
        start = unsigned(f"{name}_offset", offset, 64)
        size = window.nbytes - start if nbytes is None else unsigned("nbytes", nbytes, 64)
        return _inside(f"the window {name}", window.nbytes, start, size), size

    def _place(self, name: str, peer: int, window: Window, offset: SupportsIndex, nbytes: int) -> int:
        """The offset of a part of `peer`'s window."""
        whose = "the" if peer == self._context._rank else f"rank {peer}'s"
        return _inside(f"{whose} window {name}", window.nbytes_on(peer), unsigned(f"{name}_offset", offset, 64), nbytes)

    def put(
        self,
        peer: int,
        dst: Window,
        src: Window,
        nbytes: Optional[int] = None,
        *,
        dst_offset: int = 0,
        src_offset: int = 0,
        signal: Optional[int] = None,
        add: int = 1,
        at: Optional[tuple[Window, int]] = None,
        strong: bool = False,
        counter: Optional[int] = None,
        aggregate: bool = False,
    ) -> None:
        """Writes `nbytes` bytes (by default the rest of `src`) from this rank's window `src` to `peer`'s window `dst`.

        The peer's `signal` is raised by `add` once the bytes have arrived, and this rank's `counter` once the operation is complete.

        With emulated signals (FERROGIN_SIGNALS=emulated), `at`, a window and an offset in it, can replace `signal`: `add` is added to the 8
        bytes there. A `strong` signal arrives after all earlier operations of this context to `peer`, and this call waits for them.
        """
        target, source = self._window("dst", dst), self._window("src", src)
        start, size = self._part("src", source, src_offset, nbytes)
        rank = self._peer(peer)
        place = self._place("dst", rank, target, dst_offset, size)
        flags = self._flags(aggregate, strong, signal is not None or at is not None)
        put = (rank, target.handle, place, source.handle, start, size)
        if at is None:
            self._post(strong, "fgin_put", *put, self._action(signal, add, counter), flags, windows=(target, source))
        else:
            window, offset = self._word(rank, at, signal)
            word = (window.handle, offset, unsigned("add", add, 64), self._action(None, 0, counter))
            self._post(True, "fgin_put_signal_at", *put, *word, flags, windows=(target, source, window))

    def put_value(
        self,
        peer: int,
        dst: Window,
        value: Union[int, Any],
        nbytes: int = 8,
        *,
        dst_offset: int = 0,
        signal: Optional[int] = None,
        add: int = 1,
        at: Optional[tuple[Window, int]] = None,
        strong: bool = False,
        aggregate: bool = False,
    ) -> None:
        """Writes an int of `nbytes` bytes (1, 2, 4 or 8), or a numpy scalar of its own size, to `peer`'s window `dst` at `dst_offset`.

        Signals work as in `put`.
        """
        window = self._window("dst", dst)
        if isinstance(value, int):
            if nbytes not in (1, 2, 4, 8):
                raise ValueError(f"nbytes is {nbytes}: a value has 1, 2, 4 or 8 bytes")
            if not -(1 << 8 * nbytes - 1) <= value < 1 << 8 * nbytes:
                raise ValueError(f"{value} does not fit {nbytes} bytes: pass more bytes, or put an array")
            bits, size = value & (1 << 8 * nbytes) - 1, nbytes
        else:
            try:
                data = memoryview(value).tobytes()
            except TypeError:
                raise TypeError(f"the value is a {type(value).__name__}: pass an int, or a numpy scalar such as numpy.float32(1)") from None
            bits, size = int.from_bytes(data, "little"), len(data)
            if size not in (1, 2, 4, 8):
                raise ValueError(f"the value has {size} bytes: pass one of 1, 2, 4 or 8 bytes, or put an array")
        rank = self._peer(peer)
        place = self._place("dst", rank, window, dst_offset, size)
        flags = self._flags(aggregate, strong, signal is not None or at is not None)
        put = (rank, window.handle, place, bits, size)
        if at is None:
            self._post(strong, "fgin_put_value", *put, self._action(signal, add), flags, windows=(window,))
        else:
            other, place = self._word(rank, at, signal)
            word = (other.handle, place, unsigned("add", add, 64))
            self._post(True, "fgin_put_value_signal_at", *put, *word, flags, windows=(window, other))

    def get(
        self,
        peer: int,
        remote: Window,
        local: Window,
        nbytes: Optional[int] = None,
        *,
        remote_offset: int = 0,
        local_offset: int = 0,
        aggregate: bool = False,
    ) -> None:
        """Reads `nbytes` bytes (by default the rest of `local`) from `peer`'s window `remote`; they have arrived after `flush`."""
        source, target = self._window("remote", remote), self._window("local", local)
        start, size = self._part("local", target, local_offset, nbytes)
        rank = self._peer(peer)
        place = self._place("remote", rank, source, remote_offset, size)
        flags = _AGGREGATE if aggregate else 0
        arguments = (rank, source.handle, place, target.handle, start, size, flags)
        self._call("fgin_get", *arguments, windows=(source, target))

    def signal(
        self,
        peer: int,
        signal: Optional[int] = None,
        add: int = 1,
        *,
        at: Optional[tuple[Window, int]] = None,
        strong: bool = False,
        aggregate: bool = False,
    ) -> None:
        """Raises one of `peer`'s signals without sending bytes: `signal`, or the word `at` a window and an offset, as in `put`."""
        flags, rank = self._flags(aggregate, strong, True), self._peer(peer)
        if at is not None:
            window, offset = self._word(rank, at, signal)
            word = (window.handle, offset, unsigned("add", add, 64))
            self._post(strong, "fgin_signal_at", rank, *word, flags, windows=(window,))
        elif signal is None:
            raise TypeError("the signal is missing: pass signal, or at=(window, offset)")
        else:
            self._post(strong, "fgin_signal", rank, self._action(signal, add), flags)

    def ring(self) -> None:
        """Rings the doorbells that aggregated operations left, and doesn't wait."""
        self._call("fgin_ring")

    def flush(self) -> None:
        """Waits until every earlier operation on this context has completed."""
        self._wait(self.flush_async().done, "fgin_flush")

    def flush_async(self) -> Request:
        """Starts a flush: the request is complete when the operations before it are."""
        words = _library.RequestWords()
        self._call("fgin_flush_async", byref(words))
        return Request(self, words)

    def read_signal(self, signal: int) -> int:
        """Returns a signal's count since its last reset, modulo 2^31, or 2^64 for an emulated signal."""
        return self._read("fgin_read_signal", self._id("signal", signal, self._context.signals))

    def wait_signal(self, signal: int, least: int = 1) -> None:
        """Waits until a signal's count is at least `least`, modulo 2^31, or 2^64 for an emulated signal."""
        number, count = self._id("signal", signal, self._context.signals), unsigned("least", least, 64)
        self._wait(lambda: self._read("fgin_read_signal", number) >= count, "fgin_wait_signal", number, count)

    def reset_signal(self, signal: int) -> None:
        """Sets a signal's count to 0."""
        self._call("fgin_reset_signal", self._id("signal", signal, self._context.signals))

    def read_counter(self, counter: int) -> int:
        """Returns how many operations with this counter have completed since its last reset, modulo 2^31."""
        return self._read("fgin_read_counter", self._id("counter", counter, self._context.counters))

    def wait_counter(self, counter: int, least: int = 1) -> None:
        """Waits until a counter's count is at least `least`, modulo 2^31."""
        number, count = self._id("counter", counter, self._context.counters), unsigned("least", least, 64)
        self._wait(lambda: self._read("fgin_read_counter", number) >= count, "fgin_wait_counter", number, count)

    def reset_counter(self, counter: int) -> None:
        """Sets a counter's count to 0."""
        self._call("fgin_reset_counter", self._id("counter", counter, self._context.counters))

    def _read(self, name: str, number: int) -> int:
        value = c_uint64()
        self._call(name, number, byref(value))
        return value.value


class Request:
    """A flush started by `Gin.flush_async`."""

    def __init__(self, gin: Gin, words: ctypes.Structure) -> None:
        self._gin = gin
        self._words = words

    def __repr__(self) -> str:
        return f"<ferrogin.Request of {self._gin._context!r}>"

    def wait(self) -> None:
        """Waits until the operations before the request have completed."""
        self._gin._wait(self.done, "fgin_wait_request", byref(self._words))

    def done(self) -> bool:
        """True if `wait` would return at once."""
        done = c_int()
        self._gin._call("fgin_test_request", byref(self._words), byref(done))
        return done.value != 0
