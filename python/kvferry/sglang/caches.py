"""Reads what a rank caches from what SGLang says of its pools, and refuses by name what cannot be moved."""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.disaggregation.base.conn import KVArgs, StateType
from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_disagg, get_memory

from kvferry.errors import UnsupportedError
from kvferry.fp8 import kept_type
from kvferry.model import Dtype
from kvferry.sglang.geometry import (
    Blocks,
    Buffers,
    Component,
    StateTensors,
    cache_type,
    of_pages,
    of_rows,
    of_states,
    of_tokens,
)

#: The components that can be moved beside the main one.
STATES = {
    StateType.SWA,
    StateType.MAMBA,
    StateType.DSA,
    StateType.DSA_TAIL,
    StateType.QSA_PENDING,
    StateType.QSA_COMPRESSED,
    StateType.MINIMAX_INDEX_K,
    StateType.MINIMAX_DENSE_KV,
}


def refuse_options(args: KVArgs, cp_size: int, dcp_size: int, shard_size: int, pp_size: int) -> None:
    """Raises UnsupportedError for options with which caches cannot be moved."""
    others = [state.value for state in args.state_types if state not in STATES]
    policy = get_disagg().disaggregation_decode_allocation_policy
    layout = envs.SGLANG_AITER_KV_CACHE_LAYOUT.get().lower()
    pool = envs.SGLANG_MOONCAKE_CUSTOM_MEM_POOL.get()
    refused = {
        f"caches of the kinds {', '.join(others)}": bool(others),
        "caches of the same kind twice": len(set(args.state_types)) < len(args.state_types),
        "caches of several kinds in pipeline stages": bool(args.state_types) and pp_size > 1,
        "draft models": bool(args.num_draft_entries),
        f"attention context parallelism ({cp_size} ranks)": cp_size > 1,
        f"decode context parallelism ({dcp_size} ranks)": dcp_size > 1,
        f"KV cache sharding ({shard_size} ranks)": shard_size > 1,
        f"--disaggregation-decode-allocation-policy {policy}": policy != "early",
        "caches in memory of the host (--enable-hisparse)": get_memory().enable_hisparse,
        "SGLANG_RUST_SERVER": bool(envs.SGLANG_RUST_SERVER.get()),
        # Its small data is in memory of the device.
        f"SGLANG_MOONCAKE_CUSTOM_MEM_POOL={pool}": pool == "INTRA_NODE_NVLINK",
        # Without it pages of a failed request are others' before the agent says that nobody writes them.
        "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE=0": not (
            envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.get()
        ),
        f"SGLANG_AITER_KV_CACHE_LAYOUT={layout}": torch.version.hip is not None and layout != "nhd",
    }
    found = [what for what, asked in refused.items() if asked]
    if found:
        raise UnsupportedError(
            f"the backend kvferry does not support {' and '.join(found)}; see docs/sglang.md"
        )


def stages_of(config: ModelConfig, pp_size: int) -> list[int]:
    """Numbers of layers of all pipeline stages."""
    bounds = (get_pp_indices(config.num_hidden_layers, rank, pp_size) for rank in range(pp_size))
    return [end - begin for begin, end in bounds]


def components_of(args: KVArgs, config: ModelConfig, latent: bool, tp_size: int, held: int) -> list[Component]:
    """The components of the cache: the main one, and then those of `args.state_types`.

    Args:
        latent: the model's cache has latents, not heads
        held: how many of the model's layers this rank has
    """
    dtype = kept_type(cache_type(args.kv_cache_dtype_str, str(config.dtype)))
    heads = config.get_total_num_kv_heads()
    layers: Sequence[int] = range(config.num_hidden_layers)
    if StateType.MAMBA in args.state_types:
        layers, held, latent = _attention_layers(args)
    elif StateType.SWA in args.state_types:
        layers = config.full_attention_layer_ids
        held = len(layers)
    elif StateType.MINIMAX_INDEX_K in args.state_types:
        # Only the layers that select tokens; their places among each other are enough to tell them apart.
        held = len(args.state_data_ptrs[args.state_types.index(StateType.MINIMAX_INDEX_K)])
        layers = range(held)
    buffers = Buffers(tuple(args.kv_data_ptrs), tuple(args.kv_data_lens), tuple(args.kv_item_lens))
    main = of_tokens(
        "kv", Blocks.ALL, layers, held, buffers, args.page_size, dtype, 0 if latent else heads, tp_size
    )
    others = (
        replace(component, source=i + 1)
        for i in range(len(args.state_types))
        for component in _others(args, i, config, dtype, tp_size)
    )
    return [main, *others]


