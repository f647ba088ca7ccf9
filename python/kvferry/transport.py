"""Moving runs between processes: endpoints, peers, transfers. See kvferry/transport.h.

Both sides must call progress() (or wait(), or Transfer.wait()): the side that reads or writes, to get on; the
other, to answer connections, to receive notifications, and to serve memory that cannot be reached directly.
Methods may be called from any thread; calls on one transport wait for one another.
"""

from __future__ import annotations

import contextlib
import enum
import os
import select
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvferry._binding import ffi, lib
from kvferry._native import Arena, OfOneProcess, call, data_at, resource_of, seconds_of, string, take
from kvferry._values import callback, list_of, of_type
from kvferry.allocating import Allocating
from kvferry.buffers import (
    Allocations,
    Buffer,
    Memory,
    Registered,
    memory_array,
    region_for,
    regions_of,
)
from kvferry.errors import ClosedError, InvalidError, KvferryError, Status
from kvferry.request import RUN_DTYPE, Request
from kvferry.transfer import Freed, Move, Transfer
from kvferry.ucx import with_ucx

if TYPE_CHECKING:
    from kvferry.shard import Shard
    from kvferry.stage import Stage


@dataclass(frozen=True)
class PeerInfo:
    """The transport that serves a peer, and its counters; see kvf_peer_info in kvferry/transport.h."""

    kind: str
    way: str
    passed_over: str
    bytes_read: int
    bytes_written: int


@dataclass(frozen=True)
class TransportInfo:
    """The resources of an endpoint that peers use; see kvf_transport_info in kvferry/transport.h."""

    clients: int
    clients_max: int
    processes: int
    stuck: int
    buffer_bytes: int
    cut_buffers: int
    refused: int


@dataclass(frozen=True)
class Finding:
    """What one kind of transport found on this machine; see kvf_transport_finding in kvferry/transport.h."""

    kind: str
    asked: bool
    works: bool
    why_not: str
    library: str
    version: str
    ways: list[str]


# poll() takes milliseconds as a C int.
_LONGEST_POLL = 2e6


class Direction(enum.IntEnum):
    """The direction of a move."""

    READ = lib.KVF_READ
    WRITE = lib.KVF_WRITE


def transport_kinds() -> list[str]:
    """The kinds of transport in this build, best first."""
    names: list[str] = []
    while (name := lib.kvf_transport_kind_name(len(names))) != ffi.NULL:
        names.append(string(name))
    return names


def settings_of(arena: Arena, settings: Mapping[str, str]) -> Any:
    """The settings as a kvf_setting[]."""
    made = arena.keep(ffi.new("kvf_setting[]", len(settings) or 1))
    for i, (key, value) in enumerate(settings.items()):
        made[i].key, made[i].value = arena.text(key), arena.text(value)
    return made


class Endpoint:
    """State that must live as long as the library's endpoint, also if the caller never closes it."""

    def __init__(self, on_notify: Any, on_peer_lost: Any) -> None:
        self.pointer: Any = None
        self.process = os.getpid()
        self._lock = threading.RLock()
        self.progressing = False  # inside a call of the library that calls callbacks
        self.on_notify = on_notify
        self.on_peer_lost = on_peer_lost
        self.raised: BaseException | None = None  # by a callback, for progress() or close() to raise
        self.kept: list[Any] = []
        self.regions = Registered()
        self.allocations = Allocations()
        self.transport: Callable[[], Transport | None] = lambda: None
        # Peers keep their transport, so the transport must not keep them.
        self.peers: weakref.WeakValueDictionary[int, Peer] = weakref.WeakValueDictionary()
        self.moves: set[Move] = set()
        self.forgotten: deque[Freed] = deque()  # of transfers and moves that Python has dropped
        self.operations: set[Operation] = set()  # that move, or may
        self.stage: Stage | None = None
        self.context = ffi.new_handle(self)

    @property
    def lock(self) -> contextlib.AbstractContextManager[Any]:
        """Held while the library's endpoint is used.

        It is entered as it is: an exception that a signal handler raises while a function of Python enters or
        leaves it would keep it held for as long as that exception is handled.

        None in a child of fork(), where the library does nothing, and the thread that held it may not be.
        """
        return self._lock if self.process == os.getpid() else contextlib.nullcontext()

    def close(self) -> None:
        if self.process != os.getpid():
            return  # the endpoint belongs to the process that opened it
        with self.lock:
            if self.pointer is None:
                return
            if self.progressing:
                raise InvalidError("a callback may not close the transport that called it")
            for move in list(self.moves):
                move.end()
            if self.stage is not None:
                self.stage.close()
            self.progressing = True
            try:
                lib.kvf_transport_close(self.pointer)
            finally:  # a signal handler's exception comes when the endpoint is closed
                self.progressing = False
                self.pointer = None
                for peer in list(self.peers.values()):
                    peer._pointer = None
                self.peers.clear()
                self.operations.clear()
                self.kept.clear()
                self.regions.clear()
            self.raise_what_callbacks_raised()

    def raise_what_callbacks_raised(self) -> None:
        """Raises the first exception that was kept."""
        raised, self.raised = self.raised, None
        if raised is not None:
            raise raised

    def end_forgotten(self) -> None:
        """Frees transfers and moves that Python has dropped."""
        with self.lock:
            while self.forgotten:
                first = self.forgotten[0]
                first.end()  # a signal handler's exception may come before it is freed
                with contextlib.suppress(ValueError):
                    self.forgotten.remove(first)


