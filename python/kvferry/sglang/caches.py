"""Reads what a rank caches from what SGLang says of its pools, and refuses by name what cannot be moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.disaggregation.base.conn import KVArgs, StateType
from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_disagg

from kvferry.errors import UnsupportedError
from kvferry.sglang.geometry import Blocks, Buffers, Component, StateTensors, cache_type, of_states, of_tokens

#: The components that can be moved beside the main one, and which of their blocks belong to a request.
STATES = {StateType.SWA: Blocks.LAST, StateType.DSA: Blocks.ALL, StateType.MAMBA: Blocks.SLOT}


def refuse_options(args: KVArgs, cp_size: int, dcp_size: int, shard_size: int, pp_size: int) -> None:
    """Raises UnsupportedError for options with which caches cannot be moved."""
    others = [state.value for state in args.state_types if state not in STATES]
    policy = get_disagg().disaggregation_decode_allocation_policy
    refused = {
        f"caches of the kinds {', '.join(others)}": bool(others),
        "caches of the same kind twice": len(set(args.state_types)) < len(args.state_types),
        "caches of several kinds in pipeline stages": bool(args.state_types) and pp_size > 1,
        "draft models": bool(args.num_draft_entries),
        f"attention context parallelism ({cp_size} ranks)": cp_size > 1,
        f"decode context parallelism ({dcp_size} ranks)": dcp_size > 1,
        f"KV cache sharding ({shard_size} ranks)": shard_size > 1,
        f"--disaggregation-decode-allocation-policy {policy}": policy != "early",
        "SGLANG_RUST_SERVER": bool(envs.SGLANG_RUST_SERVER.get()),
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
    dtype = cache_type(args.kv_cache_dtype_str, str(config.dtype))
    heads = config.get_total_num_kv_heads()
    layers: Sequence[int] = range(config.num_hidden_layers)
    if StateType.MAMBA in args.state_types:
        layers, held, latent = _attention_layers(args)
    elif StateType.SWA in args.state_types:
        layers = config.full_attention_layer_ids
        held = len(layers)
    buffers = Buffers(tuple(args.kv_data_ptrs), tuple(args.kv_data_lens), tuple(args.kv_item_lens))
    found = [
        of_tokens(
            "kv", Blocks.ALL, layers, held, buffers, args.page_size, dtype, 0 if latent else heads, tp_size
        )
    ]
    for i, state in enumerate(args.state_types):
        buffers = Buffers(
            tuple(args.state_data_ptrs[i]), tuple(args.state_data_lens[i]), tuple(args.state_item_lens[i])
        )
        if state == StateType.MAMBA:
            found.append(of_states(state.value, _state_tensors(args, i), buffers, tp_size))
            continue
        if state == StateType.SWA:
            layers = config.swa_attention_layer_ids
            heads = config.get_swa_num_kv_heads(1) if args.swa_kv_cache_layout == "nhd" else 0
        else:
            layers, heads = range(len(buffers.addresses)), 0  # keys of an indexer, which all ranks have
        found.append(
            of_tokens(
                state.value, STATES[state], layers, len(layers), buffers, args.page_size, dtype, heads, tp_size
            )
        )
    return found


def facts_of(components: Sequence[Component], config: ModelConfig, weights: str) -> dict[str, str]:
    """What must be equal on both sides beyond the cells: a decode server of another model is refused by it."""
    main, *others = components
    return {
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
