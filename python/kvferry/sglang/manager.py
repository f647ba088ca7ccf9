"""One rank's agent, and what SGLang's schedulers ask it.

A decode rank lets the prefill ranks write a request into its pages, and then tells them its name (the room) and
how many pages they may fill. The prefill ranks write chunk by chunk; with the last chunk comes the row of small
data that SGLang passes on with a request. What becomes of a request is told by the agent's events, which are
taken when SGLang polls.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import zmq
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.common.conn import ABORT_TAG, AbortNotification, CommonKVManager
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_device, get_parallel
from sglang.srt.server_args import ServerArgs

from kvferry.agent import Agent
from kvferry.contact import Contact, endpoint_at
from kvferry.errors import KvferryError, NotFoundError, UnsupportedError
from kvferry.events import Event, EventKind, RequestKind
from kvferry.log import log_options
from kvferry.records import Record
from kvferry.sglang.blocks import Chunks, Extent, blocks_of, extent_of, steps_of
from kvferry.sglang.bootstrap import CONTACT_PATH, ROUTE_PATH
from kvferry.sglang.caches import components_of, draft_config, facts_of, refuse_options, stages_of
from kvferry.sglang.geometry import arrays_of, build_engine
from kvferry.sglang.prefixes import lack_last_tokens
from kvferry.sglang.settings import read_settings
from kvferry.tickets import cancel

logger = logging.getLogger(__name__)

#: What a decode rank sends a prefill rank: this word, the room, its own address and port, how many decode ranks
#: tell the prefill rank so, and the numbers of the extent that it wants.
ASK_TAG = b"KVFERRY"
#: The record with the row of small data, all its columns one behind the other.
ROW = "sglang.row"
#: Of so many failed requests, the latest ones, a prefill rank tells decode ranks that ask for them too late.
FAILURES = 1024


@dataclass(frozen=True)
class _Asker:
    """A decode rank that has blocks for a request: where SGLang's manager tells it of failures."""

    endpoint: str
    dst_port: int
    is_dummy: bool = False


@dataclass
class _Push:
    """A request that this prefill rank writes.

    Attributes:
        all_sent: the last chunk has been said to be ready
        done: all consumers have it
    """

    ticket: int
    chunks: Chunks
    all_sent: bool = False
    done: bool = False


@dataclass
class _Load:
    """A request that is being written into blocks of this decode rank.

    Attributes:
        row: for its small data
        wanted: SGLang waits for it; otherwise the row, and the room, may be another request's
    """

    room: int
    row: int
    wanted: bool = True


