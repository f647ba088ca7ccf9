"""Stages: requests through arenas, between transports without agents."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

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
    wrong_cells,
)
from kvferry import (
    BlockTable,
    CancelledError,
    ClosedError,
    Direction,
    ExistsError,
    FlowRequest,
    Group,
    GroupRequest,
    InvalidError,
    Model,
    NotFoundError,
    NotPermittedError,
    NotRegisteredError,
    Part,
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

    def __init__(self, name: str, shard: Shard, kind: str, **options: Any) -> None:
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
            **options,
        )
        self.peers: list[Peer] = []

    def meet(self, other: End) -> None:
        self.peers.append(self.transport.connect(other.transport.card))
        self.stage.join(self.peers[-1])


class Pair:
    """Two prefill ranks and a decode rank that have joined each other. The options apply to all stages."""

    def __init__(self, kind: str, decode_model: Model | None = None, **options: Any) -> None:
        model = small_model()
        self.prefill, self.decode = prefill_engine(model), decode_engine(decode_model or model)
        self.plan = Plan(self.decode.shard(0), self.prefill, convert=("f32", "f16") if decode_model else ())
        self.request = Request(self.plan, [GroupRequest(DECODE_TABLE, PREFILL_TABLE, 0, TOKENS)])
        self.theirs = [End(f"p{i}", shard, kind, **options) for i, shard in enumerate(self.prefill.shards)]
        self.here = End("d", self.decode.shard(0), kind, **options)
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


@pytest.fixture(params=[kind for kind in transport_kinds() if kind not in ("cuda", "libfabric", "ucx")])
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


def test_workers_copy_what_they_are_given() -> None:
    made = Pair("shm", workers=2)
    with made.here.stage.pull(made.request, made.here.peers, way=Way.PACKED) as move:
        made.until(lambda: move.status != Status.IN_PROGRESS)
        assert move.wait(0)
    assert made.wrong() == 0
    assert sum(end.stage.info.worker_copies for end in made.ends) > 0
    made.close()
    with pytest.raises(InvalidError, match="workers is 17; allowed: 0 to 16"):
        Pair("inproc", workers=17)


def half_model() -> Model:
    parts = tuple(Part(name, "f16", HEADS, HEAD_SIZE) for name in ("k", "v"))
    return Model([Group("full", tuple(range(LAYERS)), parts)], name="small")


def test_elements_are_converted_where_the_lender_lets_them_be() -> None:
    made = Pair("inproc", half_model(), convert=("f32", "f16"), convert_groups=["full"])
    with made.here.stage.pull(made.request, made.here.peers) as move:
        made.until(lambda: move.status != Status.IN_PROGRESS)
        assert move.wait(0) and move.packed == 2
    shard, rounded = made.here.shard, 0
    for layer, part, token, head in all_cells(shard):
        block, row = divmod(token, shard.groups[0].tokens_per_block)
        place = shard.locate(0, layer, part, DECODE_TABLE[block], row, head)
        got = made.here.regions[place.region].view(np.uint8)[place.offset : place.offset + place.bytes]
        wanted = cell(layer, part, token, head)
        assert np.array_equal(got.view(np.float16), wanted.astype(np.float16))
        rounded += not np.array_equal(wanted, wanted.astype(np.float16).astype(np.float32))
    assert rounded > 0
    made.close()


def test_elements_are_not_converted_unless_the_lender_lets_them_be() -> None:
    made = Pair("inproc", half_model())
    with made.here.stage.pull(made.request, made.here.peers) as move:
        made.until(lambda: move.status != Status.IN_PROGRESS)
        with pytest.raises(NotPermittedError, match="does not allow conversion"):
            move.wait(0)
    made.close()
    with pytest.raises(InvalidError, match="convert_groups has 'swa'; the model has full"):
        Pair("inproc", half_model(), convert=("f32", "f16"), convert_groups=["swa"])


def test_a_flow_begins_where_it_is_permitted() -> None:
    asked: list[FlowRequest] = []

    def permit(request: FlowRequest) -> bool:
        asked.append(request)
        if request.permission == 9:
            raise ValueError("nine")
        return request.permission == 7

    made = Pair("inproc", permit=permit)
    move = made.here.stage.pull(made.request, made.here.peers, way=Way.PACKED, permissions=[7, 7])
    made.until(lambda: move.status == Status.OK)
    move.close()
    assert made.wrong() == 0
    assert [request.peer for request in asked] == ["d", "d"]
    for source, request in enumerate(asked):
        assert (request.direction, request.bytes) == (Direction.READ, made.request.bytes(source))
        group = request.groups[0]
        assert isinstance(group.table, BlockTable) and list(group.table.ids) == PREFILL_TABLE
        assert (group.begin, group.end) == (0, TOKENS)

    move = made.here.stage.pull(made.request, made.here.peers, way=Way.PACKED, permissions=[7, 8])
    made.until(lambda: move.status != Status.IN_PROGRESS)
    with pytest.raises(NotPermittedError, match="the mover may not read"):
        move.wait(0)
    move.close()
    made.until(lambda: all(end.stage.info.flows == 0 for end in made.ends))
    push = made.theirs[0].stage.push(made.request, 0, made.theirs[0].peers[0], way=Way.PACKED, permission=9)
    with pytest.raises(ValueError, match="nine"):
        made.until(lambda: push.status != Status.IN_PROGRESS)
    made.until(lambda: push.status != Status.IN_PROGRESS)
    assert push.status == Status.PERMISSION and "may not write" in push.detail
    push.close()
    made.close()


@pytest.mark.parametrize("by_permission", [False, True])
def test_moves_by_a_permission_or_of_a_peer_are_ended(by_permission: bool) -> None:
    made = Pair("inproc", permit=lambda _request: True)
    move = made.here.stage.pull(made.request, made.here.peers, way=Way.PACKED, permissions=[7, 7])
    made.here.transport.progress()
    for end in made.theirs:
        end.transport.progress()  # it has lent all slots that it may, and waits
        assert end.stage.info.flows == 1
        if by_permission:
            assert end.stage.revoke(7)
        else:
            end.stage.stop(end.peers[0])
    made.until(lambda: move.status != Status.IN_PROGRESS)
    assert move.status == Status.CANCELLED
    move.close()
    made.close()


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


def test_a_peer_that_has_not_joined_is_refused_packed(pair: Pair) -> None:
    pair.here.stage.leave(pair.here.peers[0])
    with pytest.raises(NotFoundError, match="has not joined"):
        pair.here.stage.pull(pair.request, pair.here.peers, way=Way.PACKED)
    with pytest.raises(InvalidError, match="priority"):
        pair.here.stage.pull(pair.request, pair.here.peers, priority=256)
    with pytest.raises(InvalidError, match="1 permissions; the plan has 2 sources"):
        pair.here.stage.pull(pair.request, pair.here.peers, permissions=[3])
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


def test_a_forgotten_move_lets_its_request_and_its_transport_go() -> None:
    decode, prefill = decode_engine(small_model()), prefill_engine(small_model(), tp_size=1)
    here, there = Transport("inproc"), Transport("inproc")
    for transport, shard in ((here, decode.shard(0)), (there, prefill.shard(0))):
        transport.register([transport.allocate(size) for size in shard.region_bytes], shard)
    stage, groups = Stage(here, decode.shard(0)), [GroupRequest(DECODE_TABLE, PREFILL_TABLE, 0, TOKENS)]
    request, peer = Request(Plan(decode.shard(0), prefill), groups), here.connect(there.card)
    stage.pull(request, [peer], way=Way.DIRECT)
    gc.collect()
    request.set(groups)
    stage.pull(request, [peer], way=Way.DIRECT)
    known = weakref.ref(here)
    del here, transport, stage, peer
    gc.collect()
    assert known() is None
    request.set(groups)
    there.close()
