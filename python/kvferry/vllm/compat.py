"""The only module that uses private names of vLLM, and imports vLLM while the connector runs.

needs.py lists every import with its reason, and has checked them before this module is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.parallel_state import (
    get_dcp_group,
    get_pcp_group,
    get_pp_group,
    get_tp_group,
)
from vllm.logger import init_logger
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.core.single_type_kv_cache_manager import ChunkedLocalAttentionManager, SlidingWindowManager
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.utils import create_metric_per_engine
from vllm.v1.request import RequestStatus

from kvferry.vllm.needs import CPU_NEEDS, check

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

__all__ = [
    "AttentionSpec",
    "CacheHitSource",
    "ChunkedLocalAttentionSpec",
    "CircularBufferSpec",
    "FullAttentionSpec",
    "KVCacheConfig",
    "KVCacheSpec",
    "KVConnectorBase_V1",
    "KVConnectorFactory",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "MLAAttentionSpec",
    "MambaSpec",
    "RequestStatus",
    "SlidingWindowMLASpec",
    "SlidingWindowSpec",
    "SparseCacheRole",
    "SupportsHMA",
    "UniformTypeKVCacheSpecs",
    "create_metric_per_engine",
    "free_blocks",
    "get_dcp_group",
    "get_pcp_group",
    "get_pp_group",
    "get_tp_group",
    "init_logger",
    "is_conv_state_dim_first",
    "keep_one_more",
    "leave_uncached",
    "shorten_prompt",
    "write_cpu_page",
]


def shorten_prompt(request: Request, tokens: int) -> None:
    """Makes a request end after the first `tokens` tokens of its prompt, with one token after them."""
    prompt = request.prompt_token_ids
    if prompt is None:
        return
    del prompt[tokens:]
    del request._all_token_ids[tokens:]
    request.num_prompt_tokens = tokens
    request.max_tokens = 1


def keep_one_more(blocks: KVCacheManager) -> None:
    """Has requests keep what their last token sees in layers with windows or chunks, for computing it again.

    A consumer computes the last token of a prompt that it loads. The window of that token begins one before
    that of the next, for which vLLM frees blocks: at the producer when the prompt is computed, at the consumer
    when it makes room for the load. And where a prompt ends with a chunk, the next token sees none of it.
    """
    for manager in blocks.coordinator.single_type_managers:
        if isinstance(manager, SlidingWindowManager):
            manager.extra_retained_tokens = max(1, manager.extra_retained_tokens)
        elif isinstance(manager, ChunkedLocalAttentionManager):
            manager.get_num_skipped_tokens = partial(_skipped_by_last, manager.get_num_skipped_tokens)


def _skipped_by_last(skipped_by_next: Callable[[int], int], num_computed_tokens: int) -> int:
    return skipped_by_next(max(0, num_computed_tokens - 1))


def leave_uncached(blocks: KVCacheManager, group: int, request: str, entry: int) -> None:
    """Has vLLM's prefix cache leave out a block of a request, and those before it, when it takes in the rest.

    Args:
        group: index of vLLM's group
        entry: of the request's block table
    """
    cached = blocks.coordinator.single_type_managers[group].num_cached_block
    cached[request] = max(cached.get(request, 0), entry + 1)


def free_blocks(blocks: KVCacheManager) -> int:
    """The number of blocks that no request uses."""
    return blocks.block_pool.get_num_free_blocks()


def write_cpu_page(
    head_size: int,
    cache_type: str,
    content: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> str:
    """Has the CPU's attention kernel write a page of one head, and returns the name of the kernel.

    Args:
        cache_type: vLLM's name of the caches' type
        content: [token, 1, element], in the model's type: written as keys and as values
        keys: receives the page's keys
        values: receives its values
    """
    check(CPU_NEEDS)
    from vllm import _custom_ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    tokens = content.shape[0]
    isa = _get_attn_isa(content.dtype, tokens, head_size, cache_type)
    slots = torch.arange(tokens, dtype=torch.int64)
    _custom_ops.cpu_attn_reshape_and_cache(
        content, content, keys, values, slots, isa, kv_cache_dtype=cache_type
    )
    return str(isa)
