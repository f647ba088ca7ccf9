"""Work on blocks after their bytes have arrived: changing their form, zeroing, copying.

See kvferry/connector/postprocess.h. A plan puts every cell in its place while it moves and needs none of this;
these functions are for caches that were received as whole blocks in the sender's form. On an error nothing is
changed, unless a device fails while it works. Calls on different blocks may run at the same time in different
threads.

Arrays and tensors may lie in the memory of CUDA devices, which then do the work. A call returns when they have
finished, but it does not wait for what the caller's streams do with these blocks: synchronize them before. A
device raises InvalidError (the memory is not the device's), OutOfRangeError (no such device), UnsupportedError
(no driver), LimitError (a page of 1 GiB or more), OutOfMemoryError, or InputOutputError (it failed, or did not
finish within 30 s: blocks on devices have undefined contents).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvferry._binding import ffi, lib
from kvferry._native import Arena, Ids, call, fill, take
from kvferry._values import list_of, mapping_of, of_type
from kvferry.buffers import Buffer, buffers_of, region_of
from kvferry.errors import InvalidError, UnsupportedError
from kvferry.region import MemoryKind

DIRECTIONS = {"h2d": int(lib.KVF_COPY_H2D), "d2h": int(lib.KVF_COPY_D2H)}


class PageOrder(enum.IntEnum):
    """The axes of a page from outermost to innermost: HND head, token, element; NHD token, head, element."""

    HND = lib.KVF_PAGE_HND
    NHD = lib.KVF_PAGE_NHD


@dataclass(frozen=True)
class PageForm:
    """How a page is laid out."""

    order: PageOrder
    tokens: int


@dataclass(frozen=True)
class ReceivedShape:
    """The form of blocks as received, and the form wanted; one number of tokens must divide the other.

    Attributes:
        heads: of this rank
        cell_bytes: one head of one token: head size times element size
        received, wanted: the forms
    """

    heads: int
    cell_bytes: int
    received: PageForm
    wanted: PageForm

    def _struct(self, arena: Arena) -> Any:
        shape = arena.new("kvf_received_shape", heads=self.heads, cell_bytes=self.cell_bytes)
        fill(shape.received, **vars(of_type(PageForm, self.received)))
        fill(shape.wanted, **vars(of_type(PageForm, self.wanted)))
        return shape

    def scratch_bytes(self, block_count: int) -> int:
        """Bytes of working memory for calls with this shape and up to `block_count` blocks."""
        arena = Arena()
        return int(take(lib.kvf_received_scratch_bytes, "uint64_t", self._struct(arena), block_count))


@dataclass(frozen=True)
class BlockRegion:
    """Blocks of equal size in one piece of memory: a layer, or one of several things a layer keeps.

    Byte x of part p of block b is at b * block_stride_bytes + p * part_stride_bytes + x of the buffer.
    block_region() makes them from arrays.
    """

    buffer: Buffer
    block_count: int
    block_stride_bytes: int
    part_bytes: int
    part_count: int = 1
    part_stride_bytes: int = 0


def block_region(array: Buffer, *, split_axis: int | None = None) -> BlockRegion:
    """The blocks of one layer, from an array or tensor whose bytes lie in order (C-contiguous).

    Args:
        array: blocks along the first axis, or along the second if `split_axis` is 0
        split_axis: 0 or 1: the axis that separates K from V; None: an array of K, of V, or of something else
    """
    memory = region_of(array)
    if not memory.in_order:
        raise InvalidError("the array is not C-contiguous; its blocks cannot be told apart by strides alone")
    shape, axes = memory.shape, len(memory.shape)
    if split_axis is None and axes == 0:
        raise InvalidError("an array without axes has no blocks; allowed: blocks along the first axis")
    if split_axis is not None and (split_axis not in (0, 1) or axes < 3):
        raise InvalidError(f"split_axis is {split_axis} of {axes} axes; allowed: 0 or 1 of at least 3")
    if split_axis is None:
        block_bytes = memory.bytes // shape[0]
        return BlockRegion(array, shape[0], block_bytes, block_bytes)
    # In order of the axes, whatever the strides of axes of length 1 say.
    part_bytes = memory.bytes // (shape[0] * shape[1])
    strides = (part_bytes * shape[1], part_bytes)
    return BlockRegion(
        array,
        shape[1 - split_axis],
        strides[1 - split_axis],
        part_bytes,
        shape[split_axis],
        strides[split_axis],
    )


def _regions(regions: Sequence[BlockRegion | Buffer], names: Sequence[str | None], arena: Arena) -> Any:
    items = []
    for region, name in zip(regions, names, strict=True):
        blocks = region if isinstance(region, BlockRegion) else block_region(region)
        memory = arena.keep(region_of(blocks.buffer))
        items.append(
            {
                "layer": arena.text(name),
                "base": ffi.cast("void *", memory.address),
                "bytes": memory.bytes,
                "block_count": blocks.block_count,
                "block_stride_bytes": blocks.block_stride_bytes,
                "part_count": blocks.part_count,
                "part_stride_bytes": blocks.part_stride_bytes,
                "part_bytes": blocks.part_bytes,
                "kind": memory.kind,
                "device": memory.device,
            }
        )
    return arena.array("kvf_block_region", items)


def _scratch(scratch: Buffer | None, arena: Arena) -> Any:
    if scratch is None:
        return ffi.NULL
    memory = arena.keep(region_of(scratch))
    if memory.kind != MemoryKind.HOST:
        raise UnsupportedError("scratch lies in memory of a device; allowed: host memory")
    return arena.new("kvf_scratch", memory=ffi.cast("void *", memory.address), bytes=memory.bytes)


def permute_received(
    shape: ReceivedShape,
    regions: Sequence[BlockRegion | Buffer],
    block_ids: Ids,
    *,
    scratch: Buffer | None = None,
) -> None:
    """Permutes blocks in place from the received into the wanted form: the same blocks in every region.

    Args:
        regions: the layers of a group; arrays and tensors have their blocks along the first axis
        block_ids: in the order of the sequence, each once
        scratch: working memory, see ReceivedShape.scratch_bytes(); None: allocated for the call

    Raises InvalidError, NotExpressibleError (neither number of tokens divides the other), OutOfRangeError (a
    block the region does not have), OverlapError (a block listed twice), UnsupportedError (scratch on a
    device), and what devices raise (above).
    """
    arena = Arena()
    ids, count = arena.ids(block_ids)
    regions = buffers_of(regions)
    items = _regions(regions, [None] * len(regions), arena)
    call(
        lib.kvf_permute_received,
        of_type(ReceivedShape, shape)._struct(arena),
        items,
        len(regions),
        ids,
        count,
        _scratch(scratch, arena),
    )


@dataclass(frozen=True)
class ReceivedRequest:
    """What one request received in one group: its blocks, and the tokens that were transferred."""

    block_ids: Ids
    covered_tokens: int


def finish_received(
    shape: ReceivedShape,
    regions: Sequence[BlockRegion | Buffer],
    requests: Sequence[ReceivedRequest],
    *,
    scratch: Buffer | None = None,
) -> None:
    """Permutes the blocks of requests, and zeroes every token after the covered ones.

    Raises as permute_received(); OutOfRangeError also for more covered tokens than the blocks hold.
    """
    arena = Arena()
    items, regions = [], buffers_of(regions)
    for request in list_of(ReceivedRequest, requests):
        ids, count = arena.ids(request.block_ids)
        items.append({"block_ids": ids, "block_id_count": count, "covered_tokens": request.covered_tokens})
    call(
        lib.kvf_finish_received,
        of_type(ReceivedShape, shape)._struct(arena),
        _regions(regions, [None] * len(regions), arena),
        len(regions),
        arena.array("kvf_received_request", items),
        len(items),
        _scratch(scratch, arena),
    )


def copy_blocks(
    source: Mapping[str, BlockRegion | Buffer],
    destination: Mapping[str, BlockRegion | Buffer],
    source_ids: Ids,
    destination_ids: Ids,
    direction: Literal["h2d", "d2h"],
) -> int:
    """Copies blocks, in every layer of the source, to the destination's layer of the same name.

    The public connector calls this copy_kv_blocks.

    Args:
        direction: "h2d": the source is host memory; "d2h": the destination is. The other side may be a device's

    Returns the pairs copied in each layer: 0 if one side has no layers or no ids, or if the lists differ in
    length, as the public function does.
    Raises NotFoundError (no layer of that name), OutOfRangeError, MismatchError (sizes differ), OverlapError,
    InvalidError (an unknown direction; memory of a device on the host's side), and what devices raise (above):
    then some layers may have been copied, and the error names the one that was not.
    """
    if not isinstance(direction, str) or direction not in DIRECTIONS:
        raise InvalidError(f"direction is {direction!r}; allowed: {', '.join(map(repr, DIRECTIONS))}")
    arena, source, destination = Arena(), mapping_of(source), mapping_of(destination)
    from_ids, from_count = arena.ids(source_ids)
    to_ids, to_count = arena.ids(destination_ids)
    return int(
        take(
            lib.kvf_copy_blocks,
            "size_t",
            _regions(list(source.values()), list(source), arena),
            len(source),
            _regions(list(destination.values()), list(destination), arena),
            len(destination),
            from_ids,
            from_count,
            to_ids,
            to_count,
            DIRECTIONS[direction],
        )
    )
