"""Stages: requests through arenas, between transports without agents."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from coordinates import (
    DECODE_TABLE,
    PREFILL_TABLE,
    TOKENS,
    decode_engine,
    fill,
    prefill_engine,
    small_model,
    wrong_cells,
)
from kvferry import (
    CancelledError,
    ClosedError,
    ExistsError,
    GroupRequest,
    InvalidError,
    NotFoundError,
    NotRegisteredError,
    Peer,
    Plan,
    Request,
    Shard,
    Stage,
    Status,
    Transport,
    Way,
    transport_kinds,
)

SLOT = 4096


class End:
    """A rank: its transport, its memory, its stage, and its peers by rank of the other engine."""

    def __init__(self, name: str, shard: Shard, kind: str) -> None:
        self.shard = shard
        self.events: list[str] = []
        self.notices: list[bytes] = []
        self.transport = Transport(
            kind, name=name, on_notify=lambda _transport, _sender, data: self.notices.append(data)
        )
        self.regions = [self.transport.allocate(size) for size in shard.region_bytes]
        self.transport.register(self.regions, shard)
        self.stage = Stage(
            self.transport,
            shard,
            arena_bytes=8 * SLOT,
            slot_bytes=SLOT,
            on_event=lambda _peer, _status, text: self.events.append(text),
        )
        self.peers: list[Peer] = []

    def meet(self, other: End) -> None:
        self.peers.append(self.transport.connect(other.transport.card))
        self.stage.join(self.peers[-1])


class Pair:
    """Two prefill ranks and a decode rank, that have joined each other."""

    def __init__(self, kind: str) -> None:
        model = small_model()
        self.prefill, self.decode = prefill_engine(model), decode_engine(model)
        self.plan = Plan(self.decode.shard(0), self.prefill)
        self.request = Request(self.plan, [GroupRequest(DECODE_TABLE, PREFILL_TABLE, 0, TOKENS)])
        self.theirs = [End(f"p{i}", shard, kind) for i, shard in enumerate(self.prefill.shards)]
        self.here = End("d", self.decode.shard(0), kind)
        for end in self.theirs:
            fill(end.shard, end.regions, PREFILL_TABLE)
            self.here.meet(end)
            end.meet(self.here)
        self.ends = [self.here, *self.theirs]

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline
            for end in self.ends:
                end.transport.progress()

    def wrong(self) -> int:
        return len(wrong_cells(self.here.shard, self.here.regions, DECODE_TABLE))

    def close(self) -> None:
        for end in self.ends:
            end.transport.close()


@pytest.fixture(params=[kind for kind in transport_kinds() if kind not in ("cuda", "ucx")])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(request.param)
    yield made
    made.close()


@pytest.mark.parametrize("way", list(Way))
def test_a_pull_goes_as_it_is_told(pair: Pair, way: Way) -> None:
    assert pair.wrong() > 0
    with pair.here.stage.pull(pair.request, pair.here.peers, way=way, priority=3) as move:
        pair.until(lambda: move.status != Status.IN_PROGRESS)
        assert move.wait(0)
        assert move.bytes == sum(pair.request.bytes(source) for source in range(2))
        if way != Way.AUTO:
            assert move.packed == (2 if way == Way.PACKED else 0)
    assert pair.wrong() == 0
    pair.until(lambda: all(end.stage.info.flows == 0 for end in pair.ends))
    for end in pair.ends:
        info = end.stage.info
        assert (info.slots, info.slots_free, info.failed, info.refused) == (8, 8, 0, 0)
        assert not end.events and not end.notices


def test_a_push_goes_packed(pair: Pair) -> None:
    moves = [
        end.stage.push(pair.request, source, end.peers[0], way=Way.PACKED)
        for source, end in enumerate(pair.theirs)
    ]
    pair.until(lambda: all(move.status == Status.OK for move in moves))
    assert pair.wrong() == 0
    pair.until(lambda: pair.here.stage.info.lent_bytes == sum(move.bytes for move in moves))
    for move in moves:
        move.close()


def test_the_users_own_notifications_still_come(pair: Pair) -> None:
    pair.theirs[0].peers[0].notify(b"hello")
    pair.until(lambda: pair.here.notices == [b"hello"])


def test_a_move_is_cancelled(pair: Pair) -> None:
    move = pair.here.stage.pull(pair.request, pair.here.peers, way=Way.PACKED)
    move.cancel()
    pair.until(lambda: move.status == Status.CANCELLED)
    with pytest.raises(CancelledError, match="cancelled by its owner"):
        move.wait(0)
    move.close()
    pair.until(lambda: all(end.stage.info.flows == 0 for end in pair.ends))


def test_who_has_not_joined_is_refused_packed(pair: Pair) -> None:
    pair.here.stage.leave(pair.here.peers[0])
    with pytest.raises(NotFoundError, match="has not joined"):
        pair.here.stage.pull(pair.request, pair.here.peers, way=Way.PACKED)
    with pytest.raises(InvalidError, match="priority"):
        pair.here.stage.pull(pair.request, pair.here.peers, priority=256)
    with pytest.raises(ExistsError):
        pair.here.stage.join(pair.here.peers[1])


def test_a_peer_that_breaks_the_rules_is_an_event(pair: Pair) -> None:
    pair.theirs[0].peers[0].notify(b"kvfs\x01 is no message")
    pair.until(lambda: len(pair.here.events) == 1)
    assert pair.here.stage.info.refused == 1
    assert not pair.here.notices


def test_a_transport_has_one_stage_and_closes_it() -> None:
    shard = decode_engine(small_model()).shard(0)
    transport = Transport("inproc")
    with pytest.raises(NotRegisteredError):
        Stage(transport, shard)
    transport.register([transport.allocate(size) for size in shard.region_bytes], shard)
    with pytest.raises(InvalidError, match="slot_bytes"):
        Stage(transport, shard, slot_bytes=5000)
    stage = Stage(transport, shard, arena_bytes=8 * SLOT, slot_bytes=SLOT)
    with pytest.raises(ExistsError):
        Stage(transport, shard)
    transport.close()
    assert stage.closed
    with pytest.raises(ClosedError):
        _ = stage.info
    stage.close()


def test_a_transport_that_is_forgotten_goes_with_its_stage() -> None:
    shard = decode_engine(small_model()).shard(0)
    transport = Transport("inproc")
    transport.register([transport.allocate(size) for size in shard.region_bytes], shard)
    stage = Stage(transport, shard, arena_bytes=8 * SLOT, slot_bytes=SLOT)
    known = weakref.ref(transport)
    del transport
    gc.collect()
    assert known() is None
    assert stage.closed
