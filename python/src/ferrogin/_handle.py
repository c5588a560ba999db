"""Handles of the library."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from types import TracebackType
from typing import Iterable, Iterator, Optional, Type, TypeVar

from ferrogin import errors
from ferrogin._library import call

_Self = TypeVar("_Self", bound="Owned")

# Guards the handles and the use counts.
_lock = threading.Lock()


class Owned:
    """A handle of the library, which is closed once and never while a thread uses it."""

    _kind = "object"
    _close_with = "close"

    def __init__(self, handle: int) -> None:
        self._handle: Optional[int] = handle
        self._uses = 0

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

    def _close_by(self, name: str, owned: Iterable[Owned]) -> None:
        """Calls a function that closes this handle and, with it, `owned`. If it fails, they all stay open."""
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


class Owner(Owned):
    """A handle that owns others: the communicator, as its windows and contexts see it."""

    ranks: int
    _children: set[Owned]


@contextmanager
def using(*objects: Owned) -> Iterator[None]:
    """Keeps objects open during a call that takes addresses instead of handles."""
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