@contextlib.contextmanager
def _collecting(endpoint: Endpoint) -> Iterator[None]:
    """Keeps an exception of a callback, which would be lost on its way through the library."""
    try:
        yield
    except BaseException as error:
        endpoint.raised = endpoint.raised or error


@ffi.def_extern()  # type: ignore[untyped-decorator]
def python_on_notify(context: Any, _transport: Any, sender: Any, data: Any, size: int) -> None:
    endpoint: Endpoint = ffi.from_handle(context)
    transport = endpoint.transport()
    with _collecting(endpoint):
        if endpoint.stage is not None and endpoint.stage._notice(sender, data, size):
            return
        if endpoint.on_notify is not None and transport is not None:
            endpoint.on_notify(transport, string(sender), data_at(data, size))


@ffi.def_extern()  # type: ignore[untyped-decorator]
def python_on_peer_lost(context: Any, _transport: Any, pointer: Any, detail: Any) -> None:
    endpoint: Endpoint = ffi.from_handle(context)
    transport = endpoint.transport()
    with _collecting(endpoint):
        if endpoint.stage is not None:
            endpoint.stage._lost(pointer)
        if endpoint.on_peer_lost is not None and transport is not None:
            known = endpoint.peers.get(int(ffi.cast("uintptr_t", pointer)))
            endpoint.on_peer_lost(transport, known or Peer(transport, pointer), string(detail))


@ffi.def_extern()  # type: ignore[untyped-decorator]
def python_kvf_done(context: Any, number: int, status: int, detail: Any) -> None:
    operation: Operation = ffi.from_handle(context)
    with _collecting(operation._endpoint):
        operation._finish(status, string(detail))


