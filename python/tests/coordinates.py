"""A small model, and caches in which every element identifies its cell."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvferry import Engine, Group, GroupSpec, Model, Part, Shard

LAYERS, HEADS, HEAD_SIZE = 2, 4, 8
TOKENS = 40
PREFILL_TABLE, DECODE_TABLE = [7, 3, 9], [5, 1]
PREFILL_BLOCK, DECODE_BLOCK = 16, 24


def small_model(head_size: int = HEAD_SIZE) -> Model:
    parts = tuple(Part(name, "f32", HEADS, head_size) for name in ("k", "v"))
    return Model([Group("full", tuple(range(LAYERS)), parts)], name="small")


def prefill_engine(model: Model, tp_size: int = 2) -> Engine:
    return Engine(model, GroupSpec(12, PREFILL_BLOCK, "L|BPNH"), name="prefill", tp_size=tp_size)


def decode_engine(model: Model) -> Engine:
    return Engine(model, GroupSpec(8, DECODE_BLOCK, "L|BPHN"), name="decode")


def cell(layer: int, part: int, token: int, head: int) -> NDArray[np.float32]:
    """The content of the cell with these coordinates: each element of all cells has another number."""
    first = (((layer * 2 + part) * TOKENS + token) * HEADS + head) * HEAD_SIZE + 1
    return np.arange(first, first + HEAD_SIZE, dtype=np.float32)


def view_cell(
    shard: Shard,
    regions: Sequence[NDArray[np.uint8]],
    table: Sequence[int],
    coordinates: tuple[int, int, int, int],
) -> NDArray[np.float32]:
    """The memory of one cell."""
    layer, part, token, head = coordinates
    block, row = divmod(token, shard.groups[0].tokens_per_block)
    place = shard.locate(0, layer, part, table[block], row, head)
    memory = regions[place.region].view(np.uint8)[place.offset : place.offset + place.bytes]
    return memory.view(np.float32)


def all_cells(shard: Shard) -> list[tuple[int, int, int, int]]:
    """The coordinates of the cells that a shard holds of one sequence."""
    heads = shard.groups[0].parts[0].units
    return [
        (layer, part, token, head)
        for layer in range(LAYERS)
        for part in range(2)
        for token in range(TOKENS)
        for head in heads
    ]


def fill(shard: Shard, regions: Sequence[NDArray[np.uint8]], table: Sequence[int]) -> None:
    for coordinates in all_cells(shard):
        view_cell(shard, regions, table, coordinates)[:] = cell(*coordinates)


def wrong_cells(
    shard: Shard, regions: Sequence[NDArray[np.uint8]], table: Sequence[int]
) -> list[tuple[int, int, int, int]]:
    """The coordinates of cells whose content is not what fill() writes."""
    return [
        coordinates
        for coordinates in all_cells(shard)
        if not np.array_equal(view_cell(shard, regions, table, coordinates), cell(*coordinates))
    ]
