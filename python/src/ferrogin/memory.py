"""The memory behind other packages' arrays: the buffer protocol, `__cuda_array_interface__` and DLPack."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p, py_object
from typing import Any, NamedTuple, Optional, Sequence


class Span(NamedTuple):
    """Contiguous writable memory, and the objects that keep it allocated."""

    address: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    on_gpu: bool
    owner: object


_COPY = "copy it to an array that is, and register the copy"


def span_of(obj: object) -> Span:
    """Returns the memory of `obj`.

    Raises TypeError if `obj` has no memory that a window can use, and ValueError if its memory is read-only, empty or not contiguous.
    """
    name = type(obj).__name__
    try:
        view = memoryview(obj)  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError) as error:
        no_buffer = error
    else:
        return _of_buffer(name, obj, view)
    interface = getattr(obj, "__cuda_array_interface__", None)
    if interface is not None:
        return _of_cuda_array_interface(name, obj, interface)
    if hasattr(obj, "__dlpack__"):
        return _of_dlpack(name, obj)
    raise TypeError(
        f"{name} has no memory for a window ({no_buffer}): pass an object with the buffer protocol, DLPack or "
        "__cuda_array_interface__, such as an array of numpy, torch or cupy, or a bytearray"
    )


def _checked(span: Span, name: str, strides: Optional[Sequence[int]], readonly: bool) -> Span:
    """Returns `span` if a window can use it. `strides` are in bytes; None means C order."""
    if readonly:
        raise ValueError(f"{name} is read-only, and peers write to windows: pass writable memory (copy it)")
    if span.nbytes == 0:
        raise ValueError(f"{name} of shape {span.shape} has 0 bytes: pass at least one element")
    if strides is not None:
        wanted = span.itemsize
        for length, stride in zip(reversed(span.shape), reversed(strides)):
            if length > 1 and stride != wanted:
                raise ValueError(
                    f"{name} of shape {span.shape} with strides {tuple(strides)} is not contiguous in C order: {_COPY} "
                    "(numpy.ascontiguousarray, torch.Tensor.contiguous)"
                )
            wanted *= length
    return span


def _count(shape: Sequence[int]) -> int:
    number = 1
    for length in shape:
        number *= length
    return number


_FLOATS = {"e": "float16", "f": "float32", "d": "float64", "g": "longdouble"}


def _dtype_of_format(name: str, text: str, itemsize: int) -> str:
    """Converts a type from the struct module's notation to numpy's name."""
    order, code = (text[0], text[1:]) if text[:1] in "@=<>!" else ("@", text)
    if order not in ">!" or itemsize == 1:
        if code == "?":
            return "bool"
        if len(code) == 1 and code in "bhilqn":
            return f"int{8 * itemsize}"
        if len(code) == 1 and code in "BHILQNc":
            return f"uint{8 * itemsize}"
        if code in _FLOATS:
            return _FLOATS[code]
        if code[:1] == "Z" and code[1:] in ("f", "d", "g"):
            return f"complex{8 * itemsize}"
    raise TypeError(
        f"{name} has elements of the type {text!r}, of which a window cannot tell whether its bytes mean the same on another rank: "
        'pass numbers in the order of this machine, or the bytes (array.view("uint8"))'
    )


def _of_buffer(name: str, obj: object, view: memoryview) -> Span:
    dtype = _dtype_of_format(name, view.format, view.itemsize)
    shape = tuple(view.shape or ())
    # The ctypes object holds the buffer, so that a bytearray, for instance, can't be resized.
    holds: Any = None
    if not view.readonly and view.nbytes and view.c_contiguous:
        holds = ctypes.c_char.from_buffer(obj)  # type: ignore[arg-type]
    address = ctypes.addressof(holds) if holds is not None else 0
    span = Span(address, view.nbytes, shape, dtype, view.itemsize, False, (obj, holds))
    return _checked(span, name, None if view.c_contiguous else view.strides, view.readonly)


_KINDS = {"i": "int", "u": "uint", "f": "float", "c": "complex"}


def _of_cuda_array_interface(name: str, obj: object, interface: Any) -> Span:
    try:
        shape = tuple(int(length) for length in interface["shape"])
        order, kind, itemsize = interface["typestr"][0], interface["typestr"][1], int(interface["typestr"][2:])
        address, readonly = interface["data"]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise TypeError(f"__cuda_array_interface__ of {name} is not valid ({error!r}): {interface!r}") from None
    if interface.get("mask") is not None:
        raise TypeError(f"{name} has a mask, which windows do not support: pass the array without the mask")
    if (kind != "b" and kind not in _KINDS) or (order == ">" and itemsize > 1):
        raise TypeError(f"{name} has elements of the type {interface['typestr']!r}: pass numbers in the order of this machine")
    dtype = "bool" if kind == "b" else f"{_KINDS[kind]}{8 * itemsize}"
    span = Span(int(address), _count(shape) * itemsize, shape, dtype, itemsize, True, obj)
    return _checked(span, name, interface.get("strides"), bool(readonly))


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("manager", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", _DLTensor),
    ]


_READ_ONLY, _IS_COPIED = 1, 2
_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13
_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex"}

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = c_void_p, [py_object, c_char_p]
_capsule_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_capsule_is_valid.restype, _capsule_is_valid.argtypes = ctypes.c_int, [py_object, c_char_p]


def _capsule(name: str, obj: Any) -> Any:
    try:
        try:
            return obj.__dlpack__(max_version=(1, 1))
        except TypeError:
            return obj.__dlpack__()
    except Exception as error:
        raise TypeError(f"{name} does not export its memory by DLPack: {error}") from error


def _of_dlpack(name: str, obj: Any) -> Span:
    capsule = _capsule(name, obj)
    flags = 0
    if _capsule_is_valid(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        if versioned.major != 1:
            raise TypeError(f"{name} exports DLPack {versioned.major}.{versioned.minor}: this release reads version 1")
        tensor, flags = versioned.tensor, versioned.flags
    elif _capsule_is_valid(capsule, b"dltensor"):
        tensor = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    else:
        raise TypeError(f"__dlpack__ of {name} returned no DLPack capsule: {capsule!r}")
    if tensor.device_type not in (_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED):
        raise TypeError(f"{name} is on DLPack device {tensor.device_type}: pass memory of the host or of a CUDA GPU")
    if flags & _IS_COPIED:
        raise TypeError(f"{name} exports a copy of its memory by DLPack, and not the memory itself: {_COPY}")
    # Code 6 is a bool; higher codes are small floats, where only the size matters.
    if tensor.code == 3 or tensor.lanes != 1 or tensor.bits % 8 or tensor.bits == 0:
        raise TypeError(
            f"{name} has elements of DLPack type {tensor.code} with {tensor.bits} bits and {tensor.lanes} lanes: pass numbers of whole bytes"
        )
    itemsize = tensor.bits // 8
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = [tensor.strides[i] * itemsize for i in range(tensor.ndim)] if tensor.strides else None
    dtype = "bool" if tensor.code == 6 else f"{_CODES.get(tensor.code, 'float')}{tensor.bits}"
    # The capsule frees the exported memory when it is collected, so the span holds it.
    on_gpu = tensor.device_type in (_CUDA, _CUDA_MANAGED)
    span = Span((tensor.data or 0) + tensor.byte_offset, _count(shape) * itemsize, shape, dtype, itemsize, on_gpu, (obj, capsule))
    return _checked(span, name, strides, bool(flags & _READ_ONLY))
