"""The quantities named by vLLM's KV connector: ratios, target ranks, slots.

See kvferry/connector/topology.h.

They describe shapes that divide. For other shapes they raise NotExpressibleError; a Plan needs none of them and
still works. The `refusal` of their errors is the connector's word for the reason.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvferry._binding import ffi, lib
from kvferry._native import Arena, OneAtATime, result_of, string, to_range
from kvferry._quantities import (
    call,
    ids_out,
    kinds_in,
    lists_in,
    take,
    take_ids,
    take_text,
    take_two_lists,
)
from kvferry._values import listed, of_type


class CacheKind(enum.IntEnum):
    """What a group caches (GroupKind)."""

    FULL = lib.KVF_CACHE_FULL
    SWA = lib.KVF_CACHE_SWA
    MLA = lib.KVF_CACHE_MLA
    SSM = lib.KVF_CACHE_SSM


class Dialect(enum.IntEnum):
    """Which connector's conventions to follow if two releases differ in something a peer or a log sees."""

    V0_32 = lib.KVF_DIALECT_V0_32
    PR_40731 = lib.KVF_DIALECT_PR_40731


@dataclass(frozen=True)
class EngineTransferInfo:
    """The facts of a remote engine.

    Attributes:
        block_size: tokens of a kernel block
        physical_blocks_per_logical: kernel blocks of a logical block
        block_bytes: of one kernel block in one region; 0: not known
        pp_rank: for Topology.describe()
    """

    tp_size: int
    block_size: int
    dcp_size: int = 1
    pp_rank: int = 0
    physical_blocks_per_logical: int = 1
    block_bytes: int = 0


@dataclass(frozen=True)
class TpMapping:
    """From which remote ranks each group is read (TPMapping).

    Attributes:
        source_ranks: one list for each group, ascending
        all_source_ranks: their union, ascending
        attention_slot: for each rank of all_source_ranks: its piece of the local heads; None: none of ours
        rank_offset_factor: multiplied by the local block length, the byte offset into the remote block
        local_consumers: see Topology.consumers_per_source()
    """

    source_ranks: tuple[tuple[int, ...], ...]
    all_source_ranks: tuple[int, ...]
    attention_slot: dict[int, int | None]
    rank_offset_factor: int
    local_consumers: int


@dataclass(frozen=True)
class LayoutFlags:
    """How a backend lays out its cache."""

    is_kv_layout_blocks_first: bool
    cross_layers_blocks: bool
    split_k_and_v: bool


