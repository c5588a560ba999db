"""The calling thread's GPU, for a call that runs on another thread."""

from __future__ import annotations

import ctypes
import os
from ctypes import byref, c_void_p
from typing import Callable

from ferrogin import errors


def entered_here() -> Callable[[], None]:
    """Returns a function that makes the CUDA context that is current on this thread, if there is one, current on its caller's thread."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        # Without the driver, this thread has no context.
        return lambda: None
    context = c_void_p()
    if driver.cuCtxGetCurrent(byref(context)) != 0 or not context:
        return lambda: None

    def enter() -> None:
        status = driver.cuCtxSetCurrent(context)
        if status != 0:
            raise errors.CudaError(f"cuCtxSetCurrent failed with {status} on a new thread", errors.Status.CUDA_ERROR)

    return enter
