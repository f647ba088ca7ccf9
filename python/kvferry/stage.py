"""Fewer, longer operations between transports, without agents: see kvferry/stage.h.

A stage belongs to one transport and has an arena of bounded size there. What one rank gives another goes
direct, one operation for each run, or packed through the arenas of both: by what is predicted to be faster, or
as told.
The transport hands its stage what comes, and the stage progresses where the transport does.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvferry._binding import ffi, lib
from kvferry._native import Arena, call, string, take
from kvferry.errors import ClosedError, ExistsError, InvalidError, Status
from kvferry.events import Way
from kvferry.request import Request
from kvferry.transfer import Moving

if TYPE_CHECKING:
    from kvferry.shard import Shard
    from kvferry.transport import Peer, Transport


@dataclass(frozen=True)
class StageInfo:
    """What a stage has and did; see kvf_stage_info in kvferry/stage.h."""

    region: int
    slots: int
    slots_free: int
    slots_lent: int
    slots_doubt: int
    flows: int
    moves: dict[Way, int]
    bytes: dict[Way, int]
    lent_bytes: int
    failed: int
    refused: int


class Stage:
    """What makes fewer, longer operations of a rank's requests.

    Args:
        transport: on which the shard's memory is registered, and of which cards are asked for afterwards; it
            has one stage at most
        shard: this rank's
        arena_bytes: 0: 64 MiB; at least 4 slots
        slot_bytes: most that one operation moves: a power of two from 4 KiB to 1 MiB; 0: 1 MiB
        window: slots lent for one flow at once, up to 16; 0: 8
        flows: open with one peer at once, each way, the same on both sides; 0: 64
        on_event: called with the name of a peer that did what it must not, the status and a sentence, from
            Transport.progress(). It may call nothing of the stage

    Raises InvalidError, NotRegisteredError (the shard's memory is not), ExistsError (the transport has one).
    """

    def __init__(
        self,
        transport: Transport,
        shard: Shard,
        *,
        arena_bytes: int = 0,
        slot_bytes: int = 0,
        window: int = 0,
        flows: int = 0,
        on_event: Callable[[str, Status, str], object] | None = None,
    ) -> None:
        # The endpoint keeps its stage, which must not keep the transport: who forgets that, closes both.
        self._transport_of = weakref.ref(transport)
        self._endpoint = transport._endpoint
        self._shard = shard
        self._on_event = on_event
        self._moves: set[StageMove] = set()
        self._pointer: Any = None
        self._context = ffi.new_handle(self)
        options = Arena().new(
            "kvf_stage_options",
            arena_bytes=arena_bytes,
            slot_bytes=slot_bytes,
            window=window,
            flows=flows,
            on_event=lib.python_on_event,
            context=self._context,
        )
        with transport._using() as pointer:
            if transport._endpoint.stage is not None:
                raise ExistsError("this Transport has a Stage")
            self._pointer = take(lib.kvf_stage_open, "kvf_stage *", pointer, shard._get().pointer, options)
            transport._endpoint.stage = self

    @property
    def _transport(self) -> Transport:
        transport = self._transport_of()
        if transport is None:
            raise ClosedError("the Transport of this Stage is gone")
        return transport

    @contextlib.contextmanager
    def _using(self) -> Iterator[Any]:
        with self._transport._using():
            if self._pointer is None:
                raise ClosedError("this Stage was closed")
            yield self._pointer

    @property
    def closed(self) -> bool:
        """Whether it was closed, or its transport was."""
        return self._pointer is None

    def close(self) -> None:
        """Ends all flows, without a word to the peers. The transport does so where it is closed. May be called
        again."""
        with self._endpoint.lock:
            if self._pointer is None:
                return
            if self._endpoint.progressing:
                raise InvalidError("a callback may not close the stage of the transport that called it")
            pointer, self._pointer = self._pointer, None
            self._endpoint.stage = None
            for move in list(self._moves):
                move._end()
            lib.kvf_stage_close(pointer)

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def join(self, peer: Peer) -> None:
        """Names a peer that has a stage too; both sides do so before either pulls or pushes.

        Raises ExistsError (a peer of that name has joined), InvalidError.
        """
        with self._using() as pointer:
            call(lib.kvf_stage_join, pointer, peer._of(self._transport))

    def leave(self, peer: Peer) -> None:
        """Ends all flows with a peer that is about to be closed; one that is lost leaves by itself."""
        with self._using() as pointer:
            lib.kvf_stage_leave(pointer, peer._of(self._transport))

    def quiet(self, name: str) -> None:
        """Nobody of that name, who has left, touches our memory any more: slots it was lent are free."""
        with self._using() as pointer:
            lib.kvf_stage_quiet(pointer, Arena().text(name))

    def pull(
        self, request: Request, peers: Sequence[Peer], *, way: Way = Way.AUTO, priority: int = 0
    ) -> StageMove:
        """Starts reading a request; peers[i] is the peer of Plan.sources[i]. See StageMove.

        Args:
            way: of all sources; AUTO chooses for each
            priority: 0 to 255: packed flows of a higher one go first, at both ends
        """
        resource = request._get()
        count = lib.kvf_plan_source_count(lib.kvf_request_plan(resource.pointer))
        if len(peers) != count:
            raise InvalidError(f"{len(peers)} peers; the plan has {count} sources")
        with self._using() as pointer, request._lock:
            pointers = ffi.new("kvf_peer *[]", [peer._of(self._transport) for peer in peers] or 1)
            options = Arena().new("kvf_move_options", way=way, priority=priority)
            made = take(lib.kvf_stage_pull, "kvf_move *", pointer, resource.pointer, pointers, options)
            return StageMove(self, request, made)

    def push(
        self, request: Request, source: int, peer: Peer, *, way: Way = Way.AUTO, priority: int = 0
    ) -> StageMove:
        """Starts writing what one source gives, at the source itself: this process is that rank.

        Args:
            request: over a plan that fills the peer's shard
            source: index of Plan.sources which this rank is
            peer: the rank the plan calls local
        """
        resource = request._get()
        with self._using() as pointer, request._lock:
            options = Arena().new("kvf_move_options", way=way, priority=priority)
            target = peer._of(self._transport)
            made = take(lib.kvf_stage_push, "kvf_move *", pointer, resource.pointer, source, target, options)
            return StageMove(self, request, made)

    @property
    def info(self) -> StageInfo:
        """What it has and did so far."""
        with self._using() as pointer:
            info = Arena().new("kvf_stage_info")
            call(lib.kvf_stage_get_info, pointer, info)
            return StageInfo(
                info.region,
                info.slots,
                info.slots_free,
                info.slots_lent,
                info.slots_doubt,
                info.flows,
                {way: info.moves[way] for way in Way},
                {way: info.bytes[way] for way in Way},
                info.lent_bytes,
                info.failed,
                info.refused,
            )

    # What the transport calls, with its lock.

    def _notice(self, sender: Any, data: Any, size: int) -> bool:
        return bool(lib.kvf_stage_notice(self._pointer, sender, data, size))

    def _lost(self, peer: Any) -> None:
        lib.kvf_stage_leave(self._pointer, peer)

    def _progress(self) -> bool:
        busy = ffi.new("bool *")
        call(lib.kvf_stage_progress, self._pointer, busy)
        return bool(busy[0])


@ffi.def_extern()  # type: ignore[untyped-decorator]
def python_on_event(context: Any, peer: Any, status: int, text: Any) -> None:
    stage: Stage = ffi.from_handle(context)
    if stage._on_event is None:
        return
    try:
        stage._on_event(string(peer), Status(status), string(text))
    except BaseException as error:  # Transport.progress() raises it
        stage._endpoint.raised = stage._endpoint.raised or error


class StageMove(Moving):
    """A request on its way through a stage, whichever way its sources go."""

    def __init__(self, stage: Stage, request: Request, pointer: Any) -> None:
        self._stage = stage
        self._transport = stage._transport  # lives as long as what moves
        self._request = request
        self._kept = request._get()
        self._pointer: Any = pointer
        self._status, self._detail = Status.IN_PROGRESS, ""
        self._bytes, self._packed = 0, 0
        request._moving += 1
        stage._moves.add(self)

    def _look(self) -> Status:
        with self._stage._endpoint.lock:
            if self._pointer is not None:
                info = Arena().new("kvf_move_info")
                self._status = Status(lib.kvf_move_status(self._pointer))
                if self._status not in (Status.OK, Status.IN_PROGRESS):
                    self._detail = string(lib.kvf_error_detail())
                call(lib.kvf_move_get_info, self._pointer, info)
                self._bytes, self._packed = info.bytes, info.packed
            return self._status

    def _end(self) -> None:
        with self._stage._endpoint.lock:
            if self._pointer is None:
                return
            if self._look() == Status.IN_PROGRESS:
                self._status = Status.CANCELLED
            lib.kvf_move_free(self._pointer)
            self._pointer = None
            self._request._moving -= 1
            self._stage._moves.discard(self)

    @property
    def status(self) -> Status:
        return self._look()

    @property
    def detail(self) -> str:
        self._look()
        return self._detail

    @property
    def bytes(self) -> int:
        self._look()
        return self._bytes

    @property
    def packed(self) -> int:
        """How many of its sources go packed."""
        self._look()
        return self._packed

    def cancel(self) -> None:
        with self._stage._endpoint.lock:
            if self._pointer is not None:
                lib.kvf_move_cancel(self._pointer)

    def close(self) -> None:
        self._end()