class Topology(OneAtATime):
    """The view of one local (decode) rank, and the remote engines it knows.

    Args:
        tp_size, tp_rank: of the local engine
        block_size: tokens of a kernel block
        total_kv_heads: of the whole model; not used with is_mla
        dcp_size: decode context parallelism; divides tp_size
        is_mla: attention keeps one latent, which every rank holds
        is_mamba: a hybrid: some groups keep recurrent state
        block_bytes: of one kernel block in one region on this rank; 0: not known

    Raises InvalidError, OutOfRangeError; the detail names the field.
    """

    def __init__(
        self,
        *,
        engine_id: str = "",
        tp_size: int,
        tp_rank: int,
        block_size: int,
        total_kv_heads: int = 1,
        dcp_size: int = 1,
        is_mla: bool = False,
        is_mamba: bool = False,
        block_bytes: int = 0,
        dialect: Dialect = Dialect.V0_32,
    ) -> None:
        arena = Arena()
        desc = arena.new(
            "kvf_topology_desc",
            engine_id=arena.text(engine_id),
            tp_size=tp_size,
            tp_rank=tp_rank,
            dcp_size=dcp_size,
            block_size=block_size,
            total_kv_heads=total_kv_heads,
            is_mla=is_mla,
            is_mamba=is_mamba,
            block_bytes=block_bytes,
            dialect=dialect,
        )
        self._own(take(lib.kvf_topology_create, "kvf_topology *", desc), lib.kvf_topology_free)

    def check(self, remote: EngineTransferInfo) -> None:
        """Checks whether this rank can pair with an engine, before any other call: see kvf_topology_check().

        Raises NotExpressibleError, MismatchError (block lengths), OutOfRangeError; `refusal` is the rule.
        """
        resource, arena = self._get(), Arena()
        call(lib.kvf_topology_check, resource.pointer, remote_in(remote, arena))

    def register(self, engine_id: str, remote: EngineTransferInfo) -> EngineTransferInfo:
        """Registers a remote engine; a second registration changes nothing. Returns the facts on record.

        A hybrid checks the engine first, as check() does. A dense model registers any engine, as the public
        connector does: call check() to learn at once what would be refused later.

        Raises ExistsError (the local engine's own id), InvalidError, OutOfRangeError; of a hybrid as check().
        """
        resource, arena = self._get(), Arena()
        with self._lock:
            stored = arena.new("kvf_engine_transfer_info")
            name = arena.text(engine_id)
            call(lib.kvf_topology_register, resource.pointer, name, remote_in(remote, arena), stored)
            return _remote_out(stored)

    def get(self, engine_id: str) -> EngineTransferInfo:
        """The facts of a registered engine. Raises NotFoundError."""
        resource, arena = self._get(), Arena()
        with self._lock:
            found = arena.new("kvf_engine_transfer_info")
            call(lib.kvf_topology_get, resource.pointer, arena.text(engine_id), found)
            return _remote_out(found)

    def unregister(self, engine_id: str) -> None:
        """Forgets an engine; an id that is not registered is no error."""
        resource, arena = self._get(), Arena()
        with self._lock:
            lib.kvf_topology_unregister(resource.pointer, arena.text(engine_id))

    def _ask(self, function: Any, type_name: str, remote: EngineTransferInfo, *more: Any) -> Any:
        resource, arena = self._get(), Arena()
        return take(function, type_name, resource.pointer, remote_in(remote, arena), *more)

    def _ask_ids(self, function: Any, remote: EngineTransferInfo) -> list[int]:
        resource, arena = self._get(), Arena()
        return take_ids(function, resource.pointer, remote_in(remote, arena))

    # ---- ratios and flags

    def tp_ratio(self, remote: EngineTransferInfo) -> int:
        """tp_size / remote tp_size when the local engine has at least as many ranks, else -(remote / local)."""
        return int(self._ask(lib.kvf_tp_ratio, "int64_t", remote))

    def block_size_ratio(self, remote: EngineTransferInfo) -> int:
        """Local block size / remote block size."""
        return int(self._ask(lib.kvf_block_size_ratio, "uint32_t", remote))

    def is_kv_replicated(self, remote: EngineTransferInfo) -> bool:
        """Whether the remote engine has more ranks than the model has KV heads, so that ranks share a head."""
        resource, arena = self._get(), Arena()
        return bool(lib.kvf_is_kv_replicated(resource.pointer, remote_in(remote, arena)))

    def replicates_kv_cache(self, remote: EngineTransferInfo) -> bool:
        """Whether several remote ranks hold the same cells: a latent, or more ranks than heads."""
        resource, arena = self._get(), Arena()
        return bool(lib.kvf_replicates_kv_cache(resource.pointer, remote_in(remote, arena)))

    @property
    def local_replicates_kv_cache(self) -> bool:
        """The same for the local engine."""
        resource = self._get()
        return bool(lib.kvf_local_replicates_kv_cache(resource.pointer))

    # ---- ranks

    def handshake_target_ranks(self, remote: EngineTransferInfo) -> list[int]:
        """The remote ranks to shake hands with, ascending: those whose share of the model overlaps ours."""
        return self._ask_ids(lib.kvf_handshake_target_ranks, remote)

    def target_remote_ranks(self, remote: EngineTransferInfo) -> list[int]:
        """The remote ranks that hold anything this rank could read."""
        return self._ask_ids(lib.kvf_target_remote_ranks, remote)

    @property
    def dcp_rank(self) -> int:
        """Which share of the tokens this rank keeps: tp_rank modulo dcp_size."""
        resource = self._get()
        return int(lib.kvf_dcp_rank(resource.pointer))

    def dcp_source_ranks(self, remote: EngineTransferInfo) -> list[int]:
        """The remote ranks that keep tokens of ours; empty when the remote engine does not shard tokens."""
        return self._ask_ids(lib.kvf_dcp_source_ranks, remote)

    def consumers_per_source(self, remote: EngineTransferInfo) -> int:
        """How many local ranks read, or at least notify, a remote rank that this rank reads."""
        return int(self._ask(lib.kvf_consumers_per_source, "uint32_t", remote))

    def tp_mapping(self, remote: EngineTransferInfo, kinds: Sequence[CacheKind]) -> TpMapping:
        """Works out the source ranks of every group; `kinds` has one entry for each."""
        resource, arena = self._get(), Arena()
        mapping, kinds = ffi.new("kvf_tp_mapping *"), listed(kinds, "kinds")
        facts, groups = remote_in(remote, arena), kinds_in(kinds, arena)
        call(lib.kvf_tp_mapping_build, resource.pointer, facts, groups, len(kinds), mapping)
        try:
            return mapping_out(mapping)
        finally:
            lib.kvf_tp_mapping_free(mapping)

    # ---- hybrids; a topology that is not is_mamba raises InvalidError, refusal "not_hybrid"

    def fa_source_ranks(self, remote: EngineTransferInfo) -> list[int]:
        """The remote ranks from which attention is read."""
        return self._ask_ids(lib.kvf_fa_source_ranks, remote)

    def state_source_ranks(self, remote: EngineTransferInfo) -> list[int]:
        """The remote ranks from which state is read."""
        return self._ask_ids(lib.kvf_state_source_ranks, remote)

    def all_source_ranks(self, remote: EngineTransferInfo) -> list[int]:
        """The union of the two."""
        return self._ask_ids(lib.kvf_all_source_ranks, remote)

    def fa_head_slot(self, remote: EngineTransferInfo, remote_rank: int) -> int:
        """Which piece of the local heads a remote rank holds. NotFoundError: it holds no head of ours."""
        return int(self._ask(lib.kvf_fa_head_slot, "uint64_t", remote, remote_rank))

    def should_skip_fa(self, remote: EngineTransferInfo, remote_rank: int) -> bool:
        """Whether a remote rank brings state only: another source rank has the same heads."""
        return bool(self._ask(lib.kvf_should_skip_fa, "bool", remote, remote_rank))

    def fa_rank_offset(self, remote: EngineTransferInfo, kv_block_bytes: int) -> int:
        """Byte offset of our first head inside the remote rank's K (or V) block.

        Args:
            kv_block_bytes: length of a local K (or V) block
        """
        return int(self._ask(lib.kvf_fa_rank_offset, "uint64_t", remote, kv_block_bytes))

    def needs_split_handles(self, remote: EngineTransferInfo) -> bool:
        """Whether the local blocks are read in pieces from several ranks."""
        return bool(self._ask(lib.kvf_needs_split_handles, "bool", remote))

    def fa_descriptor_bytes(self, remote: EngineTransferInfo) -> int:
        """Bytes of one K (or V) descriptor of attention: half of the shorter of the two blocks."""
        return int(self._ask(lib.kvf_fa_descriptor_bytes, "uint64_t", remote))

    def filter_block_ids_for_rank(
        self,
        remote: EngineTransferInfo,
        kinds: Sequence[CacheKind],
        remote_rank: int,
        local: Sequence[Sequence[int]],
        remote_lists: Sequence[Sequence[int]],
    ) -> tuple[list[list[int]], list[list[int]]]:
        """The block lists to use with one source rank: attention is emptied if another rank brings it."""
        resource, arena = self._get(), Arena()
        return take_two_lists(
            lib.kvf_filter_block_ids_for_rank,
            resource.pointer,
            remote_in(remote, arena),
            kinds_in(kinds, arena),
            remote_rank,
            lists_in(local, arena),
            lists_in(remote_lists, arena),
        )

    # ---- texts

    def describe(self, remote: EngineTransferInfo) -> str:
        """A one-line summary of the local rank and one remote engine, in the connector's words.

        Lengths that are not known are 0 there.
        """
        resource, arena = self._get(), Arena()
        return take_text(lib.kvf_topology_describe, resource.pointer, remote_in(remote, arena))

    def completion_notice(self, remote: EngineTransferInfo, remote_request_id: str) -> str:
        """The message of a consumer to a producer rank when it is done: id, colon, number of consumers."""
        resource, arena = self._get(), Arena()
        return take_text(
            lib.kvf_completion_notice,
            resource.pointer,
            remote_in(remote, arena),
            arena.text(remote_request_id),
        )


