"""The caches of DeepSeek V4, of which some have an entry for several tokens, in the shapes of CUDA's kernels.

A layer has up to five caches: latents of its window, an entry for 4 or for 128 tokens, an indexer of such
entries, and what compressors have yet to compress. vLLM puts them into groups, which overlay each other in one
allocation.
"""

from __future__ import annotations

import itertools
import random
import unittest
from fractions import Fraction
from typing import Any

import compressed
import torch
from cells import Cells, cache_count, expected_cells, join_cells
from cuda_layouts_test import model
from layouts import Layout, Specs, fill, lay_out, move
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SparseCacheRole,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvferry import GroupKind
from kvferry.errors import MismatchError, UnsupportedError

BLOCKS = 400
TOKENS = 700
PACKED, PLAIN = "fp8_ds_mla", "bfloat16"
FP4 = "fp8_ds_mla, indexers in FP4"
#: vLLM's indexers take no others.
ORDERS = [KVCacheLayout.BLHNC, KVCacheLayout.BLNHC]
ONE_LATENT: dict[str, Any] = {"num_kv_heads": 1, "max_tp_shards": 1}


def specs(block_size: int, cache: str = PACKED, ratios: tuple[int, ...] = (0, 4, 128, 4)) -> Specs:
    """As vLLM's layers of DeepSeek V4 give them."""
    packed = cache != PLAIN
    common = ONE_LATENT | {"alignment": 576 if packed else 512}
    latent = common | {
        "head_size": 512,
        "dtype": torch.uint8 if packed else torch.bfloat16,
        "cache_dtype_str": PACKED if packed else cache,
        "model_version": "deepseek_v4",
        "state_content_bytes": 584 if packed else None,
    }
    found: Specs = {}
    for i, ratio in enumerate(ratios):
        layer = f"model.layers.{i}.attn"
        found[f"{layer}.swa_cache"] = SlidingWindowMLASpec(**latent, block_size=64, sliding_window=128)
        if not ratio:
            continue
        found[layer] = MLAAttentionSpec(**latent, block_size=block_size, tokens_per_state=ratio)
        found[f"{layer}.compressor.state_cache"] = state(ratio, 512, common)
        if ratio == 4:
            found[f"{layer}.indexer.k_cache"] = MLAAttentionSpec(
                **common,
                block_size=block_size,
                head_size=68 if cache == FP4 else 132,
                dtype=torch.uint8,
                tokens_per_state=ratio,
            )
            found[f"{layer}.indexer.compressor.state_cache"] = state(ratio, 128, common)
    return found


def state(ratio: int, size: int, common: dict[str, Any]) -> SlidingWindowMLASpec:
    """The cache of a compressor's state."""
    overlap = 2 if ratio == 4 else 1
    return SlidingWindowMLASpec(
        **common,
        block_size=4 if ratio == 4 else 8,
        head_size=2 * overlap * size,
        dtype=torch.float32,
        sliding_window=overlap * ratio,
    )


def engine(
    tp_size: int, block_size: int, name: str, order: KVCacheLayout = ORDERS[0], cache: str = PACKED
) -> Layout:
    return lay_out(model(1), lambda _: specs(block_size, cache), tp_size, name, BLOCKS, order)


