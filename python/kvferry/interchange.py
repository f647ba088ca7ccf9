"""Memory of other frameworks' tensors, by DLPack and by `__cuda_array_interface__`, without copying and without
waiting for their streams: registering memory reads nothing from it.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from kvferry._binding import ffi, lib
from kvferry._native import take
from kvferry.errors import InvalidError, NotFoundError, UnsupportedError
from kvferry.region import MemoryKind, Region, dense_elements, holes, strides_in_order


@runtime_checkable
class SupportsDLPack(Protocol):
    """A tensor whose memory other frameworks may use."""

    def __dlpack__(self, *arguments: Any, **options: Any) -> Any: ...


@runtime_checkable
class SupportsCudaArrayInterface(Protocol):
    """An array on a CUDA device whose memory other frameworks may use."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


class _Tensor(ctypes.Structure):
    """DLTensor of the DLPack interface."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _VersionedTensor(ctypes.Structure):
    """DLManagedTensorVersioned of the DLPack interface."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


DLPACK_READ_ONLY, DLPACK_COPIED = 1, 2
# Host memory, CUDA memory, host memory pinned by CUDA, and memory that CUDA moves between the two.
DLPACK_DEVICES = {1: MemoryKind.HOST, 2: MemoryKind.CUDA, 3: MemoryKind.HOST, 13: MemoryKind.CUDA}
DLPACK_ELEMENTS = {0: "i", 1: "u", 2: "f", 4: "bf"}
NO_WAITING = -1  # as a stream: the producer orders nothing


def _refuse_device(device_type: int) -> None:
    if device_type not in DLPACK_DEVICES:
        raise UnsupportedError(f"a tensor on DLPack device type {device_type}; allowed: host and CUDA")


def _where_torch_exports(tensor: Any, device: int) -> contextlib.AbstractContextManager[Any]:
    """Newer torch exports a tensor only on a thread whose current device is the tensor's."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(tensor, torch.Tensor):
        return contextlib.nullcontext()
    current: contextlib.AbstractContextManager[Any] = torch.cuda.device(device)
    return current


def _capsule_of(tensor: SupportsDLPack) -> Any:
    """The capsule of `__dlpack__`, called with arguments of the newest interface that the tensor supports."""
    name, options = type(tensor).__name__, {}
    place: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if hasattr(tensor, "__dlpack_device__"):
        try:
            device_type, device = tensor.__dlpack_device__()
        except (ValueError, BufferError) as error:  # not on a device of DLPack, as torch's "meta"
            raise InvalidError(f"{name} does not share its memory: {error}") from error
        _refuse_device(device_type)
        if DLPACK_DEVICES[device_type] == MemoryKind.CUDA:
            options["stream"] = NO_WAITING
            place = _where_torch_exports(tensor, device)
    forms: Sequence[dict[str, Any]] = ({"max_version": (1, 0), "copy": False}, {"max_version": (1, 0)}, {})
    reason: TypeError | None = None
    for form in forms:
        try:
            with place:
                return tensor.__dlpack__(**options, **form)
        except TypeError as error:  # older than these arguments
            reason = error
        except (BufferError, RuntimeError, IndexError) as error:  # the latter two: older torch
            raise InvalidError(f"{name} does not share its memory: {error}") from error
    raise InvalidError(f"__dlpack__ of {name} cannot be called: {reason}") from reason


def _refuse_flags(tensor: _VersionedTensor) -> None:
    if tensor.major != 1:
        raise UnsupportedError(f"DLPack {tensor.major}.{tensor.minor}; allowed: 1")
    if tensor.flags & DLPACK_READ_ONLY:
        raise InvalidError("the tensor is read-only; a cache is written to")
    if tensor.flags & DLPACK_COPIED:
        raise InvalidError("__dlpack__ gave a copy; the memory itself is needed")


def _look_into(capsule: Any, name: str) -> _Tensor:
    valid = ctypes.pythonapi.PyCapsule_IsValid
    valid.argtypes, valid.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_int
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.argtypes, get.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
    if valid(capsule, b"dltensor_versioned"):
        versioned = _VersionedTensor.from_address(get(capsule, b"dltensor_versioned"))
        _refuse_flags(versioned)
        tensor: _Tensor = versioned.tensor
        return tensor
    if valid(capsule, b"dltensor"):
        return _Tensor.from_address(get(capsule, b"dltensor"))
    raise InvalidError(f"__dlpack__ of {name} gave no tensor")


def region_of_tensor(tensor: SupportsDLPack) -> Region:
    """The memory of an object with `__dlpack__`; its capsule is kept."""
    capsule = _capsule_of(tensor)
    found = _look_into(capsule, type(tensor).__name__)
    _refuse_device(found.device_type)
    bits = found.bits * found.lanes
    shape = tuple(found.shape[: found.ndim]) if found.ndim else ()
    strides = tuple(found.strides[: found.ndim]) if found.strides else strides_in_order(shape)
    elements = dense_elements(shape, strides)
    if elements is None:
        raise holes(shape, strides)
    kind = DLPACK_DEVICES[found.device_type]
    return Region(
        address=(found.data or 0) + found.byte_offset,
        bytes=elements * bits // 8,
        kind=kind,
        element=f"{DLPACK_ELEMENTS.get(found.code, 'code')}{found.bits}",
        element_bits=bits,
        keeps=capsule,  # its destructor releases the memory
        shape=shape,
        strides=tuple(stride * bits // 8 for stride in strides),
        device=found.device_id if kind == MemoryKind.CUDA else 0,
    )


def region_of_cuda_array(array: SupportsCudaArrayInterface) -> Region:
    """The memory of an object with `__cuda_array_interface__`, which is kept.

    The interface does not say on which device the memory is, so the driver is asked.
    """
    name, described = type(array).__name__, array.__cuda_array_interface__
    address, read_only = described["data"]
    order, letter, size = described["typestr"][0], described["typestr"][1], int(described["typestr"][2:])
    if read_only:
        raise InvalidError(f"the {name} is read-only; a cache is written to")
    if described.get("mask") is not None:
        raise InvalidError(f"the {name} has a mask; allowed: none")
    if order == ">" and size > 1:
        raise UnsupportedError(f"an array of {described['typestr']}; allowed: little-endian elements")
    shape = tuple(described["shape"])
    strides = described.get("strides") or tuple(stride * size for stride in strides_in_order(shape))
    elements = None
    if not any(stride % size for stride in strides):
        elements = dense_elements(shape, [stride // size for stride in strides])
    if elements is None:
        raise holes(shape, strides)
    region = Region(
        address, elements * size, MemoryKind.CUDA, f"{letter}{size * 8}", size * 8, array, shape, tuple(strides)
    )
    if region.bytes == 0:
        return region
    return region.on(_device_of(region, name))


def _device_of(region: Region, name: str) -> int:
    try:
        ends = [
            int(take(lib.kvf_device_of, "uint32_t", MemoryKind.CUDA, ffi.cast("void *", address)))
            for address in (region.address, region.address + region.bytes - 1)
        ]
    except NotFoundError as error:
        raise InvalidError(f"the {name} has no memory of a device: {error.detail}") from None
    if ends[0] != ends[1]:
        raise InvalidError(f"the {name} begins on CUDA device {ends[0]} and ends on {ends[1]}; allowed: one")
    return ends[0]


def check_device(region: Region, name: str) -> None:
    """Raises InvalidError if, according to the driver, a region's memory is not on the region's device."""
    if region.kind == MemoryKind.HOST:
        return
    device = _device_of(region, name)
    if device != region.device:
        raise InvalidError(f"the {name} says it is on CUDA device {region.device}; its memory is on {device}")
