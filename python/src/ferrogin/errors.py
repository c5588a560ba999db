"""The package's exceptions. Each message names the cause and the fix.

Invalid Python arguments raise TypeError, ValueError or BufferError before the library is called.
"""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    """The codes of `ferrogin_status` in ferrogin/host.h, the same as those of ncclResult_t."""

    CUDA_ERROR = 1
    SYSTEM_ERROR = 2
    INTERNAL_ERROR = 3
    INVALID_ARGUMENT = 4
    INVALID_USAGE = 5
    REMOTE_ERROR = 6


class GinStatus(IntEnum):
    """The codes of `fgin_status` in ferrogin/gin.h."""

    INVALID_ARGUMENT = 1
    UNSUPPORTED = 2
    ABORTED = 3
    TIMEOUT = 4
    CARD_ERROR = 5
    POISONED = 6
    PEER_LOST = 7


class Error(Exception):
    """A call of the host API failed."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class CudaError(Error):
    """A CUDA driver call failed."""


class SystemCallError(Error, OSError):
    """A system call or a libfabric call failed."""


class InternalError(Error):
    """A bug in ferrogin: please report it."""


class ArgumentError(Error, ValueError):
    """An argument has an invalid value, or a handle is closed."""


class UsageError(Error, RuntimeError):
    """The machine, the settings or the order of calls doesn't allow the call."""


class RemoteError(Error, ConnectionError):
    """Another rank failed, exited, or did not answer in time."""


class GinError(Error):
    """A CPU thread's operation on a context failed. `status` is a GinStatus."""


class GinTimeout(GinError, TimeoutError):
    """A CPU thread's wait did not finish within the context's timeout."""


class GinPeerLost(GinError, ConnectionError):
    """In a context that isolates peers: the peer is lost, or a rank is whose loss isn't acknowledged. `Context.lost_ranks` names it."""


_BY_STATUS = {
    Status.CUDA_ERROR: CudaError,
    Status.SYSTEM_ERROR: SystemCallError,
    Status.INTERNAL_ERROR: InternalError,
    Status.INVALID_ARGUMENT: ArgumentError,
    Status.INVALID_USAGE: UsageError,
    Status.REMOTE_ERROR: RemoteError,
}

def of_status(call: str, status: int, text: str) -> Error:
    """Returns the exception for a failed function of ferrogin/host.h."""
    kind = _BY_STATUS.get(Status(status), InternalError) if status in list(Status) else InternalError
    return kind(f"{call}: {text}", status)


def of_gin_status(status: int, text: str) -> GinError:
    """Returns the exception for a failed function of ferrogin/gin.h."""
    kinds: dict[int, type[GinError]] = {GinStatus.TIMEOUT: GinTimeout, GinStatus.PEER_LOST: GinPeerLost}
    kind = kinds.get(status, GinError)
    return kind(text, GinStatus(status) if status in list(GinStatus) else status)