def tables(layout: Layout, seed: int) -> list[list[int]]:
    """The blocks of a request, in random order and of no two groups the same, for they overlay each other."""
    free = random.Random(seed).sample(range(1, BLOCKS), BLOCKS - 1)
    found = []
    for group in layout.ranks[0].cache.kv_cache_groups:
        count = -(-TOKENS // group.kv_cache_spec.block_size)
        found.append([free.pop() for _ in range(count)])
    return found


def config_of(cache: str) -> dict[str, Any]:
    return compressed.CONFIG | {"plain_latents": cache == PLAIN, "fp4_indexers": cache == FP4}


def cells(layout: Layout, blocks: list[list[int]], cache: str) -> Cells:
    return join_cells(layout.readouts(blocks), config_of(cache), TOKENS)


class Compressed(unittest.TestCase):
    def hand_over(self, there: Layout, here: Layout, cache: str) -> None:
        """Moves one request and compares the cells; the blocks of others must stay as they were."""
        fill(there, 1)
        fill(here, 2)
        theirs, ours = tables(there, 3), tables(here, 4)
        sent, before = cells(there, theirs, cache), cells(here, ours, cache)
        names = {cell[0] for cell in sent}
        config = config_of(cache)
        self.assertEqual(len(names), cache_count(config))
        self.assertEqual(sent.keys(), expected_cells(config, names, set()))
        self.assertTrue(all(before[cell] != sent[cell] for cell in sent))
        untouched = self.others(here, ours)
        move(there, here, theirs, ours, [TOKENS] * len(ours))
        self.assertEqual(cells(here, ours, cache), sent)
        self.assertEqual(self.others(here, ours), untouched)

    @staticmethod
    def others(layout: Layout, ours: list[list[int]]) -> list[bytes]:
        """The blocks that the request does not have."""
        taken = set(itertools.chain(*ours))
        left = [block for block in range(BLOCKS) if block not in taken]
        return [
            memory.view(BLOCKS, -1)[left].cpu().numpy().tobytes()
            for rank in layout.ranks
            for memory in rank.memory
        ]

    def test_all_caches_arrive_in_other_orders_and_blocks(self) -> None:
        shapes = itertools.product((PACKED, PLAIN, FP4), itertools.product(ORDERS, repeat=2))
        for cache, (there_order, here_order) in shapes:
            for sizes in (256, 256), (256, 512), (512, 256):
                with self.subTest(cache=cache, sizes=sizes, there=there_order.name, here=here_order.name):
                    there = engine(2, sizes[0], "prefill", there_order, cache)
                    here = engine(1, sizes[1], "decode", here_order, cache)
                    self.hand_over(there, here, cache)

    def test_a_byte_that_is_wrong_is_noticed_in_every_cache(self) -> None:
        """The control of this file's own comparison."""
        layout = engine(1, 256, "prefill")
        fill(layout, 1)
        blocks = tables(layout, 3)
        good = cells(layout, blocks, PACKED)
        for name, (group, spec) in layout.ranks[0].specs().items():
            each = int(spec.tokens_per_state)
            last = (TOKENS // each - 1) * each // spec.block_size  # the block of the last entry
            page = layout.ranks[0].caches[name][blocks[group][last]].view(torch.uint8)
            page[0, 0, 1] ^= 1
            found = cells(layout, blocks, PACKED)
            wrong = {cell[0] for cell, content in found.items() if content != good[cell]}
            page[0, 0, 1] ^= 1
            self.assertEqual(wrong, {name})

    def test_the_groups_say_how_many_tokens_an_entry_has(self) -> None:
        model_groups = engine(1, 256, "prefill").engine.model.groups
        found = {(group.tokens_per_step, group.window_tokens) for group in model_groups}
        self.assertEqual(found, {(1, 128), (1, 8), (4, 0), (128, 0)})
        self.assertTrue(all(group.kind is GroupKind.TOKENS for group in model_groups))

    def test_packed_and_plain_latents_are_not_the_same(self) -> None:
        with self.assertRaisesRegex(MismatchError, "dtype is|is missing"):
            there, here = engine(1, 256, "prefill"), engine(1, 256, "decode", cache=PLAIN)
            move(there, here, tables(there, 3), tables(here, 4), [TOKENS] * 5)

    def test_what_is_not_known_is_refused_by_name(self) -> None:
        def with_spec(spec: Any) -> None:
            lay_out(model(1), lambda _: {"model.layers.0.attn": spec}, 1, "prefill", 8)

        latent = {**ONE_LATENT, "block_size": 64, "head_size": 512}
        with self.assertRaisesRegex(UnsupportedError, "one is of 1/2; allowed: one for each token, or"):
            with_spec(MLAAttentionSpec(**latent, dtype=torch.bfloat16, tokens_per_state=Fraction(1, 2)))
        # As DeepSeek V4.1 packs entries into NVFP4.
        with self.assertRaisesRegex(UnsupportedError, "into 288 bytes, 288 bytes apart; allowed: 576 . 8"):
            with_spec(
                MLAAttentionSpec(
                    **latent,
                    dtype=torch.uint8,
                    cache_dtype_str="nvfp4_ds_mla",
                    model_version="deepseek_v4",
                    state_content_bytes=288,
                )
            )
        with self.assertRaisesRegex(UnsupportedError, "window again after each prefix hit"):
            with_spec(
                SlidingWindowMLASpec(**latent, dtype=torch.bfloat16, sliding_window=128, bounded_replay=True)
            )


class Rings(unittest.TestCase):
    """GLM 5 Next's caches: latents, indexers with an entry for 4 tokens, and rings of what is yet to be one.

    No server ran these models: vLLM's kernels for them are CUDA's.
    """

    @staticmethod
    def engine(tp_size: int, name: str, order: KVCacheLayout = ORDERS[0], rows: int = 8) -> Layout:
        def specs_of(_: int) -> Specs:
            common = ONE_LATENT | {"block_size": 256}
            found: Specs = {}
            for i in range(2):
                layer = f"model.layers.{i}.self_attn"
                found[f"{layer}.attn"] = MLAAttentionSpec(**common, head_size=576, dtype=torch.bfloat16)
                found[f"{layer}.indexer.k_cache"] = MLAAttentionSpec(
                    **common,
                    head_size=132,
                    dtype=torch.uint8,
                    tokens_per_state=4,
                    cache_role=SparseCacheRole.INDEXER,
                )
                found[f"{layer}.indexer.tail"] = CircularBufferSpec(
                    block_size=rows,
                    num_kv_heads=2,
                    head_size=128,
                    head_size_v=0,
                    dtype=torch.bfloat16,
                    dcp_sharded=False,
                )
            return found

        return lay_out(model(1), specs_of, tp_size, name, 12, order)

    @staticmethod
    def rings(layout: Layout, block: int) -> dict[tuple[int, str], torch.Tensor]:
        """The rings of a sequence, by rank and layer: heads, rows and elements."""
        return {
            (number, name): cache[block].view(torch.uint8).clone()
            for number, rank in enumerate(layout.ranks)
            for name, cache in rank.caches.items()
            if name.endswith("tail")
        }

    def hand_over(self, there: Layout, here: Layout) -> list[list[list[int]]]:
        """Moves 1003 tokens; returns the blocks of both sides, by vLLM's group."""
        tables = []
        for layout, blocks in ((there, [3, 1, 7, 5]), (here, [2, 9, 4, 6])):
            kinds = [group.kv_cache_spec for group in layout.ranks[0].cache.kv_cache_groups]
            whole = [getattr(spec, "first_spec", spec) for spec in kinds]
            tables.append([[11] if isinstance(spec, CircularBufferSpec) else blocks for spec in whole])
        fill(there, 1)
        fill(here, 2)
        move(there, here, *tables, [1003] * len(tables[0]))
        return tables

    def test_a_ring_is_handed_over_whole(self) -> None:
        for orders in itertools.product(ORDERS, repeat=2):
            there, here = self.engine(2, "prefill", orders[0]), self.engine(1, "decode", orders[1])
            kinds = {(group.kind, group.tokens_per_step) for group in here.engine.model.groups}
            self.assertEqual(kinds, {(GroupKind.TOKENS, 1), (GroupKind.TOKENS, 4), (GroupKind.STATE, 1)})
            theirs, ours = self.hand_over(there, here)
            ring = next(blocks[0] for blocks in theirs if len(blocks) == 1)
            sent, received = self.rings(there, ring), self.rings(here, ring)
            self.assertEqual(len(received), 2)
            for (_, name), content in received.items():
                self.assertTrue(torch.equal(content, sent[0, name]))
            self.assertFalse(torch.equal(*received.values()))  # of the two layers
            self.entries_are_equal(there, here, theirs, ours)

    def entries_are_equal(self, there: Layout, here: Layout, theirs: Any, ours: Any) -> None:
        """Compares the entries of indexers: 250 of 1003 tokens, keys before scales in each page of 64."""
        name = "model.layers.1.self_attn.indexer.k_cache"
        pages = [
            layout.ranks[0].caches[name][max(blocks, key=len)].contiguous().view(torch.uint8).flatten(1)
            for layout, blocks in ((there, theirs), (here, ours))
        ]
        for size, begin in ((128, 0), (4, 128 * 64)):
            whole = [page[:, begin : begin + 64 * size].reshape(256, size) for page in pages]
            self.assertTrue(torch.equal(whole[0][:250], whole[1][:250]))
            self.assertFalse(torch.equal(whole[0][250], whole[1][250]))

    def test_rings_of_other_sizes_are_refused_by_name(self) -> None:
        with self.assertRaisesRegex(MismatchError, "rows_per_step is .*8.* and .*16|rows_per_step is .16.*.8."):
            self.hand_over(self.engine(1, "prefill"), self.engine(1, "decode", rows=16))


if __name__ == "__main__":
    unittest.main()
