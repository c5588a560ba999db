"""ferrogin's host API in Python: windows and contexts for kernels that drive network cards.

    with ferrogin.Comm.open_env() as comm:
        window = comm.register(array)
        context = comm.context(signals=1)

docs/python.md describes the package; docs/host-api.md has the rules for the calls.
"""

from importlib.metadata import version as _version

from ferrogin import paths
from ferrogin._library import version
from ferrogin.comm import Comm, Memory
from ferrogin.errors import (
    ArgumentError,
    CudaError,
    Error,
    GinError,
    GinStatus,
    GinPeerLost,
    GinTimeout,
    InternalError,
    RemoteError,
    Status,
    SystemCallError,
    UsageError,
)
from ferrogin.gin import Context, Gin, Request
from ferrogin.window import Window

__version__ = _version("ferrogin")

__all__ = [
    "ArgumentError",
    "Comm",
    "Context",
    "CudaError",
    "Error",
    "Gin",
    "GinError",
    "GinStatus",
    "GinPeerLost",
    "GinTimeout",
    "InternalError",
    "Memory",
    "RemoteError",
    "Request",
    "Status",
    "SystemCallError",
    "UsageError",
    "Window",
    "__version__",
    "paths",
    "version",
]