def remote_in(remote: EngineTransferInfo, arena: Arena) -> Any:
    """A kvf_engine_transfer_info *."""
    return arena.new("kvf_engine_transfer_info", **vars(of_type(EngineTransferInfo, remote)))


def _remote_out(found: Any) -> EngineTransferInfo:
    return replace(
        EngineTransferInfo(1, 1),
        **{name: getattr(found, name) for name in EngineTransferInfo.__dataclass_fields__},
    )


def mapping_out(mapping: Any) -> TpMapping:
    """The dataclass of a kvf_tp_mapping, whose owner does not change."""
    ranks = ids_out(mapping.all_source_ranks)
    slots = {rank: int(mapping.attention_slot[i]) for i, rank in enumerate(ranks)}
    return TpMapping(
        source_ranks=tuple(tuple(ids_out(mapping.source_ranks[g])) for g in range(mapping.group_count)),
        all_source_ranks=tuple(ranks),
        attention_slot={rank: None if slot == lib.KVF_NO_SLOT else slot for rank, slot in slots.items()},
        rank_offset_factor=mapping.rank_offset_factor,
        local_consumers=mapping.local_consumers,
    )


def physical_heads(total_kv_heads: int, tp_size: int) -> int:
    """The number of KV heads that every rank of an engine of `tp_size` ranks stores at least."""
    return int(result_of(lib.kvf_physical_heads, total_kv_heads, tp_size))


