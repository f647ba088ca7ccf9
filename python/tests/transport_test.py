"""Endpoints, peers and transfers."""

from __future__ import annotations

import ctypes
import gc
import mmap
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

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
    RUN_DTYPE,
    CancelledError,
    ClosedError,
    Direction,
    ExistsError,
    GroupRequest,
    InvalidError,
    NotFoundError,
    NotRegisteredError,
    Operation,
    OutOfRangeError,
    OverlapError,
    ParseError,
    Peer,
    Plan,
    Request,
    Shard,
    Status,
    Transport,
    transport_kinds,
)

Regions = list[NDArray[np.uint8]]


def open_rank(shard: Shard, kind: str) -> tuple[Transport, Regions]:
    transport = Transport(kind)
    regions: Regions = [transport.allocate(size) for size in shard.region_bytes]
    transport.register(regions, shard)
    return transport, regions


class Pair:
    """Two prefill ranks and a decode rank, connected."""

    def __init__(self, kind: str) -> None:
        model = small_model()
        self.prefill, self.decode = prefill_engine(model), decode_engine(model)
        self.plan = Plan(self.decode.shard(0), self.prefill)
        self.request = Request(self.plan, [GroupRequest(DECODE_TABLE, PREFILL_TABLE, 0, TOKENS)])
        self.theirs = [open_rank(shard, kind) for shard in self.prefill.shards]
        self.here, self.ours = open_rank(self.decode.shard(0), kind)
        for shard, (_, regions) in zip(self.prefill.shards, self.theirs, strict=True):
            fill(shard, regions, PREFILL_TABLE)
        self.peers = [self.here.connect(transport.card) for transport, _ in self.theirs]
        self.all = [self.here, *(transport for transport, _ in self.theirs)]

    def close(self) -> None:
        self.here.close()
        for transport, _ in self.theirs:
            transport.close()


def until(condition: Callable[[], bool], *transports: Transport) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        for transport in transports:
            transport.progress()


@pytest.mark.parametrize("kind", ["inproc", "shm", "messages", "auto"])
def test_a_request_is_pulled_from_two_ranks(kind: str) -> None:
    pair = Pair(kind)
    with pair.here.pull(pair.request, pair.peers) as transfer:
        until(lambda: transfer.wait(0), *pair.all)
        assert transfer.bytes == sum(pair.request.bytes(source) for source in range(2))
        assert transfer.status is Status.OK
    assert wrong_cells(pair.decode.shard(0), pair.ours, DECODE_TABLE) == []
    pair.close()
    # Arrays outlive the transport that allocated them.
    assert wrong_cells(pair.decode.shard(0), pair.ours, DECODE_TABLE) == []


def test_a_corrupted_cell_is_seen_by_these_tests() -> None:
    pair = Pair("inproc")
    with pair.here.pull(pair.request, pair.peers) as transfer:
        with pytest.raises(OutOfRangeError, match="timeout is nan"):
            transfer.wait(float("nan"))
        transfer.wait(20)
    place = pair.decode.shard(0).locate(0, 1, 1, DECODE_TABLE[0], 17, 3)
    pair.ours[place.region][place.offset] ^= 1
    assert wrong_cells(pair.decode.shard(0), pair.ours, DECODE_TABLE) == [(1, 1, 17, 3)]
    pair.close()


def test_each_source_pushes_its_part() -> None:
    pair = Pair("shm")
    card = pair.here.card
    for source, (transport, _) in enumerate(pair.theirs):
        with transport.push(pair.request, source, transport.connect(card)) as transfer:
            until(lambda: transfer.status != Status.IN_PROGRESS, *pair.all)
            assert transfer.wait()
    assert wrong_cells(pair.decode.shard(0), pair.ours, DECODE_TABLE) == []
    pair.close()


def test_a_batch_of_runs_is_read_and_reported_once() -> None:
    pair = Pair("inproc")
    done: list[Operation] = []
    runs = pair.request.runs(0)
    operation = pair.peers[0].submit(Direction.READ, runs, done.append)
    runs["bytes"] = 2**60  # harmless, because the batch was copied
    until(lambda: operation.status != Status.IN_PROGRESS, pair.here)
    assert done == [operation] and operation.status is Status.OK
    operation.cancel()
    pair.close()


