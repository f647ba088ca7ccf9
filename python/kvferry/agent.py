"""Sessions: the ranks of two engines meet, lend each other blocks, move them, and survive each other's failure.

See kvferry/agent.h for the roles of both sides, and for who owns a block when.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, overload, runtime_checkable

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kvferry._binding import ffi, lib
from kvferry._native import Arena, Resource, call, data_at, fill, id_fields, nanoseconds, string, take
from kvferry.buffers import (
    Allocations,
    Buffer,
    Memory,
    array_bytes,
    memory_array,
    refuse_overlap,
    region_for,
    regions_of,
)
from kvferry.contact import Contact, KeyGrant, KeyPair, contact_fields, grant_fields
from kvferry.device import CudaEvent, DeviceArray, device_array, place_of
from kvferry.errors import ClosedError, InvalidError, OutOfRangeError, Status, check
from kvferry.events import (
    AgentStats,
    BlockClaim,
    BlockState,
    ClockOffset,
    Event,
    FailurePolicy,
    LogLevel,
    LogLine,
    Way,
    read_event,
    read_line,
    read_stats,
)
from kvferry.model import Agreement, DtypeLike, GroupMatch, dtype_set
from kvferry.peers import AgentPeer, read_peer
from kvferry.records import Record, records_in
from kvferry.region import MemoryKind, Region
from kvferry.request import Blocks, GroupSteps, groups_in, tables_in
from kvferry.shard import Engine, Shard
from kvferry.transport import settings_of
from kvferry.ucx import with_ucx

__all__ = ["Agent", "Contact", "KeyPair"]

# A waiting thread checks at this interval for signals, and whether the agent is being closed.
WAIT_SECONDS = 0.05
ALL_TOKENS, ALL_LAYERS = 2**64 - 1, 2**32 - 1


class HasFileno(Protocol):
    """An object with a file descriptor: a file, a socket, a pipe's end."""

    def fileno(self) -> int:
        """The descriptor."""


@runtime_checkable
class HasCudaEvent(Protocol):
    """An event like torch.cuda.Event."""

    @property
    def cuda_event(self) -> int:
        """The handle; 0 before the event was recorded."""

    @property
    def device(self) -> Any:
        """The event's device: an object with an `index`."""


# A file descriptor that becomes readable when memory is ready to be read, and stays so; or an event of a CUDA
# stream.
Readable = int | HasFileno | CudaEvent | HasCudaEvent


def _ready_event(after: Readable | None, arena: Arena) -> Any:
    """A kvf_ready_event; NULL for None."""
    if after is None:
        return ffi.NULL
    if isinstance(after, HasCudaEvent):
        after = CudaEvent(after.cuda_event, getattr(after.device, "index", None) or 0)
    if isinstance(after, CudaEvent):
        return arena.new(
            "kvf_ready_event",
            kind=lib.KVF_READY_CUDA_EVENT,
            device_event=ffi.cast("void *", after.handle),
            device=after.device,
        )
    descriptor = after if isinstance(after, int) else after.fileno()
    return arena.new("kvf_ready_event", kind=lib.KVF_READY_FD, fd=descriptor)


def _read_match(match: Any) -> GroupMatch:
    def number(value: int) -> int | None:
        return None if value == 2**32 - 1 else int(value)

    return GroupMatch(
        string(match.name),
        number(match.ours),
        number(match.theirs),
        Agreement(match.agreement),
        match.layers_both,
        match.layers_ours,
        match.layers_theirs,
        string(match.detail),
    )


