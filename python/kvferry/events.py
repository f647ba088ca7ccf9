"""What an agent reports: events, the state of blocks, statistics. See kvferry/agent.h."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvferry._binding import ffi, lib
from kvferry._native import Arena, call, id_out, result_of, string
from kvferry.commands import Command, read_command
from kvferry.errors import KvferryError, Status, error_of
from kvferry.records import Record, records_out

NO_RANK = 0xFFFFFFFF


class EventKind(enum.IntEnum):
    """What happened."""

    DONE = lib.KVF_EVENT_DONE
    FAILED = lib.KVF_EVENT_FAILED
    BLOCKS_FREE = lib.KVF_EVENT_BLOCKS_FREE
    PEER_READY = lib.KVF_EVENT_PEER_READY
    PEER_LOST = lib.KVF_EVENT_PEER_LOST
    PEER_REFUSED = lib.KVF_EVENT_PEER_REFUSED
    DRAINED = lib.KVF_EVENT_DRAINED
    LAYERS = lib.KVF_EVENT_LAYERS  # further layers of a request with `layer_events` have arrived
    COMMAND = lib.KVF_EVENT_COMMAND  # an operator asks for something: see Event.command, Agent.reply()


class RequestKind(enum.IntEnum):
    """Which call made a ticket."""

    NONE = lib.KVF_REQUEST_NONE
    HOLD = lib.KVF_REQUEST_HOLD
    PULL = lib.KVF_REQUEST_PULL
    PUSH = lib.KVF_REQUEST_PUSH
    EXPECT = lib.KVF_REQUEST_EXPECT
    CONNECT = lib.KVF_REQUEST_CONNECT


class BlockState(enum.IntEnum):
    """The claim of an agent on a block."""

    FREE = lib.KVF_BLOCK_FREE
    HELD = lib.KVF_BLOCK_HELD
    LEASED = lib.KVF_BLOCK_LEASED
    FILLING = lib.KVF_BLOCK_FILLING
    IN_DOUBT = lib.KVF_BLOCK_IN_DOUBT


class FailurePolicy(enum.IntEnum):
    """What events of failed requests ask the engine to do."""

    RECOMPUTE = lib.KVF_FAILURE_RECOMPUTE
    FAIL = lib.KVF_FAILURE_FAIL


class Way(enum.IntEnum):
    """How bytes move: see kvf_agent_options in kvferry/agent.h."""

    AUTO = lib.KVF_WAY_AUTO  # directly on one host; between machines what is predicted to be faster
    DIRECT = lib.KVF_WAY_DIRECT
    PACKED = lib.KVF_WAY_PACKED


class LogLevel(enum.IntEnum):
    """How important a line of an agent's log is, as the numbers of Python's logging."""

    DEBUG = lib.KVF_LOG_DEBUG
    INFO = lib.KVF_LOG_INFO
    WARNING = lib.KVF_LOG_WARNING


class LogForm(enum.IntEnum):
    """How a line of the log is written out."""

    TEXT = lib.KVF_LOG_TEXT
    JSON = lib.KVF_LOG_JSON


class LogLine(NamedTuple):
    """A line of an agent's log.

    Attributes:
        level: DEBUG (every rank, every piece), INFO (an engine was met: which rank reads what), or WARNING
            (a request failed or a peer was lost; the text is an object of JSON)
        time: seconds since 1970, UTC
        text: without a newline
    """

    level: LogLevel
    time: float
    text: str

    def write(self, form: LogForm = LogForm.TEXT) -> str:
        """The line with its time and level, for files: as text, or as an object of JSON."""
        arena = Arena()
        line = arena.new(
            "kvf_log_line", level=self.level, time_ns=round(self.time * 1e6) * 1000, text=arena.text(self.text)
        )
        length = ffi.new("size_t *")
        call(lib.kvf_log_write, line, form, ffi.NULL, 0, length)
        out = ffi.new("char[]", length[0] + 1)
        call(lib.kvf_log_write, line, form, out, length[0] + 1, ffi.NULL)
        return string(out)


def read_line(line: Any) -> LogLine:
    """A copy of a kvf_log_line, which is valid only during the callback."""
    return LogLine(LogLevel(line.level), line.time_ns / 1e9, string(line.text))


@dataclass(frozen=True)
class Event:
    """What happened.

    Attributes:
        kind: see EventKind
        request_kind: which call made the ticket
        ticket: the number that this call returned; 0: the event is not about a request
        request_id: the id given to that call
        status: OK unless FAILED
        detail: a sentence; "" if there is nothing to say
        engine: the peer's name; "" if the event is not about a peer
        rank: of the peer; None: all of them, or none
        blocks_free: the engine owns the request's blocks again; set once for every request
        recompute: FAILED, by policy: compute `invalid`, rather than fail the request
        invalid: FAILED pulls and expects: blocks without valid content, of each group
        bytes, runs: moved
        bytes_packed: how many of these bytes went packed; of pulls and pushes
        records: DONE pulls and expects: the records that came with the cache, rank by rank
        command: COMMAND: what the engine is asked; otherwise None
        layers: LAYERS: how many model layers have arrived, from the first on
    """

    kind: EventKind
    request_kind: RequestKind
    ticket: int
    request_id: bytes
    status: Status
    detail: str
    engine: str
    rank: int | None
    blocks_free: bool
    recompute: bool
    invalid: tuple[tuple[int, ...], ...]
    bytes: int
    runs: int
    bytes_packed: int
    records: tuple[Record, ...] = ()
    command: Command | None = None
    layers: int = 0

    @property
    def error(self) -> KvferryError | None:
        """What the request failed with, as an exception; None where it did not."""
        return None if self.status == Status.OK else error_of(self.status, self.detail)


def read_event(event: Any) -> Event:
    """A copy of a kvf_event, whose pointers are valid until the next event is taken."""
    invalid: list[tuple[int, ...]] = []
    if event.invalid != ffi.NULL:
        for i in range(event.group_count):
            blocks = event.invalid[i]
            invalid.append(tuple(ffi.unpack(blocks.ids, blocks.count)) if blocks.count else ())
    return Event(
        kind=EventKind(event.kind),
        request_kind=RequestKind(event.request_kind),
        ticket=event.ticket,
        request_id=id_out(event.id),
        status=Status(event.status),
        detail=string(event.detail),
        engine=string(event.engine),
        rank=None if event.rank == NO_RANK else event.rank,
        blocks_free=event.blocks_free,
        recompute=event.recompute,
        invalid=tuple(invalid),
        bytes=event.bytes,
        runs=event.runs,
        bytes_packed=event.bytes_packed,
        records=records_out(event.records, event.record_count),
        command=None if event.command == ffi.NULL else read_command(event.command),
        layers=event.layers,
    )


@dataclass(frozen=True)
class BlockClaim:
    """An agent's claim on a block: its state, and how many requests name it."""

    state: BlockState
    requests: int


