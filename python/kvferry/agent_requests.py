"""The requests of an agent: lending blocks, reading and writing them, and waiting for a device first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from kvferry._binding import ffi, lib
from kvferry._native import Arena, Span, call, ends, fill, id_fields, nanoseconds, take
from kvferry._session import Session
from kvferry._values import for_c, listed, whole_number
from kvferry.contact import Contact, contact_fields
from kvferry.device import CudaEvent, CudaStream
from kvferry.errors import InvalidError, OutOfRangeError
from kvferry.events import Way
from kvferry.records import Record, records_in
from kvferry.request import Blocks, GroupSteps, groups_in, tables_in

ALL_TOKENS, ALL_LAYERS = 2**64 - 1, 2**32 - 1
NO_LIMIT = 2**64 - 1  # nanoseconds


@runtime_checkable
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


@runtime_checkable
class HasEventId(Protocol):
    """An event like torch.Event, of a device of any kind."""

    @property
    def event_id(self) -> int:
        """The handle; 0 before the event was recorded."""

    @property
    def device(self) -> Any:
        """The event's device: an object with a `type` and an `index`."""


@runtime_checkable
class HasCudaStream(Protocol):
    """A stream like torch.cuda.Stream."""

    @property
    def cuda_stream(self) -> int:
        """The handle; 0: the default stream."""

    @property
    def device(self) -> Any:
        """The stream's device: an object with an `index`."""


class HasNativeHandle(Protocol):
    """A stream like torch.Stream, of a device of any kind; older torch does not tell the handle."""

    @property
    def native_handle(self) -> int:
        """The handle; 0: the default stream."""

    @property
    def device(self) -> Any:
        """The stream's device: an object with a `type` and an `index`."""


# A file descriptor that becomes readable when memory is ready to be read, and stays so; or an event of a CUDA
# stream.
Readable = int | HasFileno | CudaEvent | HasCudaEvent | HasEventId


def _index(device: Any) -> int:
    """The number of a torch.device; without one it is the first."""
    return getattr(device, "index", None) or 0


def _handle(handle: Any) -> Any:
    """A pointer of the driver, from its number."""
    return ffi.cast("void *", for_c(ffi.typeof("uintptr_t"), handle, "handle"))


def _ready_event(after: Readable | None, arena: Arena) -> Any:
    """A kvf_ready_event; NULL for None."""
    if after is None:
        return ffi.NULL
    if isinstance(after, HasCudaEvent):
        after = CudaEvent(after.cuda_event, _index(after.device))
    elif isinstance(after, HasEventId):
        if getattr(after.device, "type", None) != "cuda":
            raise InvalidError(f"after is an event of device {after.device}; allowed: of CUDA devices")
        after = CudaEvent(after.event_id, _index(after.device))
    if isinstance(after, CudaEvent):
        return arena.new(
            "kvf_ready_event",
            kind=lib.KVF_READY_CUDA_EVENT,
            device_event=_handle(after.handle),
            device=after.device,
        )
    if not isinstance(after, (int, HasFileno)):
        raise InvalidError(
            f"after is a {type(after).__name__}; allowed: a file descriptor, an object with fileno(), a "
            "torch.cuda.Event, a torch.Event, and a CudaEvent"
        )
    descriptor = after if isinstance(after, int) else after.fileno()
    return arena.new("kvf_ready_event", kind=lib.KVF_READY_FD, fd=descriptor)


def _cuda_stream(stream: HasCudaStream | HasNativeHandle | CudaStream) -> CudaStream:
    if isinstance(stream, HasCudaStream):
        return CudaStream(stream.cuda_stream, _index(stream.device))
    if isinstance(stream, CudaStream):
        return stream
    device = getattr(stream, "device", None)
    # Streams of some other devices raise an error if they are asked for the handle.
    if getattr(device, "type", None) == "cuda" and hasattr(stream, "native_handle"):
        return CudaStream(stream.native_handle, _index(device))
    raise InvalidError(
        f"stream is a {type(stream).__name__}{'' if device is None else f' of device {device}'}; allowed: a "
        "torch.cuda.Stream, a torch.Stream of a CUDA device with a native_handle, and a CudaStream"
    )


