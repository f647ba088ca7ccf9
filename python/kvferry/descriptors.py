"""Descriptor tables and the plan for one remote engine, as vLLM's connector makes them.

See kvferry/connector/descriptors.h. kvferry's own transfers need no tables: these are for comparing, explaining
and migrating.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry._binding import ffi, lib
from kvferry._native import Arena, Handle, Resource, resource_of, result_of, string
from kvferry._quantities import call, ids_out, kinds_in, lists_in, take
from kvferry._values import listed, of_type, whole_number
from kvferry.block_lists import Lists, same_length
from kvferry.errors import InvalidError
from kvferry.state import StateLayout, layout_in
from kvferry.topology import CacheKind, EngineTransferInfo, Topology, TpMapping, mapping_out, remote_in

DESCRIPTOR_DTYPE = np.dtype(
    {
        "names": ["address", "bytes", "device"],
        "formats": [np.uint64, np.uint64, np.uint32],
        "offsets": [ffi.offsetof("kvf_descriptor", field) for field in ("address", "bytes", "device")],
        "itemsize": ffi.sizeof("kvf_descriptor"),
    }
)
"""A descriptor as an element of a NumPy array: the library's own struct."""


@dataclass(frozen=True)
class DescriptorTable:
    """Descriptors, an array of DESCRIPTOR_DTYPE; the first `attention_count` are attention, the rest state."""

    at: NDArray[np.void]
    attention_count: int


def table_out(table: Any) -> DescriptorTable:
    """A copy of a kvf_descriptor_table, whose owner does not change."""
    copied = np.empty(table.count, dtype=DESCRIPTOR_DTYPE)
    if table.count:
        ffi.memmove(ffi.cast("char *", copied.ctypes.data), table.at, copied.nbytes)
    return DescriptorTable(copied, table.attention_count)


def table_in(table: DescriptorTable, arena: Arena) -> Any:
    """A kvf_descriptor_table *."""
    at: NDArray[np.void] = of_type(np.ndarray, of_type(DescriptorTable, table).at)
    if at.dtype != DESCRIPTOR_DTYPE or at.ndim != 1:
        raise InvalidError(f"a table of {at.dtype} and {at.ndim} dimensions; allowed: DESCRIPTOR_DTYPE, 1")
    kept = arena.keep(np.ascontiguousarray(at))
    pointer = ffi.cast("kvf_descriptor *", kept.ctypes.data)
    return arena.new("kvf_descriptor_table", at=pointer, count=len(kept), attention_count=table.attention_count)


def take_table(function: Any, *arguments: Any) -> DescriptorTable:
    """Calls a function whose last argument receives a kvf_descriptor_table."""
    out = ffi.new("kvf_descriptor_table *")
    try:
        call(function, *arguments, out)
        return table_out(out)
    finally:
        lib.kvf_descriptor_table_free(out)


class RegionLayout(enum.IntEnum):
    """How regions hold K and V."""

    KV_OUTER = lib.KVF_LAYOUT_KV_OUTER
    BLOCKS_FIRST = lib.KVF_LAYOUT_BLOCKS_FIRST
    PACKED = lib.KVF_LAYOUT_PACKED
    LATENT = lib.KVF_LAYOUT_LATENT


@dataclass(frozen=True)
class CacheMemory:
    """The registered memory of one rank.

    Attributes:
        region_base: address of each region
        region_block_bytes: size of a kernel block in each region
        num_blocks: kernel blocks in each region
        physical_per_logical: kernel blocks of a logical block
        state: state that shares the pages of each region
    """

    region_base: tuple[int, ...]
    region_block_bytes: tuple[int, ...]
    num_blocks: int
    device: int = 0
    physical_per_logical: int = 1
    state: StateLayout | None = None


def _memory_fields(given: CacheMemory, arena: Arena) -> dict[str, Any]:
    memory = of_type(CacheMemory, given)
    base = same_length(memory.region_base, memory.region_block_bytes)
    return {
        "struct_size": ffi.sizeof("kvf_cache_memory"),
        "region_base": arena.numbers("uint64_t", base, "region_base"),
        "region_block_bytes": arena.numbers("uint64_t", memory.region_block_bytes, "region_block_bytes"),
        "region_count": len(base),
        "device": memory.device,
        "num_blocks": memory.num_blocks,
        "physical_per_logical": memory.physical_per_logical,
        "state": ffi.NULL if memory.state is None else layout_in(memory.state, arena),
    }


