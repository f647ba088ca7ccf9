"""Memory that a transport or an agent allocates, as arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kvferry._native import OfOneProcess, take
from kvferry.buffers import Allocations, array_bytes
from kvferry.device import DeviceArray, device_array, place_of
from kvferry.region import MemoryKind


class Allocating(OfOneProcess, ABC):
    """The part of a transport or an agent that allocates memory."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether close() was called."""

    @abstractmethod
    def _allocator(self) -> tuple[AbstractContextManager[Any], Any, Allocations]:
        """The use of the library's object, the library's function that allocates, and what it has allocated."""

    @overload
    def allocate(
        self, shape: int | Sequence[int], dtype: DTypeLike = ..., *, device: int = ...
    ) -> NDArray[Any]: ...

    @overload
    def allocate(
        self,
        shape: int | Sequence[int],
        dtype: DTypeLike = ...,
        *,
        kind: MemoryKind = ...,
        device: int | str = ...,
    ) -> NDArray[Any] | DeviceArray: ...

    def allocate(
        self,
        shape: int | Sequence[int],
        dtype: DTypeLike = np.uint8,
        *,
        kind: MemoryKind = MemoryKind.HOST,
        device: int | str = 0,
    ) -> NDArray[Any] | DeviceArray:
        """A zeroed array that peers on this host can map: host memory may outlive this object, memory of a
        device ends with it.

        The memory is kept until this object is closed, also where the array is dropped and its region
        unregistered: use the array again rather than allocate another.

        Args:
            device: a number of its kind; or "cpu", "cuda" (the first) or "cuda:1", which name the kind too

        Raises OutOfRangeError (no bytes, or more than there can be), UnsupportedError (nothing here allocates
        this kind), InvalidError.
        """
        size = array_bytes(shape, dtype)
        kind, number = place_of(kind, device)
        using, function, allocations = self._allocator()
        with using as pointer:
            address = take(function, "void *", pointer, kind, number, size)
            if kind is MemoryKind.CUDA:
                allocations.add_on_device(address, size)
                return device_array(self, address, number, shape, dtype)
            return allocations.array(address, size, shape, dtype)
