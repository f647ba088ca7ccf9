"""Both halves of the connector without vLLM's engine: one rank, our own memory, steps by hand.

It makes the calls of vLLM's engine, in the engine's order. Types are vLLM's own, except the configuration and
the requests, of which the connector reads only a few fields.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvferry.vllm import worker as worker_module
from kvferry.vllm.messages import KvferryStep
from kvferry.vllm.scheduling import Scheduling
from kvferry.vllm.worker import Worker

HEADS, SIZE, LAYERS = 2, 8, 3
STEP_SECONDS = 60.0  # the longest time that steps() goes on
DRAIN = {"kv_drain_duration": 0.1}  # many tests end engines that still keep requests


def transfer_of(name: str, extra: dict[str, Any]) -> Any:
    """The part of vLLM's kv_transfer_config that the connector reads."""
    return SimpleNamespace(
        engine_id=name, kv_role="kv_both", is_kv_consumer=True, kv_connector_extra_config=DRAIN | extra
    )


def a_request(name: str, tokens: int, params: dict[str, Any] | None, computed: int = 0) -> Any:
    """The part of a request that the connector reads."""
    prompt = list(range(tokens))
    return SimpleNamespace(
        request_id=name,
        kv_transfer_params=params,
        num_prompt_tokens=tokens,
        num_tokens=tokens,
        prompt_token_ids=prompt,
        _all_token_ids=list(prompt),
        all_token_ids=list(prompt),
        prompt_embeds=None,
        lora_request=None,
        mm_features=[],
        cache_salt=None,
        num_computed_tokens=computed,
        max_tokens=16,
        abort_immediately=False,
    )


def output_of(
    compute: dict[str, int] | None = None, preempted: Sequence[str] = (), to_zero: Sequence[int] = ()
) -> Any:
    """The part of the output of vLLM's scheduler that the connector reads.

    Args:
        compute: how many tokens the step computes, by request
        preempted: requests that have lost their blocks
        to_zero: new blocks that vLLM fills with zeros
    """
    chunks = dict(compute or {})
    return SimpleNamespace(
        preempted_req_ids=set(preempted),
        num_scheduled_tokens=chunks,
        total_num_scheduled_tokens=sum(chunks.values()),
        new_block_ids_to_zero=list(to_zero) or None,
        kv_cache_block_copies=None,
    )


def blocks_of(*groups: list[int]) -> Any:
    """Blocks of a request, as vLLM's cache manager has them."""
    return SimpleNamespace(get_block_ids=lambda: groups)


def report_of(workers: Sequence[Worker]) -> Any:
    """What the scheduler's half gets of the workers' reports: vLLM adds those of several up."""
    reports = [worker.report() for worker in workers]
    if len(reports) == 1:
        return reports[0]
    outputs = [
        ModelRunnerOutput.with_kv_conn_output_only(KVConnectorOutput(kv_connector_worker_meta=report))
        for report in reports
    ]
    all_ = KVOutputAggregator(len(workers)).aggregate(outputs)
    assert all_ is not None and all_.kv_connector_output is not None
    return all_.kv_connector_output.kv_connector_worker_meta


def register_alone(worker: Worker, caches: dict[str, Any]) -> None:
    """Registers the caches of a worker that is the only rank of its engine."""
    alone = SimpleNamespace(rank_in_group=0, world_size=1)
    with mock.patch.multiple(worker_module, get_tp_group=lambda: alone, get_pp_group=lambda: alone):
        worker.register(caches)


class Layers(list[Any]):
    """The layers of a model, as in vLLM's configuration."""

    def __init__(self, count: int) -> None:
        layer = SimpleNamespace(total_num_kv_heads=HEADS, total_num_attention_heads=HEADS)
        super().__init__([layer] * count)
        self.total_num_hidden_layers = count


