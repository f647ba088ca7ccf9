"""Reads what vLLM caches, and where, from its configuration and from the tensors it registers.

Strides come from the tensors, never from the names of layouts. The tensors do not show the order inside a page,
which only the attention kernels know; key_order() finds it out by running a kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from kvferry.errors import UnsupportedError
from kvferry.fp8 import NAMES, kept_type
from kvferry.model import Dtype, GroupKind, Part, TpRule
from kvferry.shard import PartShare, Placement, TokenShare
from kvferry.transfer_params import own_group_name
from kvferry.vllm.compat import (
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
    write_cpu_page,
)
from kvferry.vllm.geometry import (
    DRAFT_PREFIX,
    UNSCALED,
    GroupGeometry,
    LayerGeometry,
    RankGeometry,
    Scales,
)
from kvferry.vllm.heads import total_kv_heads
from kvferry.vllm.layers import LayerPlace, place_layer
from kvferry.vllm.ranks import ALL_TOKENS, Ranks
from kvferry.vllm.state_layers import configured_model, place_state, state_parts

if TYPE_CHECKING:
    from vllm.config import VllmConfig


#: What an indexer keeps of so many elements of a key, by the bytes of that: their type, and the type and number
#: of scales, which lie behind all keys of a page.
INDEXED_ELEMENTS = 128
INDEXERS = {132: (Dtype.F8_E4M3, Dtype.F32, 1), 68: (Dtype.F4_E2M1, Dtype.U8, 4)}

#: An entry of "fp8_ds_mla" (DeepSeek V4): its bytes, and those of its scales, which lie behind all entries.
PACKED_BYTES, PACKED_SCALE_BYTES = 576, 8

#: What elements of one byte are, by vLLM's name of the caches' type; others only their backend knows.
BYTE_TYPES = {"fp8": Dtype.F8_E4M3, "fp8_e4m3": Dtype.F8_E4M3, "fp8_e5m2": Dtype.F8_E5M2}
#: Below this, bytes are different numbers that are not negative in both types.
EXACT_FP8 = 123


class Regions:
    """The pieces of memory behind tensors: each allocation once."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self.tensors: list[torch.Tensor] = []

    def place(self, tensor: torch.Tensor) -> tuple[int, int]:
        """The region that a tensor lies in, and its byte offset there."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._known:
            self._known[address] = len(self.tensors)
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            self.tensors.append(whole.set_(storage, 0, (storage.nbytes(),)))
        return self._known[address], tensor.data_ptr() - address


@dataclass(frozen=True)
class _Layer:
    """A layer and its parts.

    Attributes:
        tokens_per_step: tokens that share an entry
        scales: see LayerGeometry
    """

    parts: tuple[Part, ...]
    shares: tuple[PartShare, ...]
    placements: tuple[Placement, ...]
    kernel_blocks: int
    tokens: TokenShare = ALL_TOKENS
    tokens_per_step: int = 1
    scales: Scales = UNSCALED

    @property
    def kind(self) -> tuple[tuple[Part, ...], int]:
        """What layers of one kind have in common."""
        return self.parts, self.tokens_per_step


#: Layers of each kind, with their numbers.
_Kinds = dict[tuple[tuple[Part, ...], int], list[tuple[int, _Layer]]]


def dtype_of(value: torch.dtype) -> Dtype:
    """kvferry's name of an element type."""
    return Dtype.by_name(str(value))


def _cache_type(config: VllmConfig, name: str) -> str:
    """vLLM's name of the type of a layer's cache. A draft model may have another than the model."""
    layer = config.compilation_config.static_forward_context.get(name)
    return str(getattr(layer, "kv_cache_dtype", config.cache_config.cache_dtype))


def _cell_type(config: VllmConfig, name: str, tensor: torch.Tensor) -> Dtype:
    """The type of a cache's elements. vLLM says bytes for more than one type."""
    if tensor.dtype != torch.uint8:
        return dtype_of(tensor.dtype)
    return kept_type(BYTE_TYPES.get(_cache_type(config, name), Dtype.U8))


def _scales_of(config: VllmConfig, name: str, parts: Iterable[Part]) -> Scales:
    """The scales of an attention layer with a cache in FP8. vLLM has them from the checkpoint, or else 1."""
    types = {part.dtype for part in parts if not part.name.startswith("indexer")}  # its scales are a part
    if not types & {Dtype.U8, *NAMES}:
        return UNSCALED
    layer: Any = config.compilation_config.static_forward_context.get(name)
    if not hasattr(layer, "_k_scale"):
        if types & set(NAMES):
            raise UnsupportedError(f"layer {name} keeps FP8, and this vLLM does not say by what it is scaled")
        return UNSCALED
    return tuple(layer._k_scale.flatten().tolist()), tuple(layer._v_scale.flatten().tolist())