class Requests:
    """The part of an Agent that makes requests. Each returns a ticket, a number that its event has."""

    _session: Session

    def _submit(
        self,
        function: Any,
        request_id: bytes | str,
        groups: Sequence[GroupSteps] | None,
        deadline: float | None,
        consumers: int | None = None,
        contact: Contact | None = None,
        patience: float | None = None,
        priority: int = 0,
        bytes_per_second: int | None = None,
        after: Readable | None = None,
        way: Way = Way.AUTO,
        records: Sequence[Record] = (),
        by_layer: bool = False,
        layer_events: bool = False,
        limit: str = "deadline",
    ) -> int:
        """`limit`: the caller's name for the deadline."""
        if bytes_per_second is not None and whole_number(bytes_per_second, "bytes_per_second") <= 0:
            raise OutOfRangeError(
                f"bytes_per_second is {bytes_per_second}; allowed: 1 and more, or None (no cap)"
            )
        if consumers is not None and whole_number(consumers, "consumers") < 1:
            raise OutOfRangeError(f"consumers is {consumers}; allowed: 1 and more")
        arena = Arena()
        groups = None if groups is None else listed(groups, GroupSteps.__name__)
        request = arena.new(
            "kvf_agent_request",
            id=id_fields(request_id, arena),
            groups=groups_in(groups, arena),
            group_count=0 if groups is None else len(groups),
            deadline_ns=nanoseconds(deadline, limit),
            consumers=consumers or 0,
            patience_ns=nanoseconds(patience, "patience"),
            priority=priority,
            bytes_per_second=bytes_per_second or 0,
            after=_ready_event(after, arena),
            way=way,
            by_layer=by_layer,
            layer_events=layer_events,
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
                event. Or an event of a CUDA stream, as it is during the call: a torch.cuda.Event or a
                torch.Event that was recorded, or a CudaEvent
            records: data that travels with the cache, under the same lease. Each consumer rank gets the records
                of the ranks that it reads from, with its DONE event

        Event: DONE (all have them), or FAILED with TIMEOUT (the lease ran out) or CANCELLED.
        Raises ExistsError (the id is held already, or a block is being filled), OutOfRangeError, InvalidError.
        """
        return self._submit(
            lib.kvf_agent_hold,
            request_id,
            groups,
            lease,
            consumers,
            after=after,
            records=records,
            limit="lease",
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
        after: Readable | None = None,
        way: Way = Way.AUTO,
        by_layer: bool = False,
        layer_events: bool = False,
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
            after: as in hold(): the blocks are not written before; for engines whose device still uses them
            way: how its bytes go; AUTO: the agent's way
            by_layer: layers are counted as they arrive, for arrived() and let_wait()
            layer_events: with `by_layer`, events LAYERS say that further ones have arrived

        Event: DONE (every wanted byte is there), or FAILED with the blocks that must be computed.
        Raises ExistsError (a block is in use by another request, or the request is being pulled already),
        OverlapError (a block is given twice), OutOfRangeError, InvalidError, and what connect() raises.
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
            after=after,
            way=way,
            by_layer=by_layer,
            layer_events=layer_events,
        )

    def pull_into(self, ticket: int, groups: Sequence[GroupSteps], *, after: Readable | None = None) -> None:
        """Names the destination of a pull that was started without one; `after` is as in pull().

        Raises NotFoundError (the ticket has ended), ExistsError (a block is in use, or the pull has a
        destination), OverlapError, OutOfRangeError, InvalidError.
        """
        arena, groups = Arena(), listed(groups, GroupSteps.__name__)
        given, event = groups_in(groups, arena), _ready_event(after, arena)
        with self._session.using() as pointer:
            call(lib.kvf_agent_pull_into_after, pointer, ticket, given, len(groups), event)

    def expect(
        self,
        request_id: bytes | str,
        contact: Contact,
        groups: Sequence[GroupSteps],
        *,
        deadline: float | None = None,
        after: Readable | None = None,
        way: Way = Way.AUTO,
        by_layer: bool = False,
        layer_events: bool = False,
    ) -> int:
        """Consumer: lets a producer write a request into own blocks. Events and errors are those of pull().

        Args:
            contact, groups, deadline, after: as in pull()
            way: PACKED: the request is written packed, and its blocks are free as soon as it has ended; AUTO:
                the agent's way, or that of the push. A push that must go packed fails with UNSUPPORTED where
                it is expected directly: with DIRECT, or with AUTO if the producer is reached directly
            by_layer, layer_events: as in pull(); what a producer writes directly is not counted before the end
        """
        return self._submit(
            lib.kvf_agent_expect,
            request_id,
            groups,
            deadline,
            contact=contact,
            after=after,
            way=way,
            by_layer=by_layer,
            layer_events=layer_events,
        )

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
            consumers: how many engines will take the request
            deadline, priority, bytes_per_second, way: as in pull()
            after, records: as in hold(): nothing is written before `after`; records come with the last byte

        Event: DONE (all consumers have it), or FAILED; then the own blocks are free. Where consumers want
        nothing of this rank, DONE may come before anything is ready.
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
        chunk: Span = (0, ALL_TOKENS),
        layers: int = ALL_LAYERS,
        *,
        blocks: Sequence[Blocks] | None = None,
        after: Readable | None = None,
        records: Sequence[Record] = (),
    ) -> None:
        """Says how much of a push is ready; with the ticket alone, all of it.

        Args:
            chunk: the tokens, a range or (begin, end), being computed; all layers of earlier ones are ready
            layers: number of model layers that are ready for the tokens of the chunk
            blocks: blocks that the push does not have yet, one table for each group of the model, each with its
                place in the sequence: BlockTable(ids, first_block). This call claims them; those behind the
                push's end are ignored
            after: as in hold(): the chunk is ready then, and later calls take effect after it
            records: further records of the push

        Raises NotFoundError (the ticket has ended: its event says how), OutOfRangeError (out of order, or
        blocks that do not reach over the chunk), ExistsError (a block is being filled).
        """
        arena, (begin, end) = Arena(), ends(chunk)
        blocks = None if blocks is None else listed(blocks, "block tables")
        with self._session.using() as pointer:
            said = arena.new(
                "kvf_push_chunk",
                begin=begin,
                end=end,
                layers=layers,
                tables=tables_in(blocks, arena),
                table_count=0 if blocks is None else len(blocks),
                after=_ready_event(after, arena),
                **records_in(records, arena),
            )
            call(lib.kvf_agent_push_ready, pointer, ticket, said)

    def arrived(self, ticket: int) -> int:
        """How many model layers of a pull or an expect with `by_layer` have arrived: the first ones.

        A layer has arrived when all that the request brings to this rank's blocks of it is there, of all
        groups. With `verify`, and of what a producer writes directly, nothing has arrived before the end.

        Raises NotFoundError (the request has ended: see its event), InvalidError (it has no `by_layer`).
        """
        with self._session.using() as pointer:
            return int(take(lib.kvf_agent_arrived, "uint32_t", pointer, ticket))

    def let_wait(self, ticket: int, layers: int, stream: HasCudaStream | HasNativeHandle | CudaStream) -> None:
        """Lets a CUDA stream wait until so many layers have arrived, or the request has ended.

        The call itself waits only for room on the stream, of which there are about 1000 places. A stream also
        passes when the request fails: what was computed then counts only if the event says DONE. The agent must
        make progress meanwhile, on a thread that does not wait for the stream. The stream should have a higher
        priority than the lowest: `torch.cuda.Stream(priority=-1)`. For copies between host and device behind
        the wait, priorities do not count: where there are any, the process should have more queues of the
        driver (`CUDA_DEVICE_MAX_CONNECTIONS=32`, set before it starts). Before the stream has passed, no thread
        should make a call that keeps a lock of the driver while it waits: freeing CUDA memory, or a copy behind
        the wait to memory that is not pinned, such as `tensor.cpu()`. The agent would wait for that lock, until
        a second after the request's deadline; then the stream passes, and the request fails.

        Args:
            ticket: of a pull or an expect with `by_layer`; if it has ended, nothing is put on the stream
            layers: more than the model has, such as ALL_LAYERS: until the request has ended
            stream: a torch.cuda.Stream, a torch.Stream of a CUDA device, or a CudaStream with its handle

        Raises NotFoundError (there never was such a ticket), InvalidError (no `by_layer`; a CUDA graph is being
        captured from the stream), UnsupportedError, OutOfRangeError (no such device).
        """
        given = _cuda_stream(stream)
        with self._session.using() as pointer:
            call(
                lib.kvf_agent_let_wait,
                pointer,
                ticket,
                min(whole_number(layers, "layers"), ALL_LAYERS),
                given.device,
                _handle(given.handle),
            )

    def cancel(self, ticket: int) -> None:
        """Stops a request; its event still comes. Raises NotFoundError if the ticket has ended."""
        with self._session.using() as pointer:
            call(lib.kvf_agent_cancel, pointer, ticket)

    def drain(self, deadline: float | None = None) -> None:
        """Accepts nothing new, for an engine that is to end, and lets what is under way end.

        From here on hold(), pull(), expect(), push() and connect() raise CancelledError. What is held can still
        be read, and pushes still take chunks; peers that ask for anything else are refused at once. resume()
        takes it back. A second call sets the deadline anew.

        Args:
            deadline: seconds after which requests that have not ended are cancelled; None: no limit

        Event: DRAINED, once, when nothing is under way any more and the agent may be closed. Its status is
        TIMEOUT if requests were cancelled, and CANCELLED if resume() came first. Raises InvalidError (a
        directory).
        """
        with self._session.using() as pointer:
            call(
                lib.kvf_agent_drain,
                pointer,
                NO_LIMIT if deadline is None else nanoseconds(deadline, "deadline"),
            )

    def resume(self) -> None:
        """Takes a drain back, whether it is under way or has ended: new requests are accepted again.

        Requests under way go on; what was refused or cancelled meanwhile must be asked for again. An event
        DRAINED that has not been taken yet has the status CANCELLED from here on. Does nothing if the agent
        does not drain. Raises InvalidError (a directory).
        """
        with self._session.using() as pointer:
            call(lib.kvf_agent_resume, pointer)
