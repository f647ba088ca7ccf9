"""What moves, and from which rank: the cover of one shard by another engine's shards. See kvferry/plan.h."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvferry._binding import ffi, lib
from kvferry._native import Arena, Handle, Span, call, resource_of, result_of, span, take, to_range
from kvferry._values import listed, of_type
from kvferry.model import DtypeLike, dtype_set
from kvferry.shard import Engine, Shard, TokenShare


class ReplicaChoice(enum.IntEnum):
    """Which of several remote ranks with the same cells is read."""

    SPREAD = lib.KVF_REPLICA_SPREAD
    FIRST = lib.KVF_REPLICA_FIRST


@dataclass(frozen=True)
class Cut:
    """One piece of the cover: these layers and units come from this source.

    Attributes:
        tokens: which steps the source has, as a share of them
    """

    source: int
    group: int
    part: int
    layers: range
    units: range
    tokens: TokenShare


@dataclass(frozen=True)
class Strides:
    """Strides of one side of a copy rule, in bytes; `block` is between kernel blocks."""

    block: int
    row: int
    unit: int


@dataclass(frozen=True)
class CopyLane:
    """One pair of start positions of a copy rule; offsets in bytes from the start of the regions."""

    local_region: int
    local_offset: int
    remote_region: int
    remote_offset: int
    layers: range


@dataclass(frozen=True)
class CopyRule:
    """A loop nest: for each lane, block pair, row and unit, copy `cell_bytes`."""

    source: int
    group: int
    units: int
    rows_per_step: int
    cell_bytes: int
    local: Strides
    remote: Strides
    remote_tokens: TokenShare
    lanes: tuple[CopyLane, ...]
    whole_blocks: bool
    lanes_per_page: int


@dataclass(frozen=True)
class CostModel:
    """What moving costs on one transport, in nanoseconds."""

    ns_per_run: float = 0.0
    ns_per_byte: float = 0.0
    ns_per_source: float = 0.0

    @classmethod
    def assumed(cls, kind: str = "auto") -> CostModel:
        """The costs that predictions assume for a kind of transport, or have measured; see kvf_cost_assumed().

        Args:
            kind: of transport_kinds(); "auto" and unknown kinds: the best that reaches peers on one host
        """
        found = ffi.new("kvf_cost_model *")
        lib.kvf_cost_assumed(Arena().text(kind), found)
        return cls(found.ns_per_run, found.ns_per_byte, found.ns_per_source)


@dataclass(frozen=True)
class Prediction:
    """What a request is expected to move from one source, and how long that takes."""

    bytes: int
    runs: int
    ns: float


class Plan(Handle):
    """Which rank of `remote` sends what, so that `local` is filled.

    Immutable: any thread may read it. It keeps both sides alive.

    Args:
        replicas: which of several ranks with the same cells to read
        layers: of the model: fill only these; None: all
        groups: of the local model: fill only these; None: all
        convert: element types (of f32, f16, bf16, f8_e4m3, f8_e5m2) that may be converted into each other on
            the way

    The remote engine may serve another model: groups and parts are matched by name, layers by number, and only
    those asked for must be the same there.

    Raises MismatchError (what is asked for differs or is missing there), UnsupportedError (element types differ
    there, and are not in `convert`), UncoveredError (no rank holds some cells), OutOfRangeError.
    """

    def __init__(
        self,
        local: Shard,
        remote: Engine,
        *,
        replicas: ReplicaChoice = ReplicaChoice.SPREAD,
        layers: Span | None = None,
        groups: Sequence[int] | None = None,
        convert: Iterable[DtypeLike] = (),
    ) -> None:
        arena = Arena()
        options = arena.new("kvf_plan_options", replicas=replicas, convert=dtype_set(convert))
        if layers is not None:
            options.layers = span(layers)
            if options.layers.begin == options.layers.end:
                groups = ()  # to the library an empty range means all layers
        if groups is not None:
            numbers = listed(groups, "numbers")
            options.groups = arena.numbers("uint32_t", numbers, "a group")
            options.group_count = len(numbers)
        mine, theirs = resource_of(Shard, local), resource_of(Engine, remote)
        made = take(lib.kvf_plan_build, "kvf_plan *", mine.pointer, theirs.pointer, options)
        self._own(made, lib.kvf_plan_free, mine, theirs)

    @property
    def converts(self) -> bool:
        """Whether some cells have another type there: the plan then has no rules and runs, and goes packed."""
        resource = self._get()
        return bool(lib.kvf_plan_converts(resource.pointer))

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory the plan occupies."""
        resource = self._get()
        return int(lib.kvf_plan_memory_bytes(resource.pointer))

    @property
    def sources(self) -> list[int]:
        """The remote ranks it reads from, ascending; a *source* is an index of this list."""
        resource = self._get()
        count = lib.kvf_plan_source_count(resource.pointer)
        return [lib.kvf_plan_source_rank(resource.pointer, i) for i in range(count)]

    @property
    def cuts(self) -> list[Cut]:
        """Which source gives what, ordered by group, layer, part, unit."""
        resource = self._get()
        found = []
        for i in range(lib.kvf_plan_cut_count(resource.pointer)):
            cut = lib.kvf_plan_get_cut(resource.pointer, i)
            tokens = TokenShare(cut.tokens.index, cut.tokens.count, cut.tokens.width)
            layers, units = to_range(cut.layers), to_range(cut.units)
            found.append(Cut(cut.source, cut.group, cut.part, layers, units, tokens))
        return found

    @property
    def rules(self) -> list[CopyRule]:
        """How cells move, ordered by source."""
        resource = self._get()
        found = []
        for i in range(lib.kvf_plan_rule_count(resource.pointer)):
            rule = lib.kvf_plan_get_rule(resource.pointer, i)
            lanes = (rule.lanes[k] for k in range(rule.lane_count))
            found.append(
                CopyRule(
                    source=rule.source,
                    group=rule.group,
                    units=rule.units,
                    rows_per_step=rule.rows_per_step,
                    cell_bytes=rule.cell_bytes,
                    local=Strides(rule.local.block, rule.local.row, rule.local.unit),
                    remote=Strides(rule.remote.block, rule.remote.row, rule.remote.unit),
                    remote_tokens=TokenShare(
                        rule.remote_tokens.index, rule.remote_tokens.count, rule.remote_tokens.width
                    ),
                    lanes=tuple(
                        CopyLane(
                            lane.local_region,
                            lane.local_offset,
                            lane.remote_region,
                            lane.remote_offset,
                            to_range(lane.layers),
                        )
                        for lane in lanes
                    ),
                    whole_blocks=rule.whole_blocks,
                    lanes_per_page=rule.lanes_per_page,
                )
            )
        return found

    def source_rules(self, source: int) -> range:
        """The rules of one source: indices of `rules`; empty when there is no such source."""
        resource = self._get()
        return to_range(result_of(lib.kvf_plan_source_rules, resource.pointer, source))

    def verify(self) -> None:
        """Proves that every wanted cell is written once, from the bytes of the same cell, and no other cell is.

        Raises UncoveredError, OverlapError or MismatchError with the coordinates of the first wrong cell.
        """
        resource = self._get()
        call(lib.kvf_plan_verify, resource.pointer)

    def predict(self, source: int, tokens: int, cost: CostModel | None = None) -> Prediction:
        """Predicts one request of `tokens` tokens (and one state of each state group), blocks scattered.

        Raises OutOfRangeError when there is no such source, and for 2^32 tokens and more.
        """
        resource = self._get()
        model = Arena().new("kvf_cost_model", **vars(CostModel() if cost is None else of_type(CostModel, cost)))
        found = take(lib.kvf_plan_predict, "kvf_prediction", resource.pointer, source, tokens, model)
        return Prediction(found.bytes, found.runs, found.ns)

    def __repr__(self) -> str:
        return "<Plan, closed>" if self.closed else f"<Plan from ranks {self.sources}>"
