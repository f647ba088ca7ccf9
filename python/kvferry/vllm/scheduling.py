"""The scheduler's half of the connector: kvferry's Schedule, in vLLM's terms."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry.agent import Agent
from kvferry.aggregator import Aggregate, RequestKey
from kvferry.errors import CancelledError, InvalidError, KvferryError, MismatchError, NotFoundError
from kvferry.log import log_options
from kvferry.model import Group, GroupKind
from kvferry.request import NO_BLOCK, BlockTable, GroupSteps
from kvferry.rules import prefill_token_count
from kvferry.scheduler import Instruction, InstructionKind, Schedule, TransferParams
from kvferry.transfer_params import read_id, read_number, read_source, write_source
from kvferry.vllm.compat import (
    KVCacheConfig,
    free_blocks,
    init_logger,
    keep_one_more,
    leave_uncached,
    shorten_prompt,
)
from kvferry.vllm.draining import DRAINS, REFUSED, Accepting
from kvferry.vllm.geometry import GroupGeometry, build_model, draft_cells, group_order, own_layers
from kvferry.vllm.identity import content_of, prompt_of, rotation_of, scale_facts
from kvferry.vllm.messages import KvferryHandshake, KvferryReport, KvferryStep, Prompt
from kvferry.vllm.pushing import EarlyPushes
from kvferry.vllm.settings import read_settings
from kvferry.vllm.turns import Turns

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvferry")

NULL_BLOCK = 0  # vLLM's block without content, such as those before a sliding window
MAX_USES = 64


class Scheduling:
    """Keeps track of requests that wait for caches, and of requests kept for other engines."""

    def __init__(self, config: VllmConfig, cache: KVCacheConfig) -> None:
        self._config = config
        self._cache = cache
        self._settings = read_settings(config)
        self._directory: Agent | None = None
        self._schedule: Schedule | None = None
        self._groups: list[GroupGeometry] = []
        self._sizes: tuple[int, ...] = ()  # tokens of a block, of each of vLLM's groups
        self._model_groups: Sequence[Group] = ()  # the same, as the model has them
        self._layers: Sequence[Sequence[int]] = ()  # of each of them, if other engines can use that
        self._keys: dict[str, RequestKey] = {}
        self._loading: set[str] = set()
        self._matched: dict[str, int] = {}  # tokens in the prefix cache at the last match()
        self._void: list[str] = []
        self._params: dict[str, dict[str, Any]] = {}  # of requests that have finished since the last step
        self._generation = 0  # how often the caches have come back
        self._weights = ""  # identity of ours
        self._rotation = rotation_of(config.model_config)
        self._draft = ""  # digest of what our draft model caches
        self._without_draft: set[str] = set()  # requests whose other side has no such cells
        self._accepting = Accepting(self._settings.takes_commands)
        self._refused: set[str] = set()  # requests whose answers say that the engine drains
        self._turns = Turns()  # answers of a consumer that are kept for the next turn
        self._prompts: dict[str, Prompt] = {}  # of requests whose workers compare them, or say what they are
        self._early: EarlyPushes | None = None
        self._blocks: KVCacheManager | None = None

    # ---- meeting

    def introduce(self, ranks: dict[tuple[int, int], KvferryHandshake]) -> None:
        """The workers' caches are there, or there again: peers can meet the engine from here on."""
        if self._directory is not None:
            self._generation += 1
            return
        transfer = self._config.kv_transfer_config
        assert transfer is not None
        known = {said.geometry.rank: said for given in ranks.values() for said in (given, *given.others)}
        geometries = [known[rank].geometry for rank in sorted(known)]
        self._directory = Agent.directory(
            listen=self._settings.meeting,
            keys=self._settings.keys,
            allowed_keys=self._settings.grants,
            insecure=self._settings.insecure,
            **log_options(logger),
        )
        for rank in sorted(known):
            self._directory.introduce(known[rank].introduction)
        self._groups = group_order(geometries)
        self._sizes = tuple({group.source: group.tokens_per_id for group in self._groups}.values())
        model = build_model(geometries)
        self._model_groups = model.groups
        self._layers = own_layers(model.groups)
        self._draft = draft_cells(model, scale_facts(geometries))
        self._weights = known[0].weights
        self._schedule = Schedule(
            model,
            [group.tokens_per_id for group in self._groups],
            engine=transfer.engine_id,
            endpoint=self._directory.endpoint,
            public_key=self._settings.keys.public_key if self._settings.keys else None,
            incarnation=int.from_bytes(os.urandom(8), "little"),
            lookahead_tokens=self._config.num_prefill_lookahead_tokens,
            lease=self._settings.lease,
            deadline=self._settings.deadline,
        )
        if self._settings.push:
            self._early = EarlyPushes(self._schedule, self._groups, _table)
        logger.info("kvferry engine %s is met at %s", transfer.engine_id, self._directory.endpoint)

    def bind(self, blocks: KVCacheManager) -> None:
        """Keeps the manager of vLLM's blocks. vLLM gives it before the first request."""
        self._blocks = blocks
        keep_one_more(blocks)

    def close(self) -> None:
        """The engine ends."""
        if self._directory is not None:
            self._directory.close()
            self._directory = None

    # ---- requests

    def add(self, request: Request) -> None:
        """A request has arrived."""
        params = request.kv_transfer_params
        if not params or self._schedule is None:
            return
        prefills = bool(params.get("do_remote_decode"))
        source: TransferParams | None = None
        try:
            if prefills:
                source = self._turn_before(request, params)
            if params.get("do_remote_prefill"):
                source = read_source(params, self._weights)
                # Of a request that vLLM's front end has refused there is only a stub, without its prompt.
                if getattr(request, "abort_immediately", False):
                    self._decline(request, source)
                    return
                self._check_role()
                self._check_prompt(request, source, params)
            if source is None and not prefills:
                return
            if source is not None and not self._same_draft(params):
                self._without_draft.add(request.request_id)
            elif not prefills and self._keeps_turns and content_of(request, 0):
                self._turns.want(request.request_id)
            serves = prefills or self._turns.wants(request.request_id)
            push = prefills and self._settings.push
            announced = push and source is None and bool(params.get("kvferry_transfer_id"))
            if announced:
                self._check_length(request)
            push_id = (read_id(params) if announced else _push_id(request)) if push else None
            tokens = self._kept_tokens(request) if prefills else request.num_prompt_tokens
            key = self._keys[request.request_id] = self._schedule.add(
                request.request_id,
                tokens,
                now_ns=time.monotonic_ns(),
                source=source,
                serves=serves,
                consumers=(read_number(params, "kvferry_uses", 0, MAX_USES) if prefills else 0) or 1,
                push=push,
                push_id=push_id,
            )
            self._note_prompt(request, announced, source, params)
            if tokens < request.num_prompt_tokens:
                shorten_prompt(request, tokens)
            if prefills:
                self._accepting.add(request.request_id)
            if announced and self._early is not None:  # the consumer was asked at the same time
                self._early.add(request, key)
        except (KvferryError, TypeError, ValueError) as error:
            logger.error("request %s is computed here: %s", request.request_id, error)
            if source is not None and request.request_id not in self._keys:
                self._decline(request, source)

    def _decline(self, request: Request, source: TransferParams) -> None:
        """Tells the other engine that its cache is not wanted, or it would keep that until its lease ends."""
        assert self._schedule is not None
        with contextlib.suppress(KvferryError, TypeError, ValueError):  # of what the schedule refuses, too
            key = self._schedule.add(
                request.request_id,
                request.num_prompt_tokens,
                now_ns=time.monotonic_ns(),
                source=replace(source, tokens=0),  # as many as can be used: a state is not stepped back
            )
            self._schedule.abort(key)

    def _check_role(self) -> None:
        """Raises InvalidError where a load is not safe: vLLM may still compute what a block held before."""
        transfer = self._config.kv_transfer_config
        assert transfer is not None
        if not transfer.is_kv_consumer:
            raise InvalidError(
                f"kv_role is {transfer.kv_role}, which loads nothing; allowed: kv_consumer, kv_both"
            )

    def _check_prompt(self, request: Request, source: TransferParams, params: dict[str, Any]) -> None:
        """Raises MismatchError if the other engine rotates keys in another way, computed another prompt, or
        computed it with another adapter.
        """
        said = params.get("kvferry_rotation")
        if said and self._rotation and said != self._rotation:
            raise MismatchError(
                "the prefill server rotates keys in another way: rope_parameters or, with LongRoPE, "
                f"max_model_len differ (kvferry_rotation is {said!r}; here it is {self._rotation!r})"
            )
        said = params.get("kvferry_prompt")
        if not said or source.tokens > request.num_prompt_tokens:  # it has more than the prompt
            return
        own = prompt_of(request, source.tokens)
        if own and said != own:
            raise MismatchError(
                f"the prefill server computed other tokens than the first {source.tokens} of this prompt, or "
                f"with another adapter: kvferry_prompt is {said!r}; here it is {own!r}"
            )

    def _note_prompt(
        self, request: Request, announced: bool, source: TransferParams | None, params: dict[str, Any]
    ) -> None:
        """Where both servers are asked at once, the workers compare what parameters cannot say yet."""
        if announced or (source is not None and source.push and not params.get("kvferry_prompt")):
            tokens = (source.tokens if source is not None else 0) or self._kept_tokens(request)
            if digest := prompt_of(request, tokens):
                self._prompts[request.request_id] = Prompt(digest, tokens)

    def _check_length(self, request: Request) -> None:
        """Raises InvalidError if vLLM would free blocks while they are written to a consumer.

        It does so with each token after the prompt, in front of windows and chunks.
        """
        slides = any(group.window_tokens or group.chunk_tokens for group in self._model_groups)
        goes_on = request.max_tokens > 1 and self._kept_tokens(request) == request.num_prompt_tokens
        if slides and goes_on:
            raise InvalidError(
                f"max_tokens is {request.max_tokens}; allowed: 1 for a request that is written while it is "
                "computed, of a model with sliding windows or chunked attention"
            )

    def match(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens can be loaded, and whether the request waits for them; None: not known yet."""
        self._turns.asked(request.request_id, sum(-(-request.num_tokens // size) for size in self._sizes))
        key = self._keys.get(request.request_id)
        if key is None or self._schedule is None:
            return 0, False
        accepted = self._accepting.decide(request.request_id)
        if accepted is None:
            self._turns.served(request.request_id)
            return None, False
        if not accepted:
            logger.warning("request %s is not kept for peers: %s", request.request_id, DRAINS)
            self._refused.add(request.request_id)
            self._drop(request.request_id)
            return 0, False
        try:
            tokens = self._schedule.match(key, computed_tokens, now_ns=time.monotonic_ns())
        except NotFoundError:  # it has been loaded already
            return 0, False
        self._matched[request.request_id] = computed_tokens
        return tokens, tokens > 0

    def allocated(self, request: Request, blocks: KVCacheBlocks, load_tokens: int) -> None:
        """The request has blocks."""
        self._turns.served(request.request_id)
        key = self._keys.get(request.request_id)
        if key is None or self._schedule is None or request.request_id in self._loading:
            return
        computed_tokens = self._matched.pop(request.request_id, 0)
        try:
            if load_tokens and self._accepting.drains and not self._accepting.has_accepted(request.request_id):
                raise CancelledError(DRAINS)
            waits = self._schedule.allocated(
                key,
                self._tables(blocks.get_block_ids()),
                computed_tokens=computed_tokens,
                load_tokens=load_tokens,
                now_ns=time.monotonic_ns(),
            )
        except NotFoundError:
            waits = False
        except KvferryError as error:
            # Whether it is computed here is for vLLM to decide, by its kv_load_failure_policy.
            logger.error("request %s: %s", request.request_id, error)
            self._drop(request.request_id)  # or vLLM would ask for it again after the failed load
            waits = False
        if waits:
            self._loading.add(request.request_id)
            self._leave_partial(request.request_id, computed_tokens, load_tokens)
        elif load_tokens:
            # vLLM waits for a load that will not happen: report that it has failed.
            self._loading.add(request.request_id)
            self._void.append(request.request_id)

    def _leave_partial(self, request: str, computed_tokens: int, load_tokens: int) -> None:
        """Keeps the block in which a window begins out of the prefix cache: only its last tokens are loaded.

        vLLM would take it for whole, and give it to a request that continues an earlier token and sees its
        first ones.
        """
        if self._blocks is None:
            return
        for group, of_model in zip(self._groups, self._model_groups, strict=True):
            first = of_model.first_needed(computed_tokens + load_tokens)
            if first > computed_tokens and first % group.tokens_per_id:
                leave_uncached(self._blocks, group.source, request, first // group.tokens_per_id)

    def _drop(self, request: str) -> None:
        """Neither loads nor keeps a request: vLLM computes it, as if the connector had not been asked."""
        assert self._schedule is not None
        self._schedule.abort(self._keys.pop(request))
        self._turns.drop(request)
        if self._early is not None:
            self._early.finished(request, kept=False)

    def finished(
        self, request: Request, block_ids: Sequence[Sequence[int]], ended_well: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request has finished. Returns whether its blocks are kept, and parameters for the consumer."""
        keep, params = self._finish(request, block_ids, ended_well)
        if not keep:
            self._turns.drop(request.request_id)
        if self._early is not None:
            self._early.finished(request.request_id, keep)
        return keep, params

    def _finish(
        self, request: Request, block_ids: Sequence[Sequence[int]], ended_well: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        key = self._keys.pop(request.request_id, None)
        self._matched.pop(request.request_id, None)
        self._prompts.pop(request.request_id, None)
        self._without_draft.discard(request.request_id)
        self._accepting.ended(request.request_id)
        is_turn = self._turns.wants(request.request_id)
        ended_well &= not (is_turn and self._accepting.drains)  # its next turn would be a new request
        if is_turn and not ended_well:
            self._turns.drop(request.request_id)
        if request.request_id in self._refused:
            self._refused.discard(request.request_id)
            return False, {REFUSED: DRAINS}
        if key is None or self._schedule is None:
            return False, None
        try:
            if not ended_well:
                free = self._schedule.abort(key)
                if free and request.request_id in self._loading:
                    self._void.append(request.request_id)
                return not free, None
            tokens = request.num_computed_tokens
            if is_turn:  # a step that is still running may be computing the token that ended it
                tokens = min(tokens, request.num_tokens - 1)
            end = self._schedule.finished(key, self._tables(block_ids), tokens, now_ns=time.monotonic_ns())
        except NotFoundError:
            return False, None
        except KvferryError as error:
            logger.error("request %s cannot be handed over: %s", request.request_id, error)
            return not self._schedule.abort(key), None
        if end.params is None:
            return end.keep, None
        if is_turn:
            whole = {block for ids in block_ids for block in ids} - {NULL_BLOCK}
            self._turns.finished(request.request_id, len(whole))
        params = self._params_out(request, end.params, block_ids, is_turn)
        if end.keep and self._settings.takes_commands:
            self._params[request.request_id] = {**params, "remote_block_ids": []}  # which may be many
        return end.keep, params

    # ---- steps

    def step(self, output: SchedulerOutput) -> KvferryStep:
        """The workers' tasks in this step."""
        if self._schedule is None:
            return KvferryStep()
        for request in output.preempted_req_ids or ():
            key = self._keys.get(request)
            if key is not None:
                try:
                    self._schedule.preempted(key)
                except NotFoundError:
                    pass
            if self._early is not None:
                self._early.preempted(request)
        void, self._void = self._void, []
        params, self._params = self._params, {}
        idle = output.total_num_scheduled_tokens == 0
        computes = self._accepting.computes
        fills = bool(output.new_block_ids_to_zero or output.kv_cache_block_copies)
        early, blocks = self._early, self._blocks
        if early is None or blocks is None:
            instructions = self._take(output)
            prompts = self._take_prompts(instructions)
            return KvferryStep(
                instructions, void, idle=idle, params=params, computes=computes, fills=fills, prompts=prompts
            )
        early.open(output)
        instructions = self._take(output)
        return KvferryStep(
            instructions,
            void,
            early.chunks(output, instructions, blocks),
            early.take_ended(),
            early.take_lost(self._keys),
            idle,
            params,
            computes,
            fills,
            self._take_prompts(instructions),
        )

    def _take_prompts(self, instructions: Sequence[Instruction]) -> dict[str, Prompt]:
        """The prompts of requests that workers begin to write, or to have written."""
        begun = (
            item.request.id.decode()
            for item in instructions
            if item.kind in (InstructionKind.PUSH, InstructionKind.EXPECT)
        )
        return {name: self._prompts.pop(name) for name in begun if name in self._prompts}

    def _take(self, output: SchedulerOutput) -> list[Instruction]:
        """The instructions of the step, after kept answers have given way to requests that lack blocks."""
        assert self._schedule is not None
        if self._blocks is not None:
            idle = output.total_num_scheduled_tokens == 0
            for key in self._turns.give_way(free_blocks(self._blocks), idle=idle):
                logger.info("answer %s is no longer kept for its next turn", key.id.decode())
                self._schedule.abort(key)
        return [self._keep_turn(self._leave_draft(item)) for item in self._schedule.take()]

    def gives_way(self) -> bool:
        """Whether a running request that lacks blocks gets some that are kept for next turns."""
        return self._turns.can_help()

    def reset(self) -> None:
        """No answer is kept for a next turn that was computed before."""
        self._turns.reset()

    @property
    def resets(self) -> bool:
        """Whether such answers still have blocks."""
        return self._turns.resets

    def update(self, output: KVConnectorOutput) -> None:
        """Takes in the reports of all workers."""
        received = set(output.finished_recving or ())
        self._loading -= received
        self._turns.ended(output.finished_sending or ())
        if isinstance(output.kv_connector_worker_meta, KvferryReport):
            self._accepting.reported(output.kv_connector_worker_meta)
        if self._schedule is None:
            return
        news = Aggregate(
            output=0,
            expected=0,
            sent=_keys(output.finished_sending),
            received=_keys(received),
            failed=_keys(set(output.failed_recving or ()) & received),
        )
        if news.sent or news.received:
            self._schedule.update(news)

    # ---- between vLLM's terms and ours

    @property
    def _has_state(self) -> bool:
        return any(group.kind == GroupKind.STATE for group in self._groups)

    def _kept_tokens(self, request: Request) -> int:
        """How many tokens of a prompt are computed for a consumer: a state cannot be stepped back."""
        return prefill_token_count(
            request.num_prompt_tokens,
            has_state=self._has_state,
            lookahead_tokens=self._config.num_prefill_lookahead_tokens,
        )

    def _leave_draft(self, item: Instruction) -> Instruction:
        """Leaves the draft model's cells out of a load if the other side does not have them."""
        if item.request.id.decode() not in self._without_draft or not item.groups:
            return item
        groups = zip(self._groups, item.groups, strict=True)
        return replace(item, groups=tuple(GroupSteps() if group.is_draft else steps for group, steps in groups))

    def _same_draft(self, params: dict[str, Any]) -> bool:
        """Whether the other side's draft model caches what ours does, or we have none."""
        return not self._draft or params.get("kvferry_draft") == self._draft

    @property
    def _keeps_turns(self) -> bool:
        """Whether answers are kept. Not with states, which may be past the known tokens."""
        return self._settings.turns and not self._has_state

    def _keep_turn(self, item: Instruction) -> Instruction:
        """Keeps an answer as long as its next turn may take: until then no consumer gives a sign of life."""
        name = item.request.id.decode()
        if item.kind != InstructionKind.HOLD or not self._turns.wants(name):
            return item
        self._turns.keep(item.request)
        return replace(item, deadline=self._settings.turn)

    def _turn_before(self, request: Request, params: dict[str, Any]) -> TransferParams | None:
        """Where a prefill server finds what a decode server has kept of the previous turn; None: nowhere.

        A proxy need not know whether this request goes on with the tokens of that answer: it may know texts
        only, and a text can become other tokens than those that were generated.
        """
        if not params.get("remote_request_id") or not self._keeps_turns:
            return None
        try:
            source = read_source(params, self._weights)
        except (KvferryError, TypeError, ValueError) as error:
            logger.error("request %s: the turn before is computed again: %s", request.request_id, error)
            return None
        content = content_of(request, source.tokens)
        is_said = bool(content) and content == params.get("kvferry_content")
        goes_on = is_said and source.tokens <= request.num_prompt_tokens
        if goes_on and self._same_draft(params):
            return source
        if not goes_on:
            logger.info("request %s does not go on with the tokens of the turn before", request.request_id)
        self._decline(request, source)
        return None

    def _tables(self, block_ids: Sequence[Sequence[int]]) -> list[BlockTable]:
        """One table for each of our groups."""
        return [_table(group, block_ids[group.source]) for group in self._groups]

    def _params_out(
        self, request: Request, params: TransferParams, block_ids: Sequence[Sequence[int]], is_turn: bool
    ) -> dict[str, Any]:
        """The parameters that a proxy passes on: to a decode server; of a turn, to the next prefill server."""
        parallel = self._config.parallel_config
        return {
            **write_source(params, request.request_id, self._weights, self._layers),
            "do_remote_prefill": not is_turn,
            "do_remote_decode": is_turn,
            "remote_block_ids": [list(block_ids[group]) for group in self._cache.transfer_group_ids],
            "tp_size": parallel.tensor_parallel_size,
            "pp_size": parallel.pipeline_parallel_size,
            "dcp_size": parallel.decode_context_parallel_size,
            "remote_blocks_expiry_time": None,
            "remote_registration_generation": self._generation,
            "kvferry_draft": self._draft or None,
            "kvferry_rotation": self._rotation or None,
            "kvferry_prompt": prompt_of(request, params.tokens) or None,
            "kvferry_content": (content_of(request, params.tokens) or None) if is_turn else None,
        }


def _push_id(request: Request) -> bytes:
    """The name of a push: requests may share their X-Request-Id, which is what the schedule would take."""
    return f"{request.request_id}~{os.urandom(8).hex()}".encode()


def _table(group: GroupGeometry, block_ids: Sequence[int]) -> BlockTable:
    ids = np.array(block_ids, np.uint32)
    if group.kind == GroupKind.STATE:
        states = ids[ids != NULL_BLOCK]
        end = len(states) - group.speculative_blocks
        return BlockTable(states[end - 1 : end] if end > 0 else states[:1])
    ids[ids == NULL_BLOCK] = NO_BLOCK
    return BlockTable(ids)


def _keys(requests: set[str] | None) -> tuple[RequestKey, ...]:
    return tuple(RequestKey(request.encode(), 0) for request in sorted(requests or ()))
