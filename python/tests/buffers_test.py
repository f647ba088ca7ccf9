"""Which memory of Python objects can be a cache."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
from typing import Any

import numpy as np
import pytest

from coordinates import decode_engine, prefill_engine, small_model
from kvferry import Engine, GroupSpec, InvalidError, OutOfRangeError, OverlapError, Transport
from kvferry.buffers import region_of, regions_of


class Tensor:
    """A tensor of a framework that shares its memory by DLPack only."""

    def __init__(self, memory: np.ndarray[Any, Any], *, versioned: bool = True) -> None:
        self._memory = memory
        self._versioned = versioned

    def __dlpack__(self, **options: Any) -> Any:
        if "max_version" in options and not self._versioned:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self._memory.__dlpack__(**options)


def test_arrays_are_taken_where_they_lie() -> None:
    memory = np.zeros((4, 8), np.float32)
    region = region_of(memory)
    assert (region.address, region.bytes, region.element) == (memory.ctypes.data, 128, "f32")


@pytest.mark.parametrize(
    "buffer",
    [
        bytearray(64),
        array.array("f", [0.0] * 16),
        mmap.mmap(-1, 64),
        memoryview(bytearray(64)),
        (ctypes.c_int * 16)(),
    ],
)
def test_objects_with_the_buffer_protocol_are_taken(buffer: Any) -> None:
    region = region_of(buffer)
    ctypes.memset(region.address, 0x5A, region.bytes)
    assert region.bytes == 64
    assert bytes(buffer[:64] if isinstance(buffer, mmap.mmap) else memoryview(buffer).cast("B")) == b"\x5a" * 64


@pytest.mark.parametrize("versioned", [True, False])
def test_tensors_are_taken_by_dlpack(versioned: bool) -> None:
    memory = np.zeros((2, 6), np.float16)
    region = region_of(Tensor(memory, versioned=versioned))
    assert (region.address, region.bytes, region.element) == (memory.ctypes.data, 24, "f16")


def test_axes_may_be_in_any_order() -> None:
    memory = np.zeros((4, 16, 2, 8), np.float32)
    permuted = memory.transpose(0, 2, 1, 3)
    assert region_of(permuted).address == memory.ctypes.data
    assert region_of(permuted).bytes == memory.nbytes
    assert region_of(Tensor(permuted)).bytes == memory.nbytes


class OnDevice:
    """An array on a CUDA device, as CuPy and Numba describe theirs."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        data = {"version": 3, "shape": shape, "typestr": "<f4", "data": (0, False), "strides": None}
        self.__cuda_array_interface__ = data


def closed(mapped: mmap.mmap) -> mmap.mmap:
    mapped.close()
    return mapped


def released(memory: bytearray) -> memoryview:
    view = memoryview(memory)
    view.release()
    return view


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: np.zeros((4, 8))[:, :4], "holes"),
        (lambda: np.zeros((4, 8))[::2], "holes"),
        (lambda: np.zeros(8)[::-1], "holes"),
        (lambda: np.broadcast_to(np.zeros(8), (4, 8)), "read-only"),
        (lambda: Tensor(np.zeros((4, 8))[:, :4]), "holes"),
        (lambda: Tensor(np.frombuffer(bytes(64), np.uint8)), "read-?only"),
        (lambda: memoryview(bytearray(64))[::2], "holes"),
        (lambda: bytes(64), "read-only"),
        (lambda: np.zeros(0), "0 bytes"),
        (lambda: bytearray(), "0 bytes"),
        (lambda: OnDevice((4, 0)), "0 bytes"),
        (lambda: np.zeros(4, np.dtype([])), "0 bytes"),
        (lambda: closed(mmap.mmap(-1, 64)), "mmap does not share its memory: mmap closed or invalid"),
        (lambda: released(bytearray(64)), "memoryview does not share its memory: .* released"),
        (lambda: np.array([object()]), "Python objects"),
        (lambda: 7, "no memory to share"),
        (lambda: [1, 2, 3], "no memory to share"),
    ],
)
def test_an_object_that_cannot_be_a_region_is_refused(make: Any, message: str) -> None:
    with pytest.raises(InvalidError, match=message):
        region_of(make())


@pytest.mark.parametrize(
    "memory", [np.zeros(64, np.uint8), np.float32(1), bytearray(64), array.array("f", [0.0]), mmap.mmap(-1, 64)]
)
def test_memory_without_a_list_around_it_is_refused(memory: Any) -> None:
    with pytest.raises(InvalidError, match=f"is of type {type(memory).__name__}; allowed: a list of arrays"):
        regions_of(memory)


