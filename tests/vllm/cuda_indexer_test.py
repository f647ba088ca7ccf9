"""The cache of a sparse-attention indexer (DeepSeek V3.2, GLM 5), beside the latents, in CUDA's orders of axes.

The tensor has the shape of a latent: 132 bytes a token. The kernels keep a page otherwise: the keys of all its
tokens, 128 bytes each, and then the scales of all, 4 bytes each. vLLM's reference in torch reads them so.
"""

from __future__ import annotations

import itertools
import unittest
from unittest import mock

import torch
from cuda_layouts_test import LAYERS, TOKENS, model, name_of
from layouts import Layout, Specs, fill, lay_out, move
from vllm.v1.attention.ops import rocm_aiter_mla_sparse
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec, SparseCacheRole
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvferry.errors import UnsupportedError
from kvferry.vllm import tensors

KEY, SCALE = 128, 4  # bytes
BLOCKS = 6
#: vLLM takes only these where layers have pages of unlike sizes.
ORDERS = [order for order in KVCacheLayout if order.is_block_compact]
TABLES = {16: [3, 1, 2, 5, 4], 32: [2, 5, 1], 64: [4, 2], 128: [3]}

Cells = dict[tuple[str, str, int], bytes]  # by layer, part and token


def indexer_of(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.indexer.k_cache"


def specs(block_size: int, size: int, dtype: torch.dtype, content: int = KEY + SCALE) -> Specs:
    """As DeepseekV32IndexerCache and MLAAttention give them."""
    common = {"block_size": block_size, "num_kv_heads": 1, "max_tp_shards": 1}
    latent: KVCacheSpec = MLAAttentionSpec(**common, head_size=size, dtype=dtype)
    indexer: KVCacheSpec = MLAAttentionSpec(
        **common, head_size=content, dtype=torch.uint8, cache_role=SparseCacheRole.INDEXER
    )
    return {name_of(i): latent for i in range(LAYERS)} | {indexer_of(i): indexer for i in range(LAYERS)}


def engine(
    tp_size: int,
    block_size: int,
    name: str,
    order: KVCacheLayout = KVCacheLayout.LBHNC,
    latent: tuple[int, torch.dtype] = (576, torch.bfloat16),
    kernel_tokens: int | None = None,
) -> Layout:
    return lay_out(model(1), lambda _: specs(block_size, *latent), tp_size, name, BLOCKS, order, kernel_tokens)


def cells(layout: Layout, block_size: int) -> Cells:
    """All cells of one request. Every rank has to have them."""
    found: Cells = {}
    for rank in layout.ranks:
        for name, cache in rank.caches.items():
            each = cache.shape[0] // BLOCKS
            pages = cache.contiguous().view(torch.uint8).flatten(1).cpu().numpy()
            kernel = block_size // each
            for token in range(TOKENS):
                block, at = divmod(token, block_size)
                page = pages[TABLES[block_size][block] * each + at // kernel]
                at %= kernel
                size = KEY if name.endswith("k_cache") else len(page) // kernel
                parts = {"first": page[at * size : (at + 1) * size].tobytes()}
                if size == KEY:
                    begin = kernel * KEY + at * SCALE
                    parts["scale"] = page[begin : begin + SCALE].tobytes()
                for part, content in parts.items():
                    cell = name, part, token
                    assert found.setdefault(cell, content) == content, f"{cell} differs between ranks"
    return found


class Indexers(unittest.TestCase):
    def hand_over(self, there: Layout, here: Layout, sizes: tuple[int, int]) -> None:
        """Moves one request and compares the cells; then spoils a key and a scale, which must be noticed."""
        fill(there, 1)
        fill(here, 2)
        sent, before = cells(there, sizes[0]), cells(here, sizes[1])
        self.assertEqual(len(sent), 3 * LAYERS * TOKENS)
        self.assertTrue(all(before[cell] != sent[cell] for cell in sent))
        theirs, ours = (TABLES[size] for size in sizes)
        others = sorted(set(range(BLOCKS)).difference(ours))
        untouched = self.blocks(here, others)
        move(there, here, [theirs], [ours], [TOKENS])
        self.assertEqual(cells(here, sizes[1]), sent)
        self.assertEqual(self.blocks(here, others), untouched)
        for rank, (part, offset) in itertools.product(here.ranks[:1], (("first", 3), ("scale", -1))):
            cache = rank.caches[indexer_of(1)]
            each = cache.shape[0] // BLOCKS
            page = cache[ours[0] * each].view(torch.uint8)
            page[0, 0 if part == "first" else -1, offset] ^= 1
            token = 0 if part == "first" else page.shape[1] - 1
            for copy in here.ranks[1:]:
                copy.caches[indexer_of(1)].copy_(cache)
            received = cells(here, sizes[1])
            wrong = {cell for cell in sent if sent[cell] != received[cell]}
            expected = {(indexer_of(1), part, token)} if token < TOKENS else set()
            self.assertEqual(wrong, expected)
            page[0, 0 if part == "first" else -1, offset] ^= 1

    @staticmethod
    def blocks(layout: Layout, numbers: list[int]) -> list[bytes]:
        """The bytes of some blocks."""
        return [
            cache.unflatten(0, (BLOCKS, -1))[numbers].contiguous().view(torch.uint8).cpu().numpy().tobytes()
            for rank in layout.ranks
            for cache in rank.caches.values()
        ]

    def test_keys_and_scales_arrive_from_every_order_in_every_other(self) -> None:
        latents = (576, torch.bfloat16), (656, torch.uint8)
        for latent, sizes, (there_order, here_order) in itertools.product(
            latents, ((16, 32), (64, 64)), itertools.product(ORDERS, repeat=2)
        ):
            with self.subTest(latent=latent[0], sizes=sizes, there=there_order.name, here=here_order.name):
                there = engine(2, sizes[0], "prefill", there_order, latent)
                here = engine(1, sizes[1], "decode", here_order, latent)
                self.hand_over(there, here, sizes)

    def test_blocks_of_several_blocks_of_kernels(self) -> None:
        """CUDA's kernels take blocks of 64 tokens."""
        for sizes in (64, 128), (128, 64), (128, 128):
            with self.subTest(sizes=sizes):
                there, here = (
                    engine(tp_size, size, name, kernel_tokens=64)
                    for tp_size, size, name in ((1, sizes[0], "prefill"), (2, sizes[1], "decode"))
                )
                self.hand_over(there, here, sizes)

    def test_vllms_reference_finds_the_same_scores(self) -> None:
        there, here = engine(1, 16, "prefill"), engine(1, 32, "decode")
        sizes = (16, 32)
        for layout, seed in ((there, 1), (here, 2)):
            chance = torch.Generator().manual_seed(seed)
            for rank, layer in itertools.product(layout.ranks, range(LAYERS)):
                page = rank.caches[indexer_of(layer)].flatten(1)
                keys = page[:, : page.shape[1] // (KEY + SCALE) * KEY].view(torch.float8_e4m3fn)
                scales = page[:, keys.shape[1] :].view(torch.float32)
                keys.copy_(torch.randn(keys.shape, generator=chance))
                scales.copy_(torch.rand(scales.shape, generator=chance) + 0.5)
        sent = self.scores(there, 16)
        self.assertFalse(torch.allclose(self.scores(here, 32), sent))
        move(there, here, [TABLES[16]], [TABLES[32]], [TOKENS])
        self.assertTrue(torch.equal(self.scores(here, 32), sent))
        self.assertEqual(cells(here, sizes[1]), cells(there, sizes[0]))

    @staticmethod
    def scores(layout: Layout, block_size: int) -> torch.Tensor:
        """Scores of all tokens of layer 1, by vLLM's reference for the kernels."""
        cache = layout.ranks[0].caches[indexer_of(1)].squeeze(1).unsqueeze(-2).contiguous().cpu()
        query = torch.randn(1, 1, 4, KEY, generator=torch.Generator().manual_seed(9))
        with mock.patch.object(rocm_aiter_mla_sparse, "FP8_DTYPE", torch.float8_e4m3fn):
            found = rocm_aiter_mla_sparse.fp8_paged_mqa_logits_torch(
                query,
                cache,
                torch.ones(1, 4),
                torch.tensor([TOKENS]),
                torch.tensor([TABLES[block_size]]),
                TOKENS,
            )
        assert torch.isfinite(found).all()
        return found

    def test_pages_of_another_size_are_refused_by_name(self) -> None:
        said = "70 bytes a token; allowed: 132 or 68 for each 128 elements"
        with self.assertRaisesRegex(UnsupportedError, said):
            lay_out(model(1), lambda _: specs(64, 576, torch.bfloat16, 70), 1, "prefill", BLOCKS)

    def test_as_a_latent_it_would_lose_scales(self) -> None:
        """The control: described token by token, as its shape says, a block that is not full has no scales."""
        with mock.patch.object(tensors, "_is_quantized_indexer", lambda *_: False):
            there, here = engine(1, 64, "prefill"), engine(1, 64, "decode")
        fill(there, 1)
        fill(here, 2)
        move(there, here, [TABLES[64]], [TABLES[64]], [TOKENS])
        sent, received = cells(there, 64), cells(here, 64)
        wrong = {cell for cell in sent if sent[cell] != received[cell]}
        lost = itertools.product(map(indexer_of, range(LAYERS)), ("scale",), range(64, TOKENS))
        self.assertEqual(wrong, set(lost))


if __name__ == "__main__":
    unittest.main()
