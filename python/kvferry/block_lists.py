"""Lists of block ids and descriptor ids, one for each group, as vLLM's connector pairs, trims and expands them.

See kvferry/connector/descriptors.h. Every function returns new lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvferry._binding import ffi, lib
from kvferry._native import Arena, result_of
from kvferry._quantities import (
    call,
    ids_out,
    ids_pointer,
    kinds_in,
    lists_in,
    take,
    take_ids,
    take_lists,
    take_two_lists,
)
from kvferry._values import list_of, listed, of_type
from kvferry.errors import InvalidError
from kvferry.topology import CacheKind

ALL_GROUPS = int(lib.KVF_ALL_GROUPS)
"""The group of a region that all groups use."""

Lists = Sequence[Sequence[int]]


def same_length(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """The first of two lists that must be equally long."""
    first, second = listed(first), listed(second)
    if len(first) != len(second):
        raise InvalidError(f"lists of {len(first)} and {len(second)} entries; they must be equally long")
    return first


def logical_to_kernel(kinds: Sequence[CacheKind], lists: Lists, stride: int, count: int) -> list[list[int]]:
    """Expands logical block b of attention groups to kernel blocks b*stride ... b*stride + count - 1."""
    arena = Arena()
    kinds_of = kinds_in(same_length(kinds, lists), arena)
    return take_lists(lib.kvf_logical_to_kernel, kinds_of, lists_in(lists, arena), stride, count)


def mapped_blocks(blocks: Sequence[int], ratio: int) -> list[int]:
    """Each id b becomes b*ratio ... b*ratio + ratio - 1."""
    arena = Arena()
    return take_ids(lib.kvf_mapped_blocks, ids_pointer(blocks, arena), ratio)


def map_block_size(kinds: Sequence[CacheKind], local: Lists, remote: Lists, ratio: int) -> list[list[int]]:
    """Maps local attention blocks to the remote block size, cut to the remote lists; no groups: none left."""
    arena = Arena()
    return take_lists(
        lib.kvf_map_block_size,
        kinds_in(same_length(kinds, local), arena),
        lists_in(local, arena),
        lists_in(remote, arena),
        ratio,
    )


def prefix_trim(
    kinds: Sequence[CacheKind], decode: Lists, prefill: Lists, decode_ppl: int = 1, prefill_ppl: int = 1
) -> tuple[list[list[int]], list[list[int]]]:
    """Pairs the blocks still to be filled with the blocks that fill them.

    Args:
        decode_ppl, prefill_ppl: kernel blocks of a logical block on either side

    Raises OutOfRangeError (more decode than prefill blocks, states without a source).
    """
    arena = Arena()
    return take_two_lists(
        lib.kvf_prefix_trim,
        kinds_in(same_length(kinds, decode), arena),
        lists_in(decode, arena),
        lists_in(prefill, arena),
        decode_ppl,
        prefill_ppl,
    )


def prefix_trim_by_region(decode: Lists, prefill: Lists) -> tuple[list[list[int]], list[list[int]]]:
    """The same for lists of regions, which hold attention only."""
    arena = Arena()
    return take_two_lists(lib.kvf_prefix_trim_by_region, lists_in(decode, arena), lists_in(prefill, arena))


@dataclass(frozen=True)
class DcpPair:
    """A pair of token shares.

    Attributes:
        num_computed: blocks of this rank that are cached and not in the local list
        num_remote_blocks: blocks of the whole sequence at the remote engine; None: not known
    """

    local_dcp_size: int
    local_dcp_rank: int
    remote_dcp_size: int
    remote_rank: int
    num_computed: int = 0
    num_remote_blocks: int | None = None


def dcp_prefix_trim(pair: DcpPair, local: Sequence[int], remote: Sequence[int]) -> tuple[list[int], list[int]]:
    """Pairs blocks if either side distributes the blocks of a sequence over its ranks."""
    arena = Arena()
    remote_blocks = of_type(DcpPair, pair).num_remote_blocks
    known = {"has_num_remote_blocks": remote_blocks is not None}
    fields = {**vars(pair), **known, "num_remote_blocks": 0 if remote_blocks is None else remote_blocks}
    ours, theirs = ffi.new("kvf_ids *"), ffi.new("kvf_ids *")
    try:
        struct = arena.new("kvf_dcp_pair", **fields)
        mine, other = ids_pointer(local, arena), ids_pointer(remote, arena)
        call(lib.kvf_dcp_prefix_trim, struct, mine, other, ours, theirs)
        return ids_out(ours), ids_out(theirs)
    finally:
        lib.kvf_ids_free(ours)
        lib.kvf_ids_free(theirs)


def block_ids_by_region(lists: Lists, region_groups: Sequence[int]) -> list[list[int]]:
    """The blocks to read in each region: those of its group, or with ALL_GROUPS of all groups in order."""
    arena, region_groups = Arena(), listed(region_groups, "numbers")
    groups = arena.numbers("int32_t", region_groups, "a group")
    return take_lists(lib.kvf_block_ids_by_region, lists_in(lists, arena), groups, len(region_groups))


@dataclass(frozen=True)
class ExchangeGroup:
    """What a producer hands over of each group.

    Attributes:
        window_tokens: sliding window; 0: none
        spec_blocks: state groups: speculative slots after the valid one
    """

    kind: CacheKind
    window_tokens: int = 0
    spec_blocks: int = 0


def blocks_per_window(window_tokens: int, block_size: int) -> int:
    """Blocks that a sliding window can reach: ceil(window / block size) + 1; 0 without a window."""
    return int(result_of(lib.kvf_blocks_per_window, window_tokens, block_size))


def exchange_clip(
    groups: Sequence[ExchangeGroup], block_size: int, lists: Lists, *, clip_state: bool = True
) -> list[list[int]]:
    """Clips block lists to what a consumer can use: the last blocks of a window, the one slot of a state."""
    arena, groups = Arena(), list_of(ExchangeGroup, same_length(groups, lists))
    items = arena.array("kvf_exchange_group", [vars(group) for group in groups])
    return take_lists(lib.kvf_exchange_clip, items, len(groups), block_size, clip_state, lists_in(lists, arena))


def ssm_state_clip(blocks: Sequence[int], spec_blocks: int) -> list[int]:
    """The one block that holds the state: the last before the speculative ones."""
    arena = Arena()
    return take_ids(lib.kvf_ssm_state_clip, ids_pointer(blocks, arena), spec_blocks)


# ---- descriptor ids


@dataclass(frozen=True)
class IdSpace:
    """How a table is numbered: attention region r, block b is r*attention_blocks + b; then state likewise."""

    attention_regions: int
    attention_blocks: int
    state_regions: int = 0
    state_blocks: int = 0


def state_blocks(kernel_blocks: int, physical_per_logical: int) -> int:
    """Logical blocks of a cache of `kernel_blocks`. Raises NotExpressibleError if they do not divide."""
    return int(take(lib.kvf_state_blocks, "uint64_t", kernel_blocks, physical_per_logical))


def desc_ids(space: IdSpace, kinds: Sequence[CacheKind], lists: Lists) -> list[int]:
    """Descriptor ids of a request: region by region, or, if some group keeps state, group by group."""
    arena = Arena()
    return take_ids(
        lib.kvf_desc_ids,
        arena.new("kvf_id_space", **vars(of_type(IdSpace, space))),
        kinds_in(same_length(kinds, lists), arena),
        lists_in(lists, arena),
    )


def desc_ids_by_region(lists: Lists, region_groups: Sequence[int], region_blocks: Sequence[int]) -> list[int]:
    """The same for regions of different lengths that belong to groups, group by group."""
    arena, region_groups = Arena(), same_length(region_groups, region_blocks)
    groups = arena.numbers("int32_t", region_groups, "a group")
    blocks = arena.numbers("uint64_t", region_blocks)
    return take_ids(lib.kvf_desc_ids_by_region, lists_in(lists, arena), groups, blocks, len(region_groups))


def desc_ids_by_layer(lists: Lists, layer_groups: Sequence[int], layer_blocks: Sequence[int]) -> list[int]:
    """The same layer by layer, each with the blocks of its group."""
    arena, layer_groups = Arena(), same_length(layer_groups, layer_blocks)
    groups = arena.numbers("int32_t", layer_groups, "a group")
    blocks = arena.numbers("uint64_t", layer_blocks)
    return take_ids(lib.kvf_desc_ids_by_layer, lists_in(lists, arena), groups, blocks, len(layer_groups))
