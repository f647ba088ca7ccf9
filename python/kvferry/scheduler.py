"""Bookkeeping for an engine's scheduler: when requests wait, when their blocks are free, what workers do.

See kvferry/schedule.h for the life of a request. There is no input or output, no thread and no clock. Times are
nanoseconds on a clock of the engine's choice, always the same one.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry._binding import ffi, lib
from kvferry._native import (
    Arena,
    OneAtATime,
    call,
    data_at,
    id_bytes,
    id_fields,
    id_out,
    nanoseconds,
    resource_of,
    string,
    take,
)
from kvferry._values import list_of, listed, of_type
from kvferry.aggregator import (
    NO_WORKER,
    Aggregate,
    GroupBlock,
    KeyLike,
    RequestKey,
    blocks_in,
    blocks_out,
    key_in,
    key_out,
    keys_in,
)
from kvferry.errors import InvalidError
from kvferry.model import Model
from kvferry.request import Blocks, BlockTable, GroupSteps, tables_in


class LoadPolicy(enum.IntEnum):
    """What happens to a request whose load failed."""

    RECOMPUTE = lib.KVF_LOAD_RECOMPUTE
    FAIL = lib.KVF_LOAD_FAIL


class InstructionKind(enum.IntEnum):
    """What workers are told to do: see kvf_instruction_kind."""

    RESERVE = lib.KVF_INSTRUCT_RESERVE
    PULL = lib.KVF_INSTRUCT_PULL
    EXPECT = lib.KVF_INSTRUCT_EXPECT
    NOTIFY = lib.KVF_INSTRUCT_NOTIFY
    HOLD = lib.KVF_INSTRUCT_HOLD
    PUSH = lib.KVF_INSTRUCT_PUSH
    CANCEL = lib.KVF_INSTRUCT_CANCEL


class LoadOutcome(enum.IntEnum):
    """How a load ended: run the request; run it from a token on; by policy: end it."""

    LOADED = lib.KVF_LOADED
    IN_PART = lib.KVF_LOADED_IN_PART
    FAILED = lib.KVF_LOAD_FAILED


@dataclass(frozen=True)
class TransferParams:
    """How the cache of a request is found: made by the producer, carried to the consumer.

    Attributes:
        engine: the producer's name
        id: both engines' name of the transfer, up to 1024 bytes
        endpoint, public_key: where the producer is met; "": known by other means, no encryption
        tokens: number that the producer has; 0: as many as prefill_token_count() says
        expiry_ns: on the producer's clock; 0: not known
        push: the producer writes; otherwise the consumer reads
    """

    engine: str
    id: bytes
    endpoint: str = ""
    public_key: str = ""
    tokens: int = 0
    expiry_ns: int = 0
    push: bool = False


@dataclass(frozen=True)
class ScheduleEnd:
    """A request has finished: whether its blocks are kept, and what the consumer needs to find them."""

    keep: bool
    params: TransferParams | None


@dataclass(frozen=True)
class Instruction:
    """Something every worker does.

    Attributes:
        kind: what to do; InstructionKind says which reports are due
        cancels: CANCEL: the kind of instruction that it stops
        request: the request that reports must name
        transfer_id: the request id that agents must use
        groups: PULL, EXPECT, HOLD, PUSH: the steps of each group and where they are, block ids as arrays
        engine, endpoint, public_key: of the producer, for consumers; "" when there is none
        deadline: seconds; PULL, EXPECT, RESERVE, PUSH: fails after so long. HOLD: the lease
        consumers: of HOLD and PUSH
        reserved: PULL, NOTIFY: continues an earlier RESERVE
        push: NOTIFY: the producer would have written
    """

    kind: InstructionKind
    cancels: InstructionKind | None
    request: RequestKey
    transfer_id: bytes
    groups: tuple[GroupSteps, ...]
    engine: str
    endpoint: str
    public_key: str
    deadline: float
    consumers: int
    reserved: bool
    push: bool


@dataclass(frozen=True)
class Loaded:
    """A request that no longer needs to wait; see kvf_loaded.

    Attributes:
        tokens: number of tokens, from the first, whose cache is valid
        invalid: its blocks without the content that was asked for
    """

    request: RequestKey
    outcome: LoadOutcome
    tokens: int
    invalid: tuple[GroupBlock, ...]


@dataclass(frozen=True)
class Freed:
    """A request whose blocks were kept and are free now; of_load: a load was filling them."""

    request: RequestKey
    of_load: bool


@dataclass(frozen=True)
class News:
    """The result of a step: the requests to run, and those whose blocks are free."""

    loaded: tuple[Loaded, ...]
    freed: tuple[Freed, ...]


@dataclass(frozen=True)
class Heartbeat:
    """A waiting request whose producer must be kept from freeing its blocks."""

    engine: str
    endpoint: str
    public_key: str
    transfer_id: bytes


@dataclass(frozen=True)
class ScheduleCounts:
    """How many requests are in which state; see kvf_schedule_counts."""

    requests: int
    waiting: int
    loading: int
    serving: int
    stopping: int
    instructions: int


class Schedule(OneAtATime):
    """The requests of one engine, in the process of its scheduler; for consumers, producers and both at once.

    Calls from several threads wait for one another. Requests are named by a RequestKey, or by their id, which
    then means its newest life. Methods raise NotFoundError for a request that is not known or has ended.

    Args:
        tokens_per_block: of the logical blocks of each group, 1 for states
        engine, endpoint, public_key: needed to serve: our name, and where we are met
        incarnation: any number that differs after each start of this process
        lookahead_tokens: see prefill_token_count()
        lease, heartbeat, margin, deadline: seconds; None: 30 s, a sixth of the lease, 5 s, 120 s
        heartbeats: the engine sends signs of life for waiting requests by itself, see heartbeats()
        max_requests: at once; 0: 65536

    Raises InvalidError, OutOfRangeError.
    """

    def __init__(
        self,
        model: Model,
        tokens_per_block: Sequence[int],
        *,
        engine: str | None = None,
        endpoint: str | None = None,
        public_key: str | None = None,
        incarnation: int = 0,
        lookahead_tokens: int = 0,
        lease: float | None = None,
        heartbeat: float | None = None,
        margin: float | None = None,
        deadline: float | None = None,
        policy: LoadPolicy = LoadPolicy.RECOMPUTE,
        heartbeats: bool = False,
        max_requests: int = 0,
    ) -> None:
        resource, arena = resource_of(Model, model), Arena()
        tokens_per_block = listed(tokens_per_block, "numbers")
        count = lib.kvf_model_group_count(resource.pointer)
        if len(tokens_per_block) != count:
            raise InvalidError(
                f"tokens_per_block has {len(tokens_per_block)} entries; the model has {count} groups"
            )
        options = arena.new(
            "kvf_schedule_options",
            model=resource.pointer,
            tokens_per_block=arena.numbers("uint32_t", tokens_per_block, "tokens_per_block"),
            engine=arena.text(engine),
            endpoint=arena.text(endpoint),
            public_key=arena.text(public_key),
            incarnation=incarnation,
            lookahead_tokens=lookahead_tokens,
            lease_ns=nanoseconds(lease, "lease"),
            heartbeat_ns=nanoseconds(heartbeat, "heartbeat"),
            margin_ns=nanoseconds(margin, "margin"),
            deadline_ns=nanoseconds(deadline, "deadline"),
            policy=policy,
            heartbeats=heartbeats,
            max_requests=max_requests,
        )
        self._own(take(lib.kvf_schedule_create, "kvf_schedule *", options), lib.kvf_schedule_free, resource)

    def add(
        self,
        request_id: bytes | str,
        prompt_tokens: int,
        *,
        now_ns: int,
        source: TransferParams | None = None,
        clock_offset_ns: int = 0,
        serves: bool = False,
        consumers: int = 1,
        push: bool = False,
        push_id: bytes | None = None,
    ) -> RequestKey:
        """Adds a request; returns the key of this life of it.

        Args:
            source: where its cache is; None: it will be computed
            clock_offset_ns: the source's clock minus ours
            serves: other engines will want its cache, see finished()
            consumers: number of these engines
            push: we write the cache to them, rather than wait until they read
            push_id: their name of the transfer; None: base_request_id() of the id, which must then differ from
                that of every other request that is pushed

        Raises ExistsError (a request of this id has not ended), LimitError (max_requests), OutOfRangeError (the
        source's state is after more tokens than a consumer can use: add the request without a source).
        """
        resource, arena = self._get(), Arena()
        request = arena.new(
            "kvf_schedule_request",
            id=id_fields(request_id, arena),
            prompt_tokens=prompt_tokens,
            source=ffi.NULL if source is None else _params_in(source, arena),
            clock_offset_ns=clock_offset_ns,
            serves=serves,
            consumers=consumers,
            push=push,
            **({} if push_id is None else {"push_id": id_fields(push_id, arena)}),
        )
        with self._lock:
            generation = take(lib.kvf_schedule_add, "uint64_t", resource.pointer, request, now_ns)
        return RequestKey(id_bytes(request_id), generation)

    def match(self, request: KeyLike, computed_tokens: int, *, now_ns: int) -> int:
        """How many tokens beyond the locally cached ones can be loaded; 0: none, or none any more."""
        resource, arena = self._get(), Arena()
        key = key_in(request, arena)
        with self._lock:
            return int(take(lib.kvf_schedule_match, "uint64_t", resource.pointer, key, computed_tokens, now_ns))

    def allocated(
        self,
        request: KeyLike,
        tables: Sequence[Blocks],
        *,
        computed_tokens: int,
        load_tokens: int,
        now_ns: int,
    ) -> bool:
        """The request has blocks; the workers are told to fill them. Returns whether it must wait.

        Args:
            tables: one for each group, over all tokens it needs; state groups: the last entry is the state's
            load_tokens: number to load after the computed ones; 0: everything is cached here

        Raises DeadlineError (the lease has ended since match(): compute the request), OutOfRangeError.
        """
        resource, arena, tables = self._get(), Arena(), listed(tables, "block tables")
        key, blocks = key_in(request, arena), tables_in(tables, arena)
        with self._lock:
            waits = take(
                lib.kvf_schedule_allocated,
                "bool",
                resource.pointer,
                key,
                blocks,
                len(tables),
                computed_tokens,
                load_tokens,
                now_ns,
            )
        return bool(waits)

    def push(self, request: KeyLike, tables: Sequence[Blocks] | None, tokens: int) -> None:
        """Lets workers push a request before it has finished, whether or not it is computed yet.

        Args:
            tables: all blocks of its prompt; None: each Agent.push_ready() brings the blocks of its chunk
            tokens: number of tokens of the prompt
        """
        resource, arena = self._get(), Arena()
        key, count = key_in(request, arena), 0
        if tables is not None:
            tables = listed(tables, "block tables")
            count = len(tables)
        blocks = tables_in(tables, arena)
        with self._lock:
            call(lib.kvf_schedule_push, resource.pointer, key, blocks, count, tokens)

    def finished(
        self, request: KeyLike, tables: Sequence[Blocks] = (), tokens: int = 0, *, now_ns: int
    ) -> ScheduleEnd:
        """The request has finished. If it serves, it is kept for its consumers while they give signs of life.

        Args:
            tables: its blocks; not used if it does not serve
            tokens: number of computed tokens
        """
        resource, arena, tables = self._get(), Arena(), listed(tables, "block tables")
        key, blocks = key_in(request, arena), tables_in(tables, arena)
        with self._lock:
            end = take(
                lib.kvf_schedule_finished,
                "kvf_schedule_end",
                resource.pointer,
                key,
                blocks,
                len(tables),
                tokens,
                now_ns,
            )
            return ScheduleEnd(end.keep, None if end.params == ffi.NULL else _params_out(end.params))

    def abort(self, request: KeyLike) -> bool:
        """The request is aborted. Returns whether its blocks are free now; otherwise update() will name it."""
        resource, arena = self._get(), Arena()
        key = key_in(request, arena)
        with self._lock:
            return bool(take(lib.kvf_schedule_abort, "bool", resource.pointer, key))

    def preempted(self, request: KeyLike) -> bool:
        """The request loses its blocks and will be scheduled again. Returns as abort()."""
        resource, arena = self._get(), Arena()
        key = key_in(request, arena)
        with self._lock:
            return bool(take(lib.kvf_schedule_preempted, "bool", resource.pointer, key))

    def take(self) -> list[Instruction]:
        """Takes the instructions given since the last call, each once, in order. Each goes to every worker."""
        resource = self._get()
        with self._lock:
            items, count = ffi.new("kvf_instruction const **"), ffi.new("size_t *")
            call(lib.kvf_schedule_take, resource.pointer, items, count)
            return [_instruction_out(items[0][i]) for i in range(count[0])]

    def update(self, aggregate: Aggregate) -> News:
        """Takes in the result of a workers' step, from Aggregator.step() or the engine's own aggregation."""
        resource, arena = self._get(), Arena()
        aggregate = of_type(Aggregate, aggregate)
        blocks = sorted(list_of(GroupBlock, aggregate.invalid))
        struct = arena.new(
            "kvf_aggregate",
            output=NO_WORKER if aggregate.output is None else aggregate.output,
            expected=aggregate.expected,
            invalid=blocks_in(blocks, arena),
            invalid_count=len(blocks),
        )
        for field in ("sent", "received", "failed", "forgotten"):
            keys = listed(getattr(aggregate, field), "keys")
            setattr(struct, field, keys_in(keys, arena))
            setattr(struct, f"{field}_count", len(keys))
        with self._lock:
            news = take(lib.kvf_schedule_update, "kvf_schedule_news", resource.pointer, struct)
            loaded, freed = [], []
            for i in range(news.loaded_count):
                item = news.loaded[i]
                invalid = blocks_out(item.invalid, item.invalid_count)
                loaded.append(Loaded(key_out(item.request), LoadOutcome(item.outcome), item.tokens, invalid))
            for i in range(news.freed_count):
                freed.append(Freed(key_out(news.freed[i].request), news.freed[i].of_load))
            return News(tuple(loaded), tuple(freed))

    def heartbeats(self, now_ns: int) -> list[Heartbeat]:
        """The signs of life that are due, ordered by engine and endpoint; with the option `heartbeats` only."""
        resource = self._get()
        with self._lock:
            beats, count = ffi.new("kvf_heartbeat const **"), ffi.new("size_t *")
            call(lib.kvf_schedule_heartbeats, resource.pointer, now_ns, beats, count)
            return [
                Heartbeat(
                    string(beat.engine),
                    string(beat.endpoint),
                    string(beat.public_key),
                    id_out(beat.transfer_id),
                )
                for beat in (beats[0][i] for i in range(count[0]))
            ]

    @property
    def counts(self) -> ScheduleCounts:
        """How many requests are in which state."""
        resource = self._get()
        with self._lock:
            found = take(lib.kvf_schedule_count, "kvf_schedule_counts", resource.pointer)
        return ScheduleCounts(**{name: getattr(found, name) for name in ScheduleCounts.__dataclass_fields__})


def _params_in(given: TransferParams, arena: Arena) -> Any:
    params = of_type(TransferParams, given)
    return arena.new(
        "kvf_transfer_params",
        engine=arena.text(params.engine),
        endpoint=arena.text(params.endpoint),
        public_key=arena.text(params.public_key),
        id=id_fields(params.id, arena),
        tokens=params.tokens,
        expiry_ns=params.expiry_ns,
        push=params.push,
    )


def _params_out(params: Any) -> TransferParams:
    return TransferParams(
        engine=string(params.engine),
        id=id_out(params.id),
        endpoint=string(params.endpoint),
        public_key=string(params.public_key),
        tokens=params.tokens,
        expiry_ns=params.expiry_ns,
        push=params.push,
    )


def _instruction_out(item: Any) -> Instruction:
    groups = []
    for i in range(item.group_count if item.groups != ffi.NULL else 0):
        table = item.groups[i].table
        ids = np.frombuffer(data_at(table.ids, 4 * table.count), np.uint32)
        groups.append(GroupSteps(BlockTable(ids, table.first_block), item.groups[i].begin, item.groups[i].end))
    kind = InstructionKind(item.kind)
    return Instruction(
        kind=kind,
        cancels=InstructionKind(item.cancels) if kind == InstructionKind.CANCEL else None,
        request=key_out(item.request),
        transfer_id=id_out(item.transfer_id),
        groups=tuple(groups),
        engine=string(item.engine),
        endpoint=string(item.endpoint),
        public_key=string(item.public_key),
        deadline=item.deadline_ns / 1e9,
        consumers=item.consumers,
        reserved=item.reserved,
        push=item.push,
    )
