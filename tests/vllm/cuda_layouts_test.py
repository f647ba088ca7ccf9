"""Caches in the axis orders of CUDA's attention backends: tensors with their strides, on a GPU if there is one.

In vLLM 0.32 a cache is a view [block, head, token, content], with a key and its value side by side. A backend
declares the orders of axes in memory that its kernels accept. FlashAttention, Triton and the MLA backends
accept any; FlashInfer on sm_100 needs heads before tokens, in one allocation for each layer or across layers
("B" first). Views are logical, so the oracle reads them by index, whatever the strides are.
"""

from __future__ import annotations

import dataclasses
import itertools
import unittest
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from layouts import Layout, Rank, Specs, lay_out, move
from transformers import LlamaConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvferry.errors import UnsupportedError
from kvferry.model import Dtype

HEADS, SIZE, LAYERS, TOKENS = 4, 16, 3, 70
ORDERS = tuple(KVCacheLayout)
TABLES = [3, 1, 2, 5, 4], [2, 5, 1]  # of blocks of 16 and of 32 tokens
BLOCKS = 6

Cells = dict[tuple[str, int, int], bytes]  # by layer, head and token


def model(heads: int) -> Any:
    """The part of vLLM's configuration that the connector reads."""
    text = LlamaConfig(
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=heads,
        head_dim=SIZE,
        hidden_size=8 * SIZE,
    )
    layer = SimpleNamespace(total_num_kv_heads=heads, total_num_attention_heads=8)
    return SimpleNamespace(hf_text_config=text, model_arch_config=[layer] * LAYERS)


def name_of(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.attn"


def attention(block_size: int, heads: int, dtype: torch.dtype) -> KVCacheSpec:
    """The cache of FlashAttention, FlashInfer and Triton."""
    return FullAttentionSpec(
        block_size=block_size, num_kv_heads=heads, head_size=SIZE, dtype=dtype, max_tp_shards=HEADS
    )


def window(block_size: int, heads: int, dtype: torch.dtype) -> KVCacheSpec:
    """The same, for layers with a window."""
    return SlidingWindowSpec(
        block_size=block_size,
        num_kv_heads=heads,
        head_size=SIZE,
        dtype=dtype,
        max_tp_shards=HEADS,
        sliding_window=1024,
    )


def latent(block_size: int, size: int, dtype: torch.dtype) -> KVCacheSpec:
    """The cache of FlashMLA, CUTLASS MLA, FlashInfer MLA and Triton MLA; with 656 bytes, pages of
    fp8_ds_mla."""
    return MLAAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=size, dtype=dtype, max_tp_shards=1)


def window_latent(block_size: int, size: int, dtype: torch.dtype) -> KVCacheSpec:
    """The same, for layers with a window."""
    return SlidingWindowMLASpec(
        block_size=block_size, num_kv_heads=1, head_size=size, dtype=dtype, max_tp_shards=1, sliding_window=1024
    )


def specs(make: Any, *arguments: Any) -> Specs:
    return {name_of(layer): make(*arguments) for layer in range(LAYERS)}


def fill(layout: Layout, seed: int, replicated: bool) -> None:
    """Fills caches with random bytes; latents are the same on all ranks."""
    for number, rank in enumerate(layout.ranks):
        chance = torch.Generator().manual_seed(seed if replicated else seed + number)
        for cache in rank.caches.values():
            content = cache.view(torch.uint8)
            content.copy_(torch.randint(0, 256, content.shape, dtype=torch.uint8, generator=chance))


