"""What a rank of vLLM caches and where, as plain data that processes exchange; and kvferry's objects made from
it.

A group of vLLM becomes one group of kvferry for each kind of layer in it, because layers of one kvferry group
must have the same parts, and the draft model's layers are kinds of their own. All of these groups use the block
table of vLLM's group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvferry.errors import MismatchError
from kvferry.model import Group, GroupKind, Model, Part
from kvferry.shard import Engine, GroupShard, PartShare, Placement, Shard, TokenShare
from kvferry.transfer_params import own_group_name
from kvferry.vllm.ranks import ALL_TOKENS

#: Prefix of the names of groups of a draft model's layers.
DRAFT_PREFIX = "draft."


#: Scales of keys and of values: one for all heads, or one for each head that a rank has.
Scales = tuple[tuple[float, ...], tuple[float, ...]]
#: Of a layer whose elements are what attention computes with.
UNSCALED: Scales = ((1.0,), (1.0,))


@dataclass(frozen=True)
class LayerGeometry:
    """One layer that a rank holds: where each part of it is.

    Attributes:
        scales: by what attention multiplies elements in FP8
    """

    layer: int
    placements: tuple[Placement, ...]
    scales: Scales = UNSCALED


@dataclass(frozen=True)
class GroupGeometry:
    """The layers of one kind in one group of vLLM, as one rank has them.

    Attributes:
        source: index of vLLM's group, whose block table it uses
        shares: what the rank holds of each part
        tokens_per_block: number of tokens for which a block has room on each rank
        tokens: which tokens the rank keeps
        speculative_blocks: state groups: number of blocks after the block of the state
        tokens_per_step: tokens that share an entry of the cache
    """

    source: int
    name: str
    kind: GroupKind
    parts: tuple[Part, ...]
    shares: tuple[PartShare, ...]
    layers: tuple[LayerGeometry, ...]
    tokens_per_block: int
    kernel_blocks_per_block: int
    block_count: int
    window_tokens: int = 0
    chunk_tokens: int = 0
    speculative_blocks: int = 0
    tokens: TokenShare = ALL_TOKENS
    tokens_per_step: int = 1

    @property
    def tokens_per_id(self) -> int:
        """Tokens for which one block id stands, over all ranks that share them; 1 for states."""
        return 1 if self.kind == GroupKind.STATE else self.tokens_per_block * self.tokens.count

    @property
    def is_draft(self) -> bool:
        """Whether its layers are the draft model's."""
        return self.name.startswith(DRAFT_PREFIX)


@dataclass(frozen=True)
class RankGeometry:
    """Everything that one rank caches."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    layer_count: int
    layers: range
    region_bytes: tuple[int, ...]
    groups: tuple[GroupGeometry, ...]
    pcp_rank: int = 0
    pcp_size: int = 1

    @property
    def rank(self) -> int:
        """Its number in the engine, which is vLLM's."""
        return (self.pp_rank * self.pcp_size + self.pcp_rank) * self.tp_size + self.tp_rank


def number_groups(ranks: Sequence[RankGeometry]) -> list[RankGeometry]:
    """All ranks, with the model's groups numbered as if vLLM had no groups of only a draft model's layers.

    Groups of two engines are matched by name, and the other engine may have no draft.
    """
    sources = sorted({group.source for rank in ranks for group in rank.groups if not group.is_draft})
    number = {source: i for i, source in enumerate(sources)}

    def named(group: GroupGeometry) -> GroupGeometry:
        if group.is_draft:
            return group
        return replace(group, name=own_group_name(number[group.source], group.name.rpartition(".")[2]))

    return [replace(rank, groups=tuple(named(group) for group in rank.groups)) for rank in ranks]


def build_model(ranks: Sequence[RankGeometry]) -> Model:
    """The whole model, from what all ranks hold of it."""
    groups: dict[str, Group] = {}
    for rank in ranks:
        for found in rank.groups:
            layers = {layer.layer for layer in found.layers}
            known = groups.get(found.name)
            if known is not None:
                if (known.parts, known.tokens_per_step) != (found.parts, found.tokens_per_step):
                    raise MismatchError(f"rank {rank.rank} has other parts in group {found.name} than rank 0")
                layers |= set(known.layers)
            groups[found.name] = Group(
                found.name,
                tuple(sorted(layers)),
                found.parts,
                found.kind,
                found.window_tokens,
                found.chunk_tokens,
                found.tokens_per_step,
            )
    return Model([groups[name] for name in sorted(groups)], max(rank.layer_count for rank in ranks))


def build_engine(ranks: Sequence[RankGeometry], name: str) -> Engine:
    """The engine of all ranks, ordered by their numbers."""
    model = build_model(ranks)
    names = [group.name for group in model.groups]
    samples = {group.name: group for rank in ranks for group in rank.groups}
    shards = []
    for rank in sorted(ranks, key=lambda rank: rank.rank):
        held = {group.name: group for group in rank.groups}
        shards.append(
            Shard(
                model,
                rank=rank.rank,
                layers=rank.layers,
                region_bytes=rank.region_bytes,
                groups=[_group_shard(held.get(name), samples[name]) for name in names],
                tp_rank=rank.tp_rank,
                tp_size=rank.tp_size,
                pp_rank=rank.pp_rank,
                pp_size=rank.pp_size,
            )
        )
    return Engine.from_shards(model, shards, name)


def draft_cells(model: Model, facts: Mapping[str, str]) -> str:
    """A digest of what the draft model's groups cache; empty without a draft model.

    An engine asks for the draft's cells only if the other engine has the same: they make drafts better, and no
    output depends on them.

    Args:
        facts: of groups, by their names with something behind
    """
    groups = [group for group in model.groups if group.name.startswith(DRAFT_PREFIX)]
    own = sorted(fact for fact in facts.items() if fact[0].startswith(DRAFT_PREFIX))
    said = repr((groups, own)) if own else repr(groups)
    return hashlib.sha256(said.encode()).hexdigest() if groups else ""


def own_layers(groups: Sequence[Group]) -> tuple[tuple[int, ...], ...]:
    """The layers of each group of the model itself; none if a group of vLLM has layers of several kinds."""
    own = [group for group in groups if not group.name.startswith(DRAFT_PREFIX)]
    if [group.name for group in own] != [own_group_name(number, 0) for number in range(len(own))]:
        return ()
    return tuple(group.layers for group in own)


def group_order(ranks: Sequence[RankGeometry]) -> list[GroupGeometry]:
    """One description of each group of the model, in the model's order, for making block tables."""
    samples = {group.name: group for rank in ranks for group in rank.groups}
    return [samples[name] for name in sorted(samples)]


def _group_shard(group: GroupGeometry | None, sample: GroupGeometry) -> GroupShard:
    have = group or sample
    return GroupShard(
        tokens_per_block=1 if have.kind == GroupKind.STATE else have.tokens_per_block,
        block_count=have.block_count,
        parts=have.shares,
        placements=tuple(layer.placements for layer in sorted(group.layers, key=lambda layer: layer.layer))
        if group
        else (),
        tokens=have.tokens,
        kernel_blocks_per_block=have.kernel_blocks_per_block,
    )
