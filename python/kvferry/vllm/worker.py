"""The worker's half of the connector: one agent, which carries out the scheduler's instructions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from kvferry.agent import Agent, Contact
from kvferry.errors import KvferryError, NotFoundError, UnsupportedError
from kvferry.events import Event, EventKind
from kvferry.log import log_options
from kvferry.model import CONVERTED, GroupKind
from kvferry.records import Record
from kvferry.request import GroupSteps
from kvferry.scheduler import Instruction, InstructionKind
from kvferry.tickets import EventSource, cancel, drain
from kvferry.vllm.commands import Commands, Kept, how_ended
from kvferry.vllm.compat import (
    KVCacheConfig,
    KVConnectorTransferResults,
    get_dcp_group,
    get_pcp_group,
    get_pp_group,
    get_tp_group,
    init_logger,
)
from kvferry.vllm.geometry import RankGeometry, build_engine, number_groups
from kvferry.vllm.identity import scale_facts, weights_of
from kvferry.vllm.marks import DeviceMarks, record
from kvferry.vllm.messages import KvferryHandshake, KvferryReport, KvferryStep, Prompt
from kvferry.vllm.processors import engines_processors
from kvferry.vllm.pushing import LayerOrder, LayerPushes, Pieces
from kvferry.vllm.ranks import Ranks
from kvferry.vllm.settings import read_settings
from kvferry.vllm.sleeping import Caches
from kvferry.vllm.statistics import SPREADS, KvferryStats, counted
from kvferry.vllm.tensors import describe

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig

    from kvferry.shard import Engine

Gathered = TypeVar("Gathered")

logger = init_logger("vllm.kvferry")

# While only transfers are going on, vLLM steps without a pause. A step that waits a moment for an event hands
# over as soon, and leaves the cores to the threads that move the bytes.
IDLE_SECONDS = 0.01

# Time for which ended transfers are remembered: a consumer that uses their parameters again is refused at once.
REMEMBERED_SECONDS = 600.0

# The agent's lease where the settings name none.
LEASE_SECONDS = 30.0

# Requests that were sent, of which it is remembered how they ended.
MOST_GONE = 1024

# The record of a push that says what its prompt is.
PROMPT = "kvferry_prompt"
OTHER_PROMPT = "the prefill server computed other tokens than those of this prompt, or with another adapter"

SENDS = (InstructionKind.HOLD, InstructionKind.PUSH)
LOADS = (InstructionKind.PULL, InstructionKind.EXPECT)


@dataclass
class _Job:
    """The purpose of a ticket of the agent."""

    kind: InstructionKind
    request: str
    failed: bool = False
    why: str = ""  # it has failed
    named: bool = False  # its failed blocks were reported one by one
    lost: bool = False  # its blocks are vLLM's already: vLLM does not wait for its end
    params: dict[str, Any] | None = None  # a peer finds it by them; None: vLLM computes or loads it
    prompt: Prompt | None = None  # that it loads; None: it was compared before
    begun: float = field(default_factory=time.monotonic)


def _is_other(prompt: Prompt | None, records: Sequence[Record]) -> bool:
    """Whether a producer says that it has computed another prompt."""
    return prompt is not None and any(
        record.data != prompt.digest.encode()
        for record in records
        if record.name == PROMPT and record.end == prompt.tokens
    )


def find_ranks(parallel: ParallelConfig) -> Ranks:
    """Where this process stands in its engine.

    Raises UnsupportedError if vLLM distributes tokens in an order that we do not know.
    """
    tp, pp = get_tp_group(), get_pp_group()
    pcp_size, dcp_size = parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size
    ranks = Ranks(
        tp.rank_in_group,
        tp.world_size,
        pp.rank_in_group,
        pp.world_size,
        pcp_rank=get_pcp_group().rank_in_group if pcp_size > 1 else 0,
        pcp_size=pcp_size,
        dcp_size=dcp_size,
        interleave=parallel.cp_kv_cache_interleave_size,
    )
    share = get_dcp_group().rank_in_group if dcp_size > 1 else 0
    if share != ranks.place % dcp_size:
        raise UnsupportedError(
            f"tensor-parallel rank {ranks.tp_rank} and prefill context rank {ranks.pcp_rank} keeps token share "
            f"{share} of {dcp_size}; kvferry knows an order in which that is {ranks.place % dcp_size}"
        )
    return ranks


def gather(own: Gathered, pcp_size: int) -> list[Gathered]:
    """The messages of all ranks of this engine, by their numbers. All ranks call it at the same time.

    vLLM's world group may also hold ranks of other engines: data-parallel replicas, which come and go
    independently. So messages go through the groups of one engine, from the inner to the outer.
    """
    said = [own]
    for group in (get_tp_group(), *([get_pcp_group()] if pcp_size > 1 else []), get_pp_group()):
        if group.world_size > 1:
            found: list[Any] = [None] * group.world_size
            torch.distributed.all_gather_object(found, said, group=group.cpu_group)
            said = [one for each in found for one in each]
    return said


class Worker:
    """The connector's work on one rank."""

    def __init__(self, config: VllmConfig, cache: KVCacheConfig) -> None:
        self._config = config
        self._cache = cache
        self._settings = read_settings(config)
        self._agent: Agent | None = None
        self._geometry: RankGeometry | None = None
        self._caches: Caches | None = None
        self._weights = weights_of(self._settings.weights, config.model_config.model)
        self._others: tuple[KvferryHandshake, ...] = ()
        self._jobs: dict[int, _Job] = {}
        self._tickets: dict[tuple[InstructionKind, str], int] = {}
        self._results = KVConnectorTransferResults()
        self._invalid: set[int] = set()
        self._idle = False
        self._ended = dict.fromkeys(("loads", "failed_loads", "handed_over", "failed_handovers"), 0)
        self._counted: dict[str, float] = {}
        self._each: dict[str, list[float]] = {name: [] for name in SPREADS}
        self._news = False
        self._layers: LayerPushes | None = None
        self._device: Any = None  # module of the caches' device; None: they are the host's
        # Events of the device; None: nothing to wait for.
        self._filled: Any = None  # it has written what vLLM fills new blocks with
        self._drafted: Any = None  # it has computed a step's drafts
        self._begun: KvferryStep | None = None  # the step whose pushes are open
        self._prompts: dict[str, Prompt] = {}  # of this step
        self._early: dict[str, bool] = {}  # requests that are pushed and not ended; whether the push is over
        self._commands: Commands | None = None  # None: nobody may give any
        self._gone: dict[str, str] = {}  # sends that have ended, and how; only if commands are taken

    def register(self, caches: dict[str, Any]) -> None:
        """The caches are there: the rank can be met from here on. Every rank calls this at the same time.

        Caches that are registered again replace the former ones.

        Raises UnsupportedError (their layout differs from the former one), AgainError as in sleep().
        """
        ranks = find_ranks(self._config.parallel_config)
        described, memory = describe(self._config, self._cache, caches, ranks)
        everyone = number_groups(gather(described, ranks.pcp_size))
        (geometry,) = (rank for rank in everyone if rank.rank == described.rank)
        if self._caches is not None:
            if geometry != self._geometry:
                raise UnsupportedError("the caches came back in another layout; allowed: the one they had")
            self.sleep()
            self.wake(memory)
            return
        transfer = self._config.kv_transfer_config
        assert transfer is not None and transfer.engine_id is not None
        engine = build_engine(everyone, transfer.engine_id)
        facts = scale_facts(everyone) | ({"weights": self._weights} if self._weights else {})
        with engines_processors():
            self._agent = self._open(engine, geometry.rank, facts)
        if self._settings.takes_commands:
            self._commands = Commands(self._agent, self._find, self._name)
        self._caches = Caches(self._agent, self._source, memory, self._jobs, self._note)
        self._geometry = geometry
        device = memory[0].device
        if device.type != "cpu":
            self._device = torch.get_device_module(device)
        if self._settings.push:
            self._layers = LayerPushes(
                self._agent,
                LayerOrder(self._config, [name for name in self._cache_names() if name in caches]),
                Pieces(engine, geometry.rank, geometry.layers),
                self._settings.transport,
                DeviceMarks(self._device, device.index) if self._device else None,
            )
        if ranks.pcp_size > 1:
            said = KvferryHandshake(self._agent.introduction, geometry, self._weights)
            self._others = tuple(gather(said, ranks.pcp_size))
        logger.info("kvferry rank %d of %s at %s", geometry.rank, engine.name, self._agent.endpoint)

    def _open(self, engine: Engine, rank: int, facts: dict[str, str]) -> Agent:
        return Agent(
            engine,
            rank,
            listen=self._settings.listen,
            keys=self._settings.keys,
            allowed_keys=self._settings.grants,
            local_commands=self._settings.local_commands,
            transport=self._settings.transport,
            way=self._settings.move,
            lease=self._settings.lease,
            convert=CONVERTED if self._settings.convert else (),
            verify=self._settings.verify,
            insecure=self._settings.insecure,
            remember=REMEMBERED_SECONDS,
            facts=facts,
            **log_options(logger),
        )

    def sleep(self) -> None:
        """The memory of the caches goes. Peers are refused until wake(), and meet this rank anew after it.

        Raises AgainError, which names what still uses the memory: it must not go.
        """
        if self._caches is not None and self._caches.are_here:
            self._caches.leave(self._settings.drain, self._settings.lease or LEASE_SECONDS)
            logger.info("the caches are unregistered: this rank of kvferry sleeps")

    def wake(self, memory: Sequence[torch.Tensor] | None = None) -> None:
        """The memory is there again: where it was, or elsewhere."""
        if self._caches is not None and not self._caches.are_here:
            self._caches.come(memory)
            logger.info("the caches are registered anew: this rank of kvferry is awake")

    @property
    def _source(self) -> EventSource:
        """Where events come from."""
        assert self._agent is not None
        return self._agent if self._commands is None else self._commands

    def _cache_names(self) -> list[str]:
        """The layers of all groups that are transferred."""
        groups = (self._cache.kv_cache_groups[group] for group in self._cache.transfer_group_ids)
        return [name for group in groups for name in group.layer_names]

    def handshake(self) -> KvferryHandshake | None:
        """What the scheduler's half needs to know of this rank."""
        if self._agent is None or self._geometry is None:
            return None
        return KvferryHandshake(self._agent.introduction, self._geometry, self._weights, self._others)

    # ---- steps

    def begin(self, step: KvferryStep) -> None:
        """Opens the pushes of chunks that the step computes: before the step, or with its first layer."""
        self._prompts = step.prompts
        if step is self._begun or self._layers is None:
            return
        self._begun = step
        names = {chunk.request for chunk in step.chunks}
        self._early |= dict.fromkeys(names - self._early.keys(), False)
        for item in step.instructions:
            if item.kind == InstructionKind.PUSH and item.request.id.decode() in names:
                self._try(item)
        tickets = {
            name: ticket for (kind, name), ticket in self._tickets.items() if kind == InstructionKind.PUSH
        }
        self._layers.begin(step.chunks, tickets)

    def layer_done(self, step: KvferryStep, name: str) -> None:
        """A layer's attention has run: of the step, or of one of its microbatches (dual batch overlap)."""
        self.begin(step)
        if self._layers is not None and not self._config.parallel_config.use_ubatching:
            self._layers.layer_done(name)

    def seal(self, step: KvferryStep) -> None:
        """The step has computed everything."""
        self.begin(step)
        if self._layers is not None:
            self._layers.seal()
        # A request ends with its last token, for which vLLM does not wait until its drafts are computed.
        if self._device is not None and self._has_drafts:
            self._drafted = record(self._device)

    def give_up(self, step: KvferryStep) -> None:
        """The step is about to begin: vLLM may write other content into blocks that are being pushed."""
        if self._commands is not None and step.computes:  # otherwise when it has been told of what was computed
            self._commands.computes(True)
        for name in step.lost:
            self._early.pop(name, None)
            ticket = self._tickets.get((InstructionKind.PUSH, name))
            if ticket is not None:
                assert self._agent is not None
                self._jobs[ticket].lost = True
                cancel(self._agent, ticket)

    def bound(self, step: KvferryStep) -> None:
        """vLLM has queued what fills new blocks. Loads write into them too, and nothing else orders both."""
        if step.fills and self._device is not None:
            self._filled = record(self._device)

    def start(self, step: KvferryStep) -> None:
        """Carries out the instructions of the scheduler's half."""
        self._idle = step.idle
        self.begin(step)
        early = {chunk.request for chunk in step.chunks}
        for request in step.void:
            self._results.finished_recving.add(request)
            self._results.failed_recving.add(request)
        for instruction in step.instructions:
            if instruction.kind != InstructionKind.PUSH or instruction.request.id.decode() not in early:
                self._try(instruction)
        for name, params in step.params.items():
            for kind in SENDS:
                if (kind, name) in self._tickets:
                    self._jobs[self._tickets[kind, name]].params = params
        for name in step.ended:
            if self._early.pop(name, False):
                self._results.finished_sending.add(name)
        if self._commands is not None:
            self._commands.computes(step.computes)

    def _try(self, instruction: Instruction) -> None:
        request = instruction.request.id.decode()
        try:
            self._do(instruction, request)
        except KvferryError as error:
            logger.error("request %s: %s: %s", request, instruction.kind.name, error)
            self._refused(instruction.kind, request, str(error))

    def _do(self, item: Instruction, request: str) -> None:
        assert self._agent is not None
        agent, kind = self._agent, item.kind
        if kind == InstructionKind.CANCEL:
            assert item.cancels is not None
            running = self._tickets.get((item.cancels, request))
            if running is not None:
                cancel(agent, running)
            return
        prompt = self._prompts.get(request)
        if kind == InstructionKind.HOLD:
            ticket = agent.hold(
                item.transfer_id,
                item.groups,
                consumers=item.consumers,
                lease=item.deadline,
                after=self._drafted,
            )
        elif kind == InstructionKind.PUSH:
            records = [Record(PROMPT, prompt.digest.encode(), 0, prompt.tokens)] if prompt is not None else []
            ticket = agent.push(
                item.transfer_id,
                item.groups,
                consumers=item.consumers,
                deadline=item.deadline or None,
                records=records,
            )
        else:
            ticket = self._load(agent, item, request)
        self._jobs[ticket] = _Job(kind, request, prompt=prompt)
        self._tickets[kind, request] = ticket
        if kind == InstructionKind.PUSH and request not in self._early:
            assert self._layers is not None
            self._layers.finished(ticket, self._drafted)

    def _load(self, agent: Agent, item: Instruction, request: str) -> int:
        contact = Contact(item.engine, item.endpoint, item.public_key or None)
        deadline, patience = item.deadline or self._settings.deadline, self._settings.patience  # none: NOTIFY
        if item.kind == InstructionKind.RESERVE:
            return agent.pull(item.transfer_id, contact, None, deadline=deadline, patience=patience)
        groups = item.groups
        if item.kind == InstructionKind.NOTIFY:
            assert self._geometry is not None
            groups = tuple(GroupSteps() for _ in self._geometry.groups)
        if item.kind == InstructionKind.EXPECT or item.push:
            return agent.expect(item.transfer_id, contact, groups, deadline=deadline, after=self._filled)
        if item.reserved:
            ticket = self._tickets.pop((InstructionKind.RESERVE, request), None)
            if ticket is None:
                raise NotFoundError("the producer's blocks could not be reserved")
            try:
                agent.pull_into(ticket, groups, after=self._filled)
            except KvferryError:
                cancel(agent, ticket)  # or the producer's blocks would stay reserved
                raise
            return ticket
        return agent.pull(
            item.transfer_id, contact, groups, deadline=deadline, patience=patience, after=self._filled
        )

    def _refused(self, kind: InstructionKind, request: str, why: str) -> None:
        """Reports a refused request here, because without a ticket no event will report it."""
        if kind in SENDS:
            self._went(request, why)
            self._sent(request)
        elif kind in LOADS:
            self._results.finished_recving.add(request)
            self._results.failed_recving.add(request)

    def _sent(self, request: str) -> None:
        """vLLM frees the blocks of a request that is reported: it must have ended."""
        if request in self._early:
            self._early[request] = True
        else:
            self._results.finished_sending.add(request)

    def take_results(self) -> KVConnectorTransferResults:
        """The transfers that have ended since the last call."""
        if self._agent is not None:
            if self._idle and self._jobs and not self._results.finished_recving:
                self._source.wait(IDLE_SECONDS)
            for event in self._source.events():
                self._note(event)
        results, self._results = self._results, KVConnectorTransferResults()
        return results

    def take_invalid(self) -> set[int]:
        """Blocks without valid content, of loads that have ended since the last call."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    @property
    def _names_blocks(self) -> bool:
        """Whether failures can be reported to vLLM block by block.

        Its block ids must be unique, and the content before the first invalid block must be enough to go on.
        """
        assert self._geometry is not None
        return len(self._cache.kv_cache_groups) == 1 and all(
            group.kind == GroupKind.TOKENS and not group.window_tokens and not group.chunk_tokens
            for group in self._geometry.groups
        )

    @property
    def _has_drafts(self) -> bool:
        assert self._geometry is not None
        return any(group.is_draft for group in self._geometry.groups)

    def take_stats(self) -> KvferryStats | None:
        """The counts since the last call; None if nothing has ended."""
        if self._agent is None or not self._news:
            return None
        self._news = False
        now = self._ended | counted(self._agent.stats)
        before, self._counted = self._counted, now
        each, self._each = self._each, {name: [] for name in SPREADS}
        return KvferryStats({name: value - before.get(name, 0) for name, value in now.items()} | each)

    def _note(self, event: Event) -> None:
        self._news = True
        job = self._jobs.get(event.ticket)
        if job is None:
            return
        if event.kind == EventKind.DONE and job.kind in LOADS and _is_other(job.prompt, event.records):
            self._ended["failed_loads"] += 1
            job.failed, job.why = True, OTHER_PROMPT
            logger.warning("request %s: %s", job.request, job.why)
        elif event.kind == EventKind.DONE:
            self._ended["loads"] += job.kind in LOADS
            self._ended["handed_over"] += job.kind in SENDS
            seconds = time.monotonic() - job.begun
            if job.kind in LOADS:
                self._each["load_time_seconds"].append(seconds)
                self._each["load_size_bytes"].append(event.bytes)
            elif job.kind in SENDS:
                self._each["handover_time_seconds"].append(seconds)
        if event.kind == EventKind.FAILED:
            self._ended["failed_loads"] += job.kind in LOADS
            self._ended["failed_handovers"] += job.kind in SENDS
            job.failed, job.why = True, event.detail
            failure = "" if self._layers is None else self._layers.take_failure(event.ticket)
            if failure:
                job.why = f"{failure} ({event.detail})"
            logger.warning("request %s: %s", job.request, job.why)
            if job.kind in LOADS and self._names_blocks and any(event.invalid):
                job.named = True
                for blocks in event.invalid:
                    self._invalid.update(blocks)
        if not event.blocks_free:
            return
        if job.kind in SENDS:
            self._went(job.request, job.why or how_ended(event))
        del self._jobs[event.ticket]
        if self._tickets.get((job.kind, job.request)) == event.ticket:
            del self._tickets[job.kind, job.request]
        if job.lost:
            return
        if job.kind in SENDS:
            self._sent(job.request)
        elif job.kind in LOADS:
            self._results.finished_recving.add(job.request)
            if job.failed and not job.named:
                self._results.failed_recving.add(job.request)

    # ---- an operator's commands

    def report(self) -> KvferryReport | None:
        """What the scheduler's half must know after a step; None if nobody may give commands."""
        return None if self._commands is None else KvferryReport(self._commands.report())

    def _went(self, request: str, how: str) -> None:
        """Remembers how a send has ended, for an operator who asks for it."""
        if self._commands is None:
            return
        self._gone.pop(request, None)
        self._gone[request] = how
        if len(self._gone) > MOST_GONE:
            del self._gone[next(iter(self._gone))]

    def _name(self, ticket: int) -> str | None:
        """vLLM's name of a request. Other threads may call it: it only looks up."""
        job = self._jobs.get(ticket)
        return None if job is None else job.request

    def _find(self, request: str) -> Kept:
        """A request that is kept for peers. Other threads may call it: it only looks up."""
        for kind in (*SENDS, *LOADS):
            ticket = self._tickets.get((kind, request))
            job = None if ticket is None else self._jobs.get(ticket)
            if ticket is None or job is None:
                continue
            if kind in LOADS:
                raise NotFoundError(f"request {request} is being loaded here; it is kept where it comes from")
            if job.failed:
                raise NotFoundError(f"request {request} is not kept any more: {job.why}")
            if job.params is None:
                raise NotFoundError(
                    f"request {request} is still being computed, and written to the server that was asked for "
                    "it at the same time"
                )
            return Kept(ticket, job.params)
        how = self._gone.get(request)
        if how is not None:
            raise NotFoundError(f"request {request} is not kept any more: {how}")
        raise NotFoundError(
            f"no request {request} is kept here; its name is remote_request_id in its kv_transfer_params"
        )

    def close(self) -> None:
        """The engine ends. What it keeps for peers is handed over first, as long as the settings allow."""
        try:
            self._drain()
        finally:
            if self._layers is not None:
                self._layers.close()
                self._layers = None
            if self._agent is not None:
                self._agent.close()
                self._agent = self._caches = None

    def _drain(self) -> None:
        if self._agent is None:
            return
        if self._commands is not None:
            self._commands.close()
        for event in self._source.events():
            self._note(event)
        if self._commands is not None and self._commands.has_drained:
            return
        for ticket, job in self._jobs.items():
            if job.kind in LOADS or job.kind == InstructionKind.RESERVE:  # nothing will use what they load
                cancel(self._agent, ticket)
        sends = sum(job.kind in SENDS for job in self._jobs.values())
        if sends:
            seconds = self._settings.drain
            logger.info("the engine ends: peers have %g s for the %d requests kept for them", seconds, sends)
        drain(self._agent, self._source, self._note, self._settings.drain)
