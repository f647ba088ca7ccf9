"""Checksums of cached cells that do not depend on the shape of the engine that holds them.

See kvferry/checksum.h: sums of areas that share no cell add up modulo 2**64, on whichever ranks the areas are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvferry._binding import ffi, lib
from kvferry._native import Arena, Span, call, resource_of, span
from kvferry._values import whole_number
from kvferry.buffers import Buffer, memory_array, regions_of
from kvferry.errors import OutOfRangeError
from kvferry.request import Blocks, table_fields
from kvferry.shard import Shard


def checksum_steps(
    shard: Shard,
    regions: Sequence[Buffer],
    *,
    group: int,
    part: int,
    layers: Span,
    units: Span,
    table: Blocks,
    steps: Span,
) -> NDArray[np.uint64]:
    """Sums the cells of each step in an area of one part.

    Args:
        regions: the memory of each region of the shard, as registered
        layers: indices into Group.layers; all must be held here
        units: of the whole model's units; all must be held here
        table: where the steps are on this rank
        steps: tokens, entries of several tokens, or states; see Group.step_count()

    Returns the sum of each step; 0 for steps that this rank does not keep.
    Raises OutOfRangeError (the detail names field, value and what is allowed), UnsupportedError, InvalidError.
    """
    resource, found, arena = resource_of(Shard, shard), regions_of(regions, shard), Arena()
    area = span(steps)
    sums = np.zeros(area.end - area.begin if area.end > area.begin else 0, dtype=np.uint64)
    call(
        lib.kvf_checksum_steps,
        resource.pointer,
        arena.keep(memory_array(found)),
        group,
        part,
        span(layers),
        span(units),
        arena.array("kvf_block_table", [table_fields(table, arena)]),
        area.begin,
        area.end,
        ffi.cast("uint64_t *", sums.ctypes.data),
    )
    return sums


def checksum_cells(
    shard: Shard,
    regions: Sequence[Buffer],
    *,
    group: int,
    part: int,
    layers: Span,
    units: Span,
    table: Blocks,
    step: int,
) -> NDArray[np.uint64]:
    """Splits the sum of one step into an array of [layer][unit], by which two sides can find where they differ.

    Arguments and errors are those of checksum_steps().
    """
    resource, found, arena = resource_of(Shard, shard), regions_of(regions, shard), Arena()
    rows, columns = span(layers), span(units)
    if rows.end < rows.begin or columns.end < columns.begin:
        raise OutOfRangeError(f"layers {layers}, units {units}: one ends before it begins")
    # The library checks the area, but the array for its answer is allocated before.
    groups = shard.groups
    if not 0 <= whole_number(group, "group") < len(groups) or not 0 <= whole_number(part, "part") < len(
        groups[group].parts
    ):
        raise OutOfRangeError(f"group {group}, part {part}: the model has no such part")
    held = groups[group].parts[part].units
    if columns.end > held.stop or rows.end > shard.group_layers(group).stop:
        raise OutOfRangeError(
            f"layers {layers}, units {units}; this rank has layers {shard.group_layers(group)}, units {held}"
        )
    sums = np.zeros((rows.end - rows.begin, columns.end - columns.begin), dtype=np.uint64)
    call(
        lib.kvf_checksum_cells,
        resource.pointer,
        arena.keep(memory_array(found)),
        group,
        part,
        rows,
        columns,
        arena.array("kvf_block_table", [table_fields(table, arena)]),
        step,
        ffi.cast("uint64_t *", sums.ctypes.data),
    )
    return sums
