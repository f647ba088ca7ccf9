"""Latents beside states, without servers: a model like Kimi Linear, with caches that vLLM lays out.

No model with both runs on the CPU build of vLLM 0.32 (see docs/vllm.md), so the tests fill pages with random
bytes and move them by the connector's description. The oracle of the tests with servers (cells.py) names every
cell on both sides.
"""

from __future__ import annotations

import itertools
import unittest
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from cells import ReplicasDiffer, expected_cells, join_cells
from layouts import Layout, Specs, lay_out, move
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.transformers_utils.configs.kimi_linear import KimiLinearConfig
from vllm.v1.kv_cache_interface import MambaSpec, MLAAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

HEADS, SIZE, KERNEL = 4, 16, 4
LATENT = 32 + 8  # elements, including the rotated ones
TOKENS = 70
FIELDS: dict[str, Any] = {
    "model_type": "kimi_linear",
    "dtype": "float32",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "linear_attn_config": {
        "full_attn_layers": [2, 4],  # counted from 1
        "kda_layers": [1, 3],
        "num_heads": HEADS,
        "head_dim": SIZE,
        "short_conv_kernel_size": KERNEL,
    },
}
STATES = {"model.layers.0.linear_attn", "model.layers.2.linear_attn"}
LATENTS = {"model.layers.1.self_attn.mla_attn", "model.layers.3.self_attn.mla_attn"}


def model() -> Any:
    """The part of vLLM's configuration that the connector reads."""
    return SimpleNamespace(hf_text_config=KimiLinearConfig(**FIELDS))


def specs_of(tp_size: int, block_size: int) -> Specs:
    """The caches of a rank. As in vLLM, blocks are so large that a latent's page has room for a state, and
    states are padded."""
    latent = MLAAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=LATENT, dtype=torch.float32, max_tp_shards=1
    )
    state = MambaSpec(
        block_size=1024,
        shapes=MambaStateShapeCalculator.kda_state_shape(tp_size, HEADS, SIZE, conv_kernel_size=KERNEL),
        dtypes=(torch.float32, torch.float32),
        page_size_padded=latent.page_size_bytes,
    )
    return {name: state if name in STATES else latent for name in sorted(STATES | LATENTS)}


def engine(
    tp_size: int, block_size: int, order: str, name: str, pages: KVCacheLayout = KVCacheLayout.LBHNC
) -> Layout:
    """An engine whose convolutions have steps before channels ("SD") or channels before steps ("DS")."""
    with mock.patch.object(mamba_utils, "get_conv_state_layout", lambda: order):
        return lay_out(model(), lambda ranks: specs_of(ranks, block_size), tp_size, name, order=pages)


def fill(layout: Layout, tables: list[list[int]], chance: torch.Generator) -> None:
    """Fills caches with random bytes; latents are the same on all ranks."""
    for rank in layout.ranks:
        for region in rank.memory:
            region.copy_(torch.randint(0, 256, region.shape, dtype=torch.uint8, generator=chance))
    first = layout.ranks[0]
    for name, (group, _) in first.specs().items():
        if name in LATENTS:
            for rank in layout.ranks[1:]:
                rank.caches[name][tables[group]] = first.caches[name][tables[group]]


