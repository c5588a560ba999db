"""The files that come with the package: libraries, headers and device code. `python -m ferrogin NAME` prints each path."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path(__file__).resolve().parent


def _existing(path: Path, missing: str) -> Path:
    if path.exists():
        return path
    raise FileNotFoundError(f"{path} is missing: {missing}")


_NO_WHEEL = "this is not an installed wheel of ferrogin; make wheel builds one, and pip installs it"


def include() -> Path:
    """The directory for -I, with ferrogin/host.h, ferrogin/gin.h and the C++ and CUDA headers."""
    return _existing(_ROOT / "include", _NO_WHEEL)


def lib() -> Path:
    """The directory for -L, -Wl,-rpath and FI_PROVIDER_PATH, with all libraries."""
    return _existing(_ROOT / "lib", _NO_WHEEL)


def host_library() -> Path:
    """libferrogin.so: the host API, and the device API for CPU threads."""
    return _existing(lib() / "libferrogin.so.0", _NO_WHEEL)


def plugin() -> Path:
    """The value of NCCL_GIN_PLUGIN."""
    return _existing(lib() / "libnccl-gin-ferrogin.so", _NO_WHEEL)


def ptx() -> Path:
    """The device code as PTX."""
    return _existing(_ROOT / "cuda" / "ferrogin_device.ptx", _NO_WHEEL)


def bitcode() -> Path:
    """The device code as LLVM bitcode, for Triton."""
    return _existing(_ROOT / "cuda" / "ferrogin_device.bc", _NO_WHEEL)


def cuda_object(architecture: str = "") -> Path:
    """The device code as an object that nvcc links: for one architecture, such as "sm_90", or for all of them."""
    name = f"ferrogin_device.{architecture}.o" if architecture else "ferrogin_device.o"
    return _existing(
        _ROOT / "cuda" / name,
        f"this wheel has no such object; make ptx wheel builds one with the objects of {', '.join(_architectures()) or 'no GPU'}",
    )


def _architectures() -> list[str]:
    return ["sm_75", "sm_80", "sm_90", "sm_100", "sm_103", "sm_120"]


def tool() -> Path:
    """The ferrogin command line tool, which the command `ferrogin` runs."""
    return _existing(_ROOT / "bin" / "ferrogin", _NO_WHEEL)