def _memory_in(memory: CacheMemory, arena: Arena) -> Any:
    return arena.array("kvf_cache_memory", [_memory_fields(memory, arena)])


def _flags(flags: Sequence[bool] | None, count: int, arena: Arena) -> Any:
    if flags is None:
        return ffi.NULL
    flags = listed(flags, "flags")
    if len(flags) != count:
        raise InvalidError(f"region_replicated has {len(flags)} entries; there are {count} regions")
    return arena.numbers("bool", flags, "region_replicated")


def local_descriptors(memory: CacheMemory, layout: RegionLayout, block_size_ratio: int = 1) -> DescriptorTable:
    """The descriptors of the local rank, each block in `block_size_ratio` pieces; then those of state."""
    arena = Arena()
    return take_table(lib.kvf_local_descriptors, _memory_in(memory, arena), layout, block_size_ratio)


def local_state_descriptors(memory: CacheMemory) -> DescriptorTable:
    """The state descriptors of local_descriptors() alone."""
    arena = Arena()
    return take_table(lib.kvf_local_state_descriptors, _memory_in(memory, arena))


def remote_descriptors(
    topology: Topology,
    remote: EngineTransferInfo,
    *,
    layout: RegionLayout,
    local_memory: CacheMemory,
    remote_memory: CacheMemory,
    remote_rank: int,
    region_replicated: Sequence[bool] | None = None,
) -> DescriptorTable:
    """The descriptors of one remote rank: for each block, the bytes that hold heads (or channels) of ours.

    Args:
        region_replicated: regions of which every rank holds all; None: none
    """
    arena, resource = Arena(), resource_of(Topology, topology)
    view = arena.new(
        "kvf_remote_view",
        layout=layout,
        local=_memory_in(local_memory, arena),
        remote=_memory_in(remote_memory, arena),
        remote_rank=remote_rank,
        region_replicated=_flags(region_replicated, len(local_memory.region_base), arena),
    )
    return take_table(lib.kvf_remote_descriptors, resource.pointer, remote_in(remote, arena), view)


def remote_state_descriptors(
    topology: Topology,
    remote: EngineTransferInfo,
    local: StateLayout,
    remote_memory: CacheMemory,
    remote_rank: int,
) -> DescriptorTable:
    """The state descriptors of remote_descriptors() alone; `local` is our state's layout."""
    arena, resource = Arena(), resource_of(Topology, topology)
    return take_table(
        lib.kvf_remote_state_descriptors,
        resource.pointer,
        remote_in(remote, arena),
        layout_in(local, arena),
        _memory_in(remote_memory, arena),
        remote_rank,
    )


def split_descriptors(
    topology: Topology,
    remote: EngineTransferInfo,
    local: DescriptorTable,
    source_rank: int,
    *,
    region_replicated: Sequence[bool] | None = None,
    descriptors_per_region: int = 0,
) -> DescriptorTable:
    """The local descriptors to use with one source rank: for attention, only the heads that this rank holds."""
    arena, resource = Arena(), resource_of(Topology, topology)
    replicated = ffi.NULL
    if region_replicated is not None:
        region_replicated = listed(region_replicated, "flags")
        count = len(region_replicated)
        replicated = arena.new(
            "kvf_replicated_regions",
            region_replicated=_flags(region_replicated, count, arena),
            region_count=count,
            descriptors_per_region=descriptors_per_region,
        )
    facts, table = remote_in(remote, arena), table_in(local, arena)
    return take_table(lib.kvf_split_descriptors, resource.pointer, facts, table, source_rank, replicated)


def compute_split_handle_data(
    topology: Topology, remote: EngineTransferInfo, local: DescriptorTable, source_rank: int
) -> DescriptorTable:
    """The same as in PR 39529: a rank that brings only state names the first piece of attention."""
    arena, resource = Arena(), resource_of(Topology, topology)
    facts, table = remote_in(remote, arena), table_in(local, arena)
    return take_table(lib.kvf_compute_split_handle_data, resource.pointer, facts, table, source_rank)


# ---- the plan of one remote engine, and its reads


