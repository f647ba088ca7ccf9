"""Caches of SGLang's own pools move between engines of different tensor-parallel size, without servers.

Each rank has a pool of SGLang with true shapes and strides. What a rank of the prefill engine has is cut from
numbers of the whole model; afterwards each rank of the decode engine must have what is cut for it. The pools'
tensors are read by SGLang's names, by code that shares nothing with the backend's geometry.
"""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import tempfile
import unittest
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from sglang.srt.configs.mamba_utils import (
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2CacheParams,
    Mamba2StateShape,
)
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.disaggregation.base.conn import KVArgs, StateType
from sglang.srt.disaggregation.utils import (
    build_kv_layer_ids,
    get_kv_transfer_buf_infos,
    setup_state_kv_args,
)
from sglang.srt.environ import envs
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    MambaPool,
    MHATokenToKVPool,
    MiniMaxSparseKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.qsa_kv_pool import QSATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_parallel

from kvferry import Agent, BlockTable, EventKind, MismatchError, NotFoundError, Status, UnsupportedError
from kvferry.sglang.blocks import Chunks, Extent, blocks_of, extent_of, steps_of
from kvferry.sglang.caches import components_of, facts_of, refuse_options
from kvferry.sglang.geometry import arrays_of, build_engine, cache_type

PAGE = 64  # of other sizes there are no indexers
POOL = 4  # tokens that share a key
TOKENS = 478
WINDOW = 130
HEADS = 4
HEAD = 8
TYPE = torch.bfloat16
SLOTS = 24 * PAGE
LATENT, ROPE = 16, 8
SECONDS = 30


@dataclass
class Place:
    """A tensor of the cache of one rank: its first axis is a token's slot, or a state's.

    Attributes:
        name: of what is in it, equal in all ranks
        blocks: whose slots: the pages of all tokens, those of the window, or the state's
        axis: that ranks share; None: all have all
        parts: lengths of the parts that are shared separately; (): one
    """

    name: str
    tensor: torch.Tensor
    blocks: str = "all"
    axis: int | None = 1
    parts: tuple[int, ...] = ()


