"""Handles of the library."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Callable, Iterator, Optional, Type, TypeVar, Union

from ferrogin import errors
from ferrogin._library import call

_Self = TypeVar("_Self", bound="Owned")
_Result = TypeVar("_Result")

# Guards all handles, their use counts, views and children. It is reentrant, because a destructor may run while it is
# held.
lock = threading.RLock()


class Owned:
    """A handle of the library, which is closed once and never while a thread uses it."""

    _kind = "object"
    _close_with = "close"

    def __init__(self, handle: int, owner: Optional[Owned] = None) -> None:
        self._handle: Optional[int] = handle
        self._uses = 0
        self._owner = owner
        # What closes with it. Holds windows and contexts: a window stays registered, and its memory allocated, until it
        # is freed or the communicator is closed.
        self._children: set[Owned] = set()

    @property
    def closed(self) -> bool:
        """Whether it has been closed."""
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
                f"the {self._kind} is in use by {self._uses} call{'' if self._uses == 1 else 's'} of other threads: "
                f"wait for these threads before {self._close_with}()",
                errors.Status.INVALID_USAGE,
            )

    def close(self) -> None:
        """Closes it."""
        raise NotImplementedError

    def _close_by(self, name: str) -> None:
        """Calls a function that closes this handle and, with it, its children. If it fails, they all stay open."""
        with lock:
            handle = self._require()
            group = (self, *self._children)
            for one in group:
                one._check_can_close()
            handles = [one._handle for one in group]
            for one in group:
                one._handle = None
            # The owner must not be closed meanwhile.
            if self._owner is not None:
                self._owner._uses += 1

        def close() -> None:
            try:
                call(name, handle)
            except errors.Error:
                with lock:
                    for one, value in zip(group, handles):
                        one._handle = value
                raise
            finally:
                if self._owner is not None:
                    with lock:
                        self._owner._uses -= 1
            with lock:
                self._children.clear()
                if self._owner is not None:
                    self._owner._children.discard(self)
            for one in group:
                one._release()

        interruptible(close)

    def _release(self) -> None:
        """Drops what the object held while it was open."""

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
            # The exception that ended the block is the cause, and its traceback keeps views alive.
            if kind is None:
                raise


@contextmanager
def using(*objects: Owned) -> Iterator[None]:
    """Keeps objects open during a call."""
    with lock:
        for owned in objects:
            owned._require()
        for owned in objects:
            owned._uses += 1
    try:
        yield
    finally:
        with lock:
            for owned in objects:
                owned._uses -= 1


def runs_signal_handlers() -> bool:
    """Whether Python runs the handlers of signals, such as Ctrl-C, on this thread."""
    return threading.current_thread() is threading.main_thread()


class Callback:
    """A caller's function that the library calls during `interruptible`; it runs on the caller's thread."""

    def __init__(self, function: Callable[..., int]) -> None:
        self._function = function
        self._caller = threading.get_ident()
        # What the library's thread leaves to the caller: arguments of calls, and None once it has ended.
        self.calls: SimpleQueue[Optional[tuple[Any, ...]]] = SimpleQueue()
        self._results: SimpleQueue[int] = SimpleQueue()

    def __call__(self, *arguments: Any) -> int:
        if threading.get_ident() == self._caller:
            return self._function(*arguments)
        self.calls.put(arguments)
        return self._results.get()

    def run(self, arguments: tuple[Any, ...]) -> None:
        """Makes a call for the library's thread."""
        self._results.put(self._function(*arguments))

    def give_up(self) -> None:
        """Makes the library's call, or its next one, return 1."""
        self._results.put(1)


def interruptible(wait: Callable[[], _Result], callback: Optional[Callback] = None) -> _Result:
    """Calls a function of the library that waits. Ctrl-C ends the call, and leaves the library's wait to a thread of its own."""
    if not runs_signal_handlers():
        return wait()
    caller = callback or Callback(lambda: 1)
    outcome: list[Union[_Result, BaseException]] = []

    def run() -> None:
        try:
            outcome.append(wait())
        except BaseException as error:
            outcome.append(error)
        caller.calls.put(None)

    try:
        threading.Thread(target=run, name="ferrogin-wait", daemon=True).start()
    except RuntimeError:
        # There are no more threads, or the interpreter is ending.
        return wait()
    try:
        while not outcome:
            try:
                arguments = caller.calls.get(timeout=0.1)
            except Empty:
                continue
            if arguments is not None:
                caller.run(arguments)
    except BaseException:
        caller.give_up()
        raise
    result = outcome.pop()
    if not isinstance(result, BaseException):
        return result
    try:
        raise result
    finally:
        # Otherwise, the exception would keep itself alive through this frame, and with it the caller's arrays.
        del result