def physical_head_range(tp_size: int, total_kv_heads: int, rank: int) -> range:
    """The KV heads stored on one rank."""
    return to_range(take(lib.kvf_physical_head_range, "kvf_range", tp_size, total_kv_heads, rank))


def needs_split(is_mla: bool, tp_ratio: int, source_rank_count: int) -> bool:
    """Whether local blocks must be cut into one piece for each source: more prefill ranks, and not a latent."""
    return bool(result_of(lib.kvf_needs_split, is_mla, tp_ratio, source_rank_count))


def detect_layout(
    probe_shape: Sequence[int],
    *,
    is_mla: bool = False,
    is_mamba: bool = False,
    registered_dimensions: int = 0,
) -> LayoutFlags:
    """Detects the layout from the shape a backend gives to a cache of 1 block, 16 tokens, 1 head of size 1.

    Args:
        registered_dimensions: of the tensor registered over all layers; 0: none is given
    """
    arena, lengths = Arena(), listed(probe_shape, "numbers")
    shape = arena.numbers("uint64_t", lengths, "a length")
    found = take(
        lib.kvf_detect_layout,
        "kvf_layout_flags",
        shape,
        len(lengths),
        is_mla,
        is_mamba,
        registered_dimensions,
    )
    return LayoutFlags(found.is_kv_layout_blocks_first, found.cross_layers_blocks, found.split_k_and_v)


def region_order(names: Sequence[str]) -> list[str]:
    """Sorts layer names as regions are registered: runs of digits compare as numbers, the rest as text."""
    arena, names = Arena(), listed(names, "texts")
    pointers = arena.texts(names)
    call(lib.kvf_region_order, pointers, len(names))
    return [string(pointers[i]) for i in range(len(names))]
