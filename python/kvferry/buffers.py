"""Memory of Python objects as regions of a cache, without copying.

A region is anything whose bytes lie in one piece: NumPy arrays, objects with the buffer protocol (bytearray,
mmap, memoryview ...), and tensors with `__dlpack__` (torch, also bfloat16 and on CUDA devices) or
`__cuda_array_interface__`. An array may have its axes in any order, as transposed views have, but no holes:
every byte of its memory belongs to the region.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Union

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kvferry._binding import ffi, lib
from kvferry._native import fill
from kvferry._values import listed, of_type, shown, whole_number, wrong_type
from kvferry.errors import InvalidError, KvferryError, OutOfRangeError, OverlapError
from kvferry.interchange import (
    SupportsCudaArrayInterface,
    SupportsDLPack,
    check_device,
    region_of_cuda_array,
    region_of_tensor,
)
from kvferry.region import MemoryKind, Region, dense_elements, holes, lengths_of
from kvferry.shard import RegionView, Shard

# Python 3.10 has no type for objects with the buffer protocol.
Buffer = Union["NDArray[Any]", bytearray, memoryview, mmap.mmap, SupportsDLPack, Any]


# One for each region, or for each layer of the model.
Memory = Sequence[Buffer] | Mapping[int, Buffer]


def _region_of_array(array: NDArray[Any], keeps: Any) -> Region:
    if not array.flags.writeable:
        raise InvalidError("the array is read-only; a cache is written to")
    if array.dtype.hasobject:
        raise InvalidError(f"an array of {array.dtype} holds Python objects; allowed: numbers")
    size = array.dtype.itemsize
    if size == 0:
        raise InvalidError(f"an array of {array.dtype} has 0 bytes; allowed: 1 and more")
    elements = None
    if not any(stride % size for stride in array.strides):
        elements = dense_elements(array.shape, [stride // size for stride in array.strides])
    if elements is None:
        raise holes(array.shape, array.strides)
    kind = array.dtype.kind
    name = f"{kind}{size * 8}" if kind in "iuf" else array.dtype.name
    if kind == "f" and not array.dtype.isnative:
        name = array.dtype.str  # ">f4": other elements than those of the machine's order
    name = {"bfloat16": "bf16"}.get(name, name)
    shape, strides = tuple(array.shape), tuple(array.strides)
    return Region(array.ctypes.data, elements * size, MemoryKind.HOST, name, size * 8, keeps, shape, strides)


def region_of(buffer: Buffer) -> Region:
    """The memory of an object.

    Raises InvalidError (nothing with memory, read-only, with holes, empty) or UnsupportedError (a device that
    is neither the host nor CUDA).
    """
    region = _find_region(buffer)
    if region.bytes == 0 or region.address == 0:
        raise InvalidError(f"a {type(buffer).__name__} of 0 bytes; allowed: 1 and more")
    return region


def _find_region(buffer: Any) -> Region:
    if isinstance(buffer, np.ndarray):
        return _region_of_array(buffer, buffer)
    try:
        view = memoryview(buffer)
    except TypeError:
        if isinstance(buffer, SupportsDLPack):
            return region_of_tensor(buffer)
        if isinstance(buffer, SupportsCudaArrayInterface):
            return region_of_cuda_array(buffer)
        raise InvalidError(
            f"a {type(buffer).__name__} has no memory to share; allowed: NumPy arrays, the buffer protocol, "
            "__dlpack__, __cuda_array_interface__"
        ) from None
    except (ValueError, BufferError) as error:  # of an mmap that was closed, or a view that was released
        raise InvalidError(f"{type(buffer).__name__} does not share its memory: {error}") from error
    if view.readonly:
        raise InvalidError(f"the {type(buffer).__name__} is read-only; a cache is written to")
    try:
        array = np.asarray(view)
    except (ValueError, TypeError):  # an element NumPy does not know
        if not view.c_contiguous:
            raise holes(view.shape or (), view.strides or ()) from None
        array = np.asarray(view.cast("B"))
    # The view keeps the owner from moving its bytes, as a growing bytearray would.
    return _region_of_array(array, view)


def _refuse_overlaps(regions: Sequence[Region]) -> None:
    order = sorted(range(len(regions)), key=lambda i: (regions[i].kind, regions[i].device, regions[i].address))
    for one, other in itertools.pairwise(order):
        first, second = regions[one], regions[other]
        if (first.kind, first.device) != (second.kind, second.device):
            continue
        shared = first.address + first.bytes - second.address
        if shared > 0:
            low, high = sorted((one, other))
            same = first.address == second.address and first.bytes == second.bytes
            raise OverlapError(
                f"regions {low} and {high} are the same memory"
                if same
                else f"regions {low} and {high} share {min(shared, second.bytes)} bytes"
            )


def _refuse_overlap(number: int, region: Region, others: Mapping[int, Region]) -> None:
    for other, known in others.items():
        if (known.kind, known.device) != (region.kind, region.device):
            continue
        shared = min(known.address + known.bytes, region.address + region.bytes) - max(
            known.address, region.address
        )
        if shared > 0:
            raise OverlapError(f"regions {min(number, other)} and {max(number, other)} share {shared} bytes")


class Registered:
    """The memory that a transport or an agent has registered, which Python must keep."""

    def __init__(self) -> None:
        self._at: dict[int, Region] = {}
        self._doubtful: list[Mapping[int, Region]] = []

    @contextlib.contextmanager
    def adding(self, regions: Mapping[int, Region]) -> Iterator[None]:
        """Keeps regions, by number, from before the library gets them; not if it refuses them.

        If a signal handler raises an exception, such as KeyboardInterrupt, the library may have them: they are
        kept to the end.

        Raises OverlapError if they share memory with others that are registered.
        """
        others = {number: region for number, region in self._at.items() if number not in regions}
        for number, region in regions.items():
            _refuse_overlap(number, region, others)
        self._doubtful.append(regions)
        try:
            yield
            self._at.update(regions)
        except KvferryError:
            self._settle(regions)
            raise
        self._settle(regions)

    def _settle(self, regions: Mapping[int, Region]) -> None:
        self._doubtful = [others for others in self._doubtful if others is not regions]

    def remove(self, number: int) -> None:
        """The library has given a region back."""
        self._at.pop(number, None)

    def clear(self) -> None:
        """The library has given all back."""
        self._at.clear()
        self._doubtful.clear()


def _by_layer(buffers: Mapping[int, Buffer], shard: Shard | None) -> list[Buffer]:
    if shard is None:
        raise InvalidError("memory by layer needs the shard that says which region a layer is")
    ordered, wanted = [], set()
    for i, views in enumerate(shard.regions()):
        layers = {layer for view in views for layer in view.layers}
        if len(layers) != 1:
            raise InvalidError(
                f"region {i} holds layers {', '.join(map(str, sorted(layers)))}; allowed by layer: one each "
                "(give such regions as a list)"
            )
        layer = min(layers)
        if layer in wanted:
            raise InvalidError(f"layer {layer} has several regions; give them as a list")
        if layer not in buffers:
            raise InvalidError(f"layer {layer} is missing")
        wanted.add(layer)
        ordered.append(buffers[layer])
    for layer in buffers:
        if layer not in wanted:
            raise InvalidError(
                f"layer {layer} was given; this rank holds {', '.join(map(str, sorted(wanted)))}"
            )
    return ordered


def _cuts_across(region: Region, view: RegionView) -> bool:
    """Whether the axes of an array cut across those that a shard lays out.

    An axis covers the bytes from its stride to the end of its last step. An array may join axes (an array of
    plain bytes joins all) and may split them; but no axis may end inside an axis of the other, and none may
    step where the shard has a gap.
    """
    axes = [(axis.stride, axis.stride * axis.length) for axis in view.axes]
    if any(inner > begin for (begin, _), (_, inner) in itertools.pairwise(axes)):
        return False  # interleaved axes: no array has such
    if axes:
        axes[0] = (axes[0][0], max(axes[0][1], region.bytes))  # a cache may have more blocks
    smallest = axes[-1][0] if axes else region.bytes
    axes.append((1, smallest))
    for length, begin in zip(region.shape, region.strides, strict=True):
        end = begin * length
        if length < 2:
            continue
        if not any(low <= begin < high and (begin % low == 0) for low, high in axes):
            return True
        for low, high in axes:
            apart = end <= low or high <= begin
            if not apart and not (begin <= low and high <= end) and not (low <= begin and end <= high):
                return True
    return False


def _refuse_shape(number: int, region: Region, views: Sequence[RegionView]) -> None:
    """Refuses an array whose shape contradicts the content of its region, if that is one regular array."""
    if len(views) != 1 or not views[0].regular or views[0].offset:
        return
    view = views[0]
    if _cuts_across(region, view):
        wanted = " x ".join(f"{axis.name} {axis.length}" for axis in view.axes)
        plural = "s" if len(view.layers) > 1 else ""
        raise InvalidError(
            f"region {number} (layer{plural} {', '.join(map(str, view.layers))} of {view.group}: "
            f"{' '.join(view.parts)}) is an array of shape {region.shape}; the shard keeps {wanted} there, "
            "in this order (or give it as plain bytes)"
        )


def _refuse_type(number: int, region: Region, views: Sequence[RegionView]) -> None:
    names = {view.dtype.name.lower() for view in views}
    bits = {view.dtype.bits for view in views}
    fits = region.element_bits in bits if region.element[0] in "iu" else region.element in names
    if views and region.element_bits != 8 and not fits:
        raise InvalidError(
            f"region {number} is an array of {region.element}; the shard keeps {', '.join(sorted(names))} "
            "there (or give it as bytes)"
        )


def check_region(number: int, region: Region, size: int, views: Sequence[RegionView]) -> None:
    """Checks one region against the shard; raises as regions_of()."""
    if region.bytes < size:
        raise OutOfRangeError(f"region {number} has {region.bytes} bytes; the shard needs {size}")
    _refuse_type(number, region, views)
    _refuse_shape(number, region, views)


def _has_one_axis(buffers: Any) -> bool:
    """Whether this is an array, or another piece of memory, of numbers and not of arrays."""
    try:
        axes = buffers.ndim if hasattr(buffers, "ndim") else memoryview(buffers).ndim
    except (TypeError, BufferError):
        return False
    return int(axes) < 2


def buffers_of(buffers: Any) -> list[Any]:
    """What a caller gave as a list of arrays; an array of several axes is one, along its first.

    Raises InvalidError: it is no list, or the memory of one region without a list around it.
    """
    if _has_one_axis(buffers):
        raise wrong_type(buffers, "a list of arrays")
    return listed(buffers, "arrays")


def regions_of(buffers: Memory, shard: Shard | None = None) -> list[Region]:
    """The memory of a rank's regions, checked against its shard.

    `buffers` has one object for each region, in the order of the shard, or one for each layer, by its number.
    Arrays of bytes may hold any type; arrays of integers any type of as many bits; others the shard's own type.
    If a region is one regular array, an array of several axes may join and split the shard's axes, but not
    contradict them.

    Raises InvalidError (see region_of(); the wrong type or shape, the wrong number of regions),
    OutOfRangeError (a region that is smaller than the shard's) or OverlapError (two regions share memory).
    """
    if isinstance(buffers, Mapping):
        buffers = _by_layer(buffers, shard)
    found = [region_for(i, buffer, None) for i, buffer in enumerate(buffers_of(buffers))]
    _refuse_overlaps(found)
    if shard is None:
        return found
    sizes = of_type(Shard, shard).region_bytes
    if len(found) != len(sizes):
        raise InvalidError(f"{len(found)} regions were given; the shard has {len(sizes)}")
    for i, (region, size, views) in enumerate(zip(found, sizes, shard.regions(), strict=True)):
        check_region(i, region, size, views)
    return found


def region_for(number: int, buffer: Buffer, shard: Shard | None) -> Region:
    """The memory of one region, checked as by regions_of(); the driver must know memory of a device.

    Raises UnsupportedError if there is no driver.
    """
    try:
        region = region_of(buffer)
        check_device(region, type(buffer).__name__)
    except InvalidError as error:
        raise InvalidError(f"region {number}: {error.detail}") from None
    if shard is not None:
        sizes = of_type(Shard, shard).region_bytes
        if not 0 <= whole_number(number, "region") < len(sizes):
            raise OutOfRangeError(f"region is {number}; the shard has {len(sizes)}")
        check_region(number, region, sizes[number], shard.regions()[number])
    return region


def memory_array(regions: Sequence[Region], withheld: bool | None = None) -> Any:
    """The regions as a kvf_memory[]; keep both while it is in use.

    `withheld` is kvf_memory.withheld; None: true for memory of devices, which then moves packed, by any
    transport.
    """
    memory = ffi.new("kvf_memory[]", len(regions))
    for i, region in enumerate(regions):
        memory[i].struct_size = ffi.sizeof("kvf_memory")
        memory[i].address = ffi.cast("void *", region.address)
        memory[i].bytes = region.bytes
        memory[i].kind = region.kind
        memory[i].device = region.device
        fill(memory[i], withheld=region.kind != MemoryKind.HOST if withheld is None else withheld)
    return memory


class Allocations:
    """Arrays over memory that a transport or an agent has allocated, and their addresses there.

    An array uses its own mapping of the same pages, so it may outlive the transport or agent.
    """

    def __init__(self) -> None:
        self._known: list[tuple[int, int, int]] = []  # begin and end of the view, address at the owner
        self._on_devices: list[tuple[int, int]] = []  # begin and end; no two devices share addresses

    def array(self, address: Any, size: int, shape: int | Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
        """An array over `size` bytes that were allocated at `address`."""
        view = lib.python_second_view(address, size)
        if view == ffi.NULL:
            # No peer can map memory that is not shared, so Python's own memory serves as well.
            plain = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)
            return _shaped(plain[:size], shape, dtype)
        begin = int(ffi.cast("uintptr_t", view))
        known = (begin, begin + size, int(ffi.cast("uintptr_t", address)))
        self._known.append(known)

        def drop(pointer: Any) -> None:
            self._known.remove(known)  # before other memory can get these addresses
            lib.python_drop_view(pointer, size)

        owned = ffi.gc(ffi.cast("char *", view), drop)
        return _shaped(np.frombuffer(ffi.buffer(owned, size), dtype=np.uint8), shape, dtype)

    def add_on_device(self, address: Any, size: int) -> None:
        """Notes memory of a device, which lives as long as the owner."""
        begin = int(ffi.cast("uintptr_t", address))
        self._on_devices.append((begin, begin + size))

    def at_owner(self, region: Region) -> Region:
        """The same memory under the address by which the owner knows it.

        What keeps memory of a device that the owner has allocated keeps the owner, which must not keep it.
        """
        if region.kind != MemoryKind.HOST:
            own = any(b <= region.address and region.address + region.bytes <= e for b, e in self._on_devices)
            return replace(region, keeps=None) if own else region
        for begin, end, address in tuple(self._known):  # another thread may drop an array
            if begin <= region.address and region.address + region.bytes <= end:
                return replace(region, address=address + region.address - begin)
        return region


def _shaped(memory: NDArray[np.uint8], shape: int | Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
    shaped: NDArray[Any] = memory.view(dtype).reshape(lengths_of(shape))
    return shaped


def array_bytes(shape: int | Sequence[int], dtype: DTypeLike) -> int:
    """Bytes of an array; raises OutOfRangeError for none."""
    lengths = lengths_of(shape)
    try:
        element = np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise InvalidError(f"dtype is {shown(dtype)}: {error}") from None
    if element.hasobject:
        raise InvalidError(f"an array of {element} holds Python objects; allowed: numbers")
    size = math.prod(lengths) * element.itemsize
    if size <= 0 or any(length <= 0 for length in lengths):
        raise OutOfRangeError(f"an array of shape {lengths} and {element} has no bytes")
    if size > sys.maxsize:
        raise OutOfRangeError(
            f"an array of shape {lengths} and {element} has {size} bytes; allowed: up to {sys.maxsize}"
        )
    return size
