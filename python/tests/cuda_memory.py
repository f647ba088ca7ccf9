"""Memory of CUDA devices, by functions of the driver, or of a stand-in for it, that KVF_CUDA_LIBRARY names.

conftest.py loads that library before kvferry looks for libcuda.so.1, and kvferry then finds it by that name.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

LIBRARY = os.environ.get("KVF_CUDA_LIBRARY", "")
DLPACK_CODES = {"i": 0, "u": 1, "f": 2, "bf": 4}


class Driver:
    """The few functions that the tests need; each asserts that its result is 0."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(LIBRARY)
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._call("cuInit", 0)
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        self.count = count.value

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._library, name)(*arguments)
        assert result == 0, f"{name}: {result}"

    def number(self, wanted: int) -> int:
        """The device with this number, or another one if there are fewer; the first if the two do not reach
        each other's memory, as over PCIe in many machines.
        """
        number = wanted % self.count
        return number if number == 0 or (self._reaches(0, number) and self._reaches(number, 0)) else 0

    def _reaches(self, device: int, other: int) -> bool:
        can = ctypes.c_int()
        self._call("cuDeviceCanAccessPeer", ctypes.byref(can), device, other)
        return can.value != 0

    def on(self, device: int, name: str, *arguments: Any) -> None:
        """Calls a function with a device current. An asynchronous one also gets a stream, and is waited for."""
        if device not in self._contexts:
            context = ctypes.c_void_p()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[device] = context
        self._call("cuCtxPushCurrent_v2", self._contexts[device])
        try:
            if not name.endswith("Async_v2"):
                self._call(name, *arguments)
                return
            stream = ctypes.c_void_p()
            self._call("cuStreamCreateWithPriority", ctypes.byref(stream), 1, 0)
            self._call(name, *arguments, stream)
            self._call("cuStreamSynchronize", stream)
            self._call("cuStreamDestroy_v2", stream)
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def is_over(self, device: int, event: ctypes.c_void_p) -> bool:
        """Whether an event that was recorded here has happened."""
        self._call("cuCtxPushCurrent_v2", self._contexts[device])
        try:
            result = self._library.cuEventQuery(event)
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        assert result in (0, 600), result
        return bool(result == 0)


class DeviceMemory:
    """Bytes on a device, freed with the object."""

    def __init__(self, driver: Driver, device: int, size: int) -> None:
        self.driver, self.device, self.size = driver, device, size
        address = ctypes.c_uint64()
        driver.on(device, "cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self.address = address.value

    def write(self, data: NDArray[np.uint8]) -> None:
        data = np.ascontiguousarray(data)
        self.driver.on(
            self.device,
            "cuMemcpyHtoDAsync_v2",
            ctypes.c_uint64(self.address),
            ctypes.c_void_p(data.ctypes.data),
            ctypes.c_size_t(data.nbytes),
        )

    def read(self) -> NDArray[np.uint8]:
        data = np.zeros(self.size, np.uint8)
        self.driver.on(
            self.device,
            "cuMemcpyDtoHAsync_v2",
            ctypes.c_void_p(data.ctypes.data),
            ctypes.c_uint64(self.address),
            ctypes.c_size_t(self.size),
        )
        return data

    def free(self) -> None:
        if self.address:
            self.driver.on(self.device, "cuMemFree_v2", ctypes.c_uint64(self.address))
            self.address = 0

    def __del__(self) -> None:
        self.free()


class _Tensor(ctypes.Structure):
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


class _Plain(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


class Tensor:
    """Like torch's CUDA tensors: a shape and strides over a device's memory, shared by DLPack."""

    def __init__(
        self,
        memory: DeviceMemory,
        shape: Sequence[int],
        *,
        element: str = "f32",
        strides: Sequence[int] | None = None,
        offset: int = 0,
        flags: int = 0,
        device: int | None = None,
        versioned: bool = True,
    ) -> None:
        self.memory, self.shape = memory, tuple(shape)
        self.asked: list[dict[str, Any]] = []
        self._versioned = versioned
        self._kept: list[Any] = []
        letters = element.rstrip("0123456789")
        self._tensor = _Tensor(
            data=memory.address,
            device_type=2,
            device_id=memory.device if device is None else device,
            ndim=len(self.shape),
            code=DLPACK_CODES[letters],
            bits=int(element[len(letters) :]),
            lanes=1,
            shape=self._numbers(self.shape),
            strides=self._numbers(strides) if strides else None,
            byte_offset=offset,
        )
        self._flags = flags

    def _numbers(self, values: Sequence[int]) -> Any:
        self._kept.append((ctypes.c_int64 * len(values))(*values))
        return ctypes.cast(self._kept[-1], ctypes.POINTER(ctypes.c_int64))

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._tensor.device_id

    def __dlpack__(self, **options: Any) -> Any:
        self.asked.append(options)
        if "max_version" in options and not self._versioned:
            raise TypeError("unexpected keyword argument 'max_version'")
        new = ctypes.pythonapi.PyCapsule_New
        new.argtypes, new.restype = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p), ctypes.py_object
        made: Any
        if self._versioned:
            made, name = _Versioned(major=1, flags=self._flags, tensor=self._tensor), b"dltensor_versioned"
        else:
            made, name = _Plain(tensor=self._tensor), b"dltensor"
        self._kept.append(made)
        return new(ctypes.addressof(made), name, None)


class CudaArray:
    """Like arrays of other frameworks, with `__cuda_array_interface__`, which names no device."""

    def __init__(
        self,
        memory: DeviceMemory,
        shape: Sequence[int],
        *,
        typestr: str = "<f4",
        read_only: bool = False,
        **more: Any,
    ) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": tuple(shape),
            "typestr": typestr,
            "data": (memory.address, read_only),
            "strides": None,
            **more,
        }