class Transport(Allocating):
    """One endpoint of a rank.

    Args:
        kind: "auto", or one of transport_kinds(), which is then the only kind used
        name: for messages and for peers' logs; None: made from the process id
        max_in_flight: operations posted at once, for each peer; 0: a default
        settings: of kinds of transport, such as {"ucx.tls": "tcp", "shm.direct": "off"}: see
            kvferry/transport.h. Without "ucx.library", the UCX of Python packages is tried after the system's
        on_notify: called for each notification of a peer, with the transport, the sender's name and the bytes
        on_peer_lost: called when a peer is gone, with the transport, the peer and the reason

    Callbacks run inside progress(), on the thread that calls it; progress() raises their exceptions. What moves
    when the transport or a peer is closed ends inside that call; Transport.close() raises what progress() has
    not. They may call anything of the transport except progress() and close().

    Raises NotFoundError (no such kind or setting), InvalidError (the value of a setting), UnsupportedError
    (not in this build), InputOutputError.
    """

    def __init__(
        self,
        kind: str = "auto",
        *,
        name: str | None = None,
        max_in_flight: int = 0,
        settings: Mapping[str, str] | None = None,
        on_notify: Callable[[Transport, str, bytes], object] | None = None,
        on_peer_lost: Callable[[Transport, Peer, str], object] | None = None,
    ) -> None:
        endpoint = Endpoint(callback(on_notify), callback(on_peer_lost))
        endpoint.transport = weakref.ref(self)
        arena = Arena()
        settings = with_ucx(settings)
        options = arena.new(
            "kvf_transport_options",
            name=arena.text(name),
            max_in_flight=max_in_flight,
            settings=settings_of(arena, settings),
            setting_count=len(settings),
            on_notify=lib.python_on_notify,
            on_peer_lost=lib.python_on_peer_lost,
            context=endpoint.context,
        )
        endpoint.kept.append(arena)
        endpoint.pointer = take(
            lib.kvf_transport_open,
            "kvf_transport *",
            arena.text(kind),
            options,
            undo=lib.kvf_transport_close,
        )
        self._endpoint = endpoint
        self._finalizer = weakref.finalize(self, endpoint.close)

    @property
    def _lock(self) -> contextlib.AbstractContextManager[Any]:
        return self._endpoint.lock

    def _get(self) -> Any:
        """The library's endpoint, which `_lock` keeps open."""
        if self._endpoint.pointer is None:
            raise ClosedError("this Transport was closed")
        if self._endpoint.process != os.getpid():
            raise ClosedError("this Transport belongs to the process that forked this one")
        return self._endpoint.pointer

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._endpoint.pointer is None

    def close(self) -> None:
        """Closes all peers (their transfers end with CancelledError) and the endpoint. May be called again."""
        self._endpoint.close()

    def __enter__(self) -> Transport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def findings(self) -> list[Finding]:
        """What each kind of transport in this build found, best first."""
        with self._lock:
            pointer = self._get()
            found, out = Arena().new("kvf_transport_finding"), []
            for i in range(len(transport_kinds())):
                call(lib.kvf_transport_find, pointer, i, found)
                out.append(
                    Finding(
                        string(found.kind),
                        found.asked,
                        found.works,
                        string(found.why_not),
                        string(found.library),
                        string(found.version),
                        string(found.ways).split(),
                    )
                )
            return out

    @contextlib.contextmanager
    def _using(self) -> Iterator[Any]:
        with self._lock:
            yield self._get()

    def _allocator(self) -> tuple[contextlib.AbstractContextManager[Any], Any, Allocations]:
        return self._using(), lib.kvf_transport_allocate, self._endpoint.allocations

    def register(self, buffers: Memory, shard: Shard | None = None, *, withheld: bool | None = None) -> None:
        """Registers this rank's memory, once, before the card is asked for and peers are connected.

        The objects are kept until the transport is closed or their region is unregistered; their bytes are
        not copied.

        Args:
            buffers: one object for each region of the shard, or {layer: object} if a region is a layer: see
                kvferry.buffers
            shard: number, sizes, element types and shapes are checked against it: see Shard.regions(); None: no
                checks
            withheld: no peer gets access to the memory, and it moves packed, through a Stage; None: true for
                memory of devices, false for the host's

        Raises InvalidError, OutOfRangeError, OverlapError, ExistsError (registered already), UnsupportedError.
        """
        regions = [self._endpoint.allocations.at_owner(region) for region in regions_of(buffers, shard)]
        memory = memory_array(regions, withheld)
        with self._lock, self._endpoint.regions.adding(dict(enumerate(regions))):
            call(lib.kvf_transport_register, self._get(), memory, len(regions))

    def register_region(
        self, region: int, buffer: Buffer, shard: Shard | None = None, *, withheld: bool | None = None
    ) -> None:
        """Registers one region, at any time: an unregistered one, or the next new one.

        Peers reach it by cards exported after the call. The object is kept until the transport is closed or the
        region is unregistered.

        Raises InvalidError, OutOfRangeError (numbers left out, or too small), OverlapError, ExistsError,
        UnsupportedError.
        """
        found = self._endpoint.allocations.at_owner(region_for(region, buffer, shard))
        with self._lock, self._endpoint.regions.adding({region: found}):
            call(lib.kvf_transport_register_region, self._get(), region, memory_array([found], withheld))

    @property
    def info(self) -> TransportInfo:
        """The resources of this endpoint that peers use, as far as its kinds count them."""
        with self._lock:
            pointer = self._get()
            info = Arena().new("kvf_transport_info")
            call(lib.kvf_transport_get_info, pointer, info)
            return TransportInfo(
                info.clients,
                info.clients_max,
                info.processes,
                info.stuck,
                info.buffer_bytes,
                info.cut_buffers,
                info.refused,
            )

    def unregister_region(self, region: int) -> None:
        """Takes one region back, at any time: earlier cards are refused from then on.

        Raises AgainError (operations use it, or a peer, which the message names with its process, is in the
        middle of a write: make progress and call again), NotRegisteredError.
        """
        with self._lock:
            pointer = self._get()
            call(lib.kvf_transport_unregister_region, pointer, region)
            self._endpoint.regions.remove(region)

    @property
    def card(self) -> bytes:
        """The card by which peers connect and access the registered memory: give it only to peers that may."""
        with self._lock:
            pointer = self._get()
            data, size = ffi.new("void const **"), ffi.new("size_t *")
            call(lib.kvf_transport_export, pointer, data, size)
            return data_at(data[0], size[0])

    def connect(self, card: bytes) -> Peer:
        """Connects to the endpoint that exported the card. May return before the peer has answered.

        The connection lasts until Peer.close(), or until the transport is closed, also if the Peer is dropped.

        Raises ParseError (not a card), UnsupportedError (no kind in common), PeerLostError, NotPermittedError.
        """
        with self._lock:
            pointer = self._get()
            made = take(lib.kvf_transport_connect, "kvf_peer *", pointer, *Arena().data(card))
            return Peer(self, made)

    def progress(self) -> bool:
        """Does a bounded amount of work without blocking; returns whether there is more to do at once."""
        endpoint = self._endpoint
        with self._lock:
            pointer = self._get()
            if endpoint.progressing:
                raise InvalidError("a callback may not call progress() of the transport that called it")
            busy = ffi.new("bool *")
            endpoint.end_forgotten()
            endpoint.progressing = True
            try:
                call(lib.kvf_transport_progress, pointer, busy)
                staging = endpoint.stage is not None and endpoint.stage._progress()
            finally:
                endpoint.progressing = False
            endpoint.raise_what_callbacks_raised()
            return bool(busy[0]) or staging

    def wait(self, timeout: float) -> None:
        """Sleeps until progress() has something to do, or `timeout` seconds are over; then makes progress."""
        seconds = min(max(seconds_of(timeout), 0.0), _LONGEST_POLL)  # below 0 is for ever
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        if not self.progress():
            poll.poll(seconds * 1000)
            self.progress()

    def fileno(self) -> int:
        """A file descriptor that is readable when progress() has something to do. Do not read from it."""
        with self._lock:
            pointer = self._get()
            return int(lib.kvf_transport_event_fd(pointer))

    def pull(self, request: Request, peers: Sequence[Peer]) -> Transfer:
        """Starts reading a request; peers[i] is the peer of Plan.sources[i]. See Transfer."""
        return self._start(request, Direction.READ, peers)

    def put(self, request: Request, peers: Sequence[Peer]) -> Transfer:
        """Starts writing a request back to where it would be read from; peers as for pull()."""
        return self._start(request, Direction.WRITE, peers)

    def _start(self, request: Request, direction: Direction, peers: Sequence[Peer]) -> Transfer:
        resource = resource_of(Request, request)
        count = lib.kvf_plan_source_count(lib.kvf_request_plan(resource.pointer))
        peers = list_of(Peer, peers)
        if len(peers) != count:
            raise InvalidError(f"{len(peers)} peers; the plan has {count} sources")
        with self._lock, request._lock:
            self._get()
            pointers = ffi.new("kvf_peer *[]", [peer._of(self) for peer in peers] or 1)
            transfer = Transfer(self, Move(self._endpoint, request))
            transfer._move.begin(lib.kvf_transfer_start, resource.pointer, direction, pointers)
            return transfer

    def push(self, request: Request, source: int, peer: Peer) -> Transfer:
        """Starts writing one source's cells at the source itself: this process is that rank.

        Args:
            request: over a plan that fills the peer's shard
            source: this rank's index in Plan.sources
            peer: the rank that the plan calls local
        """
        resource = resource_of(Request, request)
        with self._lock, request._lock:
            self._get()
            target = of_type(Peer, peer)._of(self)
            transfer = Transfer(self, Move(self._endpoint, request))
            transfer._move.begin(lib.kvf_transfer_push, resource.pointer, source, target)
            return transfer


