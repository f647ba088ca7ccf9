"""Writing a request while it is computed: chunk by chunk, and within a chunk layer by layer.

If the decode server was asked at the same time as the prefill server, both know the name of the transfer before
there is anything to write: the decode server announces its blocks, and the prefill server opens the push with
the first chunk. Computed layers then move while the others are being computed. The scheduler's half says which
tokens a step computes and in which blocks (EarlyPushes); a worker tells its agent how much of them is ready
(LayerPushes).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from kvferry.agent import Agent
from kvferry.agent_requests import ALL_LAYERS, ALL_TOKENS, Readable
from kvferry.aggregator import Aggregate, RequestKey
from kvferry.errors import KvferryError, NotFoundError
from kvferry.model import GroupKind
from kvferry.plan import CostModel, Plan
from kvferry.request import BlockTable
from kvferry.scheduler import Instruction, InstructionKind, Schedule
from kvferry.shard import Engine
from kvferry.tickets import cancel
from kvferry.vllm.compat import init_logger
from kvferry.vllm.geometry import GroupGeometry
from kvferry.vllm.layers import place_layer
from kvferry.vllm.marks import DeviceMarks
from kvferry.vllm.messages import Chunk

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvferry")

#: The tables of a group, of block ids by vLLM's group, as the scheduler's half makes them.
TableOf = Callable[[GroupGeometry, Sequence[int]], BlockTable]


# ---- beside the scheduler


@dataclass
class _Early:
    """A request that is written while it is computed.

    Attributes:
        opened: the workers have been told of the push
        brought: blocks up to this token have gone to the workers
        needed: for each group, the first token that a consumer needs
    """

    request: Request
    key: RequestKey
    opened: bool = False
    brought: int = 0
    needed: list[int] = field(default_factory=list)


class EarlyPushes:
    """The requests that are written while they are computed, in the scheduler's half."""

    def __init__(self, schedule: Schedule, groups: Sequence[GroupGeometry], table_of: TableOf) -> None:
        self._schedule = schedule
        self._groups = groups
        self._table_of = table_of
        self._all: dict[str, _Early] = {}
        self._ended: list[str] = []
        self._lost: list[str] = []

    def add(self, request: Request, key: RequestKey) -> None:
        """Adds a request whose consumer was asked at the same time."""
        self._all[request.request_id] = _Early(request, key)

    def open(self, output: SchedulerOutput) -> None:
        """Opens the pushes of requests of which this step computes the first tokens."""
        for name in output.num_scheduled_tokens:
            early = self._all.get(name)
            if early is None or early.opened:
                continue
            try:
                self._schedule.push(early.key, None, early.request.num_prompt_tokens)
                early.opened = True
            except KvferryError as error:
                logger.error("request %s is pushed when it has finished: %s", name, error)
                del self._all[name]

    def chunks(
        self,
        output: SchedulerOutput,
        instructions: Sequence[Instruction],
        blocks: KVCacheManager,
    ) -> list[Chunk]:
        """The chunks of these requests that this step computes."""
        for item in instructions:
            early = self._all.get(item.request.id.decode())
            if early is not None and item.kind == InstructionKind.PUSH:
                early.needed = [group.begin for group in item.groups]
        found = []
        for name, count in output.num_scheduled_tokens.items():
            early = self._all.get(name)
            if early is None:
                continue
            done, prompt = early.request.num_computed_tokens, early.request.num_prompt_tokens
            if done < prompt:  # consumers do not want tokens after the prompt
                end = min(done + count, prompt)
                # vLLM's prefix cache has blocks that another request of this step is yet to compute.
                begin = done if early.brought else 0
                found.append(Chunk(name, begin, end, self._tables(early, end, blocks.get_block_ids(name))))
                early.brought = end
        return found

    def _tables(self, early: _Early, end: int, block_ids: Sequence[Sequence[int]]) -> list[BlockTable]:
        """The blocks that workers do not know yet: of tokens up to `end`; a state's comes with the last."""
        tables = []
        for group, needed in zip(self._groups, early.needed, strict=True):
            whole = self._table_of(group, block_ids[group.source])
            if group.kind == GroupKind.STATE:
                tables.append(whole if end == early.request.num_prompt_tokens else _NOTHING)
                continue
            first = max(early.brought, needed) // group.tokens_per_id
            last = -(-end // group.tokens_per_id)
            tables.append(BlockTable(whole.ids[first:last], first) if first < last else _NOTHING)
        return tables

    def preempted(self, name: str) -> None:
        """A request loses its blocks. What was written is void; it is computed again, but not pushed."""
        early = self._all.pop(name, None)
        if early is not None and early.opened:
            self._lost.append(name)

    def finished(self, name: str, kept: bool) -> None:
        """A request has finished or was aborted; `kept`: its blocks are kept until its push is over."""
        early = self._all.pop(name, None)
        if early is not None and early.opened:
            (self._ended if kept else self._lost).append(name)

    def take_ended(self) -> list[str]:
        """Those that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def take_lost(self, keys: Mapping[str, RequestKey]) -> list[str]:
        """Those that have lost their blocks since the last call, when their cancellation has been taken.

        vLLM has the blocks already and waits for no report, so the schedule gets its report here.
        """
        lost, self._lost = self._lost, []
        gone = tuple(keys[name] for name in lost if name in keys)
        if gone:
            self._schedule.update(Aggregate(output=0, expected=0, sent=gone, received=(), failed=()))
        return lost


_NOTHING = BlockTable(np.empty(0, np.uint32))


# ---- in a worker


class LayerOrder:
    """How many model layers are complete when a layer's attention has run.

    Only attention calls a hook, after it has run, and layers run in the order of their numbers, each once, or
    LayerPushes notices that they do not. So a layer with one cache is complete with its own hook. A layer with
    several caches, as with an indexer or with attention beside a state, or with none that has a hook, is
    complete when a later layer has run, or the step has.
    """

    def __init__(self, config: VllmConfig, names: Sequence[str]) -> None:
        places = {name: place_layer(config, name) for name in names}
        numbers = [place.number for place in places.values()]
        self.layers = range(min(numbers), max(numbers) + 1)
        # A draft runs several times, and is complete at the end of the step. A model with loops has layers with
        # the same numbers.
        most = min((place.number for place in places.values() if place.draft), default=self.layers.stop)
        self._complete = {
            name: min(most, place.number + (numbers.count(place.number) == 1))
            for name, place in places.items()
            if not place.draft
        }

    def complete(self, name: str) -> int:
        """All layers with a lower number; 0: not known."""
        return self._complete.get(name, 0)


class Pieces:
    """Decides in how many pieces the layers of a chunk go.

    With `n` pieces, an n-th of the chunk is still to be moved when the last layer has been computed, and moving
    costs the price of a piece n times. The sum is least at n = root of (the chunk's time / a piece's price). If
    the chunk's time is below 4 prices, the chunk goes as one piece.

    The consumer's shape hardly matters here: the chunk's time is that of moving it to an engine like this one.
    """

    def __init__(self, engine: Engine, rank: int, layers: range) -> None:
        self._engine = engine
        self._rank = rank
        self._layers = layers

    @cached_property
    def _plan(self) -> Plan:
        return Plan(self._engine.shard(self._rank), self._engine)

    def layers_each(self, tokens: int, cost: CostModel) -> int:
        """How many layers a piece has, in a chunk of `tokens` tokens."""
        moving = CostModel(cost.ns_per_run, cost.ns_per_byte)
        whole = sum(self._plan.predict(i, tokens, moving).ns for i in range(len(self._plan.sources)))
        pieces = min(len(self._layers), max(1, math.isqrt(int(whole / cost.ns_per_source))))
        return -(-len(self._layers) // pieces)


@dataclass(eq=False)
class _Word:
    """What the agent was told about a chunk.

    Attributes:
        each: number of layers that go at a time
        said: number of layers reported as ready
    """

    ticket: int
    chunk: Chunk
    each: int
    said: int


class LayerPushes:
    """Tells the agent which layers of pushed requests a step has computed, as they become ready."""

    def __init__(
        self, agent: Agent, order: LayerOrder, pieces: Pieces, transport: str, marks: DeviceMarks | None = None
    ) -> None:
        self._agent = agent
        self._order = order
        self._pieces = pieces
        self._transport = transport
        self._marks = marks
        self._words: list[_Word] = []
        self._ran: dict[str, int] = {}  # layers that have run in this step, and what order.complete() said then
        self._in_order = True
        self._failures: dict[int, str] = {}  # sentences, by ticket; the marks' thread adds some

    def close(self) -> None:
        """The engine ends."""
        if self._marks is not None:
            self._marks.close()

    def begin(self, chunks: Sequence[Chunk], tickets: Mapping[str, int]) -> None:
        """The step begins; from here on the agent owns the blocks of its chunks."""
        self.seal()  # vLLM does not tell all pipeline stages that a step has ended
        # The others were refused, or have ended.
        known = [chunk for chunk in chunks if chunk.request in tickets]
        if not known:
            return
        cost, start = CostModel.assumed(self._fabric()), self._order.layers.start
        for chunk in known:
            each = self._pieces.layers_each(chunk.end - chunk.begin, cost)
            self._words.append(_Word(tickets[chunk.request], chunk, each, start))
        self._tell(self._words, 0)

    def layer_done(self, name: str) -> None:
        """A layer's attention has run, for all tokens of the step."""
        layers = self._order.complete(name)
        if not layers or not self._in_order:
            return
        if name in self._ran or layers < max(self._ran.values(), default=0):
            self._lose_order(name)
            return
        self._ran[name] = layers
        if layers >= self._order.layers.stop:  # seal() comes next
            return
        words = [word for word in self._words if word.said + word.each <= layers]
        if words:
            self._tell(words, layers)

    def seal(self) -> None:
        """The step has ended: all layers of its chunks are ready, also those without a hook."""
        if self._words:
            self._tell(self._words, ALL_LAYERS)
        self._words = []
        self._ran = {}

    def _lose_order(self, name: str) -> None:
        """Tokens pass through layers several times, or in an order of their own, as in models with loops.

        What was reported as ready was not: such pushes fail. Later ones are written at the end of each step.
        """
        self._in_order = False
        logger.warning(
            "layer %s ran again, or after later ones: from here on requests are written at the end of a step",
            name,
        )
        early = [word for word in self._words if word.said > self._order.layers.start]
        for word in early:
            self._fail(word.ticket, f"layer {name} ran again, or after later ones, when it had been written")
        self._words = [word for word in self._words if word not in early]

    def finished(self, ticket: int, after: Readable | None) -> None:
        """A request that was not pushed while it was computed has finished: all of it is ready."""
        self._push_ready(ticket, (0, ALL_TOKENS), ALL_LAYERS, None, after)

    def take_failure(self, ticket: int) -> str:
        """Why this side has ended a push, or the device did not compute it; empty: neither."""
        return self._failures.pop(ticket, "")

    def _tell(self, words: Sequence[_Word], layers: int) -> None:
        """Reports layers of chunks as ready; with 0, the tokens before the chunks, and their blocks."""
        over = list(words)
        try:
            with self._computed([word.ticket for word in words]) as after:
                over = [word for word in words if not self._say(word, layers, after)]
        except OSError as error:  # no descriptor is free
            for word in words:
                self._fail(word.ticket, f"the device cannot be waited for: {error}")
        for word in words:
            word.said = max(word.said, layers)
        self._words = [word for word in self._words if word not in over]

    def _computed(self, tickets: Sequence[int]) -> contextlib.AbstractContextManager[int | None]:
        """A descriptor to wait for until all queued work is in memory; None: it is when the call returns.

        Args:
            tickets: of the pushes that wait for it. They fail if the device does
        """
        if self._marks is None:
            return contextlib.nullcontext()
        said = "the device failed before it had computed the request: "
        return self._marks.mark(lambda why: self._failures.update(dict.fromkeys(tickets, said + why)))

    def _fabric(self) -> str:
        """The transport kind that serves the consumers; before the first push, the kind of the settings."""
        return next((peer.fabric for peer in self._agent.peers() if peer.fabric), self._transport)

    def _say(self, word: _Word, layers: int, after: int | None) -> bool:
        """Reports layers of one chunk as ready. False: its push is over, or ends now."""
        chunk, blocks = (word.chunk.begin, word.chunk.end), None if layers else word.chunk.tables
        return self._push_ready(word.ticket, chunk, layers, blocks, after)

    def _push_ready(
        self,
        ticket: int,
        chunk: tuple[int, int],
        layers: int,
        blocks: Sequence[BlockTable] | None,
        after: Readable | None,
    ) -> bool:
        try:
            self._agent.push_ready(ticket, chunk, layers, blocks=blocks, after=after)
        except NotFoundError:  # its event says why
            return False
        except KvferryError as error:
            self._fail(ticket, str(error))
            return False
        return True

    def _fail(self, ticket: int, why: str) -> None:
        self._failures[ticket] = why
        cancel(self._agent, ticket)
