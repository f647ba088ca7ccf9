"""Sessions between agents, in one process and in several."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import kvferry.agent_events
from coordinates import (
    DECODE_TABLE,
    HEAD_SIZE,
    HEADS,
    LAYERS,
    PREFILL_TABLE,
    TOKENS,
    all_cells,
    cell,
    decode_engine,
    fill,
    prefill_engine,
    small_model,
    view_cell,
    wrong_cells,
)
from kvferry import (
    AgainError,
    Agent,
    Agreement,
    BlockState,
    BlockTable,
    CancelledError,
    ClosedError,
    Contact,
    Event,
    EventKind,
    ExistsError,
    Group,
    GroupRequest,
    GroupSteps,
    InvalidError,
    KeyGrant,
    KvferryError,
    LogLevel,
    LogLine,
    MemoryKind,
    Model,
    NotFoundError,
    NotPermittedError,
    OutOfRangeError,
    OverlapError,
    ParseError,
    Part,
    PeerRole,
    PeerState,
    Plan,
    Record,
    Request,
    RequestKind,
    Shard,
    Status,
    UnsupportedError,
    Way,
    checksum_cells,
    checksum_steps,
    make_keys,
)

HELD = [GroupSteps(PREFILL_TABLE, 0, TOKENS)]
WANTED = [GroupSteps(DECODE_TABLE, 0, TOKENS)]
NOTHING = [GroupSteps()]


class Pair:
    """A prefill engine of one rank and a decode engine, in this process."""

    def __init__(self, **options: object) -> None:
        model = small_model()
        self.prefill, self.decode = prefill_engine(model, tp_size=1), decode_engine(model)
        self.producer = Agent(self.prefill, **options)  # type: ignore[arg-type]
        self.consumer = Agent(self.decode, **options)  # type: ignore[arg-type]
        self.theirs, self.ours = self.producer.allocate_regions(), self.consumer.allocate_regions()
        fill(self.prefill.shard(0), self.theirs, PREFILL_TABLE)
        self.producer.register(self.theirs)
        self.consumer.register(self.ours)

    def wrong(self) -> list[tuple[int, int, int, int]]:
        return wrong_cells(self.decode.shard(0), self.ours, DECODE_TABLE)

    def close(self) -> None:
        self.consumer.close()
        self.producer.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_two_processes_hand_a_request_over() -> None:
    decode = decode_engine(small_model())
    command = [sys.executable, str(Path(__file__).with_name("prefill_process.py"))]
    ranks = [
        subprocess.Popen([*command, str(rank), "2"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        met = [rank.stdout.readline().split() for rank in ranks if rank.stdout]
        for rank in ranks:
            assert rank.stdin and rank.stdout
            print(*(introduction for _, introduction in met), file=rank.stdin, flush=True)
            assert rank.stdout.readline() == "holding\n"
        with Agent(decode, verify=True) as agent:
            regions = agent.allocate_regions()
            agent.register(regions)
            ticket = agent.pull("request", Contact("prefill", met[0][0]), WANTED)
            event = agent.wait_event(60)
            assert event is not None
            assert (event.kind, event.ticket, event.detail) == (EventKind.DONE, ticket, "")
            assert event.bytes == TOKENS * 2 * 2 * 4 * 32
            assert wrong_cells(decode.shard(0), regions, DECODE_TABLE) == []
            for rank in ranks:
                assert rank.stdout and rank.stdout.readline() == "DONE\n"
    finally:
        for rank in ranks:
            rank.communicate()
    assert [rank.returncode for rank in ranks] == [0, 0]


def test_a_producer_that_is_killed_fails_its_requests_with_their_blocks() -> None:
    decode = decode_engine(small_model())
    command = [sys.executable, str(Path(__file__).with_name("prefill_process.py")), "0", "1"]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as prefill,
        Agent(decode, peer_timeout=0.5) as agent,
    ):
        assert prefill.stdin and prefill.stdout
        endpoint, introduction = prefill.stdout.readline().split()
        print(introduction, file=prefill.stdin, flush=True)
        assert prefill.stdout.readline() == "holding\n"
        agent.register(agent.allocate_regions())
        agent.connect(Contact("prefill", endpoint))
        with pytest.raises(NotFoundError):
            agent.match("nobody")
        met = agent.wait_event(30)
        assert met and met.kind is EventKind.PEER_READY, met
        (common,) = agent.match("prefill")
        assert (common.ours, common.theirs, common.agreement, common.detail) == (0, 0, Agreement.SAME, "")
        prefill.kill()
        agent.pull("request", Contact("prefill", endpoint), WANTED, deadline=20)
        found: list[Event] = []
        while not found or found[-1].kind is not EventKind.FAILED:
            event = agent.wait_event(40)
            assert event, found
            found.append(event)
        assert sorted(found[-1].invalid[0]) == sorted(DECODE_TABLE) and found[-1].recompute
    assert prefill.returncode == -9


def done(agent: Agent, ticket: int) -> Event:
    while True:
        event = agent.wait_event(30)
        assert event is not None
        if event.ticket == ticket:
            break
    assert event.kind is EventKind.DONE, event
    return event


def finish(pair: Pair) -> None:
    """A request is held and pulled, and every cell of it is right."""
    hold = pair.producer.hold("moved", HELD)
    done(pair.consumer, pair.consumer.pull("moved", pair.producer.contact, WANTED))
    done(pair.producer, hold)
    assert pair.wrong() == []


def test_an_agent_that_is_dropped_in_its_log_function_is_closed() -> None:
    dropping = threading.Event()
    agents: list[Agent] = []

    def log(_line: LogLine) -> None:
        if dropping.is_set():
            agents.clear()  # as a garbage collection may do at any point

    agents.append(Agent(decode_engine(small_model()), log=log))
    session = agents[0]._session
    agents[0].register(agents[0].allocate_regions())
    agents[0].connect(Contact("nobody", "tcp://127.0.0.1:1"), deadline=0.5)
    dropping.set()
    until = time.monotonic() + 20
    while not session.closing or session.pointer is not None:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert agents == []


def test_what_is_no_id_no_event_and_no_stream_is_refused_by_name(pair: Pair) -> None:
    with pytest.raises(InvalidError, match="a request id is 7; allowed: bytes, and text"):
        pair.producer.hold(7, HELD)  # type: ignore[arg-type]
    stream = type("Stream", (), {"stream_id": 0})()
    with pytest.raises(InvalidError, match="after is a Stream; allowed: a file descriptor, "):
        pair.producer.hold("r", HELD, after=stream)
    with pytest.raises(InvalidError, match="stream is a Stream; allowed: "):
        pair.consumer.let_wait(1, 1, stream)
    finish(pair)


def test_memory_comes_and_goes_region_by_region(pair: Pair) -> None:
    finish(pair)
    held = pair.producer.hold("kept", HELD)
    with pytest.raises(AgainError, match=r'"kept".* region 1'):
        pair.producer.unregister_region(1)
    pair.producer.cancel(held)
    while (event := pair.producer.wait_event(30)) is not None and not event.blocks_free:
        pass
    for region in range(2):
        pair.producer.unregister_region(region)
        pair.theirs[region][:] = 0xEE
    with pytest.raises(InvalidError, match="no memory registered"):
        pair.producer.hold("moved", HELD)
    moved = [np.zeros(len(memory), np.uint8) for memory in pair.theirs]
    fill(pair.prefill.shard(0), moved, PREFILL_TABLE)
    pair.producer.register_region(1, moved[1])
    with pytest.raises(OverlapError, match="regions 0 and 1 share"):
        pair.producer.register_region(0, moved[1])
    with pytest.raises(OutOfRangeError, match="region 0 has 8 bytes"):
        pair.producer.register_region(0, np.zeros(8, np.uint8))
    with pytest.raises(OutOfRangeError, match="region is 2"):
        pair.producer.register_region(2, moved[0])
    for number in (-1, 2**32):
        with pytest.raises(OutOfRangeError, match=rf": argument 2 is {number}; allowed: 0 to {2**32 - 1}"):
            pair.producer.unregister_region(number)
    pair.producer.register_region(0, moved[0])
    with pytest.raises(ExistsError):
        pair.producer.register_region(0, moved[0])
    while (event := pair.consumer.wait_event(30)) is not None and event.kind is not EventKind.PEER_LOST:
        pass  # its connection is for the earlier memory
    assert event is not None and "generation" in event.detail
    pair.ours[0][:] = pair.ours[1][:] = 0
    finish(pair)


@pytest.mark.parametrize("pushes", [False, True])
def test_records_travel_with_the_cache(pair: Pair, pushes: bool) -> None:
    given = [Record("token", b"\x2a\0\0\0", TOKENS, TOKENS + 1), Record("nothing", b"")]
    last = Record("routed", bytes(range(256)), 0, TOKENS, rank=77)
    for attempt in ("first", "second"):
        if pushes:
            lent = pair.producer.push(attempt, HELD, records=given)
            taken = pair.consumer.expect(attempt, pair.producer.contact, WANTED)
            pair.producer.push_ready(lent, records=[last])
        else:
            lent = pair.producer.hold(attempt, HELD, records=[*given, last])
            taken = pair.consumer.pull(attempt, pair.producer.contact, WANTED)
        got = done(pair.consumer, taken)
        assert [(r.name, r.data, r.begin, r.end, r.rank) for r in got.records] == [
            ("token", b"\x2a\0\0\0", TOKENS, TOKENS + 1, 0),
            ("nothing", b"", 0, 0, 0),
            ("routed", bytes(range(256)), 0, TOKENS, 0),
        ]
        assert done(pair.producer, lent).records == ()
    assert pair.wrong() == []


def test_records_beyond_the_limits_are_refused(pair: Pair) -> None:
    for records, why in (
        ([Record("x", bytes(1 << 17)), Record("y", b"1")], r"records\[1\].*131072"),
        ([Record("", b"")], "name has 0 bytes"),
        ([Record("x", b"", 3, 2)], r"\[3, 2\)"),
        ([Record("x", b"")] * 65, "0 to 64"),
        ([Record("x", b"", -1)], "begin is -1"),
    ):
        with pytest.raises(OutOfRangeError, match=why):
            pair.producer.hold("r", HELD, records=records)
    finish(pair)


def test_memory_is_allocated_by_kind() -> None:
    with Agent(decode_engine(small_model()), transport="shm") as agent:
        assert agent.allocate((4, 8), np.float16, kind=MemoryKind.HOST, device=0).shape == (4, 8)
        with pytest.raises(UnsupportedError, match="CUDA"):
            agent.allocate(64, kind=MemoryKind.CUDA)
        with pytest.raises(InvalidError, match="device is 1"):
            agent.allocate(64, device=1)
        for shape in [(2**32, 2**32 + 1), (2**62, 2), (2**31, 2**31, 4)]:
            with pytest.raises(OutOfRangeError, match="bytes; allowed"):
                agent.allocate(shape)


def test_a_pull_gives_an_event_on_both_sides(pair: Pair) -> None:
    hold = pair.producer.hold("a request", HELD)
    assert pair.producer.block(0, PREFILL_TABLE[0]).state is BlockState.HELD
    pull = pair.consumer.pull("a request", pair.producer.contact, WANTED)
    got, gave = pair.consumer.wait_event(30), pair.producer.wait_event(30)
    assert got and gave
    assert (got.kind, got.request_kind, got.ticket) == (EventKind.DONE, RequestKind.PULL, pull)
    assert (gave.kind, gave.request_kind, gave.ticket) == (EventKind.DONE, RequestKind.HOLD, hold)
    assert got.request_id == b"a request" and got.blocks_free and got.error is None
    assert pair.wrong() == []
    assert pair.producer.block(0, PREFILL_TABLE[0]).state is BlockState.FREE
    stats = pair.consumer.stats
    assert stats.done[RequestKind.PULL] == 1 and stats.bytes_read == got.bytes
    assert stats.total.count == 1 and stats.total.quantile(0.5) > 0
    assert pair.consumer.clock_offset("prefill", 0).error_ns >= 0


def half_model() -> Model:
    parts = tuple(Part(name, "f16", HEADS, HEAD_SIZE) for name in ("k", "v"))
    return Model([Group("full", tuple(range(LAYERS)), parts)], name="small")


def halves(shard: Shard, regions: Sequence[np.ndarray], coordinates: tuple[int, int, int, int]) -> np.ndarray:
    """The memory of one cell of f16."""
    layer, part, token, head = coordinates
    block, row = divmod(token, shard.groups[0].tokens_per_block)
    place = shard.locate(0, layer, part, DECODE_TABLE[block], row, head)
    memory = regions[place.region].view(np.uint8)[place.offset : place.offset + place.bytes]
    return memory.view(np.float16)


def test_elements_are_converted_where_both_engines_allow_it() -> None:
    types = ("f32", "f16")
    prefill, decode = prefill_engine(small_model(), tp_size=1), decode_engine(half_model())
    with (
        Agent(prefill, convert=types, verify=True) as producer,
        Agent(decode, convert=types, convert_groups=["full"], verify=True) as consumer,
    ):
        theirs, ours = producer.allocate_regions(), consumer.allocate_regions()
        fill(prefill.shard(0), theirs, PREFILL_TABLE)
        producer.register(theirs)
        consumer.register(ours)
        producer.hold("a request", HELD)
        consumer.pull("a request", producer.contact, WANTED)
        got = consumer.wait_event(30)
        assert got and got.kind is EventKind.DONE and got.bytes_packed == got.bytes
        assert [match.agreement for match in consumer.match("prefill")] == [Agreement.CONVERT]
        rounded = 0
        for place in all_cells(decode.shard(0)):
            wanted = cell(*place)
            assert np.array_equal(halves(decode.shard(0), ours, place), wanted.astype(np.float16))
            rounded += not np.array_equal(wanted, wanted.astype(np.float16).astype(np.float32))
        assert rounded > 0


def test_types_are_not_converted_unless_both_engines_allow_it() -> None:
    prefill, decode = prefill_engine(small_model(), tp_size=1), decode_engine(half_model())
    with Agent(prefill, convert=("f32", "f16")) as producer, Agent(decode) as consumer:
        producer.register(producer.allocate_regions())
        consumer.register(consumer.allocate_regions())
        consumer.pull("a request", producer.contact, WANTED)
        got = consumer.wait_event(30)
        assert got and got.kind is EventKind.FAILED and got.error is not None
        assert 'full.k.dtype is "f16" locally and "f32" remotely' in str(got.error)
    with pytest.raises(NotFoundError, match="no group"):
        Agent(decode, convert=("f32", "f16"), convert_groups=["swa"])


def test_a_plan_that_converts_has_no_runs() -> None:
    prefill, decode = prefill_engine(small_model(), tp_size=1), decode_engine(half_model())
    with pytest.raises(UnsupportedError, match="only where both sides allow the conversion"):
        Plan(decode.shard(0), prefill)
    plan = Plan(decode.shard(0), prefill, convert=("f32", "f16"))
    assert plan.converts and not plan.rules
    request = Request(plan)
    request.set([GroupRequest(DECODE_TABLE, PREFILL_TABLE, 0, TOKENS)])
    assert request.bytes(0) == LAYERS * 2 * HEADS * HEAD_SIZE * TOKENS * 2
    with pytest.raises(UnsupportedError, match=r"full\.k is f16 locally and f32 remotely"):
        request.runs(0)


def test_a_push_is_written_as_it_becomes_ready(pair: Pair) -> None:
    pair.consumer.expect("r", pair.producer.contact, WANTED)
    ticket = pair.producer.push("r", HELD)
    pair.producer.push_ready(ticket, (0, 16), 1)
    pair.producer.push_ready(ticket, range(0, 16), 2)
    with pytest.raises(OutOfRangeError):
        pair.producer.push_ready(ticket, (0, 16), 1)
    pair.producer.push_ready(ticket, (16, TOKENS))
    for agent in (pair.consumer, pair.producer):
        event = agent.wait_event(30)
        assert event and event.kind is EventKind.DONE, event
    assert pair.wrong() == []


def test_blocks_of_a_push_may_come_with_its_chunks(pair: Pair) -> None:
    pair.consumer.expect("r", pair.producer.contact, WANTED)
    ticket = pair.producer.push("r", [GroupSteps((), 0, TOKENS)])
    with pytest.raises(OutOfRangeError, match="group full"):
        pair.producer.push_ready(ticket)
    assert pair.producer.block(0, PREFILL_TABLE[0]).state is BlockState.FREE
    pair.producer.push_ready(ticket, (0, 16), blocks=[PREFILL_TABLE[:1]])
    assert pair.producer.block(0, PREFILL_TABLE[0]).state is BlockState.HELD
    assert pair.producer.block(0, PREFILL_TABLE[1]).state is BlockState.FREE
    with pytest.raises(InvalidError, match="block 0 of the sequence"):
        pair.producer.push_ready(ticket, (16, TOKENS), blocks=[PREFILL_TABLE[1:]])
    pair.producer.push_ready(ticket, (16, TOKENS), blocks=[BlockTable(PREFILL_TABLE[1:], 1)])
    for agent in (pair.consumer, pair.producer):
        event = agent.wait_event(30)
        assert event and event.kind is EventKind.DONE, event
    assert pair.wrong() == []
    assert pair.producer.block(0, PREFILL_TABLE[0]).state is BlockState.FREE


@pytest.mark.parametrize("what", ["hold", "push", "chunk"])
def test_memory_is_read_when_its_event_has_happened(pair: Pair, what: str) -> None:
    for region in pair.theirs:
        region[...] = 0
    reading, writing = os.pipe()
    with open(reading, "rb") as ready:
        if what == "hold":
            pair.producer.hold("r", HELD, after=ready)
        else:
            ticket = pair.producer.push("r", HELD, after=ready if what == "push" else None)
            pair.producer.push_ready(ticket, after=ready.fileno() if what == "chunk" else None)
    load = pair.consumer.pull if what == "hold" else pair.consumer.expect
    load("r", pair.producer.contact, WANTED)
    assert pair.consumer.wait_event(0.1) is None
    fill(pair.prefill.shard(0), pair.theirs, PREFILL_TABLE)
    os.write(writing, b"1")
    os.close(writing)
    for agent in (pair.consumer, pair.producer):
        event = agent.wait_event(30)
        assert event and event.kind is EventKind.DONE, event
    assert pair.wrong() == []


@pytest.mark.parametrize("what", ["pull", "pull_into", "expect"])
def test_blocks_are_not_written_before_their_event(pair: Pair, what: str) -> None:
    before = [region.copy() for region in pair.ours]
    ready = os.eventfd(0, os.EFD_CLOEXEC)
    if what == "expect":
        pair.producer.push_ready(pair.producer.push("r", HELD))
        pair.consumer.expect("r", pair.producer.contact, WANTED, after=ready)
    else:
        pair.producer.hold("r", HELD)
        named = what == "pull"
        ticket = pair.consumer.pull(
            "r", pair.producer.contact, WANTED if named else None, after=ready if named else None
        )
        if not named:
            pair.consumer.pull_into(ticket, WANTED, after=ready)
    assert pair.consumer.wait_event(0.1) is None
    assert all((region == old).all() for region, old in zip(pair.ours, before, strict=True))
    os.eventfd_write(ready, 1)
    for agent in (pair.consumer, pair.producer):
        event = agent.wait_event(30)
        assert event and event.kind is EventKind.DONE, event
    assert pair.wrong() == []
    os.close(ready)


def test_an_object_that_cannot_be_waited_for_is_refused(pair: Pair) -> None:
    with open(__file__) as file, pytest.raises(InvalidError, match="cannot be waited for"):
        pair.producer.hold("r", HELD, after=file)
    pair.producer.hold("r", HELD)  # nothing was begun


def test_a_request_is_for_one_consumer_at_least(pair: Pair) -> None:
    for give in (pair.producer.hold, pair.producer.push):
        with pytest.raises(OutOfRangeError, match="consumers is 0; allowed: 1 and more"):
            give("r", HELD, consumers=0)
    assert pair.producer.kept() == []


def test_requests_have_priorities_and_caps(pair: Pair) -> None:
    with pytest.raises(OutOfRangeError, match="bytes_per_second is 0"):
        pair.consumer.pull("r", pair.producer.contact, WANTED, bytes_per_second=0)
    pair.producer.hold("r", HELD)
    pair.consumer.pull("r", pair.producer.contact, WANTED, priority=-1, bytes_per_second=1_000_000)
    for agent in (pair.consumer, pair.producer):
        event = agent.wait_event(30)
        assert event and event.kind is EventKind.DONE, event
    assert pair.wrong() == []
    pair.consumer.expect("s", pair.producer.contact, WANTED)
    pair.producer.push_ready(pair.producer.push("s", HELD, priority=2, bytes_per_second=1_000_000))
    for agent in (pair.consumer, pair.producer):
        event = agent.wait_event(30)
        assert event and event.kind is EventKind.DONE, event


@pytest.mark.parametrize("way", list(Way))
def test_a_request_goes_the_way_it_says(pair: Pair, way: Way) -> None:
    is_packed = way is Way.PACKED  # on one host, AUTO is direct
    hold = pair.producer.hold("pulled", HELD)
    event = done(pair.consumer, pair.consumer.pull("pulled", pair.producer.contact, WANTED, way=way))
    done(pair.producer, hold)
    assert event.bytes_packed == (event.bytes if is_packed else 0)
    assert not pair.wrong()

    for region in pair.ours:
        region.fill(0)
    expected = pair.consumer.expect("pushed", pair.producer.contact, WANTED, way=way)
    pushed = pair.producer.push("pushed", HELD, way=way)
    pair.producer.push_ready(pushed)
    event = done(pair.producer, pushed)
    done(pair.consumer, expected)
    assert event.bytes_packed == (event.bytes if is_packed else 0)
    assert not pair.wrong()


def test_blocks_may_be_named_after_the_pull_was_begun(pair: Pair) -> None:
    pair.producer.hold("r", HELD)
    ticket = pair.consumer.pull("r", pair.producer.contact, None)
    pair.consumer.pull_into(ticket, WANTED)
    event = pair.consumer.wait_event(30)
    assert event and event.kind is EventKind.DONE
    assert pair.wrong() == []


def test_a_cancelled_pull_names_the_blocks_to_compute(pair: Pair) -> None:
    ticket = pair.consumer.pull("nobody holds it", pair.producer.contact, WANTED)
    pair.consumer.cancel(ticket)
    event = pair.consumer.wait_event(30)
    assert event and (event.kind, event.status) == (EventKind.FAILED, Status.CANCELLED)
    assert event.invalid == (tuple(DECODE_TABLE),) or event.invalid == (tuple(sorted(DECODE_TABLE)),)
    assert event.recompute and isinstance(event.error, kvferry.CancelledError)
    with pytest.raises(NotFoundError):
        pair.consumer.cancel(ticket)


def test_a_pull_that_nobody_answers_fails_at_its_deadline(pair: Pair) -> None:
    pair.consumer.pull("r", Contact("prefill", "tcp://127.0.0.1:9"), WANTED, deadline=0.2)
    event = pair.consumer.wait_event(30)
    assert event and event.kind is EventKind.FAILED and "deadline" in event.detail
    pair.consumer.pull("r", Contact("prefill", "tcp://127.0.0.1:9"), WANTED, deadline=60, patience=0.2)
    event = pair.consumer.wait_event(30)
    assert event and event.kind is EventKind.FAILED and "patience" in event.detail


def test_requests_that_were_handed_over_are_remembered() -> None:
    pair = Pair(remember=60)
    pair.consumer.pull("r", pair.producer.contact, WANTED)
    with pytest.raises(ExistsError, match="already"):  # while the first is under way
        pair.consumer.pull("r", pair.producer.contact, None)
    pair.producer.hold("r", HELD)
    for agent in (pair.consumer, pair.producer):
        event = agent.wait_event(30)
        assert event and event.kind is EventKind.DONE
    assert pair.wrong() == []
    pair.consumer.pull("r", pair.producer.contact, WANTED, deadline=60)
    event = pair.consumer.wait_event(30)
    assert event and (event.kind, event.status) == (EventKind.FAILED, Status.EXISTS)
    assert "was handed over" in event.detail
    pair.close()


def test_bad_requests_are_refused_with_a_sentence(pair: Pair) -> None:
    with pytest.raises(OutOfRangeError, match="block 99"):
        pair.consumer.pull("r", pair.producer.contact, [GroupSteps([99, 1], 0, TOKENS)])
    with pytest.raises(OutOfRangeError, match="id -1"):
        pair.producer.hold("r", [GroupSteps([-1], 0, 16)])
    with pytest.raises(InvalidError):
        pair.producer.hold("r", [*HELD, *HELD])
    with pytest.raises(OutOfRangeError):
        pair.producer.block(0, 4000)
    with pytest.raises(ParseError):
        pair.producer.introduce(b"nonsense")
    with pytest.raises(OutOfRangeError, match=r"lease is -1\.0 s; allowed: 0 to 1\.8e10"):
        pair.producer.hold("r", HELD, lease=-1)
    with pytest.raises(OutOfRangeError, match=r"patience is -1\.0 s"):
        pair.consumer.pull("r", pair.producer.contact, HELD, patience=-1)
    with pytest.raises(OutOfRangeError, match="timeout is nan"):
        pair.producer.wait_event(timeout=float("nan"))
    with pytest.raises(OutOfRangeError, match="timeout is nan"):
        pair.producer.wait(float("nan"))
    pair.producer.hold("r", HELD)
    with pytest.raises(ExistsError):
        pair.producer.hold("r", HELD)
    with pytest.raises(KvferryError):
        Agent(pair.prefill, 1)
    with pytest.raises(NotPermittedError):
        Agent(pair.prefill, listen="tcp://0.0.0.0:*")


def test_registered_memory_is_checked_against_the_shard() -> None:
    with Agent(decode_engine(small_model())) as agent:
        with pytest.raises(InvalidError, match="1 regions"):
            agent.register([bytearray(64)])
        with pytest.raises(OutOfRangeError, match="region 0 has 64 bytes"):
            agent.register([bytearray(64), bytearray(64)])
        with pytest.raises(InvalidError):
            _ = agent.introduction


def test_an_agent_may_serve_memory_of_its_user() -> None:
    model = small_model()
    prefill, decode = prefill_engine(model, tp_size=1), decode_engine(model)
    theirs = [np.zeros(size, np.uint8) for size in prefill.shard(0).region_bytes]
    ours = [np.zeros(size // 4, np.float32) for size in decode.shard(0).region_bytes]
    fill(prefill.shard(0), theirs, PREFILL_TABLE)
    with Agent(prefill) as producer, Agent(decode) as consumer:
        producer.register(theirs)
        consumer.register(ours)
        producer.hold("r", HELD)
        consumer.pull("r", producer.contact, WANTED)
        event = consumer.wait_event(30)
        assert event and event.kind is EventKind.DONE, event
    assert wrong_cells(decode.shard(0), [region.view(np.uint8) for region in ours], DECODE_TABLE) == []


def test_keys_let_only_known_peers_in() -> None:
    model = small_model()
    known, stranger, own = make_keys(), make_keys(), make_keys()
    prefill, decode = prefill_engine(model, tp_size=1), decode_engine(model)
    with Agent(prefill, keys=own, allowed_keys=[known.public_key]) as producer:
        producer.register(producer.allocate_regions())
        producer.hold("r", HELD)
        for keys, kind in ((stranger, EventKind.FAILED), (known, EventKind.DONE)):
            with Agent(decode, keys=keys) as consumer:
                consumer.register(consumer.allocate_regions())
                consumer.pull("r", producer.contact, WANTED, deadline=2 if kind == EventKind.FAILED else 30)
                event = consumer.wait_event(40)
                assert event and event.kind is kind, event


def test_a_name_is_for_the_keys_it_was_granted_to() -> None:
    model = small_model()
    known, stranger, own = make_keys(), make_keys(), make_keys()
    prefill, decode = prefill_engine(model, tp_size=1), decode_engine(model)
    grants: list[str | KeyGrant] = [KeyGrant(known.public_key, "decode", (0, 1)), stranger.public_key]
    with Agent(prefill, keys=own, allowed_keys=grants) as producer:
        producer.register(producer.allocate_regions())
        producer.hold("r", HELD)
        for keys, kind in ((stranger, EventKind.FAILED), (known, EventKind.DONE)):
            with Agent(decode, keys=keys) as consumer:
                consumer.register(consumer.allocate_regions())
                consumer.pull("r", producer.contact, WANTED, deadline=30)
                event = consumer.wait_event(40)
                assert event and event.kind in (kind, EventKind.PEER_LOST), event
                assert kind is EventKind.DONE or "does not allow this key to speak" in event.detail
        refused = producer.wait_event(30)
        assert refused and refused.kind is EventKind.PEER_REFUSED and refused.engine == "decode", refused
        producer.allow_key(KeyGrant(stranger.public_key, "decode"))
        with pytest.raises(OutOfRangeError):
            producer.allow_key(KeyGrant(stranger.public_key, None, (0, 1)))


def test_a_directory_knows_where_the_ranks_are(pair: Pair) -> None:
    with Agent.directory() as directory:
        directory.introduce(pair.producer.introduction)
        pair.producer.hold("r", HELD)
        pair.consumer.pull("r", Contact("prefill", directory.endpoint), WANTED)
        event = pair.consumer.wait_event(30)
        assert event and event.kind is EventKind.DONE, event
        with pytest.raises(InvalidError):
            directory.allocate_regions()


def test_an_agent_that_drains_hands_over_what_it_holds_and_takes_nothing_new(pair: Pair) -> None:
    held = pair.producer.hold("held", HELD)
    pair.producer.drain(30)
    with pytest.raises(CancelledError, match="drains"):
        pair.producer.hold("new", HELD)
    done(pair.consumer, pair.consumer.pull("held", pair.producer.contact, WANTED))
    assert pair.wrong() == []
    events = [pair.producer.wait_event(30) for _ in range(2)]
    assert [event and (event.kind, event.ticket, event.status) for event in events] == [
        (EventKind.DONE, held, Status.OK),
        (EventKind.DRAINED, 0, Status.OK),
    ]
    pair.consumer.pull("new", pair.producer.contact, WANTED)
    event = pair.consumer.wait_event(30)
    assert event and event.status is Status.NOT_FOUND and "drains" in event.detail, event


def test_what_is_kept_can_be_listed(pair: Pair) -> None:
    tickets = [pair.producer.hold(f"r{i}", HELD, lease=300, consumers=2) for i in range(70)]
    kept = pair.producer.kept()
    assert [request.ticket for request in kept] == tickets
    assert [request.id for request in kept] == [f"r{i}".encode() for i in range(70)]
    first = kept[0]
    assert (first.kind, first.tokens, first.consumers, first.served) == (RequestKind.HOLD, TOKENS, 2, 0)
    assert not first.moves and 0 <= first.age < 30 and first.left is not None and 270 < first.left <= 300
    for ticket in tickets[1:]:
        pair.producer.cancel(ticket)
    assert [request.ticket for request in pair.producer.kept()] == tickets[:1]
    done(pair.consumer, pair.consumer.pull("r0", pair.producer.contact, WANTED))
    deadline = time.monotonic() + 30
    while pair.producer.kept()[0].served == 0:
        assert time.monotonic() < deadline
    assert pair.consumer.kept() == []


def test_requests_that_a_draining_agent_cannot_hand_over_are_cancelled(pair: Pair) -> None:
    held = pair.producer.hold("held", HELD)
    pair.producer.drain()
    pair.producer.drain(0)
    events = [pair.producer.wait_event(30) for _ in range(2)]
    assert [event and (event.kind, event.ticket, event.status) for event in events] == [
        (EventKind.FAILED, held, Status.CANCELLED),
        (EventKind.DRAINED, 0, Status.TIMEOUT),
    ]


def test_an_agent_that_has_drained_can_be_resumed(pair: Pair) -> None:
    pair.producer.drain()
    event = pair.producer.wait_event(30)
    assert event and (event.kind, event.status) == (EventKind.DRAINED, Status.OK), event
    pair.producer.resume()
    held = pair.producer.hold("held", HELD)
    pair.producer.drain()
    pair.producer.resume()
    event = pair.producer.wait_event(30)
    assert event and (event.kind, event.status) == (EventKind.DRAINED, Status.CANCELLED), event
    done(pair.consumer, pair.consumer.pull("held", pair.producer.contact, WANTED))
    assert pair.wrong() == []
    event = pair.producer.wait_event(30)
    assert event and (event.kind, event.ticket) == (EventKind.DONE, held), event


def test_failures_are_logged_as_json() -> None:
    lines: list[LogLine] = []
    pair = Pair(log=lines.append)
    pair.consumer.cancel(pair.consumer.pull("r", pair.producer.contact, WANTED))
    assert pair.consumer.wait_event(30)
    pair.close()
    failures = [json.loads(line.text) for line in lines if line.level == LogLevel.WARNING]
    assert failures and all(isinstance(failure, dict) for failure in failures)


def test_what_is_counted_can_be_had_as_text(pair: Pair) -> None:
    ticket = pair.consumer.pull("request", pair.producer.contact, WANTED)
    pair.producer.hold("request", HELD)
    assert done(pair.consumer, ticket).kind is EventKind.DONE
    lines = pair.consumer.metrics().splitlines()
    assert f'kvferry_read_bytes_total{{engine="decode",rank="0"}} {pair.consumer.stats.bytes_read}' in lines
    assert 'kvferry_requests_done_total{engine="decode",rank="0",kind="pull"} 1' in lines


def test_prometheus_reads_what_is_counted(pair: Pair) -> None:
    """Its own parser, which knows types, labels and the buckets of histograms."""
    parser = pytest.importorskip("prometheus_client.parser")
    finish(pair)
    families = {
        family.name: family for family in parser.text_string_to_metric_families(pair.consumer.metrics())
    }
    assert families["kvferry_read_bytes"].type == "counter"
    (read,) = families["kvferry_read_bytes"].samples
    assert read.value == pair.consumer.stats.bytes_read > 0
    assert read.labels == {"engine": "decode", "rank": "0"}
    times = families["kvferry_request_seconds"]
    assert times.type == "histogram"
    buckets = [sample for sample in times.samples if sample.name.endswith("_bucket")]
    assert len(buckets) > 10 and buckets[-1].labels["le"] == "+Inf"
    assert [bucket.value for bucket in buckets] == sorted(bucket.value for bucket in buckets)
    (count,) = [sample.value for sample in times.samples if sample.name.endswith("_count")]
    assert count == buckets[-1].value == 1


def test_a_meeting_is_logged_and_can_be_explained() -> None:
    lines: list[LogLine] = []
    before = time.time()
    pair = Pair(log=lines.append, log_level=LogLevel.DEBUG)
    with pytest.raises(NotFoundError, match="prefill"):
        pair.consumer.explain("prefill")
    pair.consumer.connect(pair.producer.contact)
    event = pair.consumer.wait_event(30)
    assert event and event.kind is EventKind.PEER_READY, event
    deadline = time.monotonic() + 30  # lines come after the event, on the agent's thread
    while not any(line.level == LogLevel.DEBUG for line in lines) and time.monotonic() < deadline:
        time.sleep(0.01)
    told = [line.text for line in lines if line.level == LogLevel.INFO]
    summary = [
        text for text in told if "has greeted" not in text and not text.startswith("transport ")
    ]  # the producer logs greetings at any time; transports are logged when memory is registered
    assert summary[0].startswith("decode rank 0 of 1 reads from prefill, met at tcp://")
    assert all(before - 1 <= line.time <= time.time() + 1 for line in lines)

    text = pair.consumer.explain("prefill")
    assert text.splitlines()[: len(summary)] == summary
    assert pair.consumer.explain("prefill", LogLevel.DEBUG).startswith(text)
    assert pair.consumer.explain().startswith("decode rank 0 of 1 at tcp://")
    assert "decode: 1 of 1 ranks have sessions here" in pair.producer.explain()
    pair.close()


def test_a_log_without_level_has_no_lines_for_debugging() -> None:
    lines: list[LogLine] = []
    pair = Pair(log=lines.append)
    pair.consumer.connect(pair.producer.contact)
    assert pair.consumer.wait_event(30)
    pair.close()
    assert {line.level for line in lines} >= {LogLevel.INFO}
    assert LogLevel.DEBUG not in {line.level for line in lines}


def test_asyncio_waits_for_events(pair: Pair) -> None:
    async def hand_over() -> list[EventKind]:
        pair.producer.hold("r", HELD)
        waiting = asyncio.gather(pair.consumer.event(), pair.producer.event())
        await asyncio.sleep(0)
        pair.consumer.pull("r", pair.producer.contact, WANTED)
        return [event.kind for event in await asyncio.wait_for(waiting, 30)]

    assert asyncio.run(hand_over()) == [EventKind.DONE, EventKind.DONE]


def test_a_task_that_waits_makes_an_agent_without_a_thread_work() -> None:
    pair = Pair(own_thread=False)

    async def hand_over() -> list[EventKind]:
        pair.producer.hold("r", HELD)
        pair.consumer.pull("r", pair.producer.contact, WANTED)
        waiting = asyncio.gather(pair.consumer.event(), pair.producer.event())
        return [event.kind for event in await asyncio.wait_for(waiting, 30)]

    assert asyncio.run(hand_over()) == [EventKind.DONE, EventKind.DONE]
    assert pair.wrong() == []
    pair.close()


def test_a_loop_that_polls_is_woken_whenever_there_is_work() -> None:
    pair = Pair(own_thread=False)
    agents = [pair.producer, pair.consumer]
    pair.producer.hold("r", HELD)
    pair.consumer.pull("r", pair.producer.contact, WANTED)
    ended = 0
    while ended < len(agents):
        readable, _, _ = select.select(agents, [], [], 30)
        assert readable, "there is work left, and nobody was woken"
        for agent in readable:
            agent.progress()
            ended += sum(event.kind == EventKind.DONE for event in agent.events())
    assert pair.wrong() == []
    pair.close()


def test_peers_are_seen_with_what_serves_them(pair: Pair) -> None:
    assert pair.consumer.peers() == []
    pair.producer.hold("r", HELD)
    pair.consumer.pull("r", pair.producer.contact, WANTED)
    event = pair.consumer.wait_event(30)
    assert event is not None and event.kind == EventKind.DONE
    (producer,) = pair.consumer.peers()
    assert (producer.role, producer.state) == (PeerRole.PRODUCER, PeerState.OPEN)
    assert (producer.rank, producer.rank_count, producer.engine) == (0, 1, pair.prefill.name)
    assert (producer.fabric, producer.way) == ("inproc", "memory of this process")
    assert (producer.passed_over, producer.failure) == ("", "")
    assert producer.bytes_read == event.bytes > 0
    assert producer.round_trip_ns > 0
    assert abs(producer.since_ns / 1e9 - time.time()) < 600
    (consumer,) = pair.producer.peers()
    assert (consumer.role, consumer.engine) == (PeerRole.CONSUMER, pair.decode.name)


@pytest.mark.parametrize("own_thread", [True, False])
def test_each_of_several_tasks_that_wait_gets_an_event(own_thread: bool) -> None:
    pair = Pair(own_thread=own_thread)

    async def hand_over() -> set[int]:
        waiting = asyncio.gather(*(pair.producer.event() for _ in range(3)))
        await asyncio.sleep(0)
        tickets = {pair.producer.hold(name, HELD) for name in "abc"}
        for ticket in tickets:
            pair.producer.cancel(ticket)
        assert {event.ticket for event in await asyncio.wait_for(waiting, 30)} == tickets
        return tickets

    assert len(asyncio.run(hand_over())) == 3
    pair.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_loop_that_ends_before_its_tasks_leaves_nothing_behind(pair: Pair) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    loop = asyncio.new_event_loop()
    task = loop.create_task(pair.consumer.event())
    loop.run_until_complete(asyncio.sleep(0))
    assert len(pair.consumer._session.awaiting) == 1
    loop.close()
    del loop, task
    gc.collect()
    assert len(pair.consumer._session.awaiting) == 0
    assert len(os.listdir("/proc/self/fd")) == descriptors
    finish(pair)


def test_a_task_that_begins_to_wait_while_a_thread_closes_the_agent_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = Agent(decode_engine(small_model()))
    closing = threading.Thread(target=agent.close)
    real = os.dup

    def dup(descriptor: int) -> int:
        closing.start()
        while not agent.closed:
            time.sleep(0)
        if not agent._session.inside:  # nothing keeps the agent open
            closing.join()
        return real(descriptor)

    monkeypatch.setattr(os, "dup", dup)
    with pytest.raises(ClosedError):
        asyncio.run(agent.event())
    closing.join()


@pytest.mark.parametrize("own_thread", [True, False])
def test_closing_an_agent_ends_the_tasks_that_wait(own_thread: bool) -> None:
    agent = Agent(decode_engine(small_model()), own_thread=own_thread)

    async def close_it() -> list[object]:
        waiting = asyncio.gather(agent.event(), agent.event(), return_exceptions=True)
        await asyncio.sleep(0)
        threading.Thread(target=agent.close).start()
        return list(await asyncio.wait_for(waiting, 30))

    assert [type(answer) for answer in asyncio.run(close_it())] == [ClosedError, ClosedError]


@pytest.mark.parametrize("own_thread", [True, False])
def test_the_log_function_may_call_the_agent(own_thread: bool) -> None:
    blocks: list[BlockState] = []

    def log(line: LogLine) -> None:
        if not line.text.startswith("transport "):  # logged before the two agents meet
            blocks.append(made.producer.block(0, 0).state)

    made = Pair(own_thread=own_thread, log=log)
    made.producer.cancel(made.producer.hold("r", HELD))
    assert made.producer.wait(30)
    made.close()
    assert blocks == [BlockState.FREE]


def test_an_agent_without_a_thread_says_when_it_is_to_be_called() -> None:
    pair = Pair(own_thread=False)
    while pair.producer.progress():
        pass
    assert pair.producer.timeout() is None
    pair.producer.hold("r", HELD, lease=100)
    left = pair.producer.timeout()
    assert left is not None and 50 < left <= 100
    pair.close()


def test_a_thread_that_waits_lets_others_run(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    # One call of the library, much longer than the test: only another thread can end it, by an event.
    monkeypatch.setattr(kvferry.agent_events, "WAIT_SECONDS", 50.0)
    entered = threading.Event()
    answers: list[bool] = []

    def wait() -> None:
        entered.set()
        answers.append(pair.producer.wait(50))

    thread = threading.Thread(target=wait)
    thread.start()
    entered.wait()
    pair.producer.cancel(pair.producer.hold("r", HELD))
    thread.join(40)
    assert answers == [True]


def test_closing_an_agent_ends_waits_in_other_threads() -> None:
    agent = Agent(decode_engine(small_model()), own_thread=False)
    entered = threading.Event()
    errors: list[BaseException] = []

    def wait() -> None:
        entered.set()
        try:
            agent.wait()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    entered.wait()
    agent.close()
    thread.join(30)
    assert [type(error) for error in errors] == [ClosedError]


def test_many_threads_may_use_one_agent(pair: Pair) -> None:
    def work(first: int) -> None:
        for i in range(20):
            pair.producer.cancel(pair.producer.hold(f"{first}-{i}", HELD))
            pair.producer.next_event()
            assert pair.producer.stats.requests_now[RequestKind.PULL] == 0

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    while pair.producer.wait_event(1):
        pass
    assert pair.producer.stats.failed[RequestKind.HOLD] == 80


def test_a_closed_agent_is_an_exception_and_its_arrays_stay(pair: Pair) -> None:
    contact = pair.producer.contact
    pair.close()
    pair.close()
    uses: list[Callable[[], object]] = [
        lambda: pair.producer.hold("r", HELD),
        lambda: pair.consumer.pull("r", contact, WANTED),
        pair.producer.next_event,
        lambda: pair.producer.wait(0),
        pair.producer.progress,
        pair.producer.fileno,
        lambda: pair.producer.endpoint,
        lambda: pair.producer.stats,
        lambda: pair.producer.block(0, 0),
        lambda: pair.producer.allocate(4),
        lambda: pair.producer.cancel(1),
    ]
    for use in uses:
        with pytest.raises(ClosedError):
            use()
    assert wrong_cells(pair.prefill.shard(0), pair.theirs, PREFILL_TABLE) == []


def test_checksums_of_both_shapes_agree_and_find_a_wrong_cell(pair: Pair) -> None:
    fill(pair.decode.shard(0), pair.ours, DECODE_TABLE)
    sums = [
        checksum_steps(
            shard, regions, group=0, part=1, layers=(0, 2), units=range(4), table=table, steps=(0, TOKENS)
        )
        for shard, regions, table in (
            (pair.prefill.shard(0), pair.theirs, PREFILL_TABLE),
            (pair.decode.shard(0), pair.ours, DECODE_TABLE),
        )
    ]
    assert np.array_equal(sums[0], sums[1]) and sums[0].all()
    before = checksum_cells(
        pair.decode.shard(0),
        pair.ours,
        group=0,
        part=1,
        layers=(0, 2),
        units=(0, 4),
        table=DECODE_TABLE,
        step=17,
    )
    assert before.shape == (2, 4) and before.sum(dtype=np.uint64) == sums[0][17]
    view_cell(pair.decode.shard(0), pair.ours, DECODE_TABLE, (1, 1, 17, 3))[0] += 1
    after = checksum_cells(
        pair.decode.shard(0),
        pair.ours,
        group=0,
        part=1,
        layers=(0, 2),
        units=(0, 4),
        table=DECODE_TABLE,
        step=17,
    )
    assert np.argwhere(before != after).tolist() == [[1, 3]]


@pytest.mark.parametrize(
    "wrong",
    [{"part": 2}, {"group": 1}, {"layers": (0, 3)}, {"units": (0, 5)}, {"table": []}, {"table": [99, 1]}],
)
def test_checksums_of_what_is_not_there_are_refused(pair: Pair, wrong: dict[str, object]) -> None:
    asked = {"group": 0, "part": 1, "layers": (0, 2), "units": (0, 4), "table": DECODE_TABLE} | wrong
    with pytest.raises(OutOfRangeError):
        checksum_steps(pair.decode.shard(0), pair.ours, steps=(0, TOKENS), **asked)  # type: ignore[arg-type]
    with pytest.raises(OutOfRangeError):
        checksum_cells(pair.decode.shard(0), pair.ours, step=3, **asked)  # type: ignore[arg-type]