class _Session:
    """State that must live as long as the library's agent, also if the caller never closes the agent."""

    def __init__(self, log: Callable[[LogLine], object] | None) -> None:
        self.pointer: Any = None
        self.log = log
        self.kept: list[Any] = []
        self.regions: dict[int, Region] = {}  # registered
        self.allocations = Allocations()
        self.process = os.getpid()
        self.inside = 0  # calls under way
        self.closing = False
        self.change = threading.Condition()
        self.events = threading.Lock()
        self.logging: set[int] = set()  # threads that are inside `log`
        self.awaiting: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}  # tasks to be told of the end
        self.context = ffi.new_handle(self)

    @contextlib.contextmanager
    def using(self) -> Iterator[Any]:
        with self.change:
            if self.closing:
                raise ClosedError("this Agent was closed")
            if self.process != os.getpid():
                raise ClosedError(f"this Agent belongs to process {self.process}, which forked this one")
            self.inside += 1
        try:
            yield self.pointer
        finally:
            with self.change:
                self.inside -= 1
                self.change.notify_all()

    @contextlib.contextmanager
    def waking(self, ready: asyncio.Event) -> Iterator[None]:
        """Sets `ready`, the event of a waiting task, if the agent is closed meanwhile."""
        with self.change:
            if self.closing:
                raise ClosedError("this Agent was closed")
            self.awaiting[ready] = asyncio.get_running_loop()
        try:
            yield
        finally:
            with self.change:
                self.awaiting.pop(ready, None)

    def close(self) -> None:
        if threading.get_ident() in self.logging:
            raise InvalidError("the log function of an agent may not close the agent")
        if self.process != os.getpid():
            return  # its threads are not here
        with self.change:
            first, self.closing = not self.closing, True
            for ready, loop in self.awaiting.items():
                with contextlib.suppress(RuntimeError):  # that loop is over, and its task with it
                    loop.call_soon_threadsafe(ready.set)
            # The agent is closed when this returns, also if another thread closes it.
            self.change.wait_for(lambda: self.inside == 0 if first else self.pointer is None)
        if first:
            if self.pointer is not None:
                lib.kvf_agent_close(self.pointer)
            with self.change:
                self.pointer = None
                self.kept.clear()
                self.regions.clear()
                self.change.notify_all()


@ffi.def_extern()  # type: ignore[untyped-decorator]
def python_log(context: Any, line: Any) -> None:
    session: _Session = ffi.from_handle(context)
    if session.log is not None:
        session.logging.add(threading.get_ident())
        try:
            session.log(read_line(line))
        finally:
            session.logging.discard(threading.get_ident())