@dataclass(frozen=True)
class ReadSpec:
    """What to read from one remote rank (ReadSpec): pairs of descriptors, and their copies as
    (remote address, local address, bytes)."""

    remote_rank: int
    local_ids: tuple[int, ...]
    remote_ids: tuple[int, ...]
    copies: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Reads:
    """A request's reads.

    Attributes:
        specs: one for each rank that is read
        notify_only: ranks that wait for this request and from which nothing is read
        notice: the message for every one of these ranks
    """

    specs: tuple[ReadSpec, ...]
    notify_only: tuple[int, ...]
    notice: str


class EngineTransferPlan(Handle):
    """The tables by which one local rank reads a remote engine.

    Raises NotExpressibleError, MismatchError (block lengths), InvalidError.
    """

    def __init__(
        self,
        topology: Topology,
        remote: EngineTransferInfo,
        *,
        layout: RegionLayout,
        kinds: Sequence[CacheKind],
        local: CacheMemory,
        remote_ranks: Sequence[CacheMemory],
        region_replicated: Sequence[bool] | None = None,
    ) -> None:
        remote_ranks, kinds = listed(remote_ranks, CacheMemory.__name__), listed(kinds, "kinds")
        if len(remote_ranks) != whole_number(of_type(EngineTransferInfo, remote).tp_size, "tp_size"):
            raise InvalidError(f"{len(remote_ranks)} remote ranks; tp_size is {remote.tp_size}")
        arena, resource = Arena(), resource_of(Topology, topology)
        desc = arena.new(
            "kvf_engine_transfer_plan_desc",
            layout=layout,
            kinds=kinds_in(kinds, arena),
            group_count=len(kinds),
            local=_memory_in(local, arena),
            remote_ranks=arena.array(
                "kvf_cache_memory", [_memory_fields(memory, arena) for memory in remote_ranks]
            ),
            region_replicated=_flags(region_replicated, len(local.region_base), arena),
        )
        facts = remote_in(remote, arena)
        made = take(
            lib.kvf_engine_transfer_plan_build, "kvf_engine_transfer_plan *", resource.pointer, facts, desc
        )
        self._groups = len(kinds)
        self._own(made, lib.kvf_engine_transfer_plan_free, resource)

    @property
    def mapping(self) -> TpMapping:
        """From which remote ranks each group is read."""
        resource = self._get()
        return mapping_out(lib.kvf_engine_transfer_plan_mapping(resource.pointer))

    def _table(self, function: Any, key: int) -> DescriptorTable | None:
        resource: Resource = self._get()
        table = result_of(function, resource.pointer, key)
        return None if table == ffi.NULL else table_out(table)

    def local_table(self, block_size: int) -> DescriptorTable | None:
        """The local table cut to `block_size` tokens: our own or the remote block size; None for another."""
        return self._table(lib.kvf_engine_transfer_plan_local, block_size)

    def split_table(self, source_rank: int) -> DescriptorTable | None:
        """The local table cut for one source rank; None when blocks are not split over ranks."""
        return self._table(lib.kvf_engine_transfer_plan_split, source_rank)

    def remote_table(self, remote_rank: int) -> DescriptorTable | None:
        """The table of one remote rank; None if it holds nothing of ours."""
        return self._table(lib.kvf_engine_transfer_plan_remote, remote_rank)

    def read(self, local_blocks: Lists, remote_blocks: Lists, remote_request_id: str) -> Reads:
        """Plans one request.

        Args:
            local_blocks: logical blocks still to fill, for each group; no groups: everything is cached
            remote_blocks: logical blocks of the whole prompt at the remote engine

        Raises OutOfRangeError, InvalidError.
        """
        resource, arena = self._get(), Arena()
        reads = ffi.new("kvf_reads *")
        ours, theirs = lists_in(local_blocks, arena), lists_in(remote_blocks, arena)
        try:
            name = arena.text(remote_request_id)
            call(lib.kvf_engine_transfer_plan_read, resource.pointer, ours, theirs, name, reads)
            specs = tuple(_read_spec(reads.specs[i]) for i in range(reads.count))
            return Reads(specs, tuple(ids_out(reads.notify_only)), string(reads.notice))
        finally:
            lib.kvf_reads_free(reads)


def _read_spec(spec: Any) -> ReadSpec:
    copies = (spec.copies[i] for i in range(spec.local_ids.count))
    return ReadSpec(
        remote_rank=spec.remote_rank,
        local_ids=tuple(ids_out(spec.local_ids)),
        remote_ids=tuple(ids_out(spec.remote_ids)),
        copies=tuple((copy.remote_address, copy.local_address, copy.bytes) for copy in copies),
    )
