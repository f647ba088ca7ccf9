"""Received and copied blocks in the memory of CUDA devices: see cuda_memory.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cuda_memory import LIBRARY, CudaArray, DeviceMemory, Driver, Tensor
from kvferry import InvalidError, UnsupportedError
from kvferry.postprocess import (
    PageForm,
    PageOrder,
    ReceivedRequest,
    ReceivedShape,
    block_region,
    copy_blocks,
    finish_received,
    permute_received,
)

pytestmark = pytest.mark.skipif(
    not LIBRARY, reason="KVF_CUDA_LIBRARY names no CUDA driver, nor a stand-in for one"
)

BLOCKS, HEADS, TOKENS, SIZE = 7, 3, 4, 5
FORM = ReceivedShape(HEADS, SIZE * 4, PageForm(PageOrder.HND, 2), PageForm(PageOrder.NHD, TOKENS))


@pytest.fixture(scope="module")
def driver() -> Driver:
    return Driver()


def random_cache(seed: int, parts: int = 2) -> NDArray[np.float32]:
    """Blocks of K and V: 2 parts, or of one of them."""
    generator = np.random.default_rng(seed)
    return generator.random((BLOCKS, parts, HEADS, TOKENS, SIZE), np.float32)


def put(
    driver: Driver, device: int, array: NDArray[Any], *, by_dlpack: bool = True
) -> tuple[DeviceMemory, Any]:
    memory = DeviceMemory(driver, driver.number(device), array.nbytes)
    memory.write(array.reshape(-1).view(np.uint8))
    return memory, (Tensor if by_dlpack else CudaArray)(memory, array.shape)


@pytest.mark.parametrize("by_dlpack", [True, False])
def test_blocks_on_devices_and_on_the_host_become_the_same(driver: Driver, by_dlpack: bool) -> None:
    host = [random_cache(i) for i in range(3)]
    there = [put(driver, i, host[i], by_dlpack=by_dlpack) for i in range(2)]
    ids = [6, 0, 3]
    permute_received(FORM, [block_region(tensor, split_axis=1) for _, tensor in there], ids)
    permute_received(FORM, [block_region(array, split_axis=1) for array in host], ids)
    for (memory, _), array in zip(there, host[:2], strict=True):
        assert np.array_equal(memory.read(), array.reshape(-1).view(np.uint8))


def test_a_request_on_a_device_is_finished_with_zeros(driver: Driver) -> None:
    host = random_cache(1)
    memory, tensor = put(driver, 1, host)
    requests = [ReceivedRequest([5, 2], 6), ReceivedRequest([1], 0)]
    finish_received(FORM, [block_region(tensor, split_axis=1)], requests)
    finish_received(FORM, [block_region(host, split_axis=1)], requests)
    assert not host[1].any()
    assert host[5].all()
    assert np.array_equal(memory.read(), host.reshape(-1).view(np.uint8))


def test_blocks_are_copied_to_a_device_and_back(driver: Driver) -> None:
    source, back = random_cache(2, 1), np.zeros((BLOCKS, 1, HEADS, TOKENS, SIZE), np.float32)
    memory, tensor = put(driver, 0, np.zeros_like(source))
    assert copy_blocks({"a": source}, {"a": tensor}, [3, 1, 2], [0, 6, 6], "h2d") == 3
    expected = np.zeros_like(source)
    expected[0], expected[6] = source[3], source[2]  # of two copies to a block the later one stays
    assert np.array_equal(memory.read(), expected.reshape(-1).view(np.uint8))
    assert copy_blocks({"a": tensor}, {"a": back}, [6, 0], [4, 5], "d2h") == 2
    assert np.array_equal(back[[4, 5]], source[[2, 3]])
    assert not back[[0, 1, 2, 3, 6]].any()


def test_memory_that_is_not_the_devices_is_refused(driver: Driver) -> None:
    host = random_cache(3)
    memory, tensor = put(driver, 0, host)
    gone = Tensor(memory, host.shape)
    memory.free()
    with pytest.raises(InvalidError, match="region 0, in memory of CUDA device 0: "):
        permute_received(FORM, [block_region(gone, split_axis=1)], [0])
    with pytest.raises(UnsupportedError, match="scratch lies in memory of a device"):
        permute_received(FORM, [block_region(host, split_axis=1)], [0], scratch=tensor)
