"""What a rank of SGLang caches and where, and kvferry's objects made from it.

SGLang's pools have a buffer for each layer and part: all keys, then all values, or one latent. In a buffer lie
pages, in a page tokens, and in a token the KV heads. What else a model caches are components of their own: a
pool for layers with a sliding window, keys of an indexer, states.

An engine of kvferry has the ranks that share one cache: attention's tensor-parallel ranks, and pipeline stages.
All of them have pools of the same shape.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry.errors import UnsupportedError
from kvferry.model import Dtype, Group, GroupKind, Model, Part, TpRule
from kvferry.shard import Engine, GroupSpec

#: Elements of a cache by SGLang's name of its type; "auto": the model's.
CACHE_TYPES = {
    "bf16": Dtype.BF16,
    "bfloat16": Dtype.BF16,
    "fp8_e4m3": Dtype.F8_E4M3,
    "fp8_e5m2": Dtype.F8_E5M2,
}


class Blocks(enum.Enum):
    """Which blocks of a component belong to a request."""

    ALL = "all"  # the pages of all tokens
    LAST = "last"  # pages of the last tokens, which their layers still look at
    SLOT = "slot"  # one state
    ROW = "row"  # one row, of what waits to become an entry; none if nothing waits

    @property
    def of_tokens(self) -> bool:
        """Whether a block holds tokens."""
        return self in (Blocks.ALL, Blocks.LAST)


@dataclass(frozen=True)
class Buffers:
    """Buffers of one rank.

    Attributes:
        items: of each: bytes from one page, or state, to the next
    """

    addresses: tuple[int, ...]
    lengths: tuple[int, ...]
    items: tuple[int, ...]

    def part(self, begin: int, end: int) -> Buffers:
        """Some of them."""
        return self.pick(range(begin, end))

    def pick(self, which: Sequence[int]) -> Buffers:
        """Some of them, in this order."""
        return Buffers(*(tuple(of[i] for i in which) for of in (self.addresses, self.lengths, self.items)))


@dataclass(frozen=True)
class Component:
    """A part of the cache with blocks of its own.

    Attributes:
        layers: of the whole model
        parts: of the whole model, in the order of the buffers: for each part, or each tensor of a state, one
            buffer a layer
        source: whose blocks it has: 0: those of the main component; i: those of the i-th kind of state
        tokens_per_step: tokens that share an entry; a page of which only the whole is known is one
    """

    name: str
    blocks: Blocks
    layers: tuple[int, ...]
    parts: tuple[Part, ...]
    buffers: Buffers
    tokens_per_block: int
    source: int = 0
    tokens_per_step: int = 1

    @property
    def group(self) -> Group:
        """The group of the model."""
        kind = GroupKind.TOKENS if self.blocks.of_tokens else GroupKind.STATE
        return Group(self.name, self.layers, self.parts, kind, tokens_per_step=self.tokens_per_step)

    @property
    def spec(self) -> GroupSpec:
        """How ranks arrange it."""
        counts = {length // item for length, item in zip(self.buffers.lengths, self.buffers.items, strict=True)}
        if len(counts) != 1:
            raise UnsupportedError(
                f"the buffers of {self.name} have {sorted(counts)} blocks; allowed: the same number in all"
            )
        order = "PL|BNH" if self.blocks.of_tokens else "TL|BNPH"
        return GroupSpec(counts.pop(), self.tokens_per_block, order)


def pages_must_be_equal(components: Sequence[Component]) -> bool:
    """Whether both engines need pages of one size: pages of other sources than the main one's are compared by
    number. States have no pages.
    """
    return any(component.source and component.blocks.of_tokens for component in components)


def cache_type(said: str, model_type: str) -> Dtype:
    """The type of the cache's elements. Raises UnsupportedError.

    Args:
        said: SGLang's name of the cache's type
        model_type: name of the model's type, as torch has it
    """
    if said == "auto":
        return Dtype.by_name(model_type)
    if said not in CACHE_TYPES:
        raise UnsupportedError(f"kv_cache_dtype is {said}; allowed: auto, {', '.join(CACHE_TYPES)}")
    return CACHE_TYPES[said]


def of_tokens(
    name: str,
    blocks: Blocks,
    layers: Sequence[int],
    held: int,
    buffers: Buffers,
    page_size: int,
    dtype: Dtype,
    kv_heads: int,
    tp_size: int,
) -> Component:
    """A component with pages of tokens. Raises UnsupportedError if its buffers contradict the model.

    Args:
        layers: of the whole model
        held: how many of them this rank holds
        kv_heads: of the whole model, of which each rank has a share; 0: latents, which all ranks have
    """
    names = ("k", "v") if kv_heads else ("latent",)
    if len(buffers.addresses) != held * len(names):
        raise UnsupportedError(
            f"{name} has {len(buffers.addresses)} buffers for {held} layers; allowed: {held * len(names)}, "
            f"{' and '.join(names)} of each layer"
        )
    heads = max(1, kv_heads // tp_size)
    parts = []
    for i, part in enumerate(names):
        page = _only(f"pages of {name} {part}", buffers.items[i * held : (i + 1) * held])
        cell, rest = divmod(page, page_size * heads)
        if rest:
            raise UnsupportedError(
                f"a page of {name} {part} has {page} bytes; allowed: {page_size} tokens of {heads} equal heads"
            )
        kind = dtype if cell % (dtype.bits // 8) == 0 else Dtype.U8
        rule = TpRule.SPLIT if kv_heads else TpRule.REPLICATE
        parts.append(Part(part, kind, max(1, kv_heads), cell // (kind.bits // 8), tp_rule=rule))
    return Component(name, blocks, tuple(layers), tuple(parts), buffers, page_size)


def of_pages(name: str, layers: Sequence[int], buffers: Buffers, page_size: int) -> Component:
    """A component with pages of something that all ranks have, such as the keys of an indexer; layers without
    any have an empty buffer. A page is taken as a whole: in it several tokens may share a key.
    """
    held = [(layer, place) for layer, place in zip(layers, _places(buffers), strict=True) if place[1]]
    kept = Buffers(*zip(*(place for _, place in held), strict=True))
    page = _only(f"pages of {name}", kept.items)
    part = Part("page", Dtype.U8, 1, page, tp_rule=TpRule.REPLICATE)
    return Component(
        name, Blocks.ALL, tuple(layer for layer, _ in held), (part,), kept, page_size, tokens_per_step=page_size
    )


def of_rows(name: str, layers: Sequence[int], parts: Sequence[str], buffers: Buffers) -> Component:
    """A component with a row for each request that all ranks have; layers without any have empty buffers.

    Args:
        parts: each has one buffer a layer
    """
    places = _places(buffers)
    if len(places) != len(layers) * len(parts):
        raise UnsupportedError(
            f"{name} has {len(places)} buffers for {len(layers)} layers; allowed: {' and '.join(parts)} of each"
        )
    kept = [place for place in places if place[1]]
    found = []
    for i, part in enumerate(parts):
        mine = places[i * len(layers) : (i + 1) * len(layers)]
        item = _only(f"rows of {name} {part}", [place[2] for place in mine if place[1]])
        found.append(Part(part, Dtype.U8, 1, item, tensor=i, tp_rule=TpRule.REPLICATE))
    of = tuple(layer for layer, place in zip(layers, places, strict=False) if place[1])
    return Component(name, Blocks.ROW, of, tuple(found), Buffers(*zip(*kept, strict=True)), 1)


def _places(buffers: Buffers) -> list[tuple[int, int, int]]:
    """Address, length and item of each buffer."""
    return list(zip(buffers.addresses, buffers.lengths, buffers.items, strict=True))


@dataclass(frozen=True)
class StateTensors:
    """What SGLang says of the tensors of states; one entry for each buffer, tensor by tensor.

    Attributes:
        layers: of each
        units: how many of the units that tensor-parallel ranks share this rank has; 0: all ranks have all
        rows: how often these units are repeated
        shared: the units of the whole model in several parts, each shared by the ranks; None: they are one
            part, or, in what comes before the last tensor of a state without any such numbers, not known
    """

    layers: tuple[int, ...]
    units: tuple[int, ...]
    rows: tuple[int, ...]
    shared: tuple[tuple[int, ...] | None, ...]


def of_states(name: str, tensors: StateTensors, buffers: Buffers, tp_size: int) -> Component:
    """A component with one state for each request. Raises UnsupportedError if its buffers differ oddly."""
    layers = tuple(dict.fromkeys(tensors.layers))
    count = len(buffers.addresses) // len(layers)
    if tensors.layers != layers * count or layers != tuple(sorted(layers)):
        raise UnsupportedError(
            f"{name} has buffers of the layers {tensors.layers}; allowed: tensor by tensor, those of all layers"
        )
    known = any(tensors.shared)
    parts = []
    for tensor in range(count):
        mine = slice(tensor * len(layers), (tensor + 1) * len(layers))
        what = f"tensor {tensor} of {name}"
        item = _only(f"sizes of {what}", buffers.items[mine])
        units = _only(f"units of {what}", tensors.units[mine])
        rows = _only(f"rows of {what}", tensors.rows[mine])
        if not units:
            parts.append(Part(f"{tensor}", Dtype.U8, 1, item, tensor=tensor, tp_rule=TpRule.REPLICATE))
            continue
        if not known and tensor < max(1, count - 1):
            # A convolution's channels may be several parts one behind the other. Engines of other sizes differ.
            parts.append(Part(f"{tensor}", Dtype.U8, tp_size, item, tensor=tensor))
            continue
        cell, rest = divmod(item, units * rows)
        shared = _only(f"parts of {what}", tensors.shared[mine]) or (units * tp_size,)
        if rest or sum(shared) != units * tp_size or any(part % tp_size for part in shared):
            raise UnsupportedError(
                f"{what} has {item} bytes for {rows} rows of {units} units on each of {tp_size} ranks, and "
                f"parts of {shared} units; allowed: equal units, and parts that the ranks share equally"
            )
        parts += [
            Part(f"{tensor}.{i}", Dtype.U8, part, cell, rows_per_step=rows, tensor=tensor)
            for i, part in enumerate(shared)
        ]
    return Component(name, Blocks.SLOT, layers, tuple(parts), buffers, 1)


def build_engine(components: Sequence[Component], name: str, tp_size: int, stages: Sequence[int]) -> Engine:
    """The engine that a rank belongs to.

    Args:
        stages: numbers of layers of the pipeline stages; the last one has those of a draft model, too
    """
    layers = max(layer + 1 for component in components for layer in component.layers)
    stages = [*stages[:-1], stages[-1] + max(0, layers - sum(stages))]
    return Engine(
        Model([component.group for component in components], sum(stages)),
        groups=[component.spec for component in components],
        name=name,
        tp_size=tp_size,
        pp_size=len(stages),
        pp_layers=stages,
    )


def _only(what: str, values: Sequence[Any]) -> Any:
    """The value that all have."""
    found = set(values)
    if len(found) != 1:
        raise UnsupportedError(
            f"{what} are {sorted(found, key=repr)} in different layers; allowed: the same in all"
        )
    return found.pop()


class _DeviceMemory:
    """Memory of a CUDA device, for those who take such arrays."""

    def __init__(self, address: int, length: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (length,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def arrays_of(components: Sequence[Component], on_device: bool) -> list[Any]:
    """All buffers as objects that an agent registers. SGLang keeps the memory as long as the process lives."""
    places = [
        place
        for component in components
        for place in zip(component.buffers.addresses, component.buffers.lengths, strict=True)
    ]
    if on_device:
        return [_DeviceMemory(*place) for place in places]
    return [
        np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address)) for address, length in places
    ]