@dataclass(frozen=True)
class ClockOffset:
    """A peer's clock minus ours, and how far off this may be, in nanoseconds."""

    offset_ns: int
    error_ns: int


@dataclass(frozen=True)
class Histogram:
    """Durations in nanoseconds: buckets[i] counts those in [2**i, 2**(i + 1)), buckets[0] also 0."""

    count: int
    sum_ns: int
    min_ns: int
    max_ns: int
    buckets: tuple[int, ...]

    def quantile(self, share: float) -> int:
        """The duration below which a share (0 to 1) of the counted durations lies, to within its bucket."""
        histogram = Arena().new("kvf_histogram", **vars(self))
        return int(result_of(lib.kvf_histogram_quantile, histogram, share))


@dataclass(frozen=True)
class AgentStats:
    """Counters since the agent was opened, except those of "now"; see kvf_agent_stats in kvferry/agent.h."""

    bytes_read: int
    bytes_written: int
    runs: int
    done: dict[RequestKind, int]
    failed: dict[RequestKind, int]
    failures_by_status: dict[Status, int]
    leases_expired: int
    messages_sent: int
    messages_received: int
    messages_repeated: int
    messages_stale: int
    messages_malformed: int
    peers_refused: int
    peers_evicted: int
    peers_lost: int
    peers_replaced: int
    checksums_wrong: int
    peers_now: int
    requests_now: dict[RequestKind, int]
    leases_now: int
    blocks_held_now: int
    blocks_filling_now: int
    blocks_in_doubt_now: int
    memory_now_bytes: int
    transfer: Histogram
    post: Histogram
    queue: Histogram
    total: Histogram
    messages_foreign: int
    over_budget: int
    connections_now: int
    connections_closed: int
    bytes_packed: int
    flows_refused: int
    plans_built: int
    plans_now: int


def read_stats(stats: Any) -> AgentStats:
    """The dataclass of a kvf_agent_stats."""
    values: dict[str, Any] = {}
    for field in AgentStats.__dataclass_fields__:
        value = getattr(stats, field)
        if field in ("done", "failed", "requests_now"):
            values[field] = {kind: value[kind] for kind in RequestKind}
        elif field == "failures_by_status":
            values[field] = {status: value[status] for status in Status if value[status]}
        elif field in ("transfer", "post", "queue", "total"):
            buckets = tuple(value.buckets)
            values[field] = Histogram(value.count, value.sum_ns, value.min_ns, value.max_ns, buckets)
        else:
            values[field] = value
    return AgentStats(**values)