class Peer(OfOneProcess):
    """Another endpoint, connected with Transport.connect(). Close it: the connection outlives the object."""

    def __init__(self, transport: Transport, pointer: Any) -> None:
        self._transport = transport
        self._pointer = pointer
        transport._endpoint.peers[int(ffi.cast("uintptr_t", pointer))] = self

    @property
    def _lock(self) -> contextlib.AbstractContextManager[Any]:
        return self._transport._lock

    def _get(self) -> Any:
        self._transport._get()
        if self._pointer is None:
            raise ClosedError("this Peer was closed")
        return self._pointer

    def _of(self, transport: Transport) -> Any:
        if self._transport is not transport:
            raise InvalidError("a peer of another transport")
        if self._pointer is None:
            raise ClosedError("this Peer was closed")
        return self._pointer

    @property
    def closed(self) -> bool:
        """Whether it was closed, or its transport was."""
        return self._pointer is None

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def kind(self) -> str:
        """The kind of transport that serves this peer, such as "shm"."""
        with self._lock:
            pointer = self._get()
            return string(lib.kvf_peer_kind(pointer))

    @property
    def info(self) -> PeerInfo:
        """The transport that serves this peer, and how much has moved."""
        with self._lock:
            pointer = self._get()
            info = Arena().new("kvf_peer_info")
            call(lib.kvf_peer_get_info, pointer, info)
            return PeerInfo(
                string(info.kind),
                string(info.way),
                string(info.passed_over),
                info.bytes_read,
                info.bytes_written,
            )

    @property
    def region_bytes(self) -> list[int]:
        """Sizes of the peer's regions."""
        with self._lock:
            pointer = self._get()
            count = ffi.new("uint32_t *")
            sizes = lib.kvf_peer_region_bytes(pointer, count)
            return [sizes[i] for i in range(count[0])]

    def submit(
        self,
        direction: Direction,
        runs: NDArray[np.void],
        on_done: Callable[[Operation], object] | None = None,
    ) -> Operation:
        """Submits a batch of runs, an array of RUN_DTYPE: all runs are accepted, or none.

        Args:
            on_done: called once, from progress(), or when the peer or the transport is closed

        Raises OutOfRangeError (a run outside a region), NotRegisteredError, PeerLostError, InvalidError.
        """
        if not isinstance(runs, np.ndarray) or runs.dtype != RUN_DTYPE or runs.ndim != 1:
            raise InvalidError("runs are not a one-dimensional array of RUN_DTYPE")
        kept = np.ascontiguousarray(runs).copy()  # must not change while it moves
        with self._lock:
            pointer = self._get()
            operation = Operation(self._transport, kept, callback(on_done))
            target = ffi.cast("kvf_run *", kept.ctypes.data)
            # Kept from before the call: an exception of a signal handler may come when the runs are under way.
            self._transport._endpoint.operations.add(operation)
            try:
                operation._number = take(
                    lib.kvf_transport_submit,
                    "kvf_operation",
                    pointer,
                    direction,
                    target,
                    len(kept),
                    lib.python_kvf_done,
                    operation._context,
                )
            except KvferryError:
                self._transport._endpoint.operations.discard(operation)
                raise
            return operation

    def notify(self, data: bytes) -> None:
        """Sends a small message, of 1 to 4096 bytes, that arrives whole, once, in order, after earlier writes.

        Raises OutOfRangeError, AgainError (the peer does not drain: progress and repeat), PeerLostError.
        """
        with self._lock:
            pointer = self._get()
            call(lib.kvf_transport_notify, pointer, *Arena().data(data))

    def close(self) -> None:
        """Ends the connection; what moves ends with CancelledError first. May be called again."""
        endpoint = self._transport._endpoint
        with endpoint.lock:
            pointer, self._pointer = self._pointer, None
            if pointer is None:
                return
            if endpoint.stage is not None:
                endpoint.stage._lost(pointer)
            before, endpoint.progressing = endpoint.progressing, True  # or a callback closes this peer
            try:
                lib.kvf_peer_close(pointer)
            finally:
                endpoint.progressing = before
            endpoint.peers.pop(int(ffi.cast("uintptr_t", pointer)), None)


class Operation(OfOneProcess):
    """A batch of runs on its way, see Peer.submit()."""

    def __init__(self, transport: Transport, runs: NDArray[np.void], on_done: Any) -> None:
        self._endpoint = transport._endpoint
        self._runs = runs
        self._on_done = on_done
        self._number = 0
        self._context = ffi.new_handle(self)
        self.status = Status.IN_PROGRESS
        """IN_PROGRESS while it moves; OK when its bytes are there."""
        self.detail = ""
        """One sentence about a failure: the kind of transport, the peer, how far it came, and why."""

    def _finish(self, status: int, detail: str) -> None:
        self.status = Status(status)
        self.detail = detail
        self._endpoint.operations.discard(self)
        if self._on_done is not None:
            self._on_done(self)

    def cancel(self) -> None:
        """Stops it: its status becomes CANCELLED once nothing can touch its memory any more, or OK."""
        with self._endpoint.lock:
            if self._endpoint.pointer is not None and self.status == Status.IN_PROGRESS:
                call(lib.kvf_transport_cancel, self._endpoint.pointer, self._number)
