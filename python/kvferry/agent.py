"""Sessions: the ranks of two engines meet, lend each other blocks, move them, and survive each other's failure.

See kvferry/agent.h for the roles of both sides, and for who owns a block when. Here are an agent's options, its
memory and its meetings with other engines. Its requests are in agent_requests.py, its events in agent_events.py
and the views of its state in agent_looks.py.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry._binding import ffi, lib
from kvferry._native import Arena, Resource, call, data_at, nanoseconds, resource_of, string, take
from kvferry._session import Session
from kvferry._values import callback, listed, mapping_of
from kvferry.agent_events import Events
from kvferry.agent_looks import Looks
from kvferry.agent_requests import Requests
from kvferry.allocating import Allocating
from kvferry.buffers import (
    Allocations,
    Buffer,
    Memory,
    memory_array,
    region_for,
    regions_of,
)
from kvferry.contact import Contact, KeyGrant, KeyPair, contact_fields, grant_fields, key_fields
from kvferry.errors import InvalidError, UnsupportedError
from kvferry.events import (
    FailurePolicy,
    LogLevel,
    LogLine,
    Way,
)
from kvferry.model import DtypeLike, dtype_set
from kvferry.region import MemoryKind, Region
from kvferry.shard import Engine, Shard
from kvferry.stage import device_arena, device_copies
from kvferry.transport import settings_of
from kvferry.ucx import with_ucx

__all__ = ["Agent", "Contact", "KeyPair"]


class Agent(Requests, Events, Looks, Allocating):
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
        lease, heartbeat, peer_timeout, idle: seconds; None: the library's defaults. A lease: 12 ms to a day; a
            heartbeat: up to half of it; a peer_timeout: up to a day; idle: up to a year
        max_peers, max_requests_per_peer: 0: the library's defaults
        max_connections, max_connections_per_address, max_connections_per_second: likewise
        policy: what the engine is asked to do about failed requests
        verify: check the bytes that were read or written against checksums of the producer
        own_thread: make progress in a thread of the agent's own, which may use the same processors as the
            thread that opens the agent; otherwise nothing happens unless the caller waits in wait(),
            wait_event() or event(), or calls progress() when fileno() is readable
        log: receives the lines of the log, in order, on any thread; it may call the agent, but not close
            it; its exceptions are printed, and change nothing
        log_level: level of the least important lines to receive
        way: how requests move; DIRECT: the agent has no arena
        arena_bytes: memory through which packed bytes go, at least 4 slots; 0: 64 MiB, touched once something
            goes packed
        device_arena_bytes: the same in memory of the device, if the cache is there and a transport takes such
            memory; 0: 64 MiB; None: there is none
        device_copy_bytes: of a run between the cache's device and the arena of the host that the driver copies
            instead of a kernel; 0: 256 KiB; None: a kernel copies everything
        slot_bytes: most that one packed operation moves, a power of two from 4 KiB to 1 MiB; 0: a default
        workers: threads that copy to and from that memory; 0: the thread that makes progress copies; up to 16
        convert: element types (of f32, f16, bf16, f8_e4m3, f8_e5m2) that may be converted into each other on
            the way; a group whose types differ moves if both engines allow all of them, and then packed
        convert_groups: the groups to which `convert` applies; None: all
        remember: seconds for which a held or pushed request is remembered after its end: a consumer that asks
            for it then is refused at once, and does not wait for a request of that id; None: not at all
        trace_requests: number of requests, the latest ones, whose times are kept for trace(); up to 65536
        local_commands: without keys, programs of this machine may give commands (see ask()); holders of keys
            need a grant instead

    Raises OutOfRangeError (the rank, a duration, a number), NotPermittedError (listening beyond loopback
    without keys), ExistsError (the address is taken), NotFoundError (a kind of transport, a setting, a group),
    InvalidError, UnsupportedError, InputOutputError.
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
        device_arena_bytes: int | None = 0,
        device_copy_bytes: int | None = 0,
        slot_bytes: int = 0,
        workers: int = 0,
        convert: Iterable[DtypeLike] = (),
        convert_groups: Sequence[str] | None = None,
        remember: float | None = None,
        trace_requests: int = 0,
        local_commands: bool = False,
        max_connections_per_second: int = 0,
    ) -> None:
        session = Session(callback(log))
        self._automatic = transport == "auto"
        resource: Resource | None = resource_of(Engine, engine) if engine is not None else None
        lines = [f"{name}: {value}" for name, value in ({} if facts is None else mapping_of(facts)).items()]
        for line in lines:
            if "\n" in line:
                raise InvalidError(f"fact {line!r} has more than one line")
        arena = Arena()
        settings = with_ucx(settings)
        grants = [KeyGrant(key) if isinstance(key, str) else key for key in listed(allowed_keys, "keys")]
        options = arena.new(
            "kvf_agent_options",
            listen=arena.text(listen),
            advertise=arena.text(advertise),
            transport=arena.text(transport),
            settings=settings_of(arena, settings),
            setting_count=len(settings),
            facts=arena.text("".join(f"{line}\n" for line in lines) or None),
            **key_fields(keys, arena),
            grants=arena.array("kvf_key_grant", [grant_fields(grant, arena) for grant in grants]),
            grant_count=len(grants),
            insecure=insecure,
            lease_ns=nanoseconds(lease, "lease"),
            heartbeat_ns=nanoseconds(heartbeat, "heartbeat"),
            peer_timeout_ns=nanoseconds(peer_timeout, "peer_timeout"),
            idle_ns=nanoseconds(idle, "idle"),
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
            device_arena_bytes=device_arena(device_arena_bytes),
            device_copy_bytes=device_copies(device_copy_bytes),
            slot_bytes=slot_bytes,
            workers=workers,
            convert=dtype_set(convert),
            remember_ns=nanoseconds(remember, "remember"),
            trace_requests=trace_requests,
            local_commands=local_commands,
            max_connections_per_second=max_connections_per_second,
        )
        if convert_groups is not None:
            names = listed(convert_groups, "texts")
            options.convert_groups, options.convert_group_count = arena.texts(names), len(names)
        session.kept.append((arena, resource))
        session.pointer = take(
            lib.kvf_agent_open,
            "kvf_agent *",
            resource.pointer if resource else ffi.NULL,
            rank,
            options,
            undo=lib.kvf_agent_close,
        )
        self._session = session
        self._shard: Shard | None = engine.shard(rank) if engine is not None else None
        self._contact_engine = engine.name if engine is not None else ""
        self._own_thread = own_thread
        self._public_key = keys.public_key if keys else None
        self._finalizer = weakref.finalize(self, session.forget)

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
        get ClosedError; arrays of allocate() stay usable. Waits at most a second until producers know which
        blocks they may free.
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

    def _allocator(self) -> tuple[AbstractContextManager[Any], Any, Allocations]:
        return self._session.using(), lib.kvf_agent_allocate, self._session.allocations

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
            withheld: no peer gets access to the memory, and it moves packed; None: true for memory of devices
                that the transport does not take as it is, false for all other

        Raises InvalidError, OutOfRangeError, OverlapError, ExistsError (registered already),
        UnsupportedError.
        """
        found = regions_of(buffers, self._shard)
        regions = [self._session.allocations.at_owner(region) for region in found]
        with self._session.using() as pointer, self._session.regions.adding(dict(enumerate(regions))):
            self._register(
                regions, withheld, lambda memory: call(lib.kvf_agent_register, pointer, memory, len(regions))
            )

    def _register(
        self, regions: Sequence[Region], withheld: bool | None, register: Callable[[Any], None]
    ) -> None:
        """Registers regions as `withheld` says, see register()."""
        on_devices = any(region.kind != MemoryKind.HOST for region in regions)
        if withheld is not None or not on_devices:
            register(memory_array(regions, withheld))
            return
        try:
            register(memory_array(regions, False))
        except UnsupportedError as error:
            register(memory_array(regions, True))
            if self._automatic:
                warnings.warn(
                    f"memory of a device moves packed, through the host: {error}", RuntimeWarning, stacklevel=3
                )

    def register_region(self, region: int, buffer: Buffer, *, withheld: bool | None = None) -> None:
        """Registers one region, at any time. Peers are served while all of the shard's regions are
        registered.

        The object is kept until the agent is closed or the region is unregistered. The first time, regions
        are registered in their order.

        Raises InvalidError, OutOfRangeError (no such region, or too small), OverlapError, ExistsError,
        UnsupportedError.
        """
        found = self._session.allocations.at_owner(region_for(region, buffer, self._shard))
        with self._session.using() as pointer, self._session.regions.adding({region: found}):
            self._register(
                [found],
                withheld,
                lambda memory: call(lib.kvf_agent_register_region, pointer, region, memory),
            )

    def unregister_region(self, region: int) -> None:
        """Takes one region back, at any time: for engines that sleep or move their cache.

        New requests are refused until all regions are registered again, and peers meet this rank anew. Nothing
        touches the memory after the call.

        Raises AgainError (a request has blocks in it, which the detail names, or a peer is in the middle of a
        write), NotRegisteredError, OutOfRangeError.
        """
        with self._session.using() as pointer:
            call(lib.kvf_agent_unregister_region, pointer, region)
            self._session.regions.remove(region)

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

        Raises ParseError, MismatchError (of another engine or model), ExistsError (of another process that says
        it is this rank).
        """
        with self._session.using() as pointer:
            call(lib.kvf_agent_introduce, pointer, *Arena().data(introduction))

    def connect(self, contact: Contact, *, deadline: float | None = None) -> int:
        """Meets an engine ahead of the first request; an event PEER_READY or FAILED follows.

        Args:
            deadline: seconds, within which attempts are repeated; None: 30 s

        Returns the ticket the event will have. Raises InvalidError (the contact; no memory is registered),
        OutOfRangeError (a port), NotPermittedError (only one of the contact and this agent has a key).
        """
        arena = Arena()
        with self._session.using() as pointer:
            target = arena.new("kvf_contact", **contact_fields(contact, arena))
            return int(
                take(lib.kvf_agent_connect, "uint64_t", pointer, target, nanoseconds(deadline, "deadline"))
            )