def _inner_specs(spec: KVCacheSpec, names: Iterable[str]) -> dict[str, KVCacheSpec]:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return {name: spec.kv_cache_specs[name] for name in names}
    return dict.fromkeys(names, spec)


def _tokens_per_entry(name: str, spec: AttentionSpec, tensor: torch.Tensor, block_count: int) -> int:
    """How many tokens share an entry of a cache, such as DeepSeek V4's."""
    entries, tokens = tensor.shape[0] * tensor.shape[-2], block_count * spec.block_size
    each = int(spec.tokens_per_state)
    if each != spec.tokens_per_state or entries * each != tokens:
        raise UnsupportedError(
            f"layer {name} keeps {entries} entries for {tokens} tokens, and says that one is of "
            f"{spec.tokens_per_state}; allowed: one for each token, or for a whole number of them"
        )
    return each


def _page_strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Bytes from one block, one head and one token of a page to the next."""
    if tensor.dim() != 4:
        raise UnsupportedError(f"a cache of shape {tuple(tensor.shape)}; allowed: block, head, token, content")
    item = tensor.element_size()
    block, head, token, element = (stride * item for stride in tensor.stride())
    if element != item:
        raise UnsupportedError(f"content elements are {element} bytes apart; allowed: {item}")
    return block, head, token


def _kept_tokens(spec: AttentionSpec, ranks: Ranks) -> TokenShare:
    """The tokens that a rank keeps; of some caches, such as a draft model's, every rank keeps all tokens."""
    return ranks.tokens(spec.block_size) if spec.dcp_sharded else ALL_TOKENS


def _latent_layer(
    spec: AttentionSpec, tensor: torch.Tensor, dtype: Dtype, ranks: Ranks, regions: Regions
) -> _Layer:
    """A latent layer: every rank holds the whole latent of the tokens that it keeps."""
    block, head, token = _page_strides(tensor)
    region, offset = regions.place(tensor)
    part = Part("latent", dtype, 1, tensor.shape[3], tp_rule=TpRule.REPLICATE)
    tokens = _kept_tokens(spec, ranks)
    place = Placement(region, offset, block, token, head)
    return _Layer((part,), (ranks.share(1, 1, tokens),), (place,), tensor.shape[0], tokens)


def _row_layer(
    spec: AttentionSpec,
    name: str,
    place: LayerPlace,
    tensor: torch.Tensor,
    dtype: Dtype,
    ranks: Ranks,
    regions: Regions,
) -> _Layer:
    """A layer without values: the last inputs of Inkling's convolutions, split as its KV heads are, or the
    summaries of several tokens by which Step 5 selects keys, which every rank has.
    """
    block, head, token = _page_strides(tensor)
    region, offset = regions.place(tensor)
    kept = _kept_tokens(spec, ranks)
    at = (Placement(region, offset, block, token, head),)
    if spec.tokens_per_state != 1:
        if spec.num_kv_heads != 1:
            raise UnsupportedError(
                f"layer {name} keeps an entry of {spec.num_kv_heads} heads for {spec.tokens_per_state} tokens; "
                "allowed: 1"
            )
        part = Part("summary", dtype, 1, tensor.shape[3], tp_rule=TpRule.REPLICATE)
        return _Layer((part,), (ranks.share(1, 1, kept),), at, tensor.shape[0], kept)
    heads = total_kv_heads(place.model, name, place.index, spec.num_kv_heads, ranks.tp_size)
    part = Part("rows", dtype, heads, tensor.shape[3])
    return _Layer((part,), (ranks.share(heads, min(ranks.tp_size, heads), kept),), at, tensor.shape[0], kept)


def _is_quantized_indexer(spec: AttentionSpec, name: str, tensor: torch.Tensor) -> bool:
    """Whether it is the cache of a sparse-attention indexer that keeps keys in FP8 or FP4, with scales.

    DeepSeek V4's do not say so, except by their names.
    """
    if not isinstance(spec, MLAAttentionSpec) or tensor.dtype != torch.uint8:
        return False
    return spec.cache_role == SparseCacheRole.INDEXER or name.endswith(".indexer.k_cache")