def test_a_run_outside_a_region_is_refused_whole() -> None:
    pair = Pair("inproc")
    runs = pair.request.runs(0)
    runs[-1]["remote_offset"] = 2**40
    with pytest.raises(OutOfRangeError, match="region"):
        pair.peers[0].submit(Direction.READ, runs)
    with pytest.raises(InvalidError, match="RUN_DTYPE"):
        pair.peers[0].submit(Direction.READ, np.zeros(3, np.uint64))
    assert not any(region.any() for region in pair.ours)
    pair.close()


def test_notifications_arrive_and_errors_of_callbacks_are_raised() -> None:
    heard: list[bytes] = []

    def listen(_transport: Transport, sender: str, data: bytes) -> None:
        assert sender == "a consumer"
        heard.append(data)
        if data == b"bad":
            raise LookupError("of the callback")

    with Transport("inproc", on_notify=listen) as there, Transport("inproc", name="a consumer") as here:
        there.register([bytearray(64)])
        here.register([bytearray(64)])
        peer = here.connect(there.card)
        assert (peer.kind, peer.region_bytes) == ("inproc", [64])
        peer.notify(b"hello")
        until(lambda: heard == [b"hello"], here, there)
        peer.notify(b"bad")
        with pytest.raises(LookupError, match="of the callback"):
            until(lambda: False, here, there)
        with pytest.raises(OutOfRangeError):
            peer.notify(b"")


def test_callbacks_may_not_progress_or_close_their_transport() -> None:
    refused: list[str] = []

    def listen(transport: Transport, _sender: str, _data: bytes) -> None:
        for call in (transport.progress, transport.close):
            with pytest.raises(InvalidError) as raised:
                call()
            refused.append(raised.value.detail)

    with Transport("inproc", on_notify=listen) as there, Transport("inproc") as here:
        there.register([bytearray(64)])
        here.register([bytearray(64)])
        here.connect(there.card).notify(b"x")
        until(lambda: len(refused) == 2, here, there)


@pytest.mark.parametrize("closes", ["the peer", "the transport"])
def test_what_ends_because_something_is_closed_may_not_close_or_progress_the_transport(closes: str) -> None:
    refused: list[str] = []

    def done(_operation: Operation) -> None:
        for call in (pair.here.progress, pair.here.close):
            with pytest.raises(InvalidError) as raised:
                call()
            refused.append(raised.value.detail)
        pair.peers[0].close()

    pair = Pair("shm")
    operation = pair.peers[0].submit(Direction.READ, pair.request.runs(0), done)
    (pair.peers[0] if closes == "the peer" else pair.here).close()
    assert operation.status is Status.CANCELLED and len(refused) == 2
    assert pair.here.closed == (closes == "the transport")
    pair.close()
    assert pair.here.closed


@pytest.mark.parametrize("closes", ["the peer", "the transport"])
def test_an_error_of_a_callback_is_raised_when_the_transport_is_closed(closes: str) -> None:
    def fail(operation: Operation) -> None:
        raise RuntimeError(f"a bug of the caller, {operation.status.name}")

    pair = Pair("shm")
    pair.peers[0].submit(Direction.READ, pair.request.runs(0), fail)
    if closes == "the peer":
        pair.peers[0].close()
    with pytest.raises(RuntimeError, match="a bug of the caller, CANCELLED"):
        pair.here.close()
    assert pair.here.closed
    pair.close()


def test_waiting_for_less_than_no_time_ends_at_once() -> None:
    with Transport("inproc") as transport:
        waiting = threading.Thread(target=transport.wait, args=(-0.001,), daemon=True)
        waiting.start()
        waiting.join(20)
        assert not waiting.is_alive()


