"""What the connector needs of vLLM.

vLLM's connector interface is young: names move, and some that a connector needs are private. So no version is
required. Before anything begins, check() names what this vLLM lacks, and what it is needed for; it is called
when the connector is imported from `kvferry.vllm`. Only compat.py uses the names listed here.

The list was made from vLLM 0.32.0 and 0.33.0.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.errors import UnsupportedError

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
_CACHE = "vllm.v1.kv_cache_interface"
_GROUPS = "vllm.distributed.parallel_state"
_STEP = "vllm.v1.core.sched.output:SchedulerOutput"
_OUTPUT = "vllm.v1.outputs:KVConnectorOutput"
_REQUEST = "vllm.v1.request:Request"


@dataclass(frozen=True)
class Need:
    """A name of vLLM that the connector requires.

    Attributes:
        where: module:name, or module:class.attribute, also for attributes that the constructor sets
        purpose: what it is needed for, as the end of a sentence
    """

    where: str
    purpose: str

    def is_met(self) -> bool:
        """Whether this vLLM has it."""
        module, _, path = self.where.partition(":")
        try:
            found: Any = importlib.import_module(module)
        except ImportError:
            return False
        for name in path.split("."):
            if not _has(found, name):
                return False
            found = getattr(found, name, None)
        return True


def _has(owner: Any, name: str) -> bool:
    """Whether a module or class has an attribute, or the constructor of the class sets it."""
    if hasattr(owner, name):
        return True
    if not inspect.isclass(owner):
        return False
    for kind in owner.__mro__:
        if name in inspect.get_annotations(kind):
            return True
        for makes in ("__init__", "__post_init__"):
            code = getattr(kind.__dict__.get(makes), "__code__", None)
            if code is not None and name in code.co_names:
                return True
    return False


# Methods that vLLM calls. A method with another name in vLLM would never be called, without any error.
HOOKS = {
    "set_xfer_handshake_metadata_pp_aware": "meeting other engines",
    "bind_kv_cache_manager": "writing requests while they are computed",
    "on_new_request": "learning of requests",
    "get_num_new_matched_tokens": "saying what can be loaded",
    "update_state_after_alloc": "learning the blocks of a request",
    "build_connector_meta": "telling the workers what to do",
    "has_pending_block_frees": "answers that give way",
    "reset_cache": "answers that are outdated",
    "has_pending_push_work": "answers that are outdated, while nothing runs",
    "update_connector_output": "learning what the workers have done",
    "register_kv_caches": "learning where the caches are",
    "get_handshake_metadata": "telling the scheduler's half of a rank",
    "bind_connector_metadata": "loading after new blocks are filled",
    "start_load_kv": "starting transfers",
    "wait_for_layer_load": "the interface",
    "save_kv_layer": "writing requests layer by layer",
    "wait_for_save": "writing requests while they are computed",
    "handle_preemptions": "not writing what was overwritten",
    "get_transfer_results": "reporting ended transfers",
    "get_block_ids_with_load_errors": "reporting blocks that failed",
    "get_loaded_kv_cache_group_ids": "skipping what vLLM would compute again",
    "get_kv_connector_stats": "statistics",
    "build_connector_worker_meta": "telling the scheduler's half of a drain",
    "build_kv_connector_stats": "statistics",
    "build_prom_metrics": "metrics",
    "requires_piecewise_for_cudagraph": "writing requests layer by layer",
    "request_finished": "keeping blocks beside a connector that knows one group only",
    "shutdown": "ending",
}

NEEDS = (
    *(Need(f"{_BASE}:KVConnectorBase_V1.{name}", purpose) for name, purpose in HOOKS.items()),
    Need(f"{_BASE}:KVConnectorBase_V1._get_connector_metadata", "what the workers do in a step"),
    Need(f"{_BASE}:KVConnectorBase_V1._cache_hit_source", "saying that tokens come from another engine"),
    Need(f"{_BASE}:KVConnectorHandshakeMetadata", "what a rank says of itself"),
    Need(f"{_BASE}:KVConnectorMetadata", "what the workers do in a step"),
    Need(f"{_BASE}:KVConnectorRole.SCHEDULER", "the two halves of the connector"),
    Need(f"{_BASE}:KVConnectorTransferResults.finished_sending", "reporting ended transfers"),
    Need(f"{_BASE}:KVConnectorTransferResults.finished_recving", "reporting ended transfers"),
    Need(f"{_BASE}:KVConnectorTransferResults.failed_recving", "reporting failed loads"),
    Need(f"{_BASE}:KVConnectorWorkerMetadata", "telling the scheduler's half of a drain"),
    Need(f"{_BASE}:SupportsHMA.request_finished_all_groups", "keeping blocks for the consumer"),
    Need(f"{_FACTORY}:KVConnectorFactory.register_connector", "statistics beside other connectors"),
    Need(f"{_METRICS}:KVConnectorPromMetrics", "metrics"),
    Need(f"{_METRICS}:KVConnectorStats", "statistics"),
    Need("vllm.v1.metrics.utils:create_metric_per_engine", "metrics"),
    Need("vllm.v1.metrics.cache_hit_source:CacheHitSource.P2P", "saying that tokens come from another engine"),
    Need("vllm.v1.request:RequestStatus.FINISHED_STOPPED", "telling an end from an abort"),
    Need("vllm.v1.request:RequestStatus.FINISHED_LENGTH_CAPPED", "telling an end from an abort"),
    *(
        Need(f"{_REQUEST}.{name}", purpose)
        for name, purpose in {
            "request_id": "requests",
            "kv_transfer_params": "where a cache is",
            "num_prompt_tokens": "the length of a prompt",
            "num_computed_tokens": "how much of a cache there is",
            "num_tokens": "how much of a turn there is, and how many blocks a request needs",
            "all_token_ids": "telling whether a request goes on with the turn before",
            "prompt_embeds": "telling whether a request goes on with the turn before",
            "lora_request": "telling whether a request goes on with the turn before",
            "mm_features": "telling whether a request goes on with the turn before",
            "cache_salt": "telling whether a request goes on with the turn before",
            "prompt_token_ids": "leaving the last tokens of a prompt to the consumer",
            "_all_token_ids": "leaving the last tokens of a prompt to the consumer",
            "max_tokens": "leaving the last tokens of a prompt to the consumer",
        }.items()
    ),
    Need(f"{_STEP}.preempted_req_ids", "requests that lose their blocks"),
    Need(f"{_STEP}.num_scheduled_tokens", "writing requests while they are computed"),
    Need(f"{_STEP}.new_block_ids_to_zero", "loading after new blocks are filled with zeros"),
    Need(f"{_STEP}.kv_cache_block_copies", "loading after new blocks are filled with copies"),
    Need(
        "vllm.v1.core.kv_cache_manager:KVCacheManager.get_block_ids", "writing requests while they are computed"
    ),
    Need("vllm.v1.core.kv_cache_manager:KVCacheManager.block_pool", "answers that give way"),
    Need("vllm.v1.core.block_pool:BlockPool.get_num_free_blocks", "answers that give way"),
    Need(
        "vllm.v1.core.kv_cache_manager:KVCacheManager.coordinator",
        "leaving blocks that are loaded in part out of the prefix cache",
    ),
    Need(
        "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.single_type_managers",
        "leaving blocks that are loaded in part out of the prefix cache",
    ),
    Need(
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.num_cached_block",
        "leaving blocks that are loaded in part out of the prefix cache",
    ),
    Need(
        "vllm.v1.core.single_type_kv_cache_manager:SlidingWindowManager.extra_retained_tokens",
        "computing the last token of a prompt that was loaded",
    ),
    Need(
        "vllm.v1.core.single_type_kv_cache_manager:ChunkedLocalAttentionManager.get_num_skipped_tokens",
        "computing the last token of a prompt that was loaded",
    ),
    Need(f"{_STEP}.total_num_scheduled_tokens", "steps in which nothing but transfers runs"),
    Need(f"{_OUTPUT}.finished_sending", "what the workers have done"),
    Need(f"{_OUTPUT}.finished_recving", "what the workers have done"),
    Need(f"{_OUTPUT}.failed_recving", "loads that failed"),
    Need(f"{_OUTPUT}.kv_connector_worker_meta", "telling the scheduler's half of a drain"),
    Need(f"{_CACHE}:KVCacheConfig.num_blocks", "the size of the caches"),
    Need(f"{_CACHE}:KVCacheConfig.kv_cache_groups", "the groups of layers"),
    Need(f"{_CACHE}:KVCacheConfig.transfer_group_ids", "the groups that are transferred"),
    Need(f"{_CACHE}:KVCacheSpec.prefix_replay_tokens", "skipping what vLLM would compute again"),
    Need(f"{_CACHE}:AttentionSpec.num_kv_heads", "heads"),
    Need(f"{_CACHE}:AttentionSpec.head_size", "heads"),
    Need(f"{_CACHE}:AttentionSpec.dcp_sharded", "which tokens the rank keeps"),
    Need(f"{_CACHE}:AttentionSpec.num_head_slots", "refusing pages in an order of their own"),
    Need(f"{_CACHE}:AttentionSpec.state_content_bytes", "refusing pages in an order of their own"),
    Need(f"{_CACHE}:FullAttentionSpec.head_size_v", "heads"),
    Need(f"{_CACHE}:ChunkedLocalAttentionSpec.attention_chunk_size", "chunked attention"),
    Need(f"{_CACHE}:SlidingWindowSpec.sliding_window", "sliding windows"),
    Need(f"{_CACHE}:MLAAttentionSpec.cache_role", "telling an indexer from a latent"),
    Need(f"{_CACHE}:MLAAttentionSpec.tokens_per_state", "entries that several tokens share"),
    Need(f"{_CACHE}:MLAAttentionSpec.model_version", "telling how latents are packed"),
    Need(f"{_CACHE}:MLAAttentionSpec.state_content_bytes", "telling how latents are packed"),
    Need(f"{_CACHE}:SlidingWindowMLASpec.model_version", "latents with a window"),
    Need(f"{_CACHE}:SlidingWindowMLASpec.state_content_bytes", "latents with a window"),
    Need(f"{_CACHE}:SlidingWindowMLASpec.bounded_replay", "latents with a window"),
    Need(f"{_CACHE}:CircularBufferSpec.dcp_sharded", "what is yet to become an entry"),
    Need(f"{_CACHE}:SparseCacheRole.INDEXER", "telling an indexer from a latent"),
    Need(f"{_CACHE}:MambaSpec.shapes", "states"),
    Need(f"{_CACHE}:MambaSpec.dtypes", "states"),
    Need(f"{_CACHE}:MambaSpec.num_speculative_blocks", "states under speculative decoding"),
    Need(f"{_CACHE}:UniformTypeKVCacheSpecs.first_spec", "groups of layers of unlike sizes"),
    Need(f"{_CACHE}:UniformTypeKVCacheSpecs.kv_cache_specs", "groups of layers of unlike sizes"),
    Need(
        "vllm.model_executor.layers.mamba.mamba_utils:is_conv_state_dim_first",
        "the order of convolution states",
    ),
    Need(f"{_GROUPS}:get_tp_group", "the rank's place in the engine"),
    Need(f"{_GROUPS}:get_pp_group", "the rank's place in the engine"),
    Need(f"{_GROUPS}:get_dcp_group", "which tokens the rank keeps"),
    Need(f"{_GROUPS}:get_pcp_group", "the rank's place in the engine"),
    Need(f"{_GROUPS}:GroupCoordinator.rank_in_group", "the rank's place in the engine"),
    Need(f"{_GROUPS}:GroupCoordinator.world_size", "the rank's place in the engine"),
    Need(f"{_GROUPS}:GroupCoordinator.cpu_group", "telling all ranks of each other"),
    Need("vllm.config:VllmConfig.num_prefill_lookahead_tokens", "states under speculative decoding"),
    Need("vllm.config:VllmConfig.speculative_config", "telling a draft model's layers from the model's"),
    Need("vllm.config:SpeculativeConfig.draft_model_config", "telling a draft model's layers from the model's"),
    Need("vllm.config:SpeculativeConfig.uses_draft_model", "telling a draft model's layers from the model's"),
    Need(
        "vllm.config.model_arch:ModelArchitectureConfig.total_num_hidden_layers",
        "telling a draft model's layers from the model's",
    ),
    Need("vllm.config:ModelConfig.model", "finding out which weights there are"),
    Need("vllm.config:ModelConfig.model_arch_config", "the KV heads of each layer"),
    Need("vllm.config.model_arch:ModelArchitectureConfig.__getitem__", "the KV heads of each layer"),
    Need("vllm.config.model_arch:ModelArchitectureConfig.total_num_kv_heads", "the KV heads of each layer"),
    Need("vllm.config:CacheConfig.cache_dtype", "telling types of one byte apart"),
    Need("vllm.config:KVTransferConfig.is_kv_consumer", "loading only where vLLM waits for its own writes"),
    Need("vllm.config:ParallelConfig.use_ubatching", "writing requests layer by layer"),
    Need("vllm.config:ParallelConfig.data_parallel_index", "ports of data-parallel engines"),
    Need("vllm.config:ParallelConfig.decode_context_parallel_size", "which tokens the rank keeps"),
    Need("vllm.config:ParallelConfig.prefill_context_parallel_size", "the rank's place in the engine"),
    Need("vllm.config:ParallelConfig.cp_kv_cache_interleave_size", "which tokens the rank keeps"),
    Need("vllm.logger:init_logger", "the log"),
)

# Needed only to read pages on the CPU.
CPU_NEEDS = (
    Need("vllm._custom_ops:cpu_attn_reshape_and_cache", "finding how the CPU kernels order keys"),
    Need("vllm.v1.attention.backends.cpu_attn:_get_attn_isa", "finding how the CPU kernels order keys"),
)

# Methods of the interface that the connector knows and does not override.
LEFT_ALONE = frozenset(
    {
        "bind_gpu_block_pool",
        "clear_connector_metadata",
        "finish_forward",
        "get_external_cache_hit_sources",
        "get_finished",
        "get_finished_count",
        "get_kv_connector_kv_cache_events",
        "get_mem_pool_context",
        "get_required_kvcache_layout",
        "has_connector_metadata",
        "register_finished_partial_tail",
        "requires_kv_delivery",
        "reset_capture_state",
        "role",
        "set_host_xfer_buffer_ops",
        "set_xfer_handshake_metadata",
        "supports_divergent_local_hybrid_hits",
        "take_events",
    }
)

# Methods for sleep, in which caches go and come back. Not every vLLM has them; without them, sleep is refused.
SLEEP = frozenset({"supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches"})


def missing(needs: Sequence[Need] = NEEDS) -> list[Need]:
    """The needs that this vLLM does not meet."""
    return [need for need in needs if not need.is_met()]


def check(needs: Sequence[Need] = NEEDS) -> None:
    """Raises UnsupportedError, which names everything that this vLLM lacks, and what each is needed for."""
    lacking = missing(needs)
    if lacking:
        import vllm

        names = "; ".join(f"{need.where.replace(':', '.')} ({need.purpose})" for need in lacking)
        raise UnsupportedError(
            f"KvferryConnector does not work with vLLM {vllm.__version__}, which has no {names}"
        )


def unknown_hooks(base: type) -> list[str]:
    """Methods of vLLM's interface that this connector does not know: vLLM's defaults apply."""
    known = HOOKS.keys() | LEFT_ALONE | SLEEP
    return sorted(name for name in dir(base) if not name.startswith("_") and name not in known)