def _layer_with_scales(
    spec: AttentionSpec, tensor: torch.Tensor, content: Part, scales: Part, ranks: Ranks, regions: Regions
) -> _Layer:
    """A layer whose kernels keep the scales of a page apart, although its tensor has the shape of latents.

    A row of the tensor has as many bytes as content and scales together. In memory all scales of a page lie
    behind the content of all rows:

        | content 0 | content 1 | ... | scales 0 | scales 1 | ... | padding |
    """
    block, head, _ = _page_strides(tensor)
    region, offset = regions.place(tensor)
    kept = _kept_tokens(spec, ranks)
    share = ranks.share(1, 1, kept)
    return _Layer(
        (content, scales),
        (share, share),
        (
            Placement(region, offset, block, content.cell_bytes, head),
            Placement(region, offset + tensor.shape[2] * content.cell_bytes, block, scales.cell_bytes, head),
        ),
        tensor.shape[0],
        kept,
    )


def _packed_layer(
    spec: AttentionSpec, name: str, tensor: torch.Tensor, ranks: Ranks, regions: Regions
) -> _Layer:
    """Latents of DeepSeek V4 in vLLM's format "fp8_ds_mla": FP8 and BF16 elements, and scales."""
    _, _, token = _page_strides(tensor)
    content = tensor.shape[3]
    if content != PACKED_BYTES + PACKED_SCALE_BYTES or token != content:
        raise UnsupportedError(
            f"layer {name} packs an entry into {content} bytes, {token} bytes apart; allowed: "
            f"{PACKED_BYTES} + {PACKED_SCALE_BYTES}, without gaps"
        )
    latent = Part("latent", Dtype.U8, 1, PACKED_BYTES, tp_rule=TpRule.REPLICATE)
    scales = Part("latent_scale", Dtype.U8, 1, PACKED_SCALE_BYTES, tp_rule=TpRule.REPLICATE)
    return _layer_with_scales(spec, tensor, latent, scales, ranks, regions)


def _indexer_layer(
    spec: AttentionSpec, name: str, tensor: torch.Tensor, ranks: Ranks, regions: Regions
) -> _Layer:
    """Keys of an indexer, in FP8 or in FP4, and their scales."""
    _, _, token = _page_strides(tensor)
    content = tensor.shape[3]
    each = next((size for size in INDEXERS if content % size == 0), 0)
    if not each or token != content:
        raise UnsupportedError(
            f"indexer {name} has {content} bytes a token; allowed: {' or '.join(map(str, INDEXERS))} for each "
            f"{INDEXED_ELEMENTS} elements, without gaps"
        )
    key_type, scale_type, scales = INDEXERS[each]
    if torch.version.hip:
        raise UnsupportedError(f"indexer {name} keeps keys in an order of AMD's kernels")
    times = content // each
    keys = Part("indexer", key_type, 1, times * INDEXED_ELEMENTS, tp_rule=TpRule.REPLICATE)
    scale = Part("indexer_scale", scale_type, 1, times * scales, tp_rule=TpRule.REPLICATE)
    return _layer_with_scales(spec, tensor, keys, scale, ranks, regions)


def _ring_layer(
    spec: CircularBufferSpec, name: str, tensor: torch.Tensor, ranks: Ranks, regions: Regions
) -> _Layer:
    """What is yet to become an entry for several tokens (GLM 5 Next, Qwen 4): a block for each sequence.

    The token at position p is in row p % rows; proposed tokens may be in others. So the block is handed over
    whole, like a state, to engines whose blocks have as many rows.
    """
    block, head, token = _page_strides(tensor)
    if spec.dcp_sharded and ranks.dcp_size > 1:
        raise UnsupportedError(f"layer {name} shares by token what is yet to become an entry")
    region, offset = regions.place(tensor)
    _, heads, rows, content = tensor.shape
    part = Part(
        "ring",
        dtype_of(tensor.dtype),
        heads,
        content,
        rows_per_step=rows,
        tp_rule=TpRule.REPLICATE,
    )
    share = ranks.share(heads, 1, ALL_TOKENS)
    return _Layer((part,), (share,), (Placement(region, offset, block, token, head),), tensor.shape[0])


def _refuse_own_pages(name: str, spec: AttentionSpec) -> None:
    """Raises UnsupportedError if the attention backend keeps pages in a form of its own, as B12X does."""
    if spec.num_head_slots is not None or spec.state_content_bytes is not None:
        raise UnsupportedError(
            f"layer {name}: the attention backend keeps pages of {spec.num_head_slots or spec.num_kv_heads} "
            f"slots and {spec.state_content_bytes} bytes a token in an order of its own; allowed: a slot for "
            f"each of the {spec.num_kv_heads} heads, with its key and its value"
        )