def _others(args: KVArgs, i: int, config: ModelConfig, dtype: Dtype, tp_size: int) -> Iterator[Component]:
    """The components of a kind of state."""
    state, page = args.state_types[i], args.page_size
    buffers = Buffers(
        tuple(args.state_data_ptrs[i]), tuple(args.state_data_lens[i]), tuple(args.state_item_lens[i])
    )
    count = len(buffers.addresses)
    if state == StateType.MAMBA:
        yield of_states(state.value, _state_tensors(args, i), buffers, tp_size)
    elif state == StateType.SWA:
        layers = config.swa_attention_layer_ids
        heads = config.get_swa_num_kv_heads(1) if args.swa_kv_cache_layout == "nhd" else 0
        yield of_tokens(state.value, Blocks.LAST, layers, len(layers), buffers, page, dtype, heads, tp_size)
    elif state == StateType.MINIMAX_DENSE_KV:
        heads = config.get_total_num_kv_heads()
        yield of_tokens(
            state.value, Blocks.ALL, range(count // 2), count // 2, buffers, page, dtype, heads, tp_size
        )
    elif state == StateType.DSA_TAIL:
        yield of_rows(state.value, range(count // 2), ("key", "score"), buffers)
    elif state == StateType.QSA_PENDING:
        # The last buffer is of the positions, which all layers share.
        yield of_rows(state.value, args.state_layer_ids[i][:-1], ("key",), buffers.part(0, count - 1))
        yield of_rows(f"{state.value}.positions", (0,), ("position",), buffers.part(count - 1, count))
    else:
        yield of_pages(state.value, args.state_layer_ids[i] or range(count), buffers, page)


def facts_of(
    components: Sequence[Component], config: ModelConfig, weights: str, scales: str | None
) -> dict[str, str]:
    """What must be equal on both sides beyond the cells: a decode server of another model is refused by it.

    Args:
        scales: the file with what elements in FP8 are multiplied by; None: the checkpoint says that
    """
    main, *others = components
    scaled = {"scales": hashlib.sha256(pathlib.Path(scales).read_bytes()).hexdigest()[:32]} if scales else {}
    return scaled | {
        "page size": str(main.tokens_per_block) if others else "any",  # blocks of others are compared by number
        "weights": weights,
        "architecture": " ".join(config.hf_config.architectures or ()),
        "layers": ", ".join(f"{component.name} {len(component.layers)}" for component in components),
    }


def _attention_layers(args: KVArgs) -> tuple[list[int], int, bool]:
    """The layers of attention of a model that has states too, their number, and whether they have latents."""
    layers = list(dict.fromkeys(args.kv_layer_ids))
    latent = bool(args.is_hybrid_mla_backend)
    if list(args.kv_layer_ids) != layers * (1 if latent else 2):
        raise UnsupportedError(
            f"attention has buffers of the layers {args.kv_layer_ids}; allowed: one for each, or keys and then "
            "values"
        )
    return layers, len(layers), latent


def _state_tensors(args: KVArgs, i: int) -> StateTensors:
    shared: list[Any] = args.state_conv_shard_groups[i] or [None] * len(args.state_data_ptrs[i])
    return StateTensors(
        layers=tuple(args.state_layer_ids[i]),
        units=tuple(args.state_dim_per_tensor[i]),
        rows=tuple(args.state_slice_outer_counts[i]),
        shared=tuple(None if parts is None else tuple(parts) for parts in shared),
    )
