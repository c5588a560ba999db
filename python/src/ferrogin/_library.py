"""libferrogin.so through ctypes: the functions of ferrogin/host.h, and those of ferrogin/gin.h for CPU threads."""

from __future__ import annotations

import ctypes
import operator
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from functools import lru_cache
from typing import Any, SupportsIndex

from ferrogin import errors, paths

ALLGATHER = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_size_t)


class Options(ctypes.Structure):
    """`ferrogin_options`."""

    _fields_ = [("size", c_uint64), ("card", c_uint32), ("reserved", c_uint32)]


class ContextOptions(ctypes.Structure):
    """`ferrogin_context_options`."""

    _fields_ = [
        ("size", c_uint64),
        ("contexts", c_uint32),
        ("signals", c_uint32),
        ("counters", c_uint32),
        ("depth", c_uint32),
        ("traffic_class", c_uint32),
        ("timeout_ms", c_uint32),
        ("on_peer_failure", c_uint32),
        ("reserved", c_uint32),
    ]


NO_TIMEOUT = (1 << 32) - 1
"""`FERROGIN_NO_TIMEOUT`."""


class RequestWords(ctypes.Structure):
    """`fgin_request`."""

    _fields_ = [("words", c_uint32 * 32)]


_OUT = POINTER(c_void_p)
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ferrogin_error": (c_char_p, []),
    "ferrogin_version": (c_char_p, []),
    "ferrogin_open": (c_int, [c_uint32, c_uint32, ALLGATHER, c_void_p, POINTER(Options), _OUT]),
    "ferrogin_open_at": (c_int, [c_char_p, c_uint32, c_uint32, POINTER(Options), _OUT]),
    "ferrogin_open_env": (c_int, [POINTER(Options), _OUT]),
    "ferrogin_rank": (c_int, [c_void_p, POINTER(c_uint32), POINTER(c_uint32)]),
    "ferrogin_lsa_rank": (c_int, [c_void_p, POINTER(c_uint32), POINTER(c_uint32)]),
    "ferrogin_lsa_world_rank": (c_int, [c_void_p, c_uint32, POINTER(c_uint32)]),
    "ferrogin_barrier": (c_int, [c_void_p]),
    "ferrogin_close": (c_int, [c_void_p]),
    "ferrogin_window_allocate": (c_int, [c_void_p, c_size_t, c_uint32, _OUT]),
    "ferrogin_window_register": (c_int, [c_void_p, c_void_p, c_size_t, c_uint32, _OUT]),
    "ferrogin_window_register_dma_buf": (c_int, [c_void_p, c_void_p, c_size_t, c_int, c_uint64, _OUT]),
    "ferrogin_window_handle": (c_void_p, [c_void_p]),
    "ferrogin_window_address": (c_void_p, [c_void_p]),
    "ferrogin_window_host_address": (c_void_p, [c_void_p]),
    "ferrogin_window_lsa_address": (c_void_p, [c_void_p, c_uint32]),
    "ferrogin_window_size": (c_int, [c_void_p, c_uint32, POINTER(c_size_t)]),
    "ferrogin_window_free": (c_int, [c_void_p]),
    "ferrogin_context_create": (c_int, [c_void_p, POINTER(ContextOptions), _OUT]),
    "ferrogin_context_handle": (c_void_p, [c_void_p]),
    "ferrogin_context_device": (c_int, [c_void_p, c_uint32, _OUT]),
    "ferrogin_context_check": (c_int, [c_void_p]),
    "ferrogin_lost_ranks": (c_int, [c_void_p, POINTER(c_uint32), c_uint32, POINTER(c_uint32)]),
    "ferrogin_acknowledge_lost": (c_int, [c_void_p, POINTER(c_uint32), c_uint32]),
    "ferrogin_context_destroy": (c_int, [c_void_p]),
    "fgin_status_name": (c_char_p, [c_int]),
    "fgin_put": (
        c_int,
        [c_void_p, c_uint32, c_void_p, c_uint64, c_void_p, c_uint64, c_uint64, c_uint64, c_uint32],
    ),
    "fgin_put_value": (c_int, [c_void_p, c_uint32, c_void_p, c_uint64, c_uint64, c_uint32, c_uint64, c_uint32]),
    "fgin_get": (c_int, [c_void_p, c_uint32, c_void_p, c_uint64, c_void_p, c_uint64, c_uint64, c_uint32]),
    "fgin_signal": (c_int, [c_void_p, c_uint32, c_uint64, c_uint32]),
    "fgin_put_signal_at": (
        c_int,
        [
            c_void_p, c_uint32, c_void_p, c_uint64, c_void_p, c_uint64, c_uint64, c_void_p, c_uint64, c_uint64, c_uint64, c_uint32,
        ],
    ),
    "fgin_put_value_signal_at": (
        c_int,
        [c_void_p, c_uint32, c_void_p, c_uint64, c_uint64, c_uint32, c_void_p, c_uint64, c_uint64, c_uint32],
    ),
    "fgin_signal_at": (c_int, [c_void_p, c_uint32, c_void_p, c_uint64, c_uint64, c_uint32]),
    "fgin_ring": (c_int, [c_void_p]),
    "fgin_flush": (c_int, [c_void_p]),
    "fgin_flush_async": (c_int, [c_void_p, POINTER(RequestWords)]),
    "fgin_wait_request": (c_int, [c_void_p, POINTER(RequestWords)]),
    "fgin_test_request": (c_int, [c_void_p, POINTER(RequestWords), POINTER(c_int)]),
    "fgin_set_timeout": (c_int, [c_void_p, c_uint64]),
    "fgin_read_signal": (c_int, [c_void_p, c_uint32, POINTER(c_uint64)]),
    "fgin_wait_signal": (c_int, [c_void_p, c_uint32, c_uint64]),
    "fgin_reset_signal": (c_int, [c_void_p, c_uint32]),
    "fgin_read_counter": (c_int, [c_void_p, c_uint32, POINTER(c_uint64)]),
    "fgin_wait_counter": (c_int, [c_void_p, c_uint32, c_uint64]),
    "fgin_reset_counter": (c_int, [c_void_p, c_uint32]),
}


@lru_cache(maxsize=None)
def load() -> ctypes.CDLL:
    """Loads the library and sets its functions' types."""
    library = ctypes.CDLL(str(paths.host_library()))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def version() -> str:
    """The release of the library, such as "0.1.0"."""
    text: bytes = load().ferrogin_version()
    return text.decode()


def last_error() -> str:
    """The cause of this thread's last error, and its fix."""
    text: bytes = load().ferrogin_error()
    return text.decode(errors="replace")


def call(name: str, *arguments: Any) -> None:
    """Calls a function of ferrogin/host.h that returns a status."""
    status = getattr(load(), name)(*arguments)
    if status != 0:
        raise errors.of_status(name, status, last_error())


def pointer(name: str, handle: int, *arguments: int) -> int:
    """Calls a function of ferrogin/host.h that returns a pointer, or NULL if it fails."""
    address = getattr(load(), name)(handle, *arguments)
    if address is None:
        raise errors.of_status(name, errors.Status.INVALID_USAGE, last_error())
    return int(address)


LAST_ID = 65533
"""The largest signal or counter that an action can name."""


def unsigned(name: str, value: SupportsIndex, bits: int) -> int:
    """Returns `value` as an unsigned C integer. ctypes would silently truncate it."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}: pass an int") from None
    if not 0 <= number < 1 << bits:
        raise ValueError(f"{name} is {number}: pass a number from 0 to 2^{bits} - 1")
    return number