def _attention_layer(
    spec: AttentionSpec,
    tensor: torch.Tensor,
    dtype: Dtype,
    heads: int,
    ranks: Ranks,
    regions: Regions,
    key_order: str,
) -> _Layer:
    """Keys and values of a rank's share of a layer's heads: `heads` in the whole model."""
    block, head, token = _page_strides(tensor)
    region, offset = regions.place(tensor)
    item = tensor.element_size()
    _, local, tokens, content = tensor.shape
    size, size_v = spec.head_size, spec.head_size_v
    if content != size + size_v or local != spec.num_kv_heads:
        raise UnsupportedError(
            f"a page of {local} heads and {content} elements a token; the model has {spec.num_kv_heads} heads "
            f"and {size} + {size_v}"
        )
    values = Part("v", dtype, heads, size_v)
    kept = _kept_tokens(spec, ranks)
    share = ranks.share(heads, min(ranks.tp_size, heads), kept)
    if key_order == "packed":
        return _Layer(
            (Part("k", dtype, heads, size), values),
            (share, share),
            (
                Placement(region, offset, block, token, head),
                Placement(region, offset + size * item, block, token, head),
            ),
            tensor.shape[0],
            kept,
        )
    # Head by head: all keys, channel by channel, then all values, token by token.
    if token != content * item or size != size_v:
        raise UnsupportedError(f"the tokens of a head are {token} bytes apart; allowed: {content * item}")
    return _Layer(
        (Part("k", dtype, heads, size), values),
        (share, share),
        (
            Placement(region, offset, block, item, head, tokens * item, size),
            Placement(region, offset + tokens * size * item, block, size * item, head),
        ),
        tensor.shape[0],
        kept,
    )


def key_order(config: VllmConfig, name: str, spec: AttentionSpec, kernel_tokens: int) -> str:
    """How the attention kernels lay a head's keys and values out in a page.

    "packed": token by token, its key and then its value. "transposed": all keys channel by channel, then all
    values token by token, as vLLM's CPU kernels do, although the tensor's shape is that of "packed". So the CPU
    kernel is tested: it writes single elements into a page of our own.
    """
    if config.device_config.device_type != "cpu":
        return "packed"
    size, tokens = spec.head_size, kernel_tokens
    cache_type = _cache_type(config, name) if spec.dtype == torch.uint8 else "auto"
    page = torch.zeros(1, 1, 2 * tokens, size, dtype=spec.dtype)
    keys, values = page.chunk(2, dim=2)
    marks = torch.arange(1, tokens * size + 1, dtype=torch.float64)
    if cache_type in BYTE_TYPES:  # numbers that the cache's type has
        kept = marks.remainder(EXACT_FP8).to(torch.uint8)
        given = kept.view(getattr(torch, NAMES[BYTE_TYPES[cache_type]])).to(config.model_config.dtype)
    else:
        kept = given = marks.remainder(251).to(spec.dtype)
    isa = write_cpu_page(size, cache_type, given.view(tokens, 1, size), keys, values)
    plain = kept.view(tokens, size)
    if torch.equal(keys.view(size, tokens), plain.t()) and torch.equal(values.view(tokens, size), plain):
        return "transposed"
    raise UnsupportedError(
        f"vLLM's CPU attention ({isa}, {spec.dtype}, {tokens} tokens a block) keeps keys in an unknown order"
    )


def _group_kind(spec: KVCacheSpec) -> tuple[GroupKind, int, int]:
    """Kind, window and chunk of a group."""
    if isinstance(spec, (MambaSpec, CircularBufferSpec)):
        return GroupKind.STATE, 0, 0
    if isinstance(spec, SlidingWindowSpec):
        return GroupKind.TOKENS, spec.sliding_window, 0
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return GroupKind.TOKENS, 0, spec.attention_chunk_size
    if isinstance(spec, FullAttentionSpec):
        return GroupKind.TOKENS, 0, 0
    raise UnsupportedError(f"layers of kind {type(spec).__name__}")