def page_of(rank: Rank, name: str, table: list[int], token: int) -> torch.Tensor:
    """The [head, content] of one token."""
    cache = rank.caches[name].view(torch.uint8)
    tokens = cache.shape[2]
    return cache[table[token // tokens], :, token % tokens]


def cells(layout: Layout, table: list[int], replicated: bool) -> Cells:
    """All cells of one request, by their coordinates in the whole model."""
    found: Cells = {}
    for number, rank in enumerate(layout.ranks):
        for name, token in itertools.product(rank.caches, range(TOKENS)):
            page = page_of(rank, name, table, token)
            first = 0 if replicated else number * page.shape[0]
            for head, content in enumerate(page.cpu().numpy()):
                cell = name, first + head, token
                content_bytes = content.tobytes()
                assert found.setdefault(cell, content_bytes) == content_bytes, f"rank {number}: {cell} differs"
    return found


class OrdersOfCuda(unittest.TestCase):
    def hand_over(self, there: Layout, here: Layout, count: int, *, replicated: bool = False) -> None:
        """Moves one request and compares the cells; then spoils one byte, which must be noticed."""
        fill(there, 1, replicated)
        fill(here, 100, replicated)
        sent = cells(there, TABLES[0], replicated)
        self.assertEqual(len(sent), count * LAYERS * TOKENS)
        before = cells(here, TABLES[1], replicated)
        self.assertTrue(all(before[cell] != sent[cell] for cell in sent))
        others = [cache[0].clone() for rank in here.ranks for cache in rank.caches.values()]
        move(there, here, [TABLES[0]], [TABLES[1]], [TOKENS])
        self.assertEqual(cells(here, TABLES[1], replicated), sent)
        after = [cache[0] for rank in here.ranks for cache in rank.caches.values()]
        for one, other in zip(others, after, strict=True):
            self.assertTrue(torch.equal(one.view(torch.uint8), other.view(torch.uint8)), "nobody's block")
        for rank in here.ranks:  # the control
            page_of(rank, name_of(1), TABLES[1], 41)[0, 3] ^= 1
        received = cells(here, TABLES[1], replicated)
        wrong = {cell[0::2] for cell in sent if sent[cell] != received[cell]}
        self.assertEqual(wrong, {(name_of(1), 41)})

    def test_keys_and_values_arrive_from_every_order_in_every_other(self) -> None:
        pairs = [(attention, *orders) for orders in itertools.product(ORDERS, repeat=2)]
        pairs += [(window, *orders) for orders in zip(ORDERS, reversed(ORDERS), strict=True)]
        for (make, there_order, here_order), (there_tp, here_tp) in zip(
            pairs, itertools.cycle(((1, 2), (2, 1))), strict=False
        ):
            with self.subTest(
                make.__name__, there=there_order.name, here=here_order.name, tp=(there_tp, here_tp)
            ):
                there = lay_out(
                    model(HEADS),
                    lambda ranks, make=make: specs(make, 16, HEADS // ranks, torch.bfloat16),
                    there_tp,
                    "prefill",
                    BLOCKS,
                    there_order,
                )
                here = lay_out(
                    model(HEADS),
                    lambda ranks, make=make: specs(make, 32, HEADS // ranks, torch.bfloat16),
                    here_tp,
                    "decode",
                    BLOCKS,
                    here_order,
                )
                self.hand_over(there, here, HEADS)

    def test_latents_arrive_from_every_order_in_every_other(self) -> None:
        kinds = (
            (latent, 576, torch.bfloat16),
            (latent, 656, torch.uint8),
            (window_latent, 576, torch.bfloat16),
        )
        for (make, size, dtype), (there_order, here_order) in itertools.product(
            kinds, itertools.product(ORDERS, repeat=2)
        ):
            with self.subTest(make.__name__, size=size, there=there_order.name, here=here_order.name):
                there, here = (
                    lay_out(
                        model(1),
                        lambda _, make=make, tokens=tokens, size=size, dtype=dtype: specs(
                            make, tokens, size, dtype
                        ),
                        tp_size,
                        name,
                        BLOCKS,
                        order,
                    )
                    for tokens, tp_size, name, order in (
                        (16, 2, "prefill", there_order),
                        (32, 1, "decode", here_order),
                    )
                )
                self.hand_over(there, here, 1, replicated=True)

    def test_types_of_one_byte_are_told_apart(self) -> None:
        for cache_type, dtype in (
            ("fp8", Dtype.F8_E4M3),
            ("fp8_e4m3", Dtype.F8_E4M3),
            ("fp8_e5m2", Dtype.F8_E5M2),
            ("fp8_ds_mla", Dtype.U8),
        ):
            for make, arguments, said in (
                (attention, (16, HEADS), cache_type),
                (latent, (16, 576), cache_type),
                (attention, (16, HEADS), "auto"),
            ):
                with self.subTest(make.__name__, cache_type=cache_type, said=said):
                    layout = lay_out(
                        model(HEADS),
                        lambda _, make=make, arguments=arguments: specs(make, *arguments, torch.uint8),
                        1,
                        "prefill",
                        BLOCKS,
                        cache_type=said,
                        layer_type=cache_type,
                    )
                    (group,) = layout.ranks[0].geometry.groups
                    self.assertEqual({part.dtype for part in group.parts}, {dtype})

    def test_fp8_of_amd_is_not_taken_for_that_of_others(self) -> None:
        """On MI300 the same bits are other numbers."""
        for chip, dtype in (("gfx942:sramecc+:xnack-", Dtype.U8), ("gfx950:sramecc+:xnack-", Dtype.F8_E4M3)):
            properties = SimpleNamespace(gcnArchName=chip)
            with (
                self.subTest(chip),
                mock.patch("torch.version.hip", "6.4"),
                mock.patch("torch.cuda.get_device_properties", lambda _, properties=properties: properties),
            ):
                layout = lay_out(
                    model(HEADS),
                    lambda _: specs(attention, 16, HEADS, torch.uint8),
                    1,
                    "prefill",
                    BLOCKS,
                    cache_type="fp8",
                )
                (group,) = layout.ranks[0].geometry.groups
                self.assertEqual({part.dtype for part in group.parts}, {dtype})

    def test_pages_of_a_backends_own_form_are_refused_by_name(self) -> None:
        """B12X has a slot for all keys of a token and one for all values: with two heads the shape is ours."""

        def pages(ranks: int) -> Specs:
            plain: Any = attention(16, 2 // ranks, torch.bfloat16)
            own = dataclasses.replace(plain, num_head_slots=2, state_content_bytes=2 * SIZE * 2)
            return {name_of(layer): own for layer in range(LAYERS)}

        said = f"layer {name_of(0)}: the attention backend keeps pages of 2 slots and {4 * SIZE} bytes a token"
        with self.assertRaisesRegex(UnsupportedError, said):
            lay_out(model(2), pages, 1, "prefill", BLOCKS)

    def test_a_cache_across_layers_is_one_region_and_strides_say_where(self) -> None:
        """Looks up block 1 of layer 2, head 3, token 5; blocks hold all layers, with tokens before heads."""
        page = 16 * HEADS * 2 * SIZE * 2  # bytes of a block of one layer
        layout = lay_out(
            model(HEADS),
            lambda ranks: specs(attention, 16, HEADS // ranks, torch.bfloat16),
            1,
            "prefill",
            BLOCKS,
            KVCacheLayout.BLNHC,
        )
        (rank,) = layout.ranks
        self.assertEqual([tensor.numel() for tensor in rank.memory], [BLOCKS * LAYERS * page])
        rank.memory[0].zero_()
        rank.caches[name_of(2)][1, 3, 5].view(torch.uint8).fill_(7)
        begin = (1 * LAYERS + 2) * page + (5 * HEADS + 3) * 2 * SIZE * 2
        self.assertTrue(torch.all(rank.memory[0][begin : begin + 2 * SIZE * 2] == 7))
        self.assertEqual(int(torch.count_nonzero(rank.memory[0])), 2 * SIZE * 2)


if __name__ == "__main__":
    unittest.main()
