"""The per-group plan of PR 41169: attention groups that differ in heads and head size but share pages.

See kvferry/connector/page_groups.h. A local page that is not a run of whole pieces raises NotExpressibleError;
a Plan does not have this limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvferry._binding import ffi, lib
from kvferry._native import Arena, Handle
from kvferry._quantities import call, ids_out, lists_in, take_ids, take_two_lists
from kvferry._values import list_of, listed
from kvferry.block_lists import Lists
from kvferry.descriptors import DescriptorTable, take_table
from kvferry.errors import InvalidError


@dataclass(frozen=True)
class PageGroup:
    """One attention group; remote_tokens_per_block of 0 is the remote engine's one block size."""

    total_kv_heads: int
    local_tokens_per_block: int
    remote_tokens_per_block: int = 0


@dataclass(frozen=True)
class RegionPlan:
    """One descriptor region of the remote engine (RegionPlan)."""

    layer: int
    desc_bytes: int
    offset_in_page: int
    page_stride: int
    num_blocks: int
    descs_per_block: int
    desc_stride: int


@dataclass(frozen=True)
class GroupPlan:
    """The plan of one group; the position of a source rank is its slot: its piece of the local heads."""

    local_blocks_per_remote_block: int
    remote_blocks_per_local_block: int
    tokens_per_piece: int
    remote_desc_offset: int
    source_ranks: tuple[int, ...]


class PagePlan(Handle):
    """How the larger of two pages is cut into pieces as long as the smaller one, for each group.

    Args:
        remote_block_size: for groups that have none of their own
        blocks_first: each page has all of K and then all of V

    Raises NotExpressibleError, InvalidError, SizeOverflowError.
    """

    def __init__(
        self,
        *,
        tp_size: int,
        tp_rank: int,
        remote_tp_size: int,
        remote_block_size: int,
        groups: Sequence[PageGroup],
        local_page_bytes: int,
        remote_page_bytes: int,
        layer_count: int,
        remote_num_blocks: int,
        blocks_first: bool = False,
    ) -> None:
        arena, groups = Arena(), list_of(PageGroup, groups)
        desc = arena.new(
            "kvf_page_plan_desc",
            tp_size=tp_size,
            tp_rank=tp_rank,
            remote_tp_size=remote_tp_size,
            remote_block_size=remote_block_size,
            groups=arena.array("kvf_page_group", [vars(group) for group in groups]),
            group_count=len(groups),
            local_page_bytes=local_page_bytes,
            remote_page_bytes=remote_page_bytes,
            blocks_first=blocks_first,
            layer_count=layer_count,
            remote_num_blocks=remote_num_blocks,
        )
        plan = ffi.new("kvf_page_plan *")
        call(lib.kvf_page_plan_build, desc, plan)
        self._layers = int(layer_count)
        self._own(plan, lib.kvf_page_plan_free)

    @property
    def remote_to_local_page_ratio(self) -> int:
        """Pieces of a remote page; 1 if it is not the larger one."""
        return int(self._get().pointer.remote_to_local_page_ratio)

    @property
    def local_to_remote_page_ratio(self) -> int:
        """Pieces of a local page; 1 if it is not the larger one."""
        return int(self._get().pointer.local_to_remote_page_ratio)

    @property
    def all_source_ranks(self) -> list[int]:
        """The ranks from which anything is read."""
        resource = self._get()
        return ids_out(resource.pointer.all_source_ranks)

    @property
    def groups(self) -> list[GroupPlan]:
        """The plan of each group."""
        resource = self._get()
        plan = resource.pointer
        return [
            GroupPlan(
                plan.groups[i].local_blocks_per_remote_block,
                plan.groups[i].remote_blocks_per_local_block,
                plan.groups[i].tokens_per_piece,
                plan.groups[i].remote_desc_offset,
                tuple(ids_out(plan.groups[i].source_ranks)),
            )
            for i in range(plan.group_count)
        ]

    @property
    def regions(self) -> list[RegionPlan]:
        """The descriptor regions of the remote engine."""
        resource = self._get()
        plan = resource.pointer
        fields = RegionPlan.__dataclass_fields__
        return [
            RegionPlan(**{name: getattr(plan.regions[i], name) for name in fields})
            for i in range(plan.region_count)
        ]

    def read(
        self, local: Lists, remote: Lists, source_rank: int, prompt_tokens: int = 0
    ) -> tuple[list[list[int]], list[list[int]]]:
        """The descriptors to read from one source rank, group by group: block * pieces + piece.

        Args:
            local: blocks still to fill, in each group
            remote: blocks of the whole prompt
            prompt_tokens: of the whole prompt, cached or not; 0: not known, and the lists are not paired

        Raises OutOfRangeError with the prompt's length (more local blocks than it fills, or fewer remote ones).
        """
        resource, arena = self._get(), Arena()
        count = resource.pointer.group_count
        local, remote = listed(local, "lists"), listed(remote, "lists")
        if len(local) != count or len(remote) != count:
            raise InvalidError(
                f"{len(local)} local and {len(remote)} remote lists; the plan has {count} groups"
            )
        return take_two_lists(
            lib.kvf_page_plan_read,
            resource.pointer,
            prompt_tokens,
            lists_in(local, arena),
            lists_in(remote, arena),
            source_rank,
        )

    def remote_table(self, layer_base: Sequence[int], device: int = 0) -> DescriptorTable:
        """The remote engine's descriptors; layer_base are the addresses of the layers' buffers."""
        resource, arena = self._get(), Arena()
        base = self._base(layer_base, arena)
        return take_table(lib.kvf_page_plan_remote_table, resource.pointer, base, device)

    def local_table(self, layer_base: Sequence[int], local_num_blocks: int, device: int = 0) -> DescriptorTable:
        """The local descriptors for gather reads: local pages cut to the remote size."""
        resource, arena = self._get(), Arena()
        base = self._base(layer_base, arena)
        return take_table(lib.kvf_page_plan_local_table, resource.pointer, base, local_num_blocks, device)

    def _base(self, layer_base: Sequence[int], arena: Arena) -> Any:
        layer_base = listed(layer_base, "numbers")
        if len(layer_base) != self._layers:
            raise InvalidError(f"layer_base has {len(layer_base)} entries; the plan has {self._layers} layers")
        return arena.numbers("uint64_t", layer_base, "layer_base")


def flat_desc_ids(lists: Lists, region_count: int, descs_per_region: int) -> list[int]:
    """Descriptor ids in a table: group by group, each in every region of `descs_per_region` descriptors."""
    arena = Arena()
    return take_ids(lib.kvf_flat_desc_ids, lists_in(lists, arena), region_count, descs_per_region)