def describe(
    config: VllmConfig, cache: KVCacheConfig, caches: Mapping[str, Any], ranks: Ranks
) -> tuple[RankGeometry, list[torch.Tensor]]:
    """What this rank caches, and the memory of its regions."""
    regions = Regions()
    groups: list[GroupGeometry] = []
    drafts = 0
    orders: dict[tuple[Any, ...], str] = {}
    for source in cache.transfer_group_ids:
        group = cache.kv_cache_groups[source]
        names = [name for name in group.layer_names if name in caches]
        kinds: tuple[_Kinds, _Kinds] = ({}, {})  # of the model, and of the draft
        for name, spec in _inner_specs(group.kv_cache_spec, names).items():
            place = place_layer(config, name)
            layer = _describe_layer(config, name, place, spec, caches[name], ranks, regions, orders)
            if isinstance(spec, AttentionSpec):
                each = _tokens_per_entry(name, spec, caches[name], cache.num_blocks)
                layer = replace(layer, tokens_per_step=each, scales=_scales_of(config, name, layer.parts))
            kinds[place.draft].setdefault(layer.kind, []).append((place.number, layer))
        for number, layers in enumerate(kinds[False].values()):
            groups.append(_group(cache, source, own_group_name(source, number), layers))
        # The two engines may have a draft's layers in different groups of vLLM.
        for layers in kinds[True].values():
            groups.append(_group(cache, source, f"{DRAFT_PREFIX}{drafts:03}", layers))
            drafts += 1
    held = [layer.layer for group in groups for layer in group.layers]
    return (
        RankGeometry(
            tp_rank=ranks.tp_rank,
            tp_size=ranks.tp_size,
            pp_rank=ranks.pp_rank,
            pp_size=ranks.pp_size,
            layer_count=max(held) + 1,
            layers=range(min(held), max(held) + 1),
            region_bytes=tuple(tensor.numel() for tensor in regions.tensors),
            groups=tuple(groups),
            pcp_rank=ranks.pcp_rank,
            pcp_size=ranks.pcp_size,
        ),
        regions.tensors,
    )


def _describe_layer(
    config: VllmConfig,
    name: str,
    place: LayerPlace,
    spec: KVCacheSpec,
    cache: torch.Tensor,
    ranks: Ranks,
    regions: Regions,
    orders: dict[tuple[Any, ...], str],
) -> _Layer:
    if isinstance(spec, SlidingWindowMLASpec) and spec.bounded_replay:
        raise UnsupportedError(f"layer {name} computes the tokens of its window again after each prefix hit")
    if isinstance(spec, (MLAAttentionSpec, SlidingWindowMLASpec)):
        if spec.model_version is not None and spec.state_content_bytes is not None:
            return _packed_layer(spec, name, cache, ranks, regions)
        if _is_quantized_indexer(spec, name, cache):
            return _indexer_layer(spec, name, cache, ranks, regions)
        return _latent_layer(spec, cache, _cell_type(config, name, cache), ranks, regions)
    if isinstance(spec, CircularBufferSpec):
        return _ring_layer(spec, name, cache, ranks, regions)
    if isinstance(spec, AttentionSpec):
        _refuse_own_pages(name, spec)
        if spec.head_size_v == 0:
            return _row_layer(spec, name, place, cache, _cell_type(config, name, cache), ranks, regions)
        dtype = _cell_type(config, name, cache)
        asked = (dtype, cache.shape[2], spec.head_size)
        if asked not in orders:
            orders[asked] = key_order(config, name, spec, cache.shape[2])
        heads = total_kv_heads(place.model, name, place.index, spec.num_kv_heads, ranks.tp_size)
        return _attention_layer(spec, cache, dtype, heads, ranks, regions, orders[asked])
    if isinstance(spec, MambaSpec):
        if ranks.pcp_size > 1:
            raise UnsupportedError(f"layer {name} keeps a state, under prefill context parallelism")
        model = configured_model(place.model)
        region, offset = regions.place(cache)
        parts, shares, places = place_state(
            spec,
            state_parts(model, place.index, len(spec.shapes)),
            (ranks.tp_rank, ranks.tp_size),
            region,
            offset,
            cache.stride(0) * cache.element_size(),
        )
        return _Layer(parts, shares, places, cache.shape[0])
    raise UnsupportedError(f"layers of kind {type(spec).__name__}")


def _group(cache: KVCacheConfig, source: int, name: str, layers: list[tuple[int, _Layer]]) -> GroupGeometry:
    spec = cache.kv_cache_groups[source].kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = spec.first_spec
    kind, window, chunk = _group_kind(spec)
    first = layers[0][1]
    blocks = first.kernel_blocks
    if any(layer.kernel_blocks != blocks for _, layer in layers) or blocks % cache.num_blocks:
        raise UnsupportedError(f"group {source} has {blocks} kernel blocks for {cache.num_blocks} blocks")
    return GroupGeometry(
        source=source,
        name=name,
        kind=kind,
        parts=first.parts,
        shares=first.shares,
        layers=tuple(LayerGeometry(number, layer.placements, layer.scales) for number, layer in layers),
        tokens_per_block=spec.block_size,
        kernel_blocks_per_block=blocks // cache.num_blocks,
        block_count=cache.num_blocks,
        window_tokens=window,
        chunk_tokens=chunk,
        speculative_blocks=spec.num_speculative_blocks if isinstance(spec, MambaSpec) else 0,
        tokens=first.tokens,
        tokens_per_step=first.tokens_per_step,
    )
