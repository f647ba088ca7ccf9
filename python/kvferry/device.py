"""Lists devices, and makes arrays in their memory. See kvferry/device.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from kvferry._binding import ffi, lib
from kvferry._native import Arena, call, string, take
from kvferry.errors import ClosedError, InvalidError, OutOfMemoryError, UnsupportedError
from kvferry.region import MemoryKind, lengths_of

if TYPE_CHECKING:
    from kvferry.allocating import Allocating

DLPACK_CUDA = 2
DLPACK_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
DLPACK_BFLOAT = 4


@dataclass(frozen=True)
class Device:
    """A device; see kvf_device_info in kvferry/device.h.

    Attributes:
        code: the code of this build that it runs, such as "sm_90"; "": none, and `why_not` says why
    """

    number: int
    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    driver_version: int
    memory_bytes: int
    code: str
    why_not: str


def devices() -> list[Device]:
    """The CUDA devices of this process.

    Raises UnsupportedError (none: the detail says what is missing), InputOutputError.
    """
    found, info = [], Arena().new("kvf_device_info")
    for number in range(take(lib.kvf_device_count, "uint32_t", MemoryKind.CUDA)):
        call(lib.kvf_device_get_info, MemoryKind.CUDA, number, info)
        found.append(
            Device(
                number,
                string(info.name),
                (info.major, info.minor),
                info.multiprocessors,
                info.driver_version,
                info.memory_bytes,
                string(info.code),
                string(info.why_not),
            )
        )
    return found


def place_of(kind: MemoryKind, device: int | str) -> tuple[MemoryKind, int]:
    """The place for memory, from a kind and a number, or from torch's words: "cpu", "cuda", "cuda:1".

    Raises InvalidError.
    """
    if kind not in tuple(MemoryKind):
        raise InvalidError(f"kind is {kind!r}; allowed: {', '.join(map(repr, MemoryKind))}")
    kind = MemoryKind(kind)
    if isinstance(device, (int, np.integer)):
        return kind, int(device)
    name, colon, number = str(device).partition(":")
    if name == "cpu" and not colon:
        return MemoryKind.HOST, 0
    if name == "cuda" and (not colon or number.isdecimal()):
        return MemoryKind.CUDA, int(number or 0)
    raise InvalidError(f'device is "{device}"; allowed: a number, "cpu", "cuda", and "cuda:" with a number')


@dataclass(frozen=True)
class CudaEvent:
    """An event of a CUDA stream, after which memory is ready: its handle, a cudaEvent_t, which is a CUevent.

    It is read during the call that gets it, and may then be recorded anew or destroyed at once.

    Attributes:
        handle: the pointer as a number, as `torch.cuda.Event.cuda_event` gives it
        device: the number of the device whose event it is
    """

    handle: int
    device: int = 0


@dataclass(frozen=True)
class CudaStream:
    """A CUDA stream that is to wait for layers: its handle, a cudaStream_t, which is a CUstream.

    Attributes:
        handle: the pointer as a number, as `torch.cuda.Stream.cuda_stream` gives it; 0: the default stream
        device: the number of the device whose stream it is
    """

    handle: int
    device: int = 0


class DeviceArray:
    """An array in a device's memory that a transport or an agent has allocated.

    Frameworks use it without copying: `torch.from_dlpack(array)`, `cupy.asarray(array)`. The array keeps its
    owner, and so does every tensor that was made from it by DLPack; but closing the owner ends the memory, also
    if such tensors exist.

    Attributes:
        address: of the first byte, on the device
        device: the number of the CUDA device
    """

    def __init__(
        self, owner: Allocating, address: int, device: int, shape: Sequence[int], dtype: DTypeLike
    ) -> None:
        self._owner = owner
        self.address, self.device = address, device
        self.shape, self.dtype = tuple(int(length) for length in shape), np.dtype(dtype)

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return int(np.prod(self.shape, dtype=np.uint64)) * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype}, device='cuda:{self.device}')"

    def _refuse_closed(self) -> None:
        if self._owner.closed:
            raise ClosedError(f"the {type(self._owner).__name__} that allocated this array was closed")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        self._refuse_closed()
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "strides": None,
            "stream": None,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return DLPACK_CUDA, self.device

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A DLPack capsule of its memory; `stream` is not waited for, because nothing here writes on a stream.

        Raises BufferError (a copy, or another device, was asked for), UnsupportedError (an element type that
        DLPack does not have), ClosedError.
        """
        self._refuse_closed()
        if copy or (dl_device is not None and tuple(dl_device) != self.__dlpack_device__()):
            raise BufferError("a DeviceArray is exported as it is: without a copy, on its own device")
        code = DLPACK_BFLOAT if self.dtype.name == "bfloat16" else DLPACK_CODES.get(self.dtype.kind)
        if code is None:
            raise UnsupportedError(f"DLPack has no element type for {self.dtype}")
        versioned = max_version is not None and max_version[0] >= 1
        made = lib.python_tensor(
            ffi.cast("void *", id(self)),
            versioned,
            ffi.cast("void *", self.address),
            self.device,
            code,
            self.dtype.itemsize * 8,
            len(self.shape),
            ffi.new("int64_t[]", self.shape or (0,)),
        )
        if made == ffi.NULL:
            raise OutOfMemoryError("no memory for a DLPack tensor")
        new = ctypes.pythonapi.PyCapsule_New
        new.argtypes, new.restype = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p), ctypes.py_object
        name = b"dltensor_versioned" if versioned else b"dltensor"
        return new(
            int(ffi.cast("uintptr_t", made)), name, int(ffi.cast("uintptr_t", lib.python_tensor_destructor()))
        )


def device_array(
    owner: Allocating, address: Any, device: int, shape: int | Sequence[int], dtype: DTypeLike
) -> DeviceArray:
    """The array over what `owner` has allocated at `address`."""
    return DeviceArray(owner, int(ffi.cast("uintptr_t", address)), device, lengths_of(shape), dtype)
