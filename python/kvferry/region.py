"""Where the bytes of an object are, and how its elements lie in them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvferry._binding import lib
from kvferry._values import listed, whole_number
from kvferry.errors import InvalidError


class MemoryKind(enum.IntEnum):
    """Where a region's bytes are."""

    HOST = lib.KVF_MEMORY_HOST
    CUDA = lib.KVF_MEMORY_CUDA


@dataclass(frozen=True)
class Region:
    """A piece of memory: where it is, how its elements lie in it, and the object that keeps it there.

    Attributes:
        element: "f32", "bf16", "i16" ...
        strides: bytes between neighbours along each axis of `shape`
        device: which one of its kind
    """

    address: int
    bytes: int
    kind: MemoryKind
    element: str
    element_bits: int
    keeps: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: int = 0  # of its kind

    def on(self, device: int) -> Region:
        """The same on a device of this number."""
        return replace(self, device=device)

    @property
    def in_order(self) -> bool:
        """Whether the elements lie in the order of the axes, the last axis innermost (C-contiguous)."""
        expected = self.element_bits // 8
        for length, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length > 1 and stride != expected:
                return False
            expected *= length
        return True


def dense_elements(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """The number of elements of an array that fills its memory, axes in any order; None if it has holes."""
    if 0 in shape:
        return 0
    expected = 1
    for stride, length in sorted((stride, length) for length, stride in zip(shape, strides, strict=True)):
        if length > 1 and stride != expected:
            return None
        expected *= length
    return expected


def lengths_of(shape: int | Sequence[int]) -> tuple[int, ...]:
    """The lengths of the axes; a number, also one of NumPy, is one axis."""
    one = isinstance(shape, (int, np.integer))
    return tuple(whole_number(length, "a length") for length in ([shape] if one else listed(shape, "lengths")))


def strides_in_order(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements with the last axis innermost: the meaning of missing strides in DLPack."""
    strides = [1]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * length)
    return tuple(reversed(strides)) if shape else ()


def holes(shape: Sequence[int], strides: Sequence[int]) -> InvalidError:
    return InvalidError(
        f"an array of shape {tuple(shape)} and strides {tuple(strides)} has holes or overlaps; "
        "allowed: one that fills its memory (axes may be in any order)"
    )
