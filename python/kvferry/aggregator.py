"""Adds up the outputs of an engine's workers in each step. See kvferry/schedule.h."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvferry._binding import ffi, lib
from kvferry._native import Arena, OneAtATime, call, id_bytes, id_fields, id_out, take
from kvferry._values import list_of, listed, of_type
from kvferry.request import Blocks, table_fields

NO_WORKER = int(lib.KVF_NO_WORKER)
REQUEST_ID_BYTES = int(lib.KVF_REQUEST_ID_BYTES)
"""The longest id of a request here; ids between engines have room for a suffix."""


@dataclass(frozen=True, order=True)
class RequestKey:
    """A request in one life.

    Attributes:
        id: any bytes; text is encoded as UTF-8
        generation: tells lives of the same id apart; 0: the engine does not count them
    """

    id: bytes
    generation: int = 0


KeyLike = RequestKey | bytes | str


@dataclass(frozen=True, order=True)
class GroupBlock:
    """A logical block of one group."""

    group: int
    block: int


class Rider(enum.IntFlag):
    """Opaque data attached to an output: the engine is told which workers had it."""

    STATS = lib.KVF_RIDER_STATS
    META = lib.KVF_RIDER_META
    EVENTS = lib.KVF_RIDER_EVENTS


class CountRule(enum.IntEnum):
    """What counts towards the number of expected workers: workers, or (as in vLLM) reports."""

    WORKERS = lib.KVF_COUNT_WORKERS
    REPORTS = lib.KVF_COUNT_REPORTS


@dataclass(frozen=True)
class WorkerOutput:
    """What one worker says in one step. Order and repeats do not matter.

    Attributes:
        sent: producer: requests whose blocks this worker no longer needs
        received: consumer: requests that have ended, successfully or not; nothing writes their blocks any more
        failed: requests, received now or later, of which nothing that was loaded is valid
        invalid: blocks without valid content, of any requests
        expected: number of workers expected from here on; 0: as before
        riders: data attached to the output, Rider or-ed
    """

    sent: Sequence[KeyLike] = ()
    received: Sequence[KeyLike] = ()
    failed: Sequence[KeyLike] = ()
    invalid: Sequence[GroupBlock] = ()
    expected: int = 0
    riders: int = 0


@dataclass(frozen=True)
class Aggregate:
    """What a step adds up to.

    Attributes:
        output: the worker whose output stands for all; None: it has none in this step
        expected: number of workers expected after this step
        sent, received: each request once, ordered by id and generation
        failed: those of `received` that failed on one worker or more
        forgotten: requests forgotten for lack of room
        invalid: invalid blocks of all workers, each once, ascending
        with_stats, with_meta, with_events: workers that have them, ascending
    """

    output: int | None
    expected: int
    sent: tuple[RequestKey, ...] = ()
    received: tuple[RequestKey, ...] = ()
    failed: tuple[RequestKey, ...] = ()
    forgotten: tuple[RequestKey, ...] = ()
    invalid: tuple[GroupBlock, ...] = ()
    with_stats: tuple[int, ...] = ()
    with_meta: tuple[int, ...] = ()
    with_events: tuple[int, ...] = ()


def key_fields(key: KeyLike, arena: Arena) -> dict[str, Any]:
    """The fields of a kvf_request_key."""
    if not isinstance(key, RequestKey):
        key = RequestKey(id_bytes(key))
    return {"id": id_fields(key.id, arena), "generation": key.generation}


def key_in(key: KeyLike, arena: Arena) -> Any:
    """A kvf_request_key *."""
    return arena.array("kvf_request_key", [key_fields(key, arena)])


def keys_in(keys: Sequence[KeyLike], arena: Arena) -> Any:
    """A kvf_request_key[]."""
    return arena.array("kvf_request_key", [key_fields(key, arena) for key in listed(keys, RequestKey.__name__)])


def blocks_in(blocks: Sequence[GroupBlock], arena: Arena) -> Any:
    """A kvf_group_block[]."""
    return arena.array("kvf_group_block", [vars(block) for block in list_of(GroupBlock, blocks)])


def key_out(key: Any) -> RequestKey:
    """A copy of a kvf_request_key."""
    return RequestKey(id_out(key.id), key.generation)


def keys_out(keys: Any, count: int) -> tuple[RequestKey, ...]:
    """Copies of a kvf_request_key[]."""
    return tuple(key_out(keys[i]) for i in range(count))


def blocks_out(blocks: Any, count: int) -> tuple[GroupBlock, ...]:
    """Copies of a kvf_group_block[]."""
    return tuple(GroupBlock(blocks[i].group, blocks[i].block) for i in range(count))


class Aggregator(OneAtATime):
    """Counts which workers have reported which requests. Calls from several threads wait for one another.

    Args:
        worker_count: outputs in a step; 1 to 1048576
        expected: workers that report each request; 0: all
        drops_steps: drop the whole step when the selected worker has no output, as vLLM's KVOutputAggregator
            does: requests may then hang; for comparing only
        max_pending: most requests remembered that not all workers have reported; 0: 65536

    Raises OutOfRangeError, InvalidError.
    """

    def __init__(
        self,
        worker_count: int,
        *,
        expected: int = 0,
        rule: CountRule = CountRule.WORKERS,
        drops_steps: bool = False,
        max_pending: int = 0,
    ) -> None:
        options = Arena().new(
            "kvf_aggregator_options",
            worker_count=worker_count,
            expected=expected,
            rule=rule,
            drops_steps=drops_steps,
            max_pending=max_pending,
        )
        self._own(take(lib.kvf_aggregator_create, "kvf_aggregator *", options), lib.kvf_aggregator_free)

    def step(self, outputs: Sequence[WorkerOutput | None], selected: int = 0) -> Aggregate:
        """Adds up one step.

        Args:
            outputs: one for each worker; None: the worker has no output
            selected: the worker whose output the engine passes on

        Raises InvalidError (wrong number of outputs; one is missing though the selected worker has one),
        OutOfRangeError (selected; an id longer than REQUEST_ID_BYTES). Nothing has been counted then.
        """
        resource, arena = self._get(), Arena()
        pointers = [
            ffi.NULL if output is None else _output_in(output, arena)
            for output in listed(outputs, WorkerOutput.__name__)
        ]
        array = arena.keep(ffi.new("kvf_worker_output const *[]", pointers or 1))
        with self._lock:
            found = take(
                lib.kvf_aggregator_step, "kvf_aggregate", resource.pointer, array, len(pointers), selected
            )
            return Aggregate(
                output=None if found.output == NO_WORKER else found.output,
                expected=found.expected,
                sent=keys_out(found.sent, found.sent_count),
                received=keys_out(found.received, found.received_count),
                failed=keys_out(found.failed, found.failed_count),
                forgotten=keys_out(found.forgotten, found.forgotten_count),
                invalid=blocks_out(found.invalid, found.invalid_count),
                with_stats=_workers(found.with_stats, found.with_stats_count),
                with_meta=_workers(found.with_meta, found.with_meta_count),
                with_events=_workers(found.with_events, found.with_events_count),
            )

    def forget(self, request: KeyLike) -> None:
        """Forgets the reports of a request that no longer exists."""
        resource, arena = self._get(), Arena()
        with self._lock:
            lib.kvf_aggregator_forget(resource.pointer, key_in(request, arena))

    @property
    def pending(self) -> int:
        """Requests that some workers have reported, but not all."""
        resource = self._get()
        with self._lock:
            return int(lib.kvf_aggregator_pending(resource.pointer))


def _workers(workers: Any, count: int) -> tuple[int, ...]:
    return tuple(ffi.unpack(workers, count)) if count else ()


def _output_in(output: WorkerOutput, arena: Arena) -> Any:
    given = of_type(WorkerOutput, output)
    sent, received, failed, invalid = map(listed, (given.sent, given.received, given.failed, given.invalid))
    return arena.new(
        "kvf_worker_output",
        sent=keys_in(sent, arena),
        sent_count=len(sent),
        received=keys_in(received, arena),
        received_count=len(received),
        failed=keys_in(failed, arena),
        failed_count=len(failed),
        invalid=blocks_in(invalid, arena),
        invalid_count=len(invalid),
        expected=given.expected,
        riders=given.riders,
    )


# ---- a scheduler's step, request by request


@dataclass(frozen=True)
class StepRequest:
    """A request of one step, the blocks it got in that step, and whether these replace its former ones.

    Attributes:
        id: any bytes, or text, which is encoded as UTF-8
        groups: blocks by group; None (as in vLLM) or empty: it got none
    """

    id: bytes | str
    groups: tuple[Blocks, ...] | None = ()
    resumed: bool = False


def step_requests(
    fresh: Sequence[StepRequest], cached: Sequence[StepRequest], resumed: Sequence[bytes | str] = ()
) -> list[StepRequest]:
    """Lists all requests of a step in order, the fresh ones first (what vLLM calls yield_req_data).

    Ids and groups come back as they were given.

    Args:
        fresh: requests that run for the first time
        cached: requests the workers know
        resumed: those of `cached` that were preempted; bytes and text with the same UTF-8 are the same id
    """
    arena = Arena()
    first = list_of(StepRequest, fresh)
    given = [*first, *list_of(StepRequest, cached)]
    items = arena.array("kvf_step_request", [_step_request_fields(request, arena) for request in given])
    names = [id_fields(name, arena) for name in listed(resumed, "ids")]
    step = arena.new(
        "kvf_step",
        fresh=items,
        fresh_count=len(first),
        cached=items + len(first) if given else ffi.NULL,
        cached_count=len(given) - len(first),
        resumed=arena.array("kvf_request_id", names),
        resumed_count=len(names),
    )
    out = ffi.new("kvf_step_request[]", max(len(given), 1))
    call(lib.kvf_step_requests, step, out)
    # The library only says which requests are resumed; ids and tables are the caller's.
    return [StepRequest(request.id, request.groups, out[i].resumed) for i, request in enumerate(given)]


def _step_request_fields(request: StepRequest, arena: Arena) -> dict[str, Any]:
    groups = () if request.groups is None else listed(request.groups, "block tables")
    tables = [table_fields(blocks, arena) for blocks in groups]
    return {
        "id": id_fields(request.id, arena),
        "groups": arena.array("kvf_block_table", tables),
        "group_count": len(tables),
    }