class KvferryManager(CommonKVManager):
    """What moves caches in one rank of an engine.

    SGLang's scheduler thread calls it; another thread hears the ranks of the other engine.

    Raises UnsupportedError for caches and options that are not supported, by name.
    """

    supports_deferred_decode_kv_release = True
    kv_status_msg_tag = b"KV_STATUS"
    kv_status_msg_carries_reason = True
    reports_transfer_latency = True

    def __init__(
        self,
        args: KVArgs,
        disaggregation_mode: DisaggregationMode,
        server_args: ServerArgs,
        is_mla_backend: bool | None = False,
    ) -> None:
        self._pushes: dict[int, _Push] = {}  # by room
        self._loads: dict[int, _Load] = {}  # by ticket
        self._failed: dict[int, str] = {}  # why requests have failed in this prefill rank, by room
        self._lock = threading.RLock()  # of all three
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        # The agent knows when pages are its own no more, so SGLang must wait for it.
        self.enable_deferred_decode_kv_release = True
        if disaggregation_mode == DisaggregationMode.DECODE:
            lack_last_tokens()
            self._open()
            self._start_heartbeat_checker_thread()
        threading.Thread(target=self._listen, name="kvferry-listen", daemon=True).start()

    # ---- the agent

    def register_to_bootstrap(self) -> None:
        """Opens the agent, and tells the bootstrap server where decode ranks meet this engine."""
        self._open()
        super().register_to_bootstrap()

    def _register_topology_row(self, url: str, payload: dict[str, Any]) -> None:
        if self._engine_rank == 0:
            contact = {"dp_rank": self._dp_rank, **vars(self.agent.contact)}
            super()._register_topology_row(url.removesuffix(ROUTE_PATH) + CONTACT_PATH, contact)
        super()._register_topology_row(url, payload)

    @property
    def _engine_rank(self) -> int:
        return int(self.pp_rank * self.attn_tp_size + self.attn_tp_rank)

    @property
    def _dp_rank(self) -> int:
        """The engine's number in data parallelism, by which decode ranks ask for it."""
        return int(self.attn_dp_rank if self.system_dp_size == 1 else self.system_dp_rank)

    def _open(self) -> None:
        refuse_options(self.kv_args, self.attn_cp_size, self.dcp_size, self.kv_shard_size, self.pp_size)
        config = ModelConfig.from_server_args(self.server_args)
        draft = draft_config(self.server_args) if self.kv_args.num_draft_entries else None
        stages = stages_of(config, self.pp_size)
        self._components = components_of(
            self.kv_args, config, bool(self.is_mla_backend), self.attn_tp_size, stages[self.pp_rank], draft
        )
        world = get_parallel().world_group
        lifetime = world.broadcast_object(uuid.uuid4().hex, src=0)
        name = f"sglang-{self.disaggregation_mode.value}-{lifetime}-{self._dp_rank}"
        settings = read_settings()
        self.agent = Agent(
            build_engine(self._components, name, self.attn_tp_size, stages),
            self._engine_rank,
            listen=endpoint_at(self.local_ip),
            transport=settings.transport,
            facts=facts_of(
                self._components, config, settings.weights, self.server_args.quantization_param_path, draft
            ),
            keys=settings.keys,
            allowed_keys=settings.allowed_keys,
            insecure=settings.insecure,
            verify=settings.verify,
            **log_options(logger, "kvferry: "),
        )
        self._buffers = arrays_of(self._components, str(get_device().device).startswith("cuda"))
        self.agent.register(self._buffers)
        for other, introduction in world.all_gather_object((name, self.agent.introduction)):
            if other == name and introduction != self.agent.introduction:
                self.agent.introduce(introduction)

    def deregister_buffer_to_engine(self) -> None:
        """SGLang gives the memory of its caches up for a while. Raises AgainError: a request is under way."""
        for region in range(len(self._buffers)):
            self.agent.unregister_region(region)

    def register_buffer_to_engine(self) -> None:
        """The memory of the caches is there again, at the same addresses."""
        for region, buffer in enumerate(self._buffers):
            self.agent.register_region(region, buffer)

    def _listen(self) -> None:
        """Hears ranks of other engines, as long as the process lives."""
        while True:
            try:
                frames = self.server_socket.recv_multipart()
            except zmq.ZMQError:  # the socket was closed
                return
            try:
                self._hear(frames)
            except Exception:
                logger.exception("a message of another rank could not be understood: %.200r", frames)

    def _hear(self, frames: list[bytes]) -> None:
        if frames[0] == ASK_TAG:
            room, port, askers, *numbers = (int(frame) for frame in (frames[1], *frames[3:]))
            self._asked(room, _Asker(frames[2].decode(), port), askers, Extent.read(numbers))
        elif frames[0] == ABORT_TAG:
            notification = AbortNotification.from_zmq(frames)
            if notification is not None:
                self.fail(notification.room, "aborted by the decode server")
                self.give_up(notification.room)
        elif frames[0] == self.kv_status_msg_tag:
            said = self.parse_kv_status_message(frames)
            if said is not None and said[1] == KVPoll.Failed:
                self.fail(said[0], f"the prefill server: {said[3] or 'it does not say why'}")

    # ---- prefill

    def begin(self, room: int) -> None:
        """SGLang has a request, whose room another one may have had."""
        with self._lock:
            self._failed.pop(room, None)

    def _asked(self, room: int, asker: _Asker, askers: int, extent: Extent) -> None:
        """A decode rank has blocks for a room. When all have that, the prefill engine may compute."""
        with self._lock:
            if room in self._failed:
                self.send_kv_status_message(
                    targets=[(asker.endpoint, asker.dst_port)],
                    bootstrap_room=room,
                    status=KVPoll.Failed,
                    failure_reason=self._failed[room],
                )
                return
            known = self.transfer_infos.setdefault(room, {})
            known[asker] = asker
            try:
                if room not in self._pushes:
                    chunks = Chunks(self._components, extent)
                    ticket = self.agent.push(str(room), chunks.steps, deadline=self._deadline)
                    self._pushes[room] = _Push(ticket, chunks)
            except KvferryError as error:
                self.update_status(room, KVPoll.Bootstrapping)
                self.fail(room, str(error))
                return
            if len(known) == askers:
                self.req_to_decode_prefix_len[room] = self._pushes[room].chunks.begin
                self.update_status(room, KVPoll.WaitingForInput)

    @property
    def _deadline(self) -> float:
        """Seconds after which SGLang gives a request up, too."""
        return float(envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get())

    def add_transfer_request(
        self,
        bootstrap_room: int,
        kv_indices: Any,
        index_slice: slice,
        is_last_chunk: bool,
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        num_kv_tokens: int | None = None,
        wait_event: Any = None,
        **_: Any,
    ) -> None:
        """A chunk has been computed: its blocks can be written to the decode ranks.

        Args:
            kv_indices: its pages
            index_slice: their places among the pages that the decode engine wants; chunks come in order
            aux_index: last chunk: the row of small data
            state_indices: last chunk: the blocks of the components beside the main one
            num_kv_tokens: its tokens; None: its pages are full
            wait_event: an event of a CUDA stream after which the pages are there; None: they are
        """
        with self._lock:
            push = self._pushes.get(bootstrap_room)
            if push is None or self.request_status.get(bootstrap_room) in (None, KVPoll.Failed):
                return
            try:
                tokens = len(kv_indices) * self.kv_args.page_size if num_kv_tokens is None else num_kv_tokens
                ready = push.chunks.add(kv_indices, tokens, (state_indices or []) if is_last_chunk else None)
                if ready is not None:
                    chunk, tables = ready
                    records = [] if aux_index is None else [Record(ROW, self._read_row(aux_index))]
                    self.agent.push_ready(push.ticket, chunk, blocks=tables, after=wait_event, records=records)
            except NotFoundError:
                pass  # its event says why; where no decode rank wants anything of this one, it is done
            except KvferryError as error:
                self.fail(bootstrap_room, str(error))
                return
            push.all_sent = is_last_chunk
            self.update_status(bootstrap_room, KVPoll.Transferring)
            self._conclude(bootstrap_room, push)

    def _conclude(self, room: int, push: _Push) -> None:
        """SGLang must not learn of success before it has sent everything, even where nobody wants it."""
        if push.done and push.all_sent:
            self.update_status(room, KVPoll.Success)

    def forget(self, room: int) -> None:
        """Ends what is left of a request that this rank writes. Decode ranks are told, unless it is done.

        Why is said only if this rank has failed: otherwise another one has, and SGLang takes its reason.
        """
        if self.request_status.get(room) == KVPoll.Failed:
            self.give_up(room)
        else:
            self._stop_push(room)

    def give_up(self, room: int) -> None:
        """Likewise; the request has failed, if it was not done."""
        self._stop_push(room)
        if self.request_status.get(room) not in (None, KVPoll.Success):
            self.conclude_failure(bootstrap_room=room, failure_reason="given up")
            with self._lock:
                self._failed[room] = self.failure_records.get(room, "")
                if len(self._failed) > FAILURES:
                    del self._failed[next(iter(self._failed))]

    def _stop_push(self, room: int) -> None:
        with self._lock:
            push = self._pushes.pop(room, None)
        if push is not None and not push.done:
            cancel(self.agent, push.ticket)

    # ---- decode

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Asks a prefill server what it is. If it does not fit, its requests fail; SGLang would end itself."""
        try:
            return bool(super().try_ensure_parallel_info(bootstrap_addr))
        except (AssertionError, RuntimeError) as why:
            for room in tuple(self.addr_to_rooms_tracker[bootstrap_addr]):
                self.fail(room, f"the prefill server {bootstrap_addr} does not fit: {why}")
            return False

    def expect(
        self, room: int, contact: Contact, pages: Any, others: Sequence[Any], prefix: int, row: int
    ) -> None:
        """Lets the prefill ranks write a request into blocks, and its small data into a row.

        Args:
            pages: those of the main component
            others: the blocks of each kind of state
            prefix: the tokens that are here already

        Raises ExistsError (a block is still being written by another request) and other KvferryErrors.
        """
        found = blocks_of(self._components, pages, others)
        steps = steps_of(self._components, extent_of(found, prefix, self.kv_args.page_size), found)
        with self._lock:
            ticket = self.agent.expect(str(room), contact, steps, deadline=self._deadline)
            self._loads[ticket] = _Load(room, row)

    def stop(self, room: int) -> None:
        """Nobody wants a request any more. Its pages are free when is_abort_release_safe() says so."""
        with self._lock:
            stopped = {ticket: load for ticket, load in self._loads.items() if load.room == room}
            for load in stopped.values():
                load.wanted = False
        for ticket in stopped:
            cancel(self.agent, ticket)

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Whether nobody writes into the pages of a request that was stopped."""
        self._take_events()
        with self._lock:
            return all(load.room != bootstrap_room for load in self._loads.values())

    def build_receiver_metadata_message(
        self,
        *,
        bootstrap_room: int,
        required_dst_info_num: int,
        kv_indices: Any,
        state_indices: list[Any] | None,
        decode_prefix_len: int | None,
        **_: Any,
    ) -> list[bytes]:
        """What tells a prefill rank that this rank has blocks for a request."""
        ids = blocks_of(self._components, kv_indices, state_indices or [])
        extent = extent_of(ids, decode_prefix_len or 0, self.kv_args.page_size)
        return [
            ASK_TAG,
            str(bootstrap_room).encode(),
            self.local_ip.encode(),
            *(str(number).encode() for number in (self.rank_port, required_dst_info_num, *extent.numbers)),
        ]

    # ---- both

    def check_status(self, bootstrap_room: int) -> KVPoll:
        """What SGLang polls, with all that has happened until now."""
        self._take_events()
        return super().check_status(bootstrap_room)

    def check_status_pp_consensus(self, bootstrap_room: int) -> KVPoll:
        """Likewise, where pipeline stages must agree."""
        self._take_events()
        return super().check_status_pp_consensus(bootstrap_room)

    def fail(self, room: int, why: str) -> None:
        """Marks a request that SGLang knows as failed. The first reason counts; decode ranks learn of it."""
        if self.request_status.get(room) in (None, KVPoll.Failed, KVPoll.Success):
            return
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            self.conclude_failure(bootstrap_room=room, failure_reason=why)
        else:
            self.record_failure(room, why)
            self.update_status(room, KVPoll.Failed)

    def _take_events(self) -> None:
        with self._lock:
            for event in self.agent.events():
                if event.request_kind == RequestKind.PUSH:
                    self._pushed(int(event.request_id), event)
                elif event.request_kind == RequestKind.EXPECT:
                    self._loaded(event)

    def _pushed(self, room: int, event: Event) -> None:
        push = self._pushes.get(room)
        if push is None or push.ticket != event.ticket:
            return  # it was given up
        if event.kind == EventKind.DONE:
            push.done = True
            self._conclude(room, push)
        elif event.kind == EventKind.FAILED:
            del self._pushes[room]
            self.fail(room, event.detail)

    def _loaded(self, event: Event) -> None:
        load = self._loads.get(event.ticket)
        if load is None:
            return
        if event.blocks_free:
            del self._loads[event.ticket]
        if not load.wanted:
            return
        if event.kind == EventKind.FAILED:
            self.fail(load.room, event.detail)
        elif event.kind == EventKind.DONE:
            try:
                self._write_row(load.row, event.records)
            except KvferryError as error:
                self.fail(load.room, str(error))
            else:
                self.update_status(load.room, KVPoll.Success)

    # ---- small data

    def _row(self, row: int) -> Iterator[tuple[int, int]]:
        """Address and bytes of each column of a row."""
        args = self.kv_args
        for address, length in zip(args.aux_data_ptrs, args.aux_item_lens, strict=True):
            yield address + row * length, length

    def _read_row(self, row: int) -> bytes:
        return b"".join(ctypes.string_at(address, length) for address, length in self._row(row))

    def _write_row(self, row: int, records: Sequence[Record]) -> None:
        """Writes what the last of the ranks has given: the last pipeline stage has the first token."""
        data = max(
            (record for record in records if record.name == ROW),
            key=lambda record: record.rank,
            default=Record(ROW, b""),
        ).data
        wanted = sum(self.kv_args.aux_item_lens)
        if len(data) != wanted:
            raise UnsupportedError(
                f"the prefill server's row of metadata has {len(data)} bytes, the decode server's {wanted}; "
                "allowed: the same options on both (checksums, sampling masks, the model's hidden size)"
            )
        place = 0
        for address, length in self._row(row):
            ctypes.memmove(address, data[place : place + length], length)
            place += length