class LatentsBesideStates(unittest.TestCase):
    def tables(self, layout: Layout, latents: list[int], state: int) -> list[list[int]]:
        """Block tables in the order of vLLM's groups."""
        groups: dict[int, list[int]] = {}
        for name, (group, _) in layout.ranks[0].specs().items():
            groups[group] = [state] if name in STATES else latents
        return [groups[group] for group in sorted(groups)]

    def hand_over(self, there: Layout, here: Layout, latents: tuple[list[int], list[int]]) -> list[list[int]]:
        """Moves one request and compares the cells; returns the ranks that each rank has read from."""
        theirs, ours = self.tables(there, latents[0], 3), self.tables(here, latents[1], 3)
        steps = [1 if table == [3] else TOKENS for table in theirs]
        chance = torch.Generator().manual_seed(7)
        fill(there, theirs, chance)
        fill(here, ours, chance)
        with self.subTest("before the transfer the cells differ"):
            sent = join_cells(there.readouts(theirs), FIELDS, TOKENS)
            self.assertEqual(sent.keys(), expected_cells(FIELDS, STATES | LATENTS, STATES))
            self.assertTrue(self.differing(here, ours, sent))
        others = [cache[0].clone() for rank in here.ranks for cache in rank.caches.values()]
        read = move(there, here, theirs, ours, steps)
        after = [cache[0] for rank in here.ranks for cache in rank.caches.values()]
        same = (
            torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(others, after, strict=True)
        )
        self.assertTrue(all(same), "a block of nobody was written")
        self.assertEqual(self.differing(here, ours, sent), set())
        return read

    def differing(self, here: Layout, ours: list[list[int]], sent: dict[Any, bytes]) -> set[Any]:
        try:
            received = join_cells(here.readouts(ours), FIELDS, TOKENS)
        except ReplicasDiffer:
            return {"replicas"}
        self.assertEqual(received.keys(), sent.keys())
        return {cell for cell in sent if received[cell] != sent[cell]}

    def test_every_cell_arrives_in_engines_of_other_sizes_blocks_and_orders(self) -> None:
        for (there_tp, here_tp), (there_order, here_order) in itertools.product(
            ((1, 1), (2, 1), (1, 2), (4, 2)), (("SD", "SD"), ("DS", "DS"), ("SD", "DS"), ("DS", "SD"))
        ):
            with self.subTest(there=there_tp, here=here_tp, orders=(there_order, here_order)):
                there = engine(there_tp, 64, there_order, "prefill")
                here = engine(here_tp, 48, here_order, "decode")
                self.hand_over(there, here, ([2, 1], [1, 2]))

    def test_every_cell_arrives_in_pages_of_one_layer_and_of_all(self) -> None:
        """States are padded, so that a page is contiguous: with layers outside blocks, or inside."""
        orders = [order for order in KVCacheLayout if order.is_block_compact]
        self.assertEqual(len(orders), 4)
        for there_order, here_order in itertools.product(orders, repeat=2):
            with self.subTest(there=there_order.name, here=here_order.name):
                there = engine(2, 64, "SD", "prefill", there_order)
                here = engine(1, 48, "DS", "decode", here_order)
                self.hand_over(there, here, ([2, 1], [1, 2]))

    def test_states_are_read_from_all_ranks_that_hold_shards_and_latents_from_one(self) -> None:
        there, here = engine(4, 64, "SD", "prefill"), engine(2, 64, "SD", "decode")
        self.assertEqual(self.hand_over(there, here, ([2, 1], [1, 2])), [[0, 1], [2, 3]])
        for rank in there.ranks:
            shares = {
                part.name: (share.units, share.replica, share.replica_count)
                for group in rank.geometry.groups
                for part, share in zip(group.parts, group.shares, strict=True)
            }
            number = rank.geometry.tp_rank
            self.assertEqual(shares.pop("latent"), (range(1), number, 4))
            for units, replica, copies in shares.values():
                self.assertIn(units, (range(number * SIZE, (number + 1) * SIZE), range(number, number + 1)))
                self.assertEqual((replica, copies), (0, 1))

    def test_a_changed_byte_is_noticed(self) -> None:
        there, here = engine(2, 64, "SD", "prefill"), engine(1, 48, "SD", "decode")
        self.hand_over(there, here, ([2, 1], [1, 2]))
        ours = self.tables(here, [1, 2], 3)
        sent = join_cells(here.readouts(ours), FIELDS, TOKENS)
        (rank,) = here.ranks
        for name, part in ((min(LATENTS), "latent"), (min(STATES), "conv q")):
            with self.subTest(part):
                page = rank.caches[name][ours[rank.specs()[name][0]][0]].view(torch.uint8)
                page[(0,) * page.dim()] ^= 1
                self.assertEqual({cell[:2] for cell in self.differing(here, ours, sent)}, {(name, part)})
                page[(0,) * page.dim()] ^= 1


if __name__ == "__main__":
    unittest.main()
