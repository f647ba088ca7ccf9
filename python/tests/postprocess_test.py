"""Blocks that were received in another form."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry import (
    InvalidError,
    MismatchError,
    NotExpressibleError,
    NotFoundError,
    OutOfRangeError,
    OverlapError,
    UnsupportedError,
)
from kvferry.interchange import _Tensor
from kvferry.postprocess import (
    BlockRegion,
    PageForm,
    PageOrder,
    ReceivedRequest,
    ReceivedShape,
    block_region,
    copy_blocks,
    finish_received,
    permute_received,
)

HEADS, SIZE = 2, 4


def sequence(tokens: int) -> NDArray[np.float32]:
    """Cells as [token, head, element], with a number for each element."""
    return np.arange(1, tokens * HEADS * SIZE + 1, dtype=np.float32).reshape(tokens, HEADS, SIZE)


def shape(received: PageForm, wanted: PageForm) -> ReceivedShape:
    return ReceivedShape(HEADS, SIZE * 4, received, wanted)


def test_shorter_received_pages_become_blocks_of_another_order() -> None:
    # Two received HND pages of 2 tokens lie in each block of 4.
    tokens = sequence(8)
    cache = np.zeros((3, 4, HEADS, SIZE), np.float32)
    for block, first in ((2, 0), (0, 4)):
        pages = tokens[first : first + 4].reshape(2, 2, HEADS, SIZE).transpose(0, 2, 1, 3)
        cache[block] = pages.reshape(4, HEADS, SIZE)
    permute_received(shape(PageForm(PageOrder.HND, 2), PageForm(PageOrder.NHD, 4)), [cache], [2, 0])
    assert np.array_equal(cache[[2, 0]].reshape(8, HEADS, SIZE), tokens)
    assert not cache[1].any()


def test_a_finished_request_has_zeros_after_the_covered_tokens() -> None:
    tokens = sequence(8)
    cache = np.zeros((2, 2, HEADS, 4, SIZE), np.float32)  # K and V, HND
    for block in range(2):
        cache[:, block] = tokens[block * 4 : block * 4 + 4].transpose(1, 0, 2)
    form = shape(PageForm(PageOrder.HND, 4), PageForm(PageOrder.NHD, 4))
    scratch = np.zeros(form.scratch_bytes(2) // 8 + 1, np.uint64)
    finish_received(form, [block_region(cache, split_axis=0)], [ReceivedRequest([0, 1], 6)], scratch=scratch)
    got = cache.reshape(2, 8, HEADS, SIZE)
    assert np.array_equal(got[:, :6], np.stack([tokens[:6]] * 2))
    assert not got[:, 6:].any()


def test_blocks_are_copied_between_layers_of_the_same_name() -> None:
    source = {name: np.full((4, 8), i, np.int16) for i, name in enumerate("ab", 1)}
    target = {name: np.zeros((5, 8), np.int16) for name in "abc"}
    assert copy_blocks(source, target, [0, 3], [4, 1], "h2d") == 2
    assert [target["a"][4, 0], target["b"][1, 0], target["a"].any(axis=1).sum()] == [1, 2, 2]
    assert not target["c"].any()
    back = {name: np.zeros((4, 8), np.int16) for name in "abc"}
    assert copy_blocks(target, back, [4], [2], "d2h") == 1
    assert [back["a"][2, 0], back["b"][2, 0], back["a"].any(axis=1).sum()] == [1, 2, 1]
    assert copy_blocks(source, target, [0], [1, 2], "h2d") == 0


class Tensor:
    """Like a torch tensor, and unlike an array: no flags, no buffer, strides in elements by a method."""

    def __init__(self, memory: NDArray[Any]) -> None:
        self._memory = memory

    @property
    def shape(self) -> tuple[int, ...]:
        return self._memory.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(stride // self._memory.itemsize for stride in self._memory.strides)

    def element_size(self) -> int:
        return self._memory.itemsize

    def __dlpack__(self, **options: Any) -> Any:
        return self._memory.__dlpack__(**options)


class DeviceTensor:
    """A tensor of 4 blocks of 8 bytes on a device; its address is not one of this machine."""

    def __init__(self, device_type: int, device: int) -> None:
        self._shape = (ctypes.c_int64 * 2)(4, 8)
        self._tensor = _Tensor(
            data=0x1000,
            device_type=device_type,
            device_id=device,
            ndim=2,
            code=1,
            bits=8,
            lanes=1,
            shape=ctypes.cast(self._shape, ctypes.POINTER(ctypes.c_int64)),
        )

    def __dlpack__(self, **options: Any) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self._tensor), b"dltensor", None)


CUDA = 2


def test_tensors_are_permuted_as_arrays_are() -> None:
    tokens = sequence(8)
    cache = np.stack([tokens[:4].transpose(1, 0, 2), tokens[4:].transpose(1, 0, 2)])  # HND
    cache = np.ascontiguousarray(cache)
    form = shape(PageForm(PageOrder.HND, 4), PageForm(PageOrder.NHD, 4))
    permute_received(form, [Tensor(cache)], np.array([0, 1]), scratch=Tensor(np.zeros(64, np.uint64)))
    assert np.array_equal(cache.reshape(8, HEADS, SIZE), tokens)


def test_tensors_of_keys_and_values_are_finished_as_arrays_are() -> None:
    tokens = sequence(4)
    cache = np.zeros((1, 2, HEADS, 4, SIZE), np.float32)
    cache[0, 0] = cache[0, 1] = tokens.transpose(1, 0, 2)
    form = shape(PageForm(PageOrder.HND, 4), PageForm(PageOrder.NHD, 4))
    finish_received(form, [block_region(Tensor(cache), split_axis=1)], [ReceivedRequest([0], 3)])
    got = cache.reshape(2, 4, HEADS, SIZE)
    assert np.array_equal(got[:, :3], np.stack([tokens[:3]] * 2))
    assert not got[:, 3].any()


def test_tensors_are_copied_as_arrays_are() -> None:
    source, target = np.arange(32, dtype=np.int16).reshape(4, 8), np.zeros((5, 8), np.int16)
    assert copy_blocks({"a": Tensor(source)}, {"a": Tensor(target)}, [1, 3], [4, 0], "d2h") == 2
    assert np.array_equal(target[[4, 0]], source[[1, 3]])
    assert not target[1:4].any()
    with pytest.raises(InvalidError, match="not C-contiguous"):
        copy_blocks({"a": Tensor(source.T)}, {"a": target}, [0], [0], "h2d")


def test_memory_that_is_not_a_devices_is_refused_by_name() -> None:
    # Without a driver, or without such a device; memory on devices: postprocess_device_test.py.
    host, device = np.zeros((4, 8), np.int8), DeviceTensor(CUDA, 99)
    form = ReceivedShape(1, 2, PageForm(PageOrder.HND, 4), PageForm(PageOrder.NHD, 4))
    refusals = (UnsupportedError, OutOfRangeError)
    with pytest.raises(refusals, match="region 0, in memory of CUDA device 99: "):
        permute_received(form, [device], [0])
    with pytest.raises(refusals, match="region 0, in memory of CUDA device 99: "):
        finish_received(form, [device], [ReceivedRequest([0], 1)])
    with pytest.raises(refusals, match="destination 0, in memory of CUDA device 99: "):
        copy_blocks({"a": host}, {"a": device}, [0], [0], "h2d")
    with pytest.raises(refusals, match="source 0, in memory of CUDA device 99: "):
        copy_blocks({"a": device}, {"a": host}, [0], [0], "d2h")
    with pytest.raises(UnsupportedError, match="scratch lies in memory of a device"):
        permute_received(form, [host], [0], scratch=device)


def test_a_direction_says_which_side_is_the_host() -> None:
    host, device = np.zeros((4, 8), np.int8), DeviceTensor(CUDA, 0)
    with pytest.raises(InvalidError, match='direction is "h2d", but source 0 is not host memory'):
        copy_blocks({"a": device}, {"a": host}, [0], [0], "h2d")
    with pytest.raises(InvalidError, match='direction is "d2h", but destination 0 is not host memory'):
        copy_blocks({"a": host}, {"a": device}, [0], [0], "d2h")
    with pytest.raises(InvalidError, match="allowed: 'h2d', 'd2h'"):
        copy_blocks({"a": host}, {"a": host.copy()}, [0], [0], "d2d")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("received", "ids", "error"),
    [
        (PageForm(PageOrder.HND, 3), [0], NotExpressibleError),
        (PageForm(PageOrder.HND, 0), [0], InvalidError),
        (PageForm(PageOrder.HND, 4), [7], OutOfRangeError),
        (PageForm(PageOrder.HND, 4), [1, 1], OverlapError),
        (PageForm(PageOrder.HND, 8), [1], InvalidError),
    ],
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(
    received: PageForm, ids: list[int], error: type[Exception]
) -> None:
    cache = sequence(12).reshape(3, 4, HEADS, SIZE).copy()
    with pytest.raises(error):
        permute_received(shape(received, PageForm(PageOrder.NHD, 4)), [cache], ids)
    assert np.array_equal(cache.reshape(12, HEADS, SIZE), sequence(12))


def test_memory_that_is_no_cache_is_refused() -> None:
    form = shape(PageForm(PageOrder.HND, 4), PageForm(PageOrder.NHD, 4))
    cache = np.zeros((3, 4, HEADS, SIZE), np.float32)
    with pytest.raises(InvalidError, match="not C-contiguous"):
        permute_received(form, [cache.transpose(0, 2, 1, 3)], [0])
    frozen = cache.copy()
    frozen.flags.writeable = False
    with pytest.raises(InvalidError, match="read-only"):
        permute_received(form, [frozen], [0])
    with pytest.raises(OutOfRangeError):
        permute_received(form, [BlockRegion(cache, 4, 128, 128)], [0])
    with pytest.raises(InvalidError, match="part_bytes"):
        permute_received(form, [np.zeros((3, 4, HEADS, SIZE), np.float16)], [0])
    with pytest.raises(NotFoundError):
        copy_blocks({"a": cache}, {"b": cache.copy()}, [0], [0], "h2d")
    with pytest.raises(MismatchError):
        copy_blocks({"a": cache}, {"a": np.zeros((3, 4), np.float32)}, [0], [0], "h2d")
    with pytest.raises(OverlapError):
        copy_blocks({"a": cache}, {"a": cache}, [0], [0], "h2d")


def test_different_blocks_may_be_permuted_by_different_threads() -> None:
    form = shape(PageForm(PageOrder.HND, 4), PageForm(PageOrder.NHD, 4))
    tokens = sequence(64 * 4).reshape(64, 4, HEADS, SIZE)
    cache: NDArray[Any] = np.ascontiguousarray(tokens.transpose(0, 2, 1, 3)).reshape(64, 4, HEADS, SIZE)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda block: permute_received(form, [cache], [block]), range(64)))
    assert np.array_equal(cache, tokens)
