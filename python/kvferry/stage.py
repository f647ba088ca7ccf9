"""Fewer, longer operations between transports, without agents: see kvferry/stage.h.

A stage belongs to one transport and has an arena of bounded size there. Cells from one rank to another go
direct, one operation for each run, or packed through the arenas of both: whichever is predicted to be faster,
or as the caller says.
The transport passes incoming messages to its stage, and progresses it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from kvferry._binding import ffi, lib
from kvferry._native import Arena, OfOneProcess, call, nanoseconds, resource_of, result_of, string, take
from kvferry._values import callback, list_of, listed, of_type
from kvferry.errors import ClosedError, ExistsError, InvalidError, Status
from kvferry.events import Way
from kvferry.model import DtypeLike, Model, dtype_set
from kvferry.request import BlockTable, GroupSteps, Request
from kvferry.shard import Shard
from kvferry.transfer import Begun, Moving
from kvferry.transport import Direction, Peer, Transport


@dataclass(frozen=True)
class StageInfo:
    """The resources and counters of a stage; see kvf_stage_info in kvferry/stage.h."""

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
    worker_copies: int
    device_slots: int
    device_flows: int


@dataclass(frozen=True)
class FlowRequest:
    """What a peer asks for when it begins a flow; see kvf_flow_request in kvferry/stage.h.

    Attributes:
        direction: READ: the peer reads from here; WRITE: it writes here
        permission: the number by which the peer claims permission, see Stage.pull(); 0: none
        bytes: of the flow, according to the peer
        groups: steps and blocks of this rank, one for each group of the model, all unchecked
    """

    peer: str
    direction: Direction
    permission: int
    bytes: int
    groups: tuple[GroupSteps, ...]


def _convert_sets(model: Model, convert: Iterable[DtypeLike], names: Sequence[str] | None) -> list[int]:
    """For each group of the model, the types that may be converted."""
    types = dtype_set(convert)
    own = [group.name for group in model.groups]
    names = None if names is None else list_of(str, names)
    for name in names or ():
        if name not in own:
            raise InvalidError(f"convert_groups has {name!r}; the model has {', '.join(own)}")
    return [types if names is None or name in names else 0 for name in own]


def device_arena(given: int | None) -> int:
    """The bytes of the arena on a device, as the library takes them."""
    return int(lib.KVF_NO_DEVICE_ARENA) if given is None else given


def device_copies(given: int | None) -> int:
    """The bytes of a run that the driver copies, as the library takes them."""
    return int(lib.KVF_NO_DEVICE_COPIES) if given is None else given


class Stage(OfOneProcess):
    """Moves a rank's requests in fewer, longer operations.

    Args:
        transport: with the shard's memory registered; its card is asked for after the stage is made; it has one
            stage at most
        shard: this rank's
        arena_bytes: 0: 64 MiB; at least 4 slots
        device_arena_bytes: of a second arena in memory of the device, if the shard's regions are there and a
            transport takes such memory; 0: 64 MiB; None: there is none
        device_copy_bytes: of a run between the device and the host's arena that the driver copies instead of a
            kernel, which takes multiprocessors; 0: 256 KiB; None: a kernel copies everything
        slot_bytes: most that one operation moves: a power of two from 4 KiB to 1 MiB; 0: 1 MiB
        window: slots lent for one flow at once, up to 16; 0: 8
        flows: open with one peer at once, each way, if both sides allow as many; further ones wait; 0: 64
        workers: threads that gather and scatter; 0: Transport.progress() does it itself; up to 16
        stall: seconds after which a flow is ended if its peer owes a message and is silent; None: 30 s
        doubt: seconds for which slots are kept that a lost peer may still touch; None: 30 s
        convert: element types (of f32, f16, bf16, f8_e4m3, f8_e5m2) between which peers' flows may be converted
        convert_groups: the groups to which `convert` applies; None: all
        permit: called with a FlowRequest, from Transport.progress(), when a peer begins a flow; returns whether
            the peer may. It may call nothing of the stage. If it raises, progress() raises the same, and the
            flow is refused. None: every peer that has joined may
        on_event: called from Transport.progress() with the name of a peer that broke the rules, the status and
            a sentence. It may call nothing of the stage

    Raises InvalidError, NotRegisteredError (the shard's memory is not), ExistsError (the transport has one).
    """

    def __init__(
        self,
        transport: Transport,
        shard: Shard,
        *,
        arena_bytes: int = 0,
        device_arena_bytes: int | None = 0,
        device_copy_bytes: int | None = 0,
        slot_bytes: int = 0,
        window: int = 0,
        flows: int = 0,
        workers: int = 0,
        stall: float | None = None,
        doubt: float | None = None,
        convert: Iterable[DtypeLike] = (),
        convert_groups: Sequence[str] | None = None,
        permit: Callable[[FlowRequest], bool] | None = None,
        on_event: Callable[[str, Status, str], object] | None = None,
    ) -> None:
        # The endpoint keeps its stage, so the stage must not keep the transport: dropping it closes both.
        self._transport_of = weakref.ref(of_type(Transport, transport))
        self._endpoint = transport._endpoint
        self._shard = of_type(Shard, shard)
        self._on_event = callback(on_event)
        self._permit = callback(permit)
        self._moves: set[_Move] = set()
        self._pointer: Any = None
        self._context = ffi.new_handle(self)
        arena = Arena()
        options = arena.new(
            "kvf_stage_options",
            arena_bytes=arena_bytes,
            device_arena_bytes=device_arena(device_arena_bytes),
            device_copy_bytes=device_copies(device_copy_bytes),
            slot_bytes=slot_bytes,
            window=window,
            flows=flows,
            workers=workers,
            stall_ns=nanoseconds(stall, "stall"),
            doubt_ns=nanoseconds(doubt, "doubt"),
            convert=arena.numbers("uint32_t", _convert_sets(shard.model, convert, convert_groups)),
            permit=lib.python_permit if permit is not None else ffi.NULL,
            on_event=lib.python_on_event,
            context=self._context,
        )
        with transport._using() as pointer:
            if transport._endpoint.stage is not None:
                raise ExistsError("this Transport has a Stage already")
            self._pointer = take(
                lib.kvf_stage_open,
                "kvf_stage *",
                pointer,
                shard._get().pointer,
                options,
                undo=lib.kvf_stage_close,
            )
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
        """Ends all flows, without telling the peers. Closing the transport does so too. May be called again."""
        with self._endpoint.lock:
            if self._pointer is None:
                return
            if self._endpoint.progressing:
                raise InvalidError("a callback may not close the stage of the transport that called it")
            for move in list(self._moves):  # a signal handler's exception comes when one is freed
                move.end()
            pointer, self._pointer = self._pointer, None
            self._endpoint.stage = None
            lib.kvf_stage_close(pointer)

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _peer(self, peer: Peer) -> Any:
        return of_type(Peer, peer)._of(self._transport)

    def join(self, peer: Peer) -> None:
        """Names a peer that has a stage too; both sides do so before either pulls or pushes.

        Raises ExistsError (a peer of that name has joined), InvalidError.
        """
        with self._using() as pointer:
            call(lib.kvf_stage_join, pointer, self._peer(peer))

    def leave(self, peer: Peer) -> None:
        """Ends all flows with a peer that is about to be closed; one that is lost leaves by itself."""
        with self._using() as pointer:
            lib.kvf_stage_leave(pointer, self._peer(peer))

    def stop(self, peer: Peer) -> None:
        """Ends the flows that this peer has opened, with CancelledError there."""
        with self._using() as pointer:
            lib.kvf_stage_stop(pointer, self._peer(peer))

    def revoke(self, permission: int) -> bool:
        """Ends the flows that peers have opened by a permission, with CancelledError there.

        Returns whether none of them touches the shard's memory any more. A device cannot be stopped in a copy:
        progress, and ask again.
        """
        with self._using() as pointer:
            return bool(result_of(lib.kvf_stage_revoke, pointer, permission))

    def quiet(self, name: str) -> None:
        """Says that a peer that has left no longer touches our memory: the slots lent to it are free."""
        with self._using() as pointer:
            lib.kvf_stage_quiet(pointer, Arena().text(name))

    def pull(
        self,
        request: Request,
        peers: Sequence[Peer],
        *,
        way: Way = Way.AUTO,
        priority: int = 0,
        permissions: Sequence[int] | None = None,
    ) -> StageMove:
        """Starts reading a request; peers[i] is the peer of Plan.sources[i]. See StageMove.

        Args:
            way: of all sources; AUTO chooses for each
            priority: 0 to 255: packed flows of higher priority go first, at both ends; one slot in
                16 is of the flow whose last one was longest ago
            permissions: for each source, a number from its peer, for the peer's `permit`; None: 0 for all
        """
        resource = resource_of(Request, request)
        count = lib.kvf_plan_source_count(lib.kvf_request_plan(resource.pointer))
        peers = listed(peers, "peers")
        if len(peers) != count:
            raise InvalidError(f"{len(peers)} peers; the plan has {count} sources")
        given = [0] * count if permissions is None else listed(permissions, "numbers")
        if len(given) != count:
            raise InvalidError(f"{len(given)} permissions; the plan has {count} sources")
        arena = Arena()
        with self._using() as pointer, request._lock:
            pointers = ffi.new("kvf_peer *[]", [self._peer(peer) for peer in peers] or 1)
            options = arena.new("kvf_move_options", way=way, priority=priority)
            options.permissions = arena.numbers("uint64_t", given, "a permission")
            move = StageMove(self, request)
            move._move.begin(lib.kvf_stage_pull, pointer, resource.pointer, pointers, options)
            return move

    def push(
        self,
        request: Request,
        source: int,
        peer: Peer,
        *,
        way: Way = Way.AUTO,
        priority: int = 0,
        permission: int = 0,
    ) -> StageMove:
        """Starts writing one source's cells at the source itself: this process is that rank.

        Args:
            request: over a plan that fills the peer's shard
            source: this rank's index in Plan.sources
            peer: the rank that the plan calls local
            way, priority: as in pull()
            permission: a number from the peer, which the peer's `permit` gets
        """
        resource = resource_of(Request, request)
        arena = Arena()
        with self._using() as pointer, request._lock:
            options = arena.new("kvf_move_options", way=way, priority=priority)
            options.permissions = arena.numbers("uint64_t", [permission], "permission")
            target = self._peer(peer)
            move = StageMove(self, request)
            move._move.begin(lib.kvf_stage_push, pointer, resource.pointer, source, target, options)
            return move

    @property
    def info(self) -> StageInfo:
        """Its resources, and its counters so far."""
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
                info.worker_copies,
                info.device_slots,
                info.device_flows,
            )

    # The transport calls these, holding its lock.

    def _notice(self, sender: Any, data: Any, size: int) -> bool:
        return bool(lib.kvf_stage_notice(self._pointer, sender, data, size))

    def _lost(self, peer: Any) -> None:
        lib.kvf_stage_leave(self._pointer, peer)

    def _progress(self) -> bool:
        busy = ffi.new("bool *")
        call(lib.kvf_stage_progress, self._pointer, busy)
        return bool(busy[0])


@ffi.def_extern()  # type: ignore[untyped-decorator]
def python_permit(context: Any, peer: Any, request: Any) -> bool:
    stage: Stage = ffi.from_handle(context)
    try:
        return stage._permit is not None and bool(stage._permit(_read_flow_request(peer, request)))
    except BaseException as error:  # Transport.progress() raises it
        stage._endpoint.raised = stage._endpoint.raised or error
        return False


def _read_flow_request(peer: Any, request: Any) -> FlowRequest:
    def steps(group: Any) -> GroupSteps:
        ids = ffi.unpack(group.table.ids, group.table.count) if group.table.count else []
        return GroupSteps(BlockTable(ids, group.table.first_block), group.begin, group.end)

    groups = tuple(steps(request.groups[g]) for g in range(request.group_count))
    return FlowRequest(string(peer), Direction(request.direction), request.permission, request.bytes, groups)


@ffi.def_extern()  # type: ignore[untyped-decorator]
def python_on_event(context: Any, peer: Any, status: int, text: Any) -> None:
    stage: Stage = ffi.from_handle(context)
    if stage._on_event is None:
        return
    try:
        stage._on_event(string(peer), Status(status), string(text))
    except BaseException as error:  # Transport.progress() raises it
        stage._endpoint.raised = stage._endpoint.raised or error


class _Move(Begun):
    """The library's side of a move, which the stage keeps."""

    def __init__(self, stage: Stage, request: Request) -> None:
        super().__init__(stage._endpoint, request, stage._moves, "kvf_move *")
        self.status, self.detail = Status.IN_PROGRESS, ""
        self.bytes, self.packed = 0, 0

    def look(self) -> _Move:
        """Asks the library how far it is; of one that was freed, the last answer stays."""
        with self.endpoint.lock:
            if self.pointer is not None:
                info = Arena().new("kvf_move_info")
                self.status = Status(lib.kvf_move_status(self.pointer))
                if self.status not in (Status.OK, Status.IN_PROGRESS):
                    self.detail = string(lib.kvf_error_detail())
                call(lib.kvf_move_get_info, self.pointer, info)
                self.bytes, self.packed = info.bytes, info.packed
            return self

    @property
    def _free(self) -> Any:
        return lib.kvf_move_free

    def _look_last(self) -> None:
        if self.look().status == Status.IN_PROGRESS:
            self.status = Status.CANCELLED


class StageMove(Moving):
    """A request moving through a stage, whether its sources go direct or packed."""

    def __init__(self, stage: Stage, request: Request) -> None:
        self._transport = stage._transport  # lives as long as the move
        self._move = _Move(stage, request)

    def __del__(self) -> None:
        # Not freed here, because a garbage collection may begin with any lock held.
        self._move.endpoint.forgotten.append(self._move)

    @property
    def status(self) -> Status:
        return self._move.look().status

    @property
    def detail(self) -> str:
        return self._move.look().detail

    @property
    def bytes(self) -> int:
        return self._move.look().bytes

    @property
    def packed(self) -> int:
        """How many of its sources go packed."""
        return self._move.look().packed

    def cancel(self) -> None:
        with self._move.endpoint.lock:
            if self._move.pointer is not None:
                lib.kvf_move_cancel(self._move.pointer)

    def close(self) -> None:
        self._move.end()