class Agent:
    """One rank of an engine, as its peers know it. Safe to use from several threads.

    Args:
        engine: every rank of this engine; None: a directory, see Agent.directory()
        rank: number of this rank in the engine
        listen: where to listen; None: "tcp://127.0.0.1:*"; "": nowhere
        advertise: the endpoint told to peers; None: the one listened on
        transport: kind, see transport_kinds()
        settings: of kinds of transport, see Transport
        facts: facts beyond the model that must be equal on both sides: weights, rotary scaling ...
        keys: own keys; None: no encryption
        allowed_keys: public keys of peers that may connect, or grants, which also name the peer; none: every
            peer that knows our public key
        insecure: listen beyond loopback without keys
        lease, heartbeat, peer_timeout, idle: seconds; None: the library's defaults
        max_peers, max_requests_per_peer: 0: the library's defaults
        max_connections, max_connections_per_address: likewise
        policy: what the engine is asked to do about failed requests
        verify: check the bytes that were read or written against checksums of the producer
        own_thread: make progress in a thread of the agent's own; otherwise nothing happens unless the caller
            waits in wait(), wait_event() or event(), or calls progress() when fileno() is readable
        log: receives the lines of the log, in order, on any thread; it may call the agent, but not close it
        log_level: level of the least important lines to receive
        way: how requests move; DIRECT: the agent has no arena
        arena_bytes: memory through which packed bytes go; 0: 64 MiB, touched once something goes packed
        slot_bytes: most that one packed operation moves, a power of two from 4 KiB to 1 MiB; 0: a default
        workers: threads that copy to and from that memory; 0: the thread that makes progress copies; up to 16
        convert: element types (of f32, f16, bf16) that may be converted into each other on the way; a group
            whose types differ moves if both engines allow all of them, and then packed
        convert_groups: the groups to which `convert` applies; None: all
        remember: seconds for which a held or pushed request is remembered after its end: a consumer that asks
            for it then is refused at once, and does not wait for a request of that id; None: not at all
        trace_requests: number of requests, the latest ones, whose times are kept for trace(); up to 65536

    Raises OutOfRangeError (rank), NotPermittedError (listening beyond loopback without keys), ExistsError
    (the address is taken), InvalidError, UnsupportedError, InputOutputError.
    """

    def __init__(
        self,
        engine: Engine | None,
        rank: int = 0,
        *,
        listen: str | None = None,
        advertise: str | None = None,
        transport: str = "auto",
        settings: Mapping[str, str] | None = None,
        facts: dict[str, str] | None = None,
        keys: KeyPair | None = None,
        allowed_keys: Sequence[str | KeyGrant] = (),
        insecure: bool = False,
        lease: float | None = None,
        heartbeat: float | None = None,
        peer_timeout: float | None = None,
        idle: float | None = None,
        max_peers: int = 0,
        max_requests_per_peer: int = 0,
        max_connections: int = 0,
        max_connections_per_address: int = 0,
        policy: FailurePolicy = FailurePolicy.RECOMPUTE,
        verify: bool = False,
        own_thread: bool = True,
        log: Callable[[LogLine], object] | None = None,
        log_level: LogLevel = LogLevel.INFO,
        way: Way = Way.AUTO,
        arena_bytes: int = 0,
        slot_bytes: int = 0,
        workers: int = 0,
        convert: Iterable[DtypeLike] = (),
        convert_groups: Sequence[str] | None = None,
        remember: float | None = None,
        trace_requests: int = 0,
    ) -> None:
        session = _Session(log)
        resource: Resource | None = engine._get() if engine is not None else None
        lines = "".join(f"{name}: {value}\n" for name, value in (facts or {}).items())
        arena = Arena()
        settings = with_ucx(settings)
        grants = [KeyGrant(key) if isinstance(key, str) else key for key in allowed_keys]
        options = arena.new(
            "kvf_agent_options",
            listen=arena.text(listen),
            advertise=arena.text(advertise),
            transport=arena.text(transport),
            settings=settings_of(arena, settings),
            setting_count=len(settings),
            facts=arena.text(lines or None),
            public_key=arena.text(keys.public_key if keys else None),
            secret_key=arena.text(keys.secret_key if keys else None),
            grants=arena.array("kvf_key_grant", [grant_fields(grant, arena) for grant in grants]),
            grant_count=len(grants),
            insecure=insecure,
            lease_ns=nanoseconds(lease),
            heartbeat_ns=nanoseconds(heartbeat),
            peer_timeout_ns=nanoseconds(peer_timeout),
            idle_ns=nanoseconds(idle),
            max_peers=max_peers,
            max_requests_per_peer=max_requests_per_peer,
            max_connections=max_connections,
            max_connections_per_address=max_connections_per_address,
            policy=policy,
            verify=verify,
            own_thread=own_thread,
            log=lib.python_log if log is not None else ffi.NULL,
            log_context=session.context,
            log_level=log_level,
            way=way,
            arena_bytes=arena_bytes,
            slot_bytes=slot_bytes,
            workers=workers,
            convert=dtype_set(convert),
            remember_ns=nanoseconds(remember),
            trace_requests=trace_requests,
        )
        if convert_groups is not None:
            names = [arena.text(name) for name in convert_groups]
            options.convert_groups = arena.keep(ffi.new("const char *[]", names or [ffi.NULL]))
            options.convert_group_count = len(names)
        session.kept.append((arena, resource))
        session.pointer = take(
            lib.kvf_agent_open, "kvf_agent *", resource.pointer if resource else ffi.NULL, rank, options
        )
        self._session = session
        self._shard: Shard | None = engine.shard(rank) if engine is not None else None
        self._contact_engine = engine.name if engine is not None else ""
        self._own_thread = own_thread
        self._public_key = keys.public_key if keys else None
        self._finalizer = weakref.finalize(self, session.close)

    @classmethod
    def directory(cls, **options: Any) -> Agent:
        """An agent without memory: it hands out the introductions of an engine's ranks. Options as above."""
        return cls(None, 0, **options)

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._session.closing

    def close(self) -> None:
        """Ends everything under way; no more events come, and peers notice. May be called again.

        Blocks must not be used again before it has returned. Threads inside wait() and tasks inside event()
        get ClosedError; arrays of allocate() stay usable.
        """
        self._session.close()

    def __enter__(self) -> Agent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def allow_key(self, key: str | KeyGrant) -> None:
        """Lets holders of another key connect: as any engine that no grant names, or as the grant says.

        Raises InvalidError (not a key, or everyone may connect), OutOfRangeError (ranks that are no range).
        """
        arena = Arena()
        grant = KeyGrant(key) if isinstance(key, str) else key
        with self._session.using() as pointer:
            call(lib.kvf_agent_grant_key, pointer, arena.new("kvf_key_grant", **grant_fields(grant, arena)))

    def withdraw_key(self, public_key: str) -> None:
        """Removes a key from the allowed ones: the agent ignores its holders from then on.

        Raises NotFoundError (it was not allowed), InvalidError.
        """
        with self._session.using() as pointer:
            call(lib.kvf_agent_withdraw_key, pointer, Arena().text(public_key))

    # ---- memory and meeting

    @overload
    def allocate(
        self, shape: int | Sequence[int], dtype: DTypeLike = ..., *, device: int = ...
    ) -> NDArray[Any]: ...

    @overload
    def allocate(
        self,
        shape: int | Sequence[int],
        dtype: DTypeLike = ...,
        *,
        kind: MemoryKind = ...,
        device: int | str = ...,
    ) -> NDArray[Any] | DeviceArray: ...

    def allocate(
        self,
        shape: int | Sequence[int],
        dtype: DTypeLike = np.uint8,
        *,
        kind: MemoryKind = MemoryKind.HOST,
        device: int | str = 0,
    ) -> NDArray[Any] | DeviceArray:
        """A zeroed array that peers on this host can map: host memory may outlive the agent, memory of a
        device ends with it.

        Args:
            device: a number of its kind; or "cpu", "cuda" or "cuda:1", which name the kind too

        Raises OutOfRangeError (no bytes, or more than there can be), UnsupportedError (nothing here allocates
        this kind), InvalidError.
        """
        size = array_bytes(shape, dtype)
        kind, number = place_of(kind, device)
        with self._session.using() as pointer:
            address = take(lib.kvf_agent_allocate, "void *", pointer, kind, number, size)
            if kind is MemoryKind.CUDA:
                return device_array(self, address, number, shape, dtype)
            return self._session.allocations.array(address, size, shape, dtype)

    def allocate_regions(self) -> list[NDArray[np.uint8]]:
        """One array of bytes for each region of this rank's shard, to register."""
        if self._shard is None:
            raise InvalidError("a directory has no memory")
        return [self.allocate(size) for size in self._shard.region_bytes]

    def register(self, buffers: Memory, *, withheld: bool | None = None) -> None:
        """Registers this rank's memory, once; from here on peers are served.

        The agent keeps the objects until it is closed or their region is unregistered; their bytes are not
        copied.
        Number, sizes, element types and shapes are checked against the shard: see Shard.regions(). `buffers`
        has one object for each region, or is {layer: object}.

        Args:
            withheld: no peer gets access to the memory, and it moves packed; None: true for memory of devices,
                false for the host's

        Raises InvalidError, OutOfRangeError, OverlapError, ExistsError (registered already),
        UnsupportedError.
        """
        found = regions_of(buffers, self._shard)
        regions = [self._session.allocations.at_owner(region) for region in found]
        memory = memory_array(regions, withheld)
        with self._session.using() as pointer:
            call(lib.kvf_agent_register, pointer, memory, len(regions))
            self._session.regions = dict(enumerate(regions))

    def register_region(self, region: int, buffer: Buffer, *, withheld: bool | None = None) -> None:
        """Registers one region, at any time. Peers are served while all of the shard's regions are
        registered.

        The object is kept until the agent is closed or the region is unregistered. The first time, regions
        are registered in their order.

        Raises InvalidError, OutOfRangeError (no such region, or too small), OverlapError, ExistsError,
        UnsupportedError.
        """
        found = self._session.allocations.at_owner(region_for(region, buffer, self._shard))
        with self._session.using() as pointer:
            others = {number: kept for number, kept in self._session.regions.items() if number != region}
            refuse_overlap(region, found, others)
            call(lib.kvf_agent_register_region, pointer, region, memory_array([found], withheld))
            self._session.regions[region] = found

    def unregister_region(self, region: int) -> None:
        """Takes one region back, at any time: for engines that sleep or move their cache.

        New requests are refused until all regions are registered again, and peers meet this rank anew. Nothing
        touches the memory after the call.

        Raises AgainError (a request has blocks in it, which the detail names, or a peer is in the middle of a
        write), NotRegisteredError, OutOfRangeError.
        """
        with self._session.using() as pointer:
            call(lib.kvf_agent_unregister_region, pointer, region)
            self._session.regions.pop(region, None)

    @property
    def endpoint(self) -> str:
        """The endpoint peers connect to, such as "tcp://127.0.0.1:41217"."""
        with self._session.using() as pointer:
            return string(lib.kvf_agent_endpoint(pointer))

    @property
    def contact(self) -> Contact:
        """A contact for this engine at this agent, which must know the introductions of the other ranks."""
        return Contact(self._contact_engine, self.endpoint, self._public_key)

    @property
    def introduction(self) -> bytes:
        """The introduction of this rank, for introduce() of others. Raises InvalidError before register()."""
        with self._session.using() as pointer:
            data, size = ffi.new("void const **"), ffi.new("size_t *")
            call(lib.kvf_agent_introduction, pointer, data, size)
            return data_at(data[0], size[0])

    def introduce(self, introduction: bytes) -> None:
        """Adds another rank of the same engine to the introductions that this agent (or directory) hands out.

        Raises ParseError, MismatchError (of another engine or model).
        """
        with self._session.using() as pointer:
            call(lib.kvf_agent_introduce, pointer, Arena().data(introduction), len(introduction))

    def connect(self, contact: Contact, *, deadline: float | None = None) -> int:
        """Meets an engine ahead of the first request; an event PEER_READY or FAILED follows.

        Args:
            deadline: seconds, within which attempts are repeated; None: 30 s

        Returns the ticket the event will have.
        """
        arena = Arena()
        with self._session.using() as pointer:
            target = arena.new("kvf_contact", **contact_fields(contact, arena))
            return int(take(lib.kvf_agent_connect, "uint64_t", pointer, target, nanoseconds(deadline)))

    def match(self, engine: str) -> list[GroupMatch]:
        """What a met engine and ours have in common, group by group.

        The groups of our model come first, in order, then groups that only theirs has. A request needs only the
        groups whose steps it names. Raises NotFoundError: no engine of this name was met.
        """
        found: list[GroupMatch] = []
        arena = Arena()
        with self._session.using() as pointer:
            match = arena.new("kvf_group_match")
            name = arena.text(engine)
            call(lib.kvf_agent_match, pointer, name, 0, match)
            while True:
                found.append(_read_match(match))
                status = lib.kvf_agent_match(pointer, name, len(found), match)
                if status == Status.NOT_FOUND:
                    return found
                check(status)

    # ---- requests

    def _submit(
        self,
        function: Any,
        request_id: bytes | str,
        groups: Sequence[GroupSteps] | None,
        deadline: float | None,
        consumers: int = 0,
        contact: Contact | None = None,
        patience: float | None = None,
        priority: int = 0,
        bytes_per_second: int | None = None,
        after: Readable | None = None,
        way: Way = Way.AUTO,
        records: Sequence[Record] = (),
    ) -> int:
        if bytes_per_second is not None and bytes_per_second <= 0:
            raise OutOfRangeError(
                f"bytes_per_second is {bytes_per_second}; allowed: 1 and more, or None (no cap)"
            )
        arena = Arena()
        request = arena.new(
            "kvf_agent_request",
            id=id_fields(request_id, arena),
            groups=groups_in(groups, arena),
            group_count=0 if groups is None else len(groups),
            deadline_ns=nanoseconds(deadline),
            consumers=consumers,
            patience_ns=nanoseconds(patience),
            priority=priority,
            bytes_per_second=bytes_per_second or 0,
            after=_ready_event(after, arena),
            way=way,
            **records_in(records, arena),
        )
        if contact is not None:
            fill(request.contact, **contact_fields(contact, arena))
        with self._session.using() as pointer:
            return int(take(function, "uint64_t", pointer, request))

    def hold(
        self,
        request_id: bytes | str,
        groups: Sequence[GroupSteps],
        *,
        consumers: int = 1,
        lease: float | None = None,
        after: Readable | None = None,
        records: Sequence[Record] = (),
    ) -> int:
        """Producer: keeps blocks for consumers to read; returns a ticket.

        Args:
            request_id: up to 1024 bytes; the consumers use the same
            groups: one for each group of the model: the steps that are there
            consumers: how many engines will take the request
            lease: seconds without a sign of life after which the blocks are free; None: the agent's
            after: a file descriptor, such as an eventfd, that becomes readable once the blocks are written.
                Only then are the blocks read, do consumers learn of them, and does the lease begin. The agent
                duplicates the descriptor, so it may be closed; nobody may read from it before the request's
                event. Or an event of a CUDA stream, as it is during the call: a torch.cuda.Event that was
                recorded, or a CudaEvent
            records: data that travels with the cache, under the same lease. Each consumer rank gets the records
                of the ranks that it reads from, with its DONE event

        Event: DONE (all have them), or FAILED with TIMEOUT (the lease ran out) or CANCELLED.
        Raises ExistsError (the id is held already, or a block is being filled), OutOfRangeError, InvalidError.
        """
        return self._submit(
            lib.kvf_agent_hold, request_id, groups, lease, consumers, after=after, records=records
        )

    def pull(
        self,
        request_id: bytes | str,
        contact: Contact,
        groups: Sequence[GroupSteps] | None,
        *,
        deadline: float | None = None,
        patience: float | None = None,
        priority: int = 0,
        bytes_per_second: int | None = None,
        way: Way = Way.AUTO,
    ) -> int:
        """Consumer: reads what a producer holds, or will hold before the deadline, into own blocks.

        If all groups are empty, nothing is read, and the producer is told that it may free its blocks. With
        None, the producer's blocks are only reserved until pull_into() names the destination.

        Args:
            contact: where the producer is met
            groups: one for each group of the model: the steps that are wanted
            deadline: seconds; None: 120 s
            patience: seconds within which the producer must be met and must lend its blocks; None: the deadline
            priority: requests of higher priority move first; a lower one still moves 1 MiB every 100 ms
            bytes_per_second: most that this rank moves of the request; None: no cap
            way: how its bytes go; AUTO: the agent's way

        Event: DONE (every wanted byte is there), or FAILED with the blocks that must be computed.
        Raises ExistsError (a block is in use by another request), OutOfRangeError, InvalidError.
        """
        return self._submit(
            lib.kvf_agent_pull,
            request_id,
            groups,
            deadline,
            contact=contact,
            patience=patience,
            priority=priority,
            bytes_per_second=bytes_per_second,
            way=way,
        )

    def pull_into(self, ticket: int, groups: Sequence[GroupSteps]) -> None:
        """Names the destination of a pull that was started without one. NotFoundError: the ticket has ended."""
        arena = Arena()
        with self._session.using() as pointer:
            call(lib.kvf_agent_pull_into, pointer, ticket, groups_in(groups, arena), len(groups))

    def expect(
        self,
        request_id: bytes | str,
        contact: Contact,
        groups: Sequence[GroupSteps],
        *,
        deadline: float | None = None,
        way: Way = Way.AUTO,
    ) -> int:
        """Consumer: lets a producer write a request into own blocks. Events and errors are those of pull().

        Args:
            way: PACKED: the request is written packed, and its blocks are free as soon as it has ended; AUTO:
                the agent's way, or that of the push
        """
        return self._submit(lib.kvf_agent_expect, request_id, groups, deadline, contact=contact, way=way)

    def push(
        self,
        request_id: bytes | str,
        groups: Sequence[GroupSteps],
        *,
        consumers: int = 1,
        deadline: float | None = None,
        priority: int = 0,
        bytes_per_second: int | None = None,
        after: Readable | None = None,
        way: Way = Way.AUTO,
        records: Sequence[Record] = (),
    ) -> int:
        """Producer: begins to write a request to the consumers that expect it; push_ready() says what is ready.

        Args:
            groups: one for each group of the model. Their `end` says how long the request will be; push_ready()
                brings the blocks that their tables do not have yet
            priority, bytes_per_second, way: as in pull()
            after, records: as in hold(): nothing is written before `after`; records come with the last byte

        Event: DONE (all consumers have it), or FAILED; then the own blocks are free.
        Raises ExistsError (the id is being pushed already, or a block is being filled), OutOfRangeError,
        InvalidError.
        """
        return self._submit(
            lib.kvf_agent_push,
            request_id,
            groups,
            deadline,
            consumers,
            priority=priority,
            bytes_per_second=bytes_per_second,
            after=after,
            way=way,
            records=records,
        )

    def push_ready(
        self,
        ticket: int,
        chunk: tuple[int, int] = (0, ALL_TOKENS),
        layers: int = ALL_LAYERS,
        *,
        blocks: Sequence[Blocks] | None = None,
        after: Readable | None = None,
        records: Sequence[Record] = (),
    ) -> None:
        """Says how much of a push is ready; with the ticket alone, all of it.

        Args:
            chunk: the tokens (begin, end) that are being computed; all layers of earlier tokens are ready
            layers: number of model layers that are ready for the tokens of the chunk
            blocks: blocks that the push does not have yet, one table for each group of the model, each with its
                place in the sequence: BlockTable(ids, first_block). This call claims them
            after: as in hold(): the chunk is ready then, and later calls take effect after it
            records: further records of the push

        Raises NotFoundError (the ticket has ended), OutOfRangeError (out of order, or blocks that do not reach
        over the chunk), ExistsError (a block is being filled).
        """
        arena = Arena()
        with self._session.using() as pointer:
            said = arena.new(
                "kvf_push_chunk",
                begin=chunk[0],
                end=chunk[1],
                layers=layers,
                tables=tables_in(blocks, arena),
                table_count=0 if blocks is None else len(blocks),
                after=_ready_event(after, arena),
                **records_in(records, arena),
            )
            call(lib.kvf_agent_push_ready, pointer, ticket, said)

    def cancel(self, ticket: int) -> None:
        """Stops a request; its event still comes. Raises NotFoundError if the ticket has ended."""
        with self._session.using() as pointer:
            call(lib.kvf_agent_cancel, pointer, ticket)

    # ---- events

    def next_event(self) -> Event | None:
        """Takes the next event; None when there is none."""
        with self._session.using() as pointer, self._session.events:
            event = Arena().new("kvf_event")
            status = lib.kvf_agent_next_event(pointer, event)
            if status == Status.EMPTY:
                return None
            check(status)
            return read_event(event)

    def events(self) -> Iterator[Event]:
        """Takes all events that have come so far."""
        while (event := self.next_event()) is not None:
            yield event

    def wait(self, timeout: float | None = None) -> bool:
        """Makes progress until there is an event to take, at most `timeout` seconds; returns whether there is.

        Other threads run meanwhile. Raises ClosedError when the agent is closed by one of them.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            left = WAIT_SECONDS if until is None else min(WAIT_SECONDS, max(until - time.monotonic(), 0.0))
            with self._session.using() as pointer:
                status = lib.kvf_agent_wait(pointer, int(left * 1e9))
                if status != Status.TIMEOUT:
                    check(status)
                    return True
            if until is not None and time.monotonic() >= until:
                return False

    def wait_event(self, timeout: float | None = None) -> Event | None:
        """Takes the next event, waiting for it at most `timeout` seconds; None if none came."""
        until = None if timeout is None else time.monotonic() + timeout
        while (event := self.next_event()) is None:
            left = None if until is None else until - time.monotonic()
            if (left is not None and left <= 0) or not self.wait(left):
                return self.next_event()
        return event

    async def event(self) -> Event:
        """Takes the next event, in asyncio: other tasks run meanwhile. The agent needs no thread for it.

        Several tasks may wait; each event goes to one of them. Raises ClosedError when the agent is closed.
        """
        while (event := self._work_and_take()) is None:
            await self._readable()
        return event

    def _work_and_take(self) -> Event | None:
        if not self._own_thread:
            self.progress()
        return self.next_event()

    async def _readable(self) -> None:
        ready = asyncio.Event()
        loop = asyncio.get_running_loop()
        # A loop allows one reader for each descriptor, so every waiting task has its own descriptor.
        descriptor = os.dup(self.fileno())
        try:
            with self._session.waking(ready):
                loop.add_reader(descriptor, ready.set)
                try:
                    await ready.wait()
                finally:
                    loop.remove_reader(descriptor)
        finally:
            os.close(descriptor)

    def fileno(self) -> int:
        """A file descriptor that is readable while there are events to take. Do not read from it.

        Without `own_thread` it is also readable while progress() has something to do.
        """
        with self._session.using() as pointer:
            return int(lib.kvf_agent_event_fd(pointer))

    def timeout(self) -> float | None:
        """Seconds after which progress() must be called again at the latest; None: no limit.

        For loops that do not wait for fileno(), which becomes readable at that time.
        """
        with self._session.using() as pointer:
            left = int(lib.kvf_agent_timeout(pointer))
            return None if left == ALL_TOKENS else left / 1e9

    def progress(self) -> bool:
        """Does what can be done now without waiting; returns whether there is more to do at once."""
        with self._session.using() as pointer:
            return bool(take(lib.kvf_agent_progress, "bool", pointer))

    def block(self, group: int, block: int) -> BlockClaim:
        """The agent's claim on a block. Raises OutOfRangeError if there is no such block."""
        with self._session.using() as pointer:
            state, requests = ffi.new("kvf_block_state *"), ffi.new("uint32_t *")
            call(lib.kvf_agent_block, pointer, group, block, state, requests)
            return BlockClaim(BlockState(state[0]), requests[0])

    def explain(self, engine: str | None = None, level: LogLevel = LogLevel.INFO) -> str:
        """Describes which rank reads what from which, by which transport, and how long a request should take.

        Args:
            engine: an engine that was met, or that reads from here; None: this agent, and all engines it knows
            level: INFO: a summary; DEBUG: the summary, then every rank and every piece

        Raises NotFoundError: the agent does not know the engine.
        """
        arena = Arena()
        return self._text(lib.kvf_agent_explain, arena.text(engine), level)

    def metrics(self) -> str:
        """The agent's counters as text for Prometheus, to be added to the engine's page of metrics."""
        return self._text(lib.kvf_agent_metrics)

    def trace(self) -> str:
        """The times of the latest requests, also of those under way, as the text of a file that Perfetto opens.

        kvferry.trace joins those of several agents. Raises InvalidError: `trace_requests` was 0.
        """
        return self._text(lib.kvf_agent_trace)

    def _text(self, function: Any, *arguments: Any) -> str:
        """A text that a function of the library writes into a buffer."""
        length, size = ffi.new("size_t *"), 0
        while True:  # it may become longer between two calls
            text = ffi.new("char[]", size + 1)
            with self._session.using() as pointer:
                call(function, pointer, *arguments, text, size + 1, length)
            if length[0] <= size:
                return string(text)
            size = length[0]

    def peers(self) -> list[AgentPeer]:
        """The peers: first those with a session, then those that were lost lately."""
        count, room = ffi.new("uint32_t *"), 8
        with self._session.using() as pointer:
            while True:  # there may be more, and more may come meanwhile
                peers = ffi.new("kvf_agent_peer[]", room)
                peers[0].struct_size = ffi.sizeof("kvf_agent_peer")
                call(lib.kvf_agent_peers, pointer, peers, room, count)
                if count[0] <= room:
                    return [read_peer(peers[i]) for i in range(count[0])]
                room = count[0]

    @property
    def stats(self) -> AgentStats:
        """What the agent has counted."""
        with self._session.using() as pointer:
            stats = Arena().new("kvf_agent_stats")
            call(lib.kvf_agent_get_stats, pointer, stats)
            return read_stats(stats)

    def clock_offset(self, engine: str, rank: int) -> ClockOffset:
        """A peer's clock minus ours. NotFoundError: there is no session with that rank."""
        with self._session.using() as pointer:
            offset, error = ffi.new("int64_t *"), ffi.new("uint64_t *")
            call(lib.kvf_agent_clock_offset, pointer, Arena().text(engine), rank, offset, error)
            return ClockOffset(offset[0], error[0])
