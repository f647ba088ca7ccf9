"""The only module that uses private names of vLLM, and imports vLLM while the connector runs.

needs.py lists every import with its reason, and has checked them before this module is imported.
"""

from __future__ import annotations

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
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.utils import create_metric_per_engine
from vllm.v1.request import RequestStatus

from kvferry.vllm.needs import CPU_NEEDS, check

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = [
    "AttentionSpec",
    "CacheHitSource",
    "ChunkedLocalAttentionSpec",
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
    "SlidingWindowSpec",
    "SupportsHMA",
    "UniformTypeKVCacheSpecs",
    "create_metric_per_engine",
    "get_dcp_group",
    "get_pcp_group",
    "get_pp_group",
    "get_tp_group",
    "init_logger",
    "is_conv_state_dim_first",
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


def write_cpu_page(
    spec: AttentionSpec,
    cache_type: str,
    content: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> str:
    """Has the CPU's attention kernel write a page of one head, and returns the name of the kernel.

    Args:
        content: [token, 1, element]: written as keys and as values
        keys: receives the page's keys
        values: receives its values
    """
    check(CPU_NEEDS)
    from vllm import _custom_ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    tokens = content.shape[0]
    isa = _get_attn_isa(spec.dtype, tokens, spec.head_size, cache_type)
    slots = torch.arange(tokens, dtype=torch.int64)
    _custom_ops.cpu_attn_reshape_and_cache(content, content, keys, values, slots, isa)
    return str(isa)
