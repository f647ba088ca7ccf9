"""Reads what a rank caches from what SGLang says of its pools, and refuses by name what cannot be moved."""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from sglang.srt.disaggregation.base.conn import KVArgs, StateType
from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.environ import envs
from sglang.srt.mem_cache.qsa_kv_pool import QSA_ROPE_STATE_LAYER_ID
from sglang.srt.runtime_context import get_disagg, get_memory, get_spec
from sglang.srt.server_args import ServerArgs

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
    pages_must_be_equal,
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
        "draft models in pipeline stages": bool(args.num_draft_entries) and pp_size > 1,
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


def draft_config(server_args: ServerArgs) -> ModelConfig:
    """The configuration of the draft model."""
    spec = get_spec()
    return ModelConfig.from_server_args(
        server_args,
        model_path=spec.speculative_draft_model_path,
        model_revision=spec.speculative_draft_model_revision,
        is_draft_model=True,
    )


def components_of(
    args: KVArgs, config: ModelConfig, latent: bool, tp_size: int, held: int, draft: ModelConfig | None = None
) -> list[Component]:
    """The components of the cache: the main one, that of a draft model, and then those of `args.state_types`.

    Args:
        latent: the model's cache has latents, not heads
        held: how many of the model's layers this rank has
        draft: of the draft model, if it has a cache
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
    own = len(buffers.addresses) - args.num_draft_entries
    found = [
        of_tokens(
            "kv",
            Blocks.ALL,
            layers,
            held,
            buffers.part(0, own),
            args.page_size,
            dtype,
            0 if latent else heads,
            tp_size,
        )
    ]
    if draft is not None:
        found.append(_draft(args, config, draft, tp_size, buffers.part(own, len(buffers.addresses))))
    others = (
        replace(component, source=i + 1)
        for i in range(len(args.state_types))
        for component in _others(args, i, config, dtype, tp_size)
    )
    return [*found, *others]


def _draft(args: KVArgs, config: ModelConfig, draft: ModelConfig, tp_size: int, buffers: Buffers) -> Component:
    """The cache of a draft model, in the pages of the main component. Its layers follow the model's.

    The type of its elements may be one of its own. It is not converted, so bytes are enough.
    """
    latent = draft.attention_arch == AttentionArch.MLA
    held = len(buffers.addresses) // (1 if latent else 2)
    layers = range(config.num_hidden_layers, config.num_hidden_layers + held)
    heads = 0 if latent else draft.get_total_num_kv_heads()
    return of_tokens("draft", Blocks.ALL, layers, held, buffers, args.page_size, Dtype.U8, heads, tp_size)


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
        # Keys and then scores, of the model and then of a draft model.
        own = min(count // 2, config.num_hidden_layers)
        keys = [*range(own), *range(2 * own, own + count // 2)]
        scores = [buffer for buffer in range(count) if buffer not in keys]
        yield of_rows(state.value, range(count // 2), ("key", "score"), buffers.pick(keys + scores))
    elif state == StateType.QSA_PENDING:
        # The last buffer of the model, and of a draft model, is of the positions, which all layers share.
        layers = args.state_layer_ids[i]
        shared = sorted({layers.index(QSA_ROPE_STATE_LAYER_ID), count - 1})
        keys = [buffer for buffer in range(count) if buffer not in shared]
        yield of_rows(state.value, [layers[buffer] for buffer in keys], ("key",), buffers.pick(keys))
        yield of_rows(f"{state.value}.positions", range(len(shared)), ("position",), buffers.pick(shared))
    else:
        yield of_pages(state.value, args.state_layer_ids[i] or range(count), buffers, page)


def facts_of(
    components: Sequence[Component],
    config: ModelConfig,
    weights: str,
    scales: str | None,
    draft: ModelConfig | None = None,
) -> dict[str, str]:
    """What must be equal on both sides beyond the cells: a decode server of another model is refused by it.

    Args:
        scales: the file with what elements in FP8 are multiplied by; None: the checkpoint says that
        draft: as for components_of()
    """
    page = components[0].tokens_per_block
    facts = {}
    if scales:
        facts["scales"] = hashlib.sha256(pathlib.Path(scales).read_bytes()).hexdigest()[:32]
    if draft is not None:
        kept = get_spec().speculative_draft_kv_cache_dtype or "the model's"
        facts["draft"] = f"{' '.join(draft.hf_config.architectures or ())}, cache {kept}"
    return facts | {
        "page size": str(page) if pages_must_be_equal(components) else "any",
        "weights": weights,
        "architecture": " ".join(config.hf_config.architectures or ()),
        "layers": ", ".join(f"{component.name} {len(component.layers)}" for component in components),
    }


def _attention_layers(args: KVArgs) -> tuple[list[int], int, bool]:
    """The layers of attention of a model that has states too, their number, and whether they have latents."""
    of = list(args.kv_layer_ids)[: len(args.kv_data_ptrs) - args.num_draft_entries]
    layers = list(dict.fromkeys(of))
    latent = bool(args.is_hybrid_mla_backend)
    if of != layers * (1 if latent else 2):
        raise UnsupportedError(
            f"attention has buffers of the layers {of}; allowed: one for each, or keys and then values"
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