def test_a_lost_peer_is_reported() -> None:
    lost: list[tuple[Peer, str]] = []
    with Transport("inproc", on_peer_lost=lambda _transport, *what: lost.append(what)) as here:
        there = Transport("inproc")
        there.register([bytearray(64)])
        here.register([bytearray(64)])
        peer = here.connect(there.card)
        there.close()
        until(lambda: lost == [(peer, "the peer has closed its endpoint")], here)


def test_a_request_that_moves_cannot_be_set() -> None:
    pair = Pair("inproc")
    transfer = pair.here.pull(pair.request, pair.peers)
    with pytest.raises(InvalidError, match="being moved"):
        pair.request.set([GroupRequest(DECODE_TABLE, PREFILL_TABLE, 0, 1)])
    transfer.wait(20)
    transfer.close()
    transfer.close()
    pair.request.set([GroupRequest(DECODE_TABLE, PREFILL_TABLE, 0, 1)])
    pair.close()


def test_a_request_whose_transfer_was_dropped_can_be_set_again() -> None:
    pair = Pair("inproc")
    for end in (1, 2, 3):
        pair.request.set([GroupRequest(DECODE_TABLE, PREFILL_TABLE, 0, end)])
        assert pair.here.pull(pair.request, pair.peers).wait(20)
    pair.close()


def test_a_cancelled_transfer_says_so() -> None:
    pair = Pair("inproc")
    transfer = pair.here.pull(pair.request, pair.peers)
    transfer.cancel()
    until(lambda: transfer.status != Status.IN_PROGRESS, pair.here)
    if transfer.status != Status.OK:
        with pytest.raises(CancelledError):
            transfer.wait(1)
    pair.close()


def test_objects_of_a_closed_transport_are_closed() -> None:
    pair = Pair("inproc")
    transfer = pair.here.pull(pair.request, pair.peers)
    pair.close()
    pair.close()
    assert transfer.status in (Status.CANCELLED, Status.OK)
    transfer.cancel()
    transfer.close()
    peer = pair.peers[0]
    assert peer.closed and pair.here.closed
    peer.close()
    uses: list[Callable[[], object]] = [
        lambda: peer.kind,
        lambda: peer.region_bytes,
        lambda: peer.notify(b"x"),
        lambda: peer.submit(Direction.READ, np.zeros(1, RUN_DTYPE)),
        pair.here.progress,
        pair.here.fileno,
        lambda: pair.here.card,
        lambda: pair.here.allocate(4),
        lambda: pair.here.connect(b"x"),
        lambda: pair.here.pull(pair.request, pair.peers),
        lambda: pair.here.register([bytearray(4)]),
    ]
    for use in uses:
        with pytest.raises(ClosedError):
            use()


def test_wrong_kinds_cards_peers_and_registrations_are_refused() -> None:
    assert "inproc" in transport_kinds()
    with pytest.raises(NotFoundError):
        Transport("pigeon")
    pair = Pair("inproc")
    with pytest.raises(ParseError):
        pair.here.connect(b"not a card")
    with pytest.raises(ExistsError):
        pair.here.register(pair.ours)
    with pytest.raises(InvalidError, match="1 peers; the plan has 2 sources"):
        pair.here.pull(pair.request, pair.peers[:1])
    with pytest.raises(InvalidError, match="another transport"):
        pair.theirs[0][0].pull(pair.request, pair.peers)
    with pytest.raises(OutOfRangeError):
        pair.here.allocate((0, 4))
    pair.close()


def test_a_peer_is_closed_at_the_end_of_its_block() -> None:
    with Transport("inproc") as there, Transport("inproc") as here:
        with here.connect(there.card) as peer:
            assert not peer.closed
        assert peer.closed
        with pytest.raises(ClosedError):
            peer.notify(b"more")


def test_a_text_that_is_none_is_refused_by_its_value() -> None:
    with pytest.raises(InvalidError, match=r"^16 is of type int; allowed: text$"):
        Transport("cuda", settings={"cuda.blocks": 16})  # type: ignore[dict-item]
    with pytest.raises(InvalidError, match=r"^b'rank 0' is of type bytes; allowed: text$"):
        Transport("inproc", name=b"rank 0")  # type: ignore[arg-type]