class Rank:
    """A rank of an engine: its pool, its agent, and the blocks of the request."""

    def __init__(
        self, kind: type[Cache], name: str, rank: int, tp_size: int, draw: np.random.Generator, page: int = PAGE
    ) -> None:
        self.tp, self.page = (rank, tp_size), page
        cache = kind(tp_size, page)
        self.pool, self.places = cache.pool, cache.places()
        self.args = args = KVArgs()
        buffers = [get_kv_transfer_buf_infos(self.pool)]
        args.num_draft_entries = 0
        if cache.draft is not None:
            buffers.append(cache.draft.get_contiguous_buf_infos())
            args.num_draft_entries = len(buffers[1][0])
        args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = (
            list(itertools.chain(*of)) for of in zip(*buffers, strict=True)
        )
        args.page_size, args.kv_cache_dtype_str = page, "auto"
        args.kv_layer_ids = build_kv_layer_ids(
            token_to_kv_pool=self.pool,
            draft_token_to_kv_pool=cache.draft,
            num_draft_entries=args.num_draft_entries,
            num_hidden_layers=cache.LAYERS,
        )
        setup_state_kv_args(args, self.pool, cache.draft, cache.LAYERS)
        of = (args, cache.config(), cache.latent, tp_size, cache.LAYERS, cache.draft_config())
        self.components = components_of(*of)
        engine = build_engine(self.components, name, tp_size, [cache.LAYERS])
        self.agent = Agent(engine, rank, facts=facts_of(self.components, cache.config(), "", None))
        self.arrays = arrays_of(self.components, False)
        self.agent.register(self.arrays)
        count = -(-TOKENS // page)
        self.pages = draw.permutation(np.arange(1, SLOTS // page))[:count].astype(np.uint32)
        self.looked_at = (TOKENS - WINDOW) // page * page  # the first token in the window's pages
        count -= self.looked_at // page
        self.window = draw.permutation(np.arange(1, SLOTS // 2 // page))[:count].astype(np.uint32)
        self.slot = np.uint32(draw.integers(1, 6))

    def wanted(self, prefix: int) -> list[Any]:
        """The blocks of all components, as SGLang gives them to an engine that has so many tokens."""
        pages = self.pages[prefix // self.page :]
        waiting = TOKENS % POOL
        of = {
            StateType.SWA: self.window,
            StateType.DSA: pages,
            StateType.MAMBA: [np.array(self.slot)],
            # SGLang also says in which places tokens wait: from the first, so many, then from place 0, so many.
            StateType.DSA_TAIL: [int(self.slot), (TOKENS - waiting) % POOL, waiting, 0, 0, POOL],
            StateType.QSA_PENDING: np.array([self.slot], dtype=np.int32),
            StateType.QSA_COMPRESSED: self.pages,  # all, whatever the prefix
            StateType.MINIMAX_INDEX_K: pages,
            StateType.MINIMAX_DENSE_KV: self.pages,
        }
        return [pages, *(of[state] for state in self.args.state_types)]

    def rows(self, place: Place, prefix: int = 0) -> tuple[Any, slice]:
        """Rows of a tensor that belong to the request behind a prefix, and which of the whole they are."""
        if place.blocks == "slot":
            return np.array([self.slot]), slice(0, 1)
        first, pages = (0, self.pages) if place.blocks == "all" else (self.looked_at, self.window)
        tokens = np.arange(max(prefix, first), TOKENS)
        rows = pages[(tokens - first) // self.page].astype(np.int64) * self.page + tokens % self.page
        return rows, slice(max(prefix, first), TOKENS)

    def share(self, whole: Any, place: Place) -> Any:
        """What this rank has of the numbers of the whole model."""
        if place.axis is None:
            return whole
        rank, size = self.tp
        length = whole.shape[place.axis]
        found, begin = [], 0
        for part in place.parts or (length,):
            copies = max(1, size // part)  # more ranks than units: several have the same
            each = max(1, part // size)
            first = begin + rank // copies * each
            found.append(np.take(whole, range(first, first + each), axis=place.axis))
            begin += part
        return np.concatenate(found, axis=place.axis)


class Cache:
    """A pool of one rank, and where things are in it."""

    LAYERS = 3
    latent = False
    pool: Any
    draft: Any = None

    def __init__(self, tp_size: int, page: int) -> None:
        raise NotImplementedError

    def config(self) -> Any:
        """What the backend reads of the model's configuration."""
        return SimpleNamespace(
            num_hidden_layers=self.LAYERS,
            dtype=TYPE,
            hf_config=SimpleNamespace(architectures=["Tiny"]),
            get_total_num_kv_heads=lambda: HEADS,
            get_swa_num_kv_heads=lambda tp_size: HEADS * 2 // tp_size,
            full_attention_layer_ids=[0, 2],
            swa_attention_layer_ids=[1],
        )

    def draft_config(self) -> Any:
        """What the backend reads of the draft model's configuration; None: there is none."""
        return None

    def places(self) -> list[Place]:
        """The tensors."""
        return self.heads(self.pool, "full")

    @staticmethod
    def heads(pool: Any, name: str, blocks: str = "all") -> list[Place]:
        """Keys and values."""
        return [
            Place(f"{name} {kind} {layer}", tensor, blocks)
            for kind, buffers in (("k", pool.k_buffer), ("v", pool.v_buffer))
            for layer, tensor in enumerate(buffers)
        ]


class Heads(Cache):
    """Multi-head attention; values of another size than keys."""

    def __init__(self, tp_size: int, page: int) -> None:
        heads = max(1, HEADS // tp_size)
        self.pool = MHATokenToKVPool(
            SLOTS, page, TYPE, heads, HEAD, self.LAYERS, "cpu", False, v_head_dim=HEAD // 2
        )


class Latents(Cache):
    """Multi-head latent attention."""

    latent = True

    def __init__(self, tp_size: int, page: int) -> None:
        self.pool = MLATokenToKVPool(SLOTS, page, TYPE, LATENT, ROPE, self.LAYERS, "cpu", False)

    def places(self) -> list[Place]:
        """The tensors."""
        return [Place(f"latent {i}", tensor, axis=None) for i, tensor in enumerate(self.pool.kv_buffer)]


class Indexed(Latents):
    """Latents, and an indexer whose keys and scales lie apart in each page."""

    def __init__(self, tp_size: int, page: int) -> None:
        self.pool = DSATokenToKVPool(
            SLOTS, page, LATENT, TYPE, ROPE, self.LAYERS, "cpu", 128, False, LATENT + ROPE
        )

    def places(self) -> list[Place]:
        """The tensors; an indexer's page, shared out evenly to its tokens."""
        index = [
            Place(f"index {i}", tensor.view(torch.uint8).reshape(-1, tensor[0].nbytes // PAGE), axis=None)
            for i, tensor in enumerate(self.pool.index_k_with_scale_buffer)
        ]
        return super().places() + index


class Pooled(Indexed):
    """An indexer with a key for each few tokens, and rows of what waits to become one. One layer has none."""

    def __init__(self, tp_size: int, page: int) -> None:
        self.pool = DSATokenToKVPool(
            SLOTS,
            page,
            LATENT,
            TYPE,
            ROPE,
            self.LAYERS,
            "cpu",
            128,
            False,
            LATENT + ROPE,
            index_kpool=page // PAGE,
            index_kpool_compress=True,
            max_running_requests=8,
            skip_topk_layers=[False, True, False][: self.LAYERS],
        )

    def places(self) -> list[Place]:
        """The tensors."""
        return pooled_places(self.pool)


def pooled_places(pool: Any) -> list[Place]:
    """Latents; of an indexer's keys, shares of a page as large as a token's; and what waits to become a key."""
    latents = [Place(f"latent {i}", tensor, axis=None) for i, tensor in enumerate(pool.kv_buffer)]
    index = [
        Place(f"index {i}", tensor.view(torch.uint8).reshape(-1, tensor[0].nbytes // pool.page_size), axis=None)
        for i, tensor in enumerate(pool.index_k_with_scale_buffer)
        if len(tensor)
    ]
    rows = [
        Place(f"waiting {what} {i}", tensor, "slot", axis=None)
        for what, tensors in (("k", pool._compress_tail_k), ("score", pool._compress_tail_score))
        for i, tensor in enumerate(tensors)
        if len(tensor)
    ]
    return [*latents, *index, *rows]


class Sparse(Cache):
    """MiniMax M3: one layer without an indexer, and two with a key for each token."""

    def __init__(self, tp_size: int, page: int) -> None:
        self.pool = MiniMaxSparseKVPool(
            SLOTS,
            page,
            TYPE,
            max(1, HEADS // tp_size),
            HEAD,
            16,
            [0],
            [1, 2],
            "cpu",
            disable_value_sparse_layer_ids=[1, 2],
            start_layer=0,
            end_layer=self.LAYERS,
        )

    def places(self) -> list[Place]:
        """The tensors."""
        keys = [
            Place(f"index {i}", tensor, axis=None) for i, tensor in enumerate(self.pool.index_k_pool.k_buffer)
        ]
        return [*self.heads(self.pool.main_pool, "full"), *keys]


class Windows(Cache):
    """Layers with a sliding window in a pool of their own, with more heads than the others."""

    def __init__(self, tp_size: int, page: int) -> None:
        self.pool = SWAKVPool(
            SLOTS,
            SLOTS // 2,
            page,
            TYPE,
            max(1, HEADS // tp_size),
            HEAD,
            [1],
            [0, 2],
            "cpu",
            swa_head_num=max(1, HEADS * 2 // tp_size),
        )

    def places(self) -> list[Place]:
        """The tensors."""
        return [
            *self.heads(self.pool.full_kv_pool, "full"),
            *self.heads(self.pool.swa_kv_pool, "window", "window"),
        ]


class States(Cache):
    """Gated delta nets: a convolution's state of three parts, and a recurrent state."""

    PARTS: tuple[int, ...] = (16, 16, 64)
    STATES = 8

    def __init__(self, tp_size: int, page: int) -> None:
        self._of_states(tp_size, page, self.state_shape(tp_size))

    def _of_states(self, tp_size: int, page: int, params: Any) -> None:
        states = MambaPool(
            size=self.STATES, spec_state_size=0, cache_params=params, mamba_layer_ids=[0, 2], device="cpu"
        )
        self.pool = HybridLinearKVPool(SLOTS, TYPE, page, max(1, HEADS // tp_size), HEAD, [1], "cpu", states)

    def state_shape(self, tp_size: int) -> Any:
        """The shapes of a rank's states."""
        shape = Mamba2StateShape.create(
            tp_world_size=tp_size,
            intermediate_size=64,
            n_groups=4,
            num_heads=4,
            head_dim=16,
            state_size=4,
            conv_kernel=4,
            conv_shard_groups=list(self.PARTS) or None,
        )
        return Mamba2CacheParams(shape=shape, layers=[0, 2])

    CONV_AXIS = 1

    def places(self) -> list[Place]:
        """The tensors."""
        cache = self.pool.mamba_pool.mamba_cache
        conv = [
            Place(f"conv {layer}", tensor, "slot", self.CONV_AXIS, self.PARTS)
            for layer, tensor in enumerate(cache.conv[0])
        ]
        state = [Place(f"state {layer}", tensor, "slot") for layer, tensor in enumerate(cache.temporal)]
        return [*self.heads(self.pool.full_kv_pool, "full"), *conv, *state]


class RowStates(States):
    """Kimi's delta nets, whose convolution's state has channels innermost."""

    PARTS = (128, 64, 64)
    CONV_AXIS = 2

    def state_shape(self, tp_size: int) -> Any:
        """The shapes of a rank's states."""
        shape = KimiLinearStateShape.create(
            tp_world_size=tp_size, num_heads=8, head_dim=16, num_k_heads=4, head_k_dim=16
        )
        return KimiLinearCacheParams(shape=shape, layers=[0, 2])


class Compressed(States):
    """Qwen 4: gated delta nets, and an indexer with keys in the model's type; all layers share positions."""

    RATIO = 4

    def _of_states(self, tp_size: int, page: int, params: Any) -> None:
        states = MambaPool(
            size=self.STATES, spec_state_size=0, cache_params=params, mamba_layer_ids=[0, 2], device="cpu"
        )
        self.pool = QSATokenToKVPool(
            size=SLOTS,
            dtype=TYPE,
            page_size=page,
            head_num=max(1, HEADS // tp_size),
            head_dim=HEAD,
            full_attention_layer_ids=[1],
            device="cpu",
            mamba_pool=states,
            qsa_index_kv_heads=1,
            qsa_index_head_dim=16,
            qsa_compress_ratio=self.RATIO,
            qsa_token_topk=512,
            num_request_slots=self.STATES,
        )

    def places(self) -> list[Place]:
        """The tensors; of the compressed keys, what each token would have of its share."""
        keys = [
            Place(f"index {i}", tensor.view(torch.uint8).reshape(-1, 16 * 2 // self.RATIO), axis=None)
            for i, tensor in enumerate(self.pool.qsa_compressed_k_buffer_pool)
        ]
        rows = [
            Place(f"waiting {i}", tensor.view(self.STATES, -1), "slot", axis=None)
            for i, tensor in enumerate(
                [*self.pool.qsa_key_state_buffer_pool, self.pool.qsa_rope_position_buffer]
            )
        ]
        return [*super().places(), *keys, *rows]


class PooledStates(RowStates):
    """GLM 5 Next: Kimi's delta nets, latents, and an indexer with a key for several tokens."""

    latent = True

    def _of_states(self, tp_size: int, page: int, params: Any) -> None:
        states = MambaPool(
            size=self.STATES, spec_state_size=0, cache_params=params, mamba_layer_ids=[0, 2], device="cpu"
        )
        self.pool = HybridLinearKVPool(
            SLOTS,
            TYPE,
            page,
            1,
            LATENT,
            [1],
            "cpu",
            states,
            use_mla=True,
            kv_lora_rank=LATENT,
            qk_rope_head_dim=ROPE,
            use_dsa=True,
            index_head_dim=128,
            kv_cache_dim=LATENT + ROPE,
            index_kpool=page // PAGE,
            index_kpool_compress=True,
            max_running_requests=8,
        )

    def places(self) -> list[Place]:
        """The tensors."""
        cache = self.pool.mamba_pool.mamba_cache
        parts = self.PARTS
        conv = [Place(f"conv {i}", tensor, "slot", 2, parts) for i, tensor in enumerate(cache.conv[0])]
        state = [Place(f"state {i}", tensor, "slot") for i, tensor in enumerate(cache.temporal)]
        return [*pooled_places(self.pool.full_kv_pool), *conv, *state]


class Drafted(Cache):
    """A model with a draft model that caches heads of another number and size, in two layers."""

    HEADS = 2

    def __init__(self, tp_size: int, page: int) -> None:
        super().__init__(tp_size, page)
        heads = max(1, self.HEADS // tp_size)
        self.draft = MHATokenToKVPool(SLOTS, page, torch.float32, heads, 2 * HEAD, 2, "cpu", False)

    def draft_config(self) -> Any:
        """See above."""
        return SimpleNamespace(
            attention_arch=AttentionArch.MHA,
            get_total_num_kv_heads=lambda: self.HEADS,
        )

    def places(self) -> list[Place]:
        """The tensors."""
        return [*super().places(), *self.heads(self.draft, "draft")]


class DraftedHeads(Drafted, Heads):
    """A small model before one with heads, or EAGLE."""


class DraftedStates(Drafted, States):
    """Likewise before one with states."""


class DraftedWindows(Drafted, Windows):
    """Likewise before one with windows."""


class DraftedLatents(Drafted, Latents):
    """EAGLE 3 before a model with latents."""


class Predicting(Cache):
    """A model with a layer more that predicts tokens (MTP), which caches what the others do."""

    def __init__(self, tp_size: int, page: int) -> None:
        super().__init__(tp_size, page)
        mine, self.LAYERS = self.pool, 1
        super().__init__(tp_size, page)
        self.pool, self.draft = mine, self.pool
        del self.LAYERS

    def draft_config(self) -> Any:
        """See above."""
        return SimpleNamespace(
            attention_arch=AttentionArch.MLA if self.latent else AttentionArch.MHA,
            get_total_num_kv_heads=lambda: HEADS,
        )

    def places(self) -> list[Place]:
        """The tensors."""
        mine, found = self.pool, super().places()
        self.pool = self.draft
        more = super().places()
        self.pool = mine
        return [*found, *(replace(place, name=f"{place.name} of the draft") for place in more)]


class PredictingHeads(Predicting, Heads):
    """MiMo."""


class PredictingLatents(Predicting, Latents):
    """DeepSeek V3."""


class PredictingIndexed(Predicting, Indexed):
    """DeepSeek V3.2."""


class PredictingPooled(Predicting, Pooled):
    """GLM 5 Next, without its states."""


class PredictingCompressed(Predicting, Compressed):
    """Qwen 4, whose draft layer has no state."""

    def places(self) -> list[Place]:
        """The tensors."""
        states = ("conv 0 of", "conv 1 of", "state 0 of", "state 1 of")
        return [place for place in super().places() if not place.name.startswith(states)]


class UnknownStates(States):
    """Mamba 2: SGLang does not say what the channels of the convolution are."""

    PARTS = ()


@contextlib.contextmanager
def engines(
    kind: type[Cache], *sizes: int, pages: tuple[int, ...] = (PAGE, PAGE)
) -> Iterator[list[list[Rank]]]:
    """Engines of one model, a list of ranks each."""
    draw = np.random.default_rng(3)
    with contextlib.ExitStack() as stack, get_parallel().override(attn_dcp_size=1):
        found = []
        for i, size in enumerate(sizes):
            ranks = [Rank(kind, f"engine-{i}", rank, size, draw, pages[i]) for rank in range(size)]
            for rank in ranks:
                stack.callback(rank.agent.close)
                # A request has the same blocks in all ranks of an engine.
                rank.pages, rank.window, rank.slot = ranks[0].pages, ranks[0].window, ranks[0].slot
            for rank in ranks[1:]:
                ranks[0].agent.introduce(rank.agent.introduction)
            found.append(ranks)
        yield found


def whole_model(ranks: list[Rank], draw: np.random.Generator) -> dict[str, Any]:
    """Numbers for the request of all ranks, by the names of tensors; bytes, so that all patterns occur."""
    found = {}
    for place in ranks[0].places:
        shape = [1 if place.blocks == "slot" else TOKENS, *bytes_of(place.tensor).shape[1:]]
        if place.axis is not None:
            units = bytes_of(place.tensor).shape[place.axis] * ranks[0].tp[1]
            shape[place.axis] = min(units, HEADS) if place.name.startswith("full") else units
        found[place.name] = draw.integers(0, 256, shape, dtype=np.uint8)
    return found


def bytes_of(tensor: torch.Tensor) -> Any:
    """A tensor's bytes, those of an element as a last axis; a view."""
    return tensor.unsqueeze(-1).view(torch.uint8).numpy()


def fill(rank: Rank, whole: dict[str, Any]) -> None:
    """Puts into a rank what it has of the numbers."""
    for place in rank.places:
        rows, which = rank.rows(place)
        bytes_of(place.tensor)[rows] = rank.share(whole[place.name], place)[which]


def differing(rank: Rank, whole: dict[str, Any], prefix: int = 0) -> list[str]:
    """The tensors that do not have what they must have."""
    found = []
    for place in rank.places:
        rows, which = rank.rows(place, prefix)
        if not np.array_equal(bytes_of(place.tensor)[rows], rank.share(whole[place.name], place)[which]):
            found.append(place.name)
    return found


def say(rank: Rank, ticket: int, chunk: tuple[int, int], tables: list[BlockTable]) -> None:
    """Says that a chunk is ready; the push may have ended, where nobody wants anything of this rank."""
    with contextlib.suppress(NotFoundError):
        rank.agent.push_ready(ticket, chunk, blocks=tables)


def move(prefill: list[Rank], decode: list[Rank], chunks: tuple[int, ...], prefix: int = 0) -> None:
    """Moves the request as the backend's managers do.

    Args:
        chunks: numbers of pages of the prefill engine, without the last chunk
        prefix: tokens that the decode engine has
    """
    contact = prefill[0].agent.contact
    for rank in decode:
        pages, *others = rank.wanted(prefix)
        ids = blocks_of(rank.components, pages, others)
        extent = extent_of(ids, prefix, rank.page)
        rank.agent.expect("request", contact, steps_of(rank.components, extent, ids))
    for rank in prefill:
        said = Chunks(rank.components, extent)
        ticket = rank.agent.push("request", said.steps)
        left, *others = rank.wanted(said.begin)
        for count in chunks:
            ready = said.add(left[:count], count * rank.page, None)
            if ready is not None:
                say(rank, ticket, *ready)
            left = left[count:]
        ready = said.add(left, TOKENS - said.begin - sum(chunks) * rank.page, others)
        assert ready is not None
        say(rank, ticket, *ready)
    for rank in (*decode, *prefill):
        event = rank.agent.wait_event(SECONDS)
        while event is not None and event.kind == EventKind.PEER_READY:
            event = rank.agent.wait_event(SECONDS)
        assert event is not None and event.kind == EventKind.DONE, event


class Pools(unittest.TestCase):
    """See above."""

    KINDS = (Heads, Latents, Indexed, Windows, States, RowStates, Sparse, Compressed)
    DRAFTED = (
        DraftedHeads,
        DraftedStates,
        DraftedWindows,
        DraftedLatents,
        PredictingHeads,
        PredictingLatents,
        PredictingIndexed,
        PredictingCompressed,
    )

    def test_what_ranks_have_is_what_other_ranks_get(self) -> None:
        for kind in self.KINDS:
            for sizes in ((1, 1), (1, 2), (2, 1), (4, 2), (2, 4)):
                for chunks in ((), (2, 1, 3)):
                    with self.subTest(kind.__name__, sizes=sizes, chunks=chunks):
                        self._move(kind, sizes, chunks=chunks)

    def test_what_a_draft_model_caches_moves_too(self) -> None:
        for kind in self.DRAFTED:
            for sizes in ((1, 1), (1, 2), (2, 1)):
                for chunks, prefix in (((), 0), ((2, 1, 3), 0), ((1,), 2 * PAGE)):
                    with self.subTest(kind.__name__, sizes=sizes, chunks=chunks, prefix=prefix):
                        self._move(kind, sizes, chunks=chunks, prefix=prefix)
        self._move(PredictingPooled, (2, 1), (PAGE * POOL,) * 2)

    def test_pages_may_have_other_sizes_beside_a_draft_model(self) -> None:
        for kind in (DraftedHeads, DraftedLatents, DraftedStates, PredictingLatents):
            for pages in ((1, 16), (64, 48)):
                for prefix in (0, 3 * pages[1]):
                    with self.subTest(kind.__name__, pages=pages, prefix=prefix):
                        self._move(kind, (2, 1), pages, (2, 1), prefix)

    def test_more_ranks_than_heads_have_the_same_heads(self) -> None:
        for sizes in ((8, 1), (1, 8), (8, 2)):
            with self.subTest(sizes=sizes):
                self._move(Heads, sizes, chunks=(3,))

    def test_pages_may_have_other_sizes(self) -> None:
        for kind in (Heads, Latents, States, RowStates):
            for pages in ((1, 16), (16, 1), (16, 64), (64, 16), (64, 48)):
                for prefix in (0, 3 * pages[1]):
                    with self.subTest(kind.__name__, pages=pages, prefix=prefix):
                        self._move(kind, (2, 1), pages, (2, 1), prefix)

    def test_pages_that_the_decode_engine_has_do_not_move(self) -> None:
        for kind in (Heads, Indexed, Windows, States, Sparse, Compressed):
            with self.subTest(kind.__name__):
                self._move(kind, (2, 1), chunks=(1,), prefix=2 * PAGE)

    def test_keys_that_tokens_share_move_with_what_waits_to_become_one(self) -> None:
        for kind, sizes in itertools.product((Pooled, PooledStates), ((1, 1), (2, 1), (1, 4))):
            for chunks, prefix in (((), 0), ((1,), 0), ((), PAGE * POOL)):
                with self.subTest(kind.__name__, sizes=sizes, chunks=chunks, prefix=prefix):
                    self._move(kind, sizes, (PAGE * POOL,) * 2, chunks, prefix)

    def test_nothing_waits_behind_a_complete_key(self) -> None:
        with engines(Pooled, 1, 1, pages=(PAGE * POOL,) * 2) as (prefill, decode):
            whole = whole_model(prefill, np.random.default_rng(5))
            fill(prefill[0], whole)
            for rank in (*prefill, *decode):
                wanted = rank.wanted
                rank.wanted = lambda prefix, wanted=wanted: [*wanted(prefix)[:-1], []]  # type: ignore[method-assign]
            move(prefill, decode, ())
            waiting = [place.name for place in decode[0].places if place.blocks == "slot"]
            self.assertEqual(differing(decode[0], whole), waiting)

    def _move(
        self,
        kind: type[Cache],
        sizes: tuple[int, int],
        pages: tuple[int, int] = (PAGE, PAGE),
        chunks: tuple[int, ...] = (),
        prefix: int = 0,
    ) -> None:
        """Moves a request, and judges what each decode rank then has."""
        with engines(kind, *sizes, pages=pages) as (prefill, decode):
            whole = whole_model(prefill, np.random.default_rng(5))
            for rank in prefill:
                fill(rank, whole)
            for rank in decode:  # a control: nothing is there before
                self.assertEqual(differing(rank, whole), [place.name for place in rank.places])
            move(prefill, decode, chunks, prefix)
            for rank in decode:
                self.assertEqual(differing(rank, whole, prefix), [])
                first = next(place for place in rank.places if place.blocks == "all")
                rows, _ = rank.rows(first)
                self.assertFalse(bytes_of(first.tensor)[rows[:prefix]].any())

    def test_engines_whose_pages_differ_move_no_pages_of_other_kinds(self) -> None:
        for kind in (Compressed, Windows):
            with self.subTest(kind.__name__), engines(kind, 1, 1, pages=(64, 16)) as (prefill, decode):
                with self.assertRaisesRegex(MismatchError, "page size is 64 in the prefill server, and 16 in"):
                    move(prefill, decode, ())
                event = decode[0].agent.wait_event(SECONDS)
                assert event is not None
                self.assertEqual(event.status, Status.MISMATCH)
                self.assertRegex(event.detail, "page size")

    def test_states_of_unknown_channels_move_only_between_equal_sizes(self) -> None:
        for pages in ((PAGE, PAGE), (64, 16)):
            self._move(UnknownStates, (2, 2), pages)
        failure = self.assertRaisesRegex(AssertionError, "MISMATCH.*mamba")
        with engines(UnknownStates, 2, 1) as (prefill, decode), failure:
            move(prefill, decode, ())

    def test_another_number_of_blocks_is_refused_by_name(self) -> None:
        with engines(Windows, 1) as ((rank,),):
            chunks = Chunks(rank.components, Extent(0, 512, PAGE, (2,)))
            with self.assertRaisesRegex(MismatchError, f"{len(rank.window)} blocks of swa .* 2 in the decode"):
                chunks.add(rank.pages, TOKENS, [rank.window])
        with engines(Indexed, 1) as ((rank,),):
            chunks = Chunks(rank.components, Extent(0, 512, PAGE, (8,)))
            with self.assertRaisesRegex(MismatchError, "other pages of dsa than of kv"):
                chunks.add(rank.pages, TOKENS, [rank.pages[::-1]])

    def test_scales_of_a_file_are_told_to_the_other_engine(self) -> None:
        with engines(Windows, 1) as ((rank,),), tempfile.TemporaryDirectory() as folder:
            config = Windows(1, PAGE).config()
            said = []
            for content in ("{}", "{}", "{ }"):
                file = pathlib.Path(folder) / str(len(said))
                file.write_text(content)
                said.append(facts_of(rank.components, config, "", str(file))["scales"])
            self.assertNotIn("scales", facts_of(rank.components, config, "", None))
        self.assertEqual((said[0] == said[1], said[0] == said[2]), (True, False))

    def test_which_draft_model_there_is_is_told_to_the_other_engine(self) -> None:
        with engines(DraftedHeads, 1) as ((rank,),):
            said = []
            for name, kept in (("Eagle", None), ("Eagle", "fp8_e4m3"), ("Other", None), ("Eagle", None)):
                draft = SimpleNamespace(hf_config=SimpleNamespace(architectures=[name]))
                spec = SimpleNamespace(speculative_draft_kv_cache_dtype=kept)
                with mock.patch("kvferry.sglang.caches.get_spec", lambda spec=spec: spec):
                    facts = facts_of(rank.components, DraftedHeads(1, PAGE).config(), "", None, draft)
                self.assertEqual((facts["page size"], facts["layers"]), ("any", "kv 3, draft 2"))
                said.append(facts["draft"])
        self.assertEqual((len(set(said)), said[0]), (3, said[3]))

    def test_options_with_which_caches_cannot_be_moved_are_refused_by_name(self) -> None:
        early, late = "early", "prefill_complete"
        for policy, release, hisparse, pool, stages, says in (
            (early, True, False, "NVLINK", 1, ""),
            (early, False, False, None, 1, "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE=0"),
            (late, True, False, None, 1, f"--disaggregation-decode-allocation-policy {late}"),
            (early, True, True, None, 1, r"caches in memory of the host \(--enable-hisparse\)"),
            (early, True, False, "INTRA_NODE_NVLINK", 1, "SGLANG_MOONCAKE_CUSTOM_MEM_POOL=INTRA_NODE_NVLINK"),
            (early, True, False, None, 2, "draft models in pipeline stages"),
        ):
            args = KVArgs()
            args.state_types, args.num_draft_entries = [], 2
            disagg = SimpleNamespace(disaggregation_decode_allocation_policy=policy)
            memory = SimpleNamespace(enable_hisparse=hisparse)
            with (
                self.subTest(says=says),
                mock.patch("kvferry.sglang.caches.get_disagg", lambda disagg=disagg: disagg),
                mock.patch("kvferry.sglang.caches.get_memory", lambda memory=memory: memory),
                envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.override(release),
                envs.SGLANG_MOONCAKE_CUSTOM_MEM_POOL.override(pool),
                self.assertRaisesRegex(UnsupportedError, f"support {says}; see")
                if says
                else contextlib.nullcontext(),
            ):
                refuse_options(args, 1, 1, 1, stages)

    def test_a_type_that_is_not_known_is_refused_by_name(self) -> None:
        with self.assertRaisesRegex(UnsupportedError, "kv_cache_dtype is fp4_e2m1; allowed: auto, bf16"):
            cache_type("fp4_e2m1", "torch.bfloat16")


if __name__ == "__main__":
    unittest.main()
