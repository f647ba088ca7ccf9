"""Which rank holds which cells, and where: shards, and engines as sets of ranks. See kvferry/shard.h."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry._binding import ffi, lib
from kvferry._native import Arena, Handle, Resource, Span, resource_of, result_of, span, string, take, to_range
from kvferry._values import list_of, listed, of_type, whole_number
from kvferry.errors import InvalidError, NotFoundError, Status, check
from kvferry.model import Dtype, Model


@dataclass(frozen=True)
class TokenShare:
    """Which tokens a rank keeps (decode context parallelism): token t when (t // width) % count == index."""

    index: int = 0
    count: int = 1
    width: int = 1


@dataclass(frozen=True)
class Placement:
    """Where a rank keeps the cells of one (layer, part); strides in bytes.

    The cell of (kernel block, row, unit) is at offset + block * block_stride + row * row_stride
    + (unit - first unit held) * unit_stride of the region. It is kept in `pieces` equal pieces, `piece_stride`
    apart: keys channel by channel are cells in pieces of one element.
    """

    region: int
    offset: int
    block_stride: int
    row_stride: int
    unit_stride: int
    piece_stride: int = 0
    pieces: int = 1


@dataclass(frozen=True)
class PartShare:
    """What a rank holds of one part, in every layer of the group."""

    units: range
    replica: int = 0
    replica_count: int = 1


@dataclass(frozen=True)
class RegionAxis:
    """An axis of an array: its number of steps, and the bytes from one step to the next.

    Attributes:
        name: as in GroupSpec.order: L, B (kernel blocks), P, H, N (rows); D: the elements of a cell, or its
            bytes if elements are smaller than a byte
    """

    name: str
    length: int
    stride: int


@dataclass(frozen=True)
class RegionView:
    """What one group keeps in a memory region, of parts with equal cells: an array, if it is regular.

    Attributes:
        layers: of the model
        offset: bytes before the first cell
        regular: axes describe it; otherwise only placements do
        axes: those with two steps and more, outermost first
    """

    group: str
    parts: tuple[str, ...]
    layers: tuple[int, ...]
    dtype: Dtype
    offset: int
    regular: bool
    axes: tuple[RegionAxis, ...]

    @property
    def order(self) -> str:
        """The names of the axes, such as "BPHND"; "irregular" if axes cannot describe it."""
        return "".join(axis.name for axis in self.axes) if self.regular else "irregular"


@dataclass(frozen=True)
class GroupShard:
    """What a rank holds of one group.

    Attributes:
        tokens_per_block: of a logical block; a multiple of the group's tokens_per_step; 1 for state groups
        block_count: logical blocks in the cache
        parts: one for each part of the model's group
        placements: [held layer of this group][part], layers ascending
        kernel_blocks_per_block: number of smaller blocks into which memory is cut for each logical block
        tokens: which tokens the rank keeps
    """

    tokens_per_block: int
    block_count: int
    parts: tuple[PartShare, ...]
    placements: tuple[tuple[Placement, ...], ...]
    kernel_blocks_per_block: int = 1
    tokens: TokenShare = TokenShare()


@dataclass(frozen=True)
class CellLocation:
    """The region and byte offset of one cell: of its first piece, if it is kept in several.

    Attributes:
        bytes: of the whole cell; each piece has bytes / pieces
        piece_stride: from the beginning of a piece to that of the next
    """

    region: int
    offset: int
    bytes: int
    piece_stride: int = 0
    pieces: int = 1


def _group_shard_fields(group: GroupShard, arena: Arena) -> dict[str, Any]:
    parts = [
        {"units": span(part.units), "replica": part.replica, "replica_count": part.replica_count}
        for part in list_of(PartShare, group.parts)
    ]
    rows = [list_of(Placement, row) for row in group.placements]
    for row in rows:
        if len(row) != len(parts):
            raise InvalidError(f"a layer has {len(row)} placements; its group has {len(parts)} parts")
    placements = [vars(placement) for row in rows for placement in row]
    return {
        "tokens_per_block": group.tokens_per_block,
        "kernel_blocks_per_block": group.kernel_blocks_per_block,
        "block_count": group.block_count,
        "tokens": arena.array("kvf_token_share", [vars(of_type(TokenShare, group.tokens))])[0],
        "parts": arena.array("kvf_part_share", parts),
        "placements": arena.array("kvf_placement", placements),
    }


class Shard(Handle):
    """What one rank holds, made from explicit placements: for memory that the engine's own allocator laid out.

    Every cell of every block is checked to lie inside its region and to share no byte with another cell of
    its group. Immutable: any thread may read it. Engine makes the shards of all ranks from a specification.

    Args:
        rank: number of this rank in its engine
        layers: model layers this rank holds
        region_bytes: size of each memory region
        groups: one for each group of the model, also if no layer of it is held

    Raises InvalidError, OutOfRangeError, SizeOverflowError, OverlapError.
    """

    def __init__(
        self,
        model: Model,
        *,
        rank: int = 0,
        layers: Span,
        region_bytes: Sequence[int],
        groups: Sequence[GroupShard],
        tp_rank: int = 0,
        tp_size: int = 1,
        pp_rank: int = 0,
        pp_size: int = 1,
    ) -> None:
        arena = Arena()
        resource = resource_of(Model, model)
        count = lib.kvf_model_group_count(resource.pointer)
        groups, here = list_of(GroupShard, groups), span(layers)
        region_bytes = listed(region_bytes, "numbers")
        if len(groups) != count:
            raise InvalidError(f"groups has {len(groups)} entries; the model has {count} groups")
        for i, group in enumerate(groups):
            want = lib.kvf_model_group(resource.pointer, i)
            held = sum(here.begin <= want.layers[k] < here.end for k in range(want.layer_count))
            parts, placements = listed(group.parts, "parts"), listed(group.placements, "placements")
            if len(parts) != want.part_count or len(placements) != held:
                raise InvalidError(
                    f"group {string(want.name)} has {len(parts)} parts and placements of "
                    f"{len(placements)} layers; it must have {want.part_count} and {held}"
                )
        desc = arena.new(
            "kvf_shard_desc",
            rank=rank,
            layers=here,
            region_bytes=arena.numbers("uint64_t", region_bytes, "region_bytes"),
            region_count=len(region_bytes),
            groups=arena.array("kvf_group_shard_desc", [_group_shard_fields(g, arena) for g in groups]),
            tp_rank=tp_rank,
            tp_size=tp_size,
            pp_rank=pp_rank,
            pp_size=pp_size,
        )
        self._own(take(lib.kvf_shard_create, "kvf_shard *", resource.pointer, desc), lib.kvf_shard_free)

    @classmethod
    def _borrow(cls, pointer: Any, owner: Resource) -> Shard:
        """A shard owned by another object of the library; the shard keeps that object alive."""
        shard = cls.__new__(cls)
        shard._resource = Resource.borrow(pointer, owner)
        return shard

    @property
    def model(self) -> Model:
        """The model whose cells it holds."""
        resource = self._get()
        return Model._of(lib.kvf_shard_model(resource.pointer))

    @property
    def rank(self) -> int:
        """Number of this rank in its engine."""
        resource = self._get()
        return int(lib.kvf_shard_get(resource.pointer).rank)

    @property
    def layers(self) -> range:
        """Model layers this rank holds."""
        resource = self._get()
        return to_range(lib.kvf_shard_get(resource.pointer).layers)

    @property
    def region_bytes(self) -> list[int]:
        """Size of each memory region that the rank must register."""
        resource = self._get()
        desc = lib.kvf_shard_get(resource.pointer)
        return [desc.region_bytes[i] for i in range(desc.region_count)]

    @property
    def tp_rank(self) -> int:
        """Its place in tensor parallelism."""
        resource = self._get()
        return int(lib.kvf_shard_get(resource.pointer).tp_rank)

    @property
    def pp_rank(self) -> int:
        """Its pipeline stage."""
        resource = self._get()
        return int(lib.kvf_shard_get(resource.pointer).pp_rank)

    @property
    def groups(self) -> tuple[GroupShard, ...]:
        """What it holds of each group of the model, with defaults filled in."""
        resource = self._get()
        desc = lib.kvf_shard_get(resource.pointer)
        model = lib.kvf_shard_model(resource.pointer)
        found = []
        for g in range(lib.kvf_model_group_count(model)):
            group, part_count = desc.groups[g], lib.kvf_model_group(model, g).part_count
            held = to_range(lib.kvf_shard_group_layers(resource.pointer, g))
            shares = (group.parts[p] for p in range(part_count))
            found.append(
                GroupShard(
                    tokens_per_block=group.tokens_per_block,
                    block_count=group.block_count,
                    parts=tuple(PartShare(to_range(s.units), s.replica, s.replica_count) for s in shares),
                    placements=tuple(
                        tuple(_placement(resource.pointer, g, layer, p) for p in range(part_count))
                        for layer in held
                    ),
                    kernel_blocks_per_block=group.kernel_blocks_per_block,
                    tokens=TokenShare(group.tokens.index, group.tokens.count, group.tokens.width),
                )
            )
        return tuple(found)

    def group_layers(self, group: int) -> range:
        """The layers of a group that this rank holds: indices into Group.layers."""
        resource = self._get()
        return to_range(result_of(lib.kvf_shard_group_layers, resource.pointer, group))

    def placement(self, group: int, layer: int, part: int) -> Placement:
        """The placement of one (layer, part); `layer` is an index into Group.layers.

        Raises NotFoundError when this rank does not hold that layer, or there is no such part.
        """
        resource = self._get()
        return _placement(resource.pointer, group, layer, part)

    def locate(self, group: int, layer: int, part: int, block: int, row: int, unit: int) -> CellLocation:
        """Finds one cell by its place in the block table's terms.

        Args:
            layer: index into Group.layers
            block: logical block
            row: row in the logical block: step in the block * rows_per_step + row of the step
            unit: unit of the whole model

        Raises OutOfRangeError when this rank does not hold it.
        """
        resource = self._get()
        found = take(
            lib.kvf_shard_locate, "kvf_cell_location", resource.pointer, group, layer, part, block, row, unit
        )
        return CellLocation(found.region, found.offset, found.bytes, found.piece_stride, found.pieces)

    def regions(self) -> list[tuple[RegionView, ...]]:
        """What each memory region holds, in the order in which they are registered.

        Mostly one view a region; several if groups share it, or if its parts differ or lie at uneven distances.
        """
        resource = self._get()
        count = lib.kvf_shard_get(resource.pointer).region_count
        return [tuple(_views(resource.pointer, region)) for region in range(count)]


def _views(shard: Any, region: int) -> Iterator[RegionView]:
    model = lib.kvf_shard_model(shard)
    view = ffi.new("kvf_region_view *")
    view.struct_size = ffi.sizeof("kvf_region_view")
    i = 0
    while (status := lib.kvf_shard_region_view(shard, region, i, view)) == Status.OK:
        group = lib.kvf_model_group(model, view.group)
        held = [
            layer
            for layer in to_range(view.layers)
            if result_of(lib.kvf_shard_placement, shard, view.group, layer, view.parts.begin).region == region
        ]
        yield RegionView(
            group=string(group.name),
            parts=tuple(string(group.parts[p].name) for p in to_range(view.parts)),
            layers=tuple(int(group.layers[layer]) for layer in held),
            dtype=Dtype(view.dtype),
            offset=view.offset,
            regular=view.regular,
            axes=tuple(
                RegionAxis(axis.letter.decode(), axis.length, axis.stride)
                for axis in (view.axes[k] for k in range(view.axis_count))
            ),
        )
        i += 1
    if status != Status.NOT_FOUND:
        check(status)


def _placement(shard: Any, group: int, layer: int, part: int) -> Placement:
    found = result_of(lib.kvf_shard_placement, shard, group, layer, part)
    if found == ffi.NULL:
        raise NotFoundError(f"this rank does not hold group {group}, layer {layer}, part {part}")
    return Placement(
        found.region,
        found.offset,
        found.block_stride,
        found.row_stride,
        found.unit_stride,
        found.piece_stride,
        found.pieces,
    )


@dataclass(frozen=True)
class GroupSpec:
    """How each rank arranges a group in memory.

    Attributes:
        block_count: logical blocks in the cache
        tokens_per_block: of a logical block; 0: the first multiple of the group's tokens_per_step from 16 on;
            state groups: always 1
        order: the axes from outermost to innermost, see kvf_group_spec in kvferry/shard.h: L layer, B block,
            T tensor, P part, H head, N token; '|' ends the axes that get a buffer of their own
        kernel_blocks_per_block: number of smaller blocks into which memory is cut for each logical block
        page_bytes: stride of the B axis; 0: the size of its content
        page_align: rounds that stride up to a multiple
    """

    block_count: int = 0
    tokens_per_block: int = 0
    order: str = "L|BPHN"
    kernel_blocks_per_block: int = 1
    page_bytes: int = 0
    page_align: int = 1


def _spec_fields(spec: GroupSpec, arena: Arena) -> dict[str, Any]:
    return {**vars(of_type(GroupSpec, spec)), "order": arena.text(spec.order)}


class Engine(Handle):
    """Every rank of one deployment, laid out from a specification. Immutable: any thread may read it.

    Rank numbers are pp_rank * tp_size + tp_rank.

    Args:
        all: how ranks arrange every token group, unless `groups` says otherwise
        name: for messages, and for agents: what peers call it
        tp_size, pp_size: tensor-parallel ranks and pipeline stages
        pp_layers: layers of each stage, summing to the model's; None: split as evenly as possible
        dcp_size: ranks that share the tokens of a sequence
        dcp_width: number of neighbouring tokens kept together
        state: how ranks arrange state groups; None: as `all`
        groups: one for each group of the model, instead of `all` and `state`
        share_pages: groups use the same buffers

    Raises InvalidError, OutOfRangeError, SizeOverflowError; the detail names the field.
    """

    def __init__(
        self,
        model: Model,
        all: GroupSpec | None = None,
        *,
        name: str = "engine",
        tp_size: int = 1,
        pp_size: int = 1,
        pp_layers: Sequence[int] | None = None,
        dcp_size: int = 1,
        dcp_width: int = 1,
        state: GroupSpec | None = None,
        groups: Sequence[GroupSpec] | None = None,
        share_pages: bool = False,
    ) -> None:
        arena = Arena()
        resource = resource_of(Model, model)
        count = lib.kvf_model_group_count(resource.pointer)
        groups = None if groups is None else list_of(GroupSpec, groups)
        pp_layers = None if pp_layers is None else listed(pp_layers, "numbers")
        if groups is not None and len(groups) != count:
            raise InvalidError(f"groups has {len(groups)} entries; the model has {count} groups")
        if pp_layers is not None and len(pp_layers) != whole_number(pp_size, "pp_size"):
            raise InvalidError(f"pp_layers has {len(pp_layers)} entries; pp_size is {pp_size}")
        spec = arena.new(
            "kvf_engine_spec",
            name=arena.text(name),
            tp_size=tp_size,
            pp_size=pp_size,
            pp_layers=ffi.NULL if pp_layers is None else arena.numbers("uint32_t", pp_layers, "pp_layers"),
            dcp_size=dcp_size,
            dcp_width=dcp_width,
            groups=ffi.NULL
            if groups is None
            else arena.array("kvf_group_spec", [_spec_fields(group, arena) for group in groups]),
            share_pages=share_pages,
        )
        for field, value in (("all", all), ("state", state)):
            if value is not None:
                setattr(spec, field, arena.array("kvf_group_spec", [_spec_fields(value, arena)])[0])
        self._own(take(lib.kvf_engine_build, "kvf_engine *", resource.pointer, spec), lib.kvf_engine_free)

    @classmethod
    def from_shards(cls, model: Model, shards: Sequence[Shard], name: str = "engine") -> Engine:
        """Makes an engine from existing shards; shards[i] has rank i.

        The engine takes the shards over, and their Python objects are closed. Shards that belong to another
        engine cannot be used.

        Raises MismatchError (another model, or ranks that share tokens differently), InvalidError.
        """
        resource = resource_of(Model, model)
        shards = list_of(Shard, shards)
        resources = [shard._get() for shard in shards]
        if len({id(resource) for resource in resources}) != len(resources):
            raise InvalidError("a shard is in the list twice")
        if any(resource.borrowed for resource in resources):
            raise InvalidError("a shard belongs to another engine")
        arena = Arena()
        pointers = arena.keep(ffi.new("kvf_shard *[]", [resource.pointer for resource in resources]))
        made = take(
            lib.kvf_engine_from_shards,
            "kvf_engine *",
            resource.pointer,
            arena.text(name),
            pointers,
            len(shards),
        )
        engine = cls.__new__(cls)
        # A thread that is using a shard may go on, because the engine keeps it.
        engine._resource = Resource.owner_of(resources, made, lib.kvf_engine_free)
        for shard in shards:
            shard.close()
        return engine

    @property
    def name(self) -> str:
        """Its name for messages and peers."""
        resource = self._get()
        return string(lib.kvf_engine_name(resource.pointer))

    @property
    def model(self) -> Model:
        """The model it serves."""
        resource = self._get()
        return Model._of(lib.kvf_engine_model(resource.pointer))

    @property
    def rank_count(self) -> int:
        """How many ranks it has."""
        resource = self._get()
        return int(lib.kvf_engine_rank_count(resource.pointer))

    def shard(self, rank: int) -> Shard:
        """The shard of one rank. Raises NotFoundError when there is no such rank."""
        resource = self._get()
        count = lib.kvf_engine_rank_count(resource.pointer)
        if not 0 <= whole_number(rank, "rank") < count:
            raise NotFoundError(f"engine {self.name} has no rank {rank}; allowed: 0 to {count - 1}")
        return Shard._borrow(lib.kvf_engine_shard(resource.pointer, rank), resource)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The shards of all ranks."""
        return tuple(self.shard(rank) for rank in range(self.rank_count))