class Half:
    """One engine of one rank."""

    def __init__(
        self,
        name: str,
        block_size: int,
        blocks: int = 16,
        window: int = 0,
        chunk: int = 0,
        draft: int = 0,
        scales: tuple[float, float] | None = None,
        **extra: Any,
    ) -> None:
        """`draft`: the number of layers of a draft model, which vLLM puts into the group of the full layers.
        `scales`: of keys and values in FP8.

        With a window, or chunks, all layers but the first have it.
        """
        self._dtype = torch.float32 if scales is None else torch.uint8
        held = range(LAYERS + draft)
        groups = [self._group(FullAttentionSpec, held, block_size)]
        if window or chunk:
            kind = SlidingWindowSpec if window else ChunkedLocalAttentionSpec
            size = {"sliding_window": window} if window else {"attention_chunk_size": chunk}
            groups = [
                self._group(FullAttentionSpec, range(1), block_size),
                self._group(kind, range(1, LAYERS), block_size, **size),
            ]
        self.cache = KVCacheConfig(blocks, [], groups)
        self.block_size = block_size
        parallel = SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
            data_parallel_index=0,
            use_ubatching=False,
        )
        self.config: Any = SimpleNamespace(
            kv_transfer_config=transfer_of(name, extra),
            parallel_config=parallel,
            device_config=SimpleNamespace(device_type="other"),  # its kernels follow the tensors' strides
            model_config=SimpleNamespace(
                model="tiny",
                model_arch_config=Layers(LAYERS),
                hf_text_config=SimpleNamespace(to_dict=lambda: {"num_key_value_heads": HEADS}),
            ),
            speculative_config=SimpleNamespace(
                uses_draft_model=lambda: False,
                draft_model_config=SimpleNamespace(
                    model_arch_config=Layers(draft),
                    hf_text_config=SimpleNamespace(to_dict=lambda: {"num_key_value_heads": HEADS}),
                ),
            )
            if draft
            else None,
            num_prefill_lookahead_tokens=0,
        )
        if scales is not None:
            layer = SimpleNamespace(_k_scale=torch.tensor(scales[0]), _v_scale=torch.tensor(scales[1]))
            known = {name: layer for group in groups for name in group.layer_names}
            self.config.cache_config = SimpleNamespace(cache_dtype="fp8")
            self.config.compilation_config = SimpleNamespace(static_forward_context=known)
        shape = (blocks, HEADS, block_size, 2 * SIZE)
        self.layers = {f"model.layers.{i}.attn": torch.zeros(shape, dtype=self._dtype) for i in held}
        self.scheduling = Scheduling(self.config, self.cache)
        self.worker = Worker(self.config, self.cache)
        self.register()
        self.sent: set[str] = set()
        self.received: set[str] = set()
        self.failed: set[str] = set()
        self.invalid: set[int] = set()

    def register(self) -> None:
        """Registers the caches, as vLLM does with all of its parts: for the first time, or again."""
        register_alone(self.worker, self.layers)
        introduction = self.worker.handshake()
        assert introduction is not None
        self.scheduling.introduce({(0, 0): introduction})

    def _group(self, kind: Any, layers: range, block_size: int, **more: Any) -> KVCacheGroupSpec:
        spec = kind(block_size=block_size, num_kv_heads=HEADS, head_size=SIZE, dtype=self._dtype, **more)
        return KVCacheGroupSpec([f"model.layers.{i}.attn" for i in layers], spec)

    def close(self) -> None:
        """Closes both halves."""
        self.worker.close()
        self.scheduling.close()

    # ---- steps

    def step(self, preempted: tuple[str, ...] = ()) -> KvferryStep:
        """Makes one step in which no request runs. Returns the step's message to the worker."""
        step = self.scheduling.step(output_of(preempted=preempted))
        self.worker.give_up(step)
        self.worker.bound(step)
        self.worker.start(step)
        results = self.worker.take_results()
        self.invalid |= self.worker.take_invalid()
        self.sent |= results.finished_sending
        self.received |= results.finished_recving
        self.failed |= results.failed_recving
        self.scheduling.update(
            SimpleNamespace(
                finished_sending=results.finished_sending,
                finished_recving=results.finished_recving,
                failed_recving=results.failed_recving,
                kv_connector_worker_meta=report_of([self.worker]),
            )
        )
        return step

    # ---- requests

    def serve(self, name: str, tokens: int, *tables: list[int], **asked: Any) -> dict[str, Any]:
        """A request whose cache another engine wants, and which has finished here; returns what a proxy
        gets."""
        said = {f"kvferry_{key}": value for key, value in asked.items()}
        request = a_request(name, tokens, {"do_remote_decode": True, "do_remote_prefill": False, **said})
        self.scheduling.add(request)
        request.num_computed_tokens = tokens
        keep, params = self.scheduling.finished(request, tables, True)
        assert keep and params is not None
        return params

    def want(
        self, name: str, tokens: int, params: dict[str, Any] | None, *tables: list[int], computed: int = 0
    ) -> int:
        """A request whose cache another engine has; returns how many tokens vLLM would wait for."""
        request = a_request(name, tokens, params)
        self.scheduling.add(request)
        load, _ = self.scheduling.match(request, computed)
        self.scheduling.allocated(request, blocks_of(*tables), load)
        return load

    # ---- bytes

    def cell(self, layer: int, blocks: list[int], token: int) -> torch.Tensor:
        """Keys and values of a token in all heads, where vLLM's kernels look for them."""
        tensor = self.layers[f"model.layers.{layer}.attn"]
        return tensor[blocks[token // self.block_size], :, token % self.block_size]

    def write(self, layer: int, blocks: list[int], tokens: range, salt: int = 0) -> None:
        """Writes numbers that follow from the coordinates of their cells."""
        for token in tokens:
            cells = self.cell(layer, blocks, token)
            for head in range(HEADS):
                for element in range(2 * SIZE):
                    cells[head, element] = value_of(layer, token, head, element, salt)

    def wrong(self, layer: int, blocks: list[int], tokens: range, salt: int = 0) -> int:
        """How many numbers are not those of write()."""
        return sum(
            float(self.cell(layer, blocks, token)[head, element]) != value_of(layer, token, head, element, salt)
            for token in tokens
            for head in range(HEADS)
            for element in range(2 * SIZE)
        )


def value_of(layer: int, token: int, head: int, element: int, salt: int) -> float:
    """The number of a cell; exact in float32, and never 0."""
    return 1.0 + element + 2 * SIZE * (head + HEADS * (layer + 5 * (token + 1000 * salt)))


def steps(*halves: Half, until: Any) -> None:
    """Makes steps of all engines in turn, until a condition holds."""
    end = time.monotonic() + STEP_SECONDS
    while not until():
        assert time.monotonic() < end, "what was waited for has not happened"
        for half in halves:
            half.step()