def test_an_array_of_arrays_is_a_list() -> None:
    layers: Any = np.zeros((3, 64), np.uint8)
    assert [region.address for region in regions_of(layers)] == [row.ctypes.data for row in layers]


def test_a_read_only_array_is_refused() -> None:
    memory = np.zeros(8)
    memory.flags.writeable = False
    with pytest.raises(InvalidError, match="region 0: the array is read-only"):
        regions_of([memory])


def test_a_bytearray_cannot_move_while_it_is_registered() -> None:
    memory = bytearray(64)
    with Transport("inproc") as transport:
        transport.register([memory])
        with pytest.raises(BufferError):
            memory.extend(b"more")
    gc.collect()
    memory.extend(b"more")


def test_regions_are_checked_against_the_shard() -> None:
    shard = decode_engine(small_model()).shard(0)
    size = shard.region_bytes[0]
    good = [np.zeros(size // 4, np.float32), np.zeros(size, np.uint8)]
    assert len(regions_of(good, shard)) == 2
    # NumPy users keep types that NumPy lacks as integers of the same size.
    regions_of([np.zeros(size // 4, np.int32), good[1]], shard)
    with pytest.raises(InvalidError, match="1 regions were given; the shard has 2"):
        regions_of(good[:1], shard)
    with pytest.raises(OutOfRangeError, match=f"region 1 has {size - 1} bytes; the shard needs {size}"):
        regions_of([good[0], np.zeros(size - 1, np.uint8)], shard)
    for wrong in (np.float16, np.float64, np.int64):
        with pytest.raises(InvalidError, match=r"region 0 is an array of .* the shard keeps f32 there"):
            regions_of([np.zeros(size, wrong), good[1]], shard)


def test_a_shape_whose_bytes_do_not_fit_a_number_is_refused() -> None:
    for shape in [(2**32, 2**32 + 1), (2**62, 2), (2**31, 2**31, 4)]:
        with Transport("inproc") as transport, pytest.raises(OutOfRangeError, match="bytes; allowed"):
            transport.allocate(shape)


def test_regions_that_overlap_or_are_given_twice_are_refused() -> None:
    memory = np.zeros(1000, np.uint8)
    assert len(regions_of([memory[500:], memory[:500]])) == 2  # touching is no overlap
    with pytest.raises(OverlapError, match="regions 0 and 2 are the same memory"):
        regions_of([memory[:100], memory[100:200], memory[:100]])
    with pytest.raises(OverlapError, match="regions 0 and 1 share 1 bytes"):
        regions_of([memory[499:], memory[:500]])


def test_a_shard_says_what_its_regions_hold() -> None:
    (view,) = decode_engine(small_model()).shard(0).regions()[1]
    assert (view.group, view.parts, view.layers, view.dtype.name) == ("full", ("k", "v"), (1,), "F32")
    assert view.order == "BPHND"
    assert [(axis.length, axis.stride) for axis in view.axes] == [
        (8, 6144),
        (2, 3072),
        (4, 768),
        (24, 32),
        (8, 4),
    ]
    (view,) = prefill_engine(small_model()).shard(1).regions()[0]
    assert view.order == "BPNHD"


# Blocks of 24 tokens, K and V of 4 heads, cells of 8 f32: the shard keeps B 8 x P 2 x H 4 x N 24 x D 8.
FITTING = [
    np.zeros((8, 2, 4, 24, 8), np.float32),
    np.zeros((9, 2, 4, 24, 8), np.float32),  # more blocks than it needs
    np.zeros((16, 4, 24, 8), np.float32),  # joined
    np.zeros((8, 2, 4, 24, 2, 4), np.float32),  # split
    np.zeros((8, 1536), np.float32),
    np.zeros((8, 2, 4, 24, 8), np.uint32),
    np.zeros((8, 2, 4, 24, 32), np.uint8),
    np.zeros(49152, np.uint8),
    np.zeros((8, 2, 24, 4, 8), np.float32).view(np.uint8).reshape(-1),
    # The axes are named as in NHD, but the memory is HND, and only the memory counts.
    np.zeros((8, 2, 4, 24, 8), np.float32).transpose(0, 1, 3, 2, 4),
]
CONTRADICTING = [
    np.zeros((8, 2, 24, 4, 8), np.float32),  # NHD
    # The axes are named correctly, but in memory K of all blocks comes first.
    np.zeros((2, 8, 4, 24, 8), np.float32).transpose(1, 0, 2, 3, 4),
    np.zeros((8, 24, 2, 4, 8), np.float32),
    np.zeros((8, 2, 24, 4, 8), np.uint32),
    np.zeros((8, 2, 24, 4, 32), np.uint8),
    np.zeros((8, 2, 4, 8, 24), np.float32),
    np.zeros((12, 2, 4, 16, 8), np.float32),  # as many bytes in blocks of 16 tokens
]


@pytest.mark.parametrize("wrap", [lambda memory: memory, Tensor])
def test_an_array_whose_shape_contradicts_its_region_is_refused(wrap: Any) -> None:
    shard = decode_engine(small_model()).shard(0)
    plain = np.zeros(49152, np.uint8)
    for memory in FITTING:
        assert len(regions_of([plain, wrap(memory)], shard)) == 2
    for memory in CONTRADICTING:
        with pytest.raises(InvalidError) as refusal:
            regions_of([plain, wrap(memory)], shard)
        for word in ("region 1", "layer 1 of full: k v", str(memory.shape), "B 8 x P 2 x H 4 x N 24 x D 8"):
            assert word in str(refusal.value)


def test_an_array_of_another_type_is_refused_before_its_shape() -> None:
    shard = decode_engine(small_model()).shard(0)
    with pytest.raises(InvalidError, match="region 0 is an array of f16; the shard keeps f32 there"):
        regions_of([np.zeros((8, 2, 4, 24, 16), np.float16), np.zeros(49152, np.uint8)], shard)


def test_an_array_in_another_byte_order_is_refused() -> None:
    shard = decode_engine(small_model()).shard(0)
    plain = np.zeros(49152, np.uint8)
    regions_of([np.zeros((8, 2, 4, 24, 8), "<f4"), plain], shard)
    with pytest.raises(InvalidError, match="region 0 is an array of >f4; the shard keeps f32 there"):
        regions_of([np.zeros((8, 2, 4, 24, 8), ">f4"), plain], shard)


def test_pages_that_are_wider_than_their_content_are_seen() -> None:
    model = small_model()
    shard = Engine(model, GroupSpec(8, 24, "L|BPHN", page_bytes=8192), name="padded").shard(0)
    sizes = shard.region_bytes
    dense = np.zeros((sizes[0] // 6144 + 1, 2, 4, 24, 8), np.float32)
    with pytest.raises(InvalidError, match=r"region 0 .*an array of shape"):
        regions_of([dense, np.zeros(sizes[1], np.uint8)], shard)
    pages = np.zeros((8, 2048), np.float32)
    assert len(regions_of([pages, np.zeros(sizes[1], np.uint8)], shard)) == 2


def test_memory_by_layer_is_put_in_the_order_of_the_shard() -> None:
    shard = decode_engine(small_model()).shard(0)
    layers = [{layer for view in views for layer in view.layers} for views in shard.regions()]
    assert all(len(held) == 1 for held in layers)
    sizes = {min(held): size for held, size in zip(layers, shard.region_bytes, strict=True)}
    memory = {layer: np.zeros(size, np.uint8) for layer, size in sorted(sizes.items(), reverse=True)}
    found = regions_of(memory, shard)
    assert [region.address for region in found] == [memory[min(held)].ctypes.data for held in layers]
    with pytest.raises(InvalidError, match="layer 77 was given"):
        regions_of(memory | {77: np.zeros(8, np.uint8)}, shard)
    last = max(memory)
    del memory[last]
    with pytest.raises(InvalidError, match=f"layer {last} is missing"):
        regions_of(memory, shard)
    with pytest.raises(InvalidError, match="needs the shard"):
        regions_of(memory)


def test_a_tensor_without_memory_is_refused() -> None:
    class OnNoDevice:  # as torch's tensors on "meta"
        def __dlpack_device__(self) -> tuple[int, int]:
            raise ValueError("Unknown device type meta for Dlpack")

        def __dlpack__(self, **_: object) -> object:
            raise AssertionError("it says it has none")

    with pytest.raises(InvalidError, match="OnNoDevice does not share its memory: Unknown device type meta"):
        region_of(OnNoDevice())


@pytest.mark.parametrize("kind", [BufferError, RuntimeError, IndexError])
def test_a_tensor_that_refuses_is_refused_with_its_reason(kind: type[Exception]) -> None:
    class Refusing:  # torch's tensors of float8, or with gradients; which exception depends on torch's version
        def __dlpack__(self, **_: object) -> object:
            raise kind("float8 types are not supported by dlpack")

    with pytest.raises(
        InvalidError, match="region 0: Refusing does not share its memory: float8 types are not"
    ):
        regions_of([Refusing()])