def test_single_regions_come_and_go() -> None:
    memory = np.zeros(64, np.uint8)
    with Transport("inproc") as transport:
        transport.register([memory[:32], memory[32:]])
        card = transport.card
        transport.unregister_region(0)
        with pytest.raises(NotRegisteredError):
            transport.unregister_region(0)
        with pytest.raises(OverlapError, match="regions 0 and 1 share 32 bytes"):
            transport.register_region(0, memory)
        transport.register_region(0, memory[:32])
        with Transport("inproc") as other:
            other.register([np.zeros(8, np.uint8)])
            with pytest.raises(NotRegisteredError, match="generation"):
                other.connect(card)
            assert other.connect(transport.card).region_bytes == [32, 32]


def test_an_endpoint_counts_what_peers_take_of_it() -> None:
    with Transport("shm") as owner, Transport("shm") as reader:
        owner.register([np.zeros(64, np.uint8)])
        reader.register([np.zeros(64, np.uint8)])
        assert (owner.info.clients, owner.info.processes, owner.info.refused) == (0, 0, 0)
        peer = reader.connect(owner.card)
        owner.progress()
        assert (owner.info.clients, owner.info.processes, owner.info.stuck) == (1, 1, 0)
        assert owner.info.clients_max > 1
        peer.close()
        owner.progress()
        assert owner.info.clients == 0
    assert Transport("inproc").info.clients_max == 0


def test_a_forgotten_transport_is_closed_and_lets_its_memory_go() -> None:
    memory = np.zeros(64, np.uint8)
    transport = Transport("inproc")
    transport.register([memory])
    gone = weakref.ref(memory)
    del memory
    gc.collect()
    assert gone() is not None
    del transport
    gc.collect()
    assert gone() is None


def test_forgotten_peers_and_transfers_do_not_keep_their_transport() -> None:
    pair = Pair("inproc")
    pair.here.pull(pair.request, pair.peers)
    gc.collect()
    pair.here.progress()
    pair.request.set([GroupRequest(DECODE_TABLE, PREFILL_TABLE, 0, 1)])
    transport = weakref.ref(pair.here)
    pair.here.pull(pair.request, pair.peers)
    pair.close()
    del pair
    gc.collect()
    assert transport() is None


def mapped_at(address: int, size: int) -> NDArray[np.uint8]:
    """New memory at an address where nothing is."""
    library = ctypes.CDLL(None)
    library.mmap.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    length = ctypes.c_size_t(size)
    place = library.mmap(ctypes.c_void_p(address), length, protection, flags, -1, ctypes.c_size_t(0))
    assert place == address
    return np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(place)), np.uint8)


def unmap(memory: NDArray[np.uint8]) -> None:
    ctypes.CDLL(None).munmap(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes))


def test_memory_where_an_array_of_the_transport_was_is_registered_as_it_is() -> None:
    size = 1 << 20
    with Transport("shm") as there, Transport("shm") as here:
        gone = here.allocate(size)
        at = gone.ctypes.data
        del gone
        gc.collect()
        memory = mapped_at(at, size)
        here.register([memory])
        there.register([np.full(size, 7, np.uint8)])
        runs = np.zeros(1, RUN_DTYPE)
        runs["bytes"] = size
        operation = here.connect(there.card).submit(Direction.READ, runs)
        until(lambda: operation.status != Status.IN_PROGRESS, here, there)
        assert operation.status is Status.OK
        assert (memory == 7).all()
        here.unregister_region(0)
    unmap(memory)


def test_threads_may_share_a_transport() -> None:
    pair = Pair("shm")
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(200):
                pair.here.progress()
                assert len(pair.peers[0].region_bytes) == 2
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    with pair.here.pull(pair.request, pair.peers) as transfer:
        until(lambda: transfer.status != Status.IN_PROGRESS, *pair.all)
    for thread in threads:
        thread.join()
    assert errors == []
    assert wrong_cells(pair.decode.shard(0), pair.ours, DECODE_TABLE) == []
    pair.close()
