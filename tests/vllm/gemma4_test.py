"""Gemma 4 as the connector describes it, at published sizes, without servers.

Layers with a sliding window have more KV heads than the others, of another size. Full layers use one projection
for keys and values, but cache both: keys are rotated, and both are normalized differently. So every layer has
keys and values.
"""

from __future__ import annotations

import json
import pathlib
import unittest
from types import SimpleNamespace
from typing import Any

import torch
from layouts import Layout, Specs, lay_out
from transformers import Gemma4TextConfig
from vllm.transformers_utils.model_arch_config_convertor import Gemma4ModelArchConfigConvertor
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from kvferry import Plan
from kvferry.errors import UnsupportedError
from kvferry.model import GroupKind
from kvferry.vllm.heads import total_kv_heads

MODELS = pathlib.Path(__file__).resolve().parents[2] / "models"
SLIDING, FULL = 256, 512  # elements of a head
BLOCK, WINDOW = 16, 1024

# : KV heads on each rank, worked out by hand: in layers with a window, and in full ones.
LOCAL = {
    "gemma-4-26b-a4b": {1: (8, 2), 2: (4, 1), 4: (2, 1), 8: (1, 1), 16: (1, 1)},
    "gemma-4-31b": {1: (16, 4), 2: (8, 2), 4: (4, 1), 8: (2, 1), 16: (1, 1)},
}
# : Tokens in a block of each kind: vLLM gives the smaller page more tokens until both pages are equal.
BLOCKS = {
    "gemma-4-26b-a4b": {1: (16, 32), 2: (16, 32), 4: (16, 16), 8: (32, 16), 16: (32, 16)},
    "gemma-4-31b": {1: (16, 32), 2: (16, 32), 4: (16, 32), 8: (16, 16), 16: (32, 16)},
}
#: KV heads in the whole model.
TOTAL = {"gemma-4-26b-a4b": (8, 2), "gemma-4-31b": (16, 4)}


def model_of(name: str) -> Any:
    """The part of vLLM's configuration that the connector reads; vLLM's own code makes it from the published
    file."""
    fields = json.loads((MODELS / f"{name}.json").read_text())["text_config"]
    text = Gemma4TextConfig(**fields)
    return SimpleNamespace(
        model_arch_config=Gemma4ModelArchConfigConvertor(text, text).convert(), hf_text_config=text
    )


def specs_of(name: str, tp_size: int) -> Specs:
    """The cache of each layer on one rank."""
    sliding, full = LOCAL[name][tp_size]
    types = json.loads((MODELS / f"{name}.json").read_text())["text_config"]["layer_types"]
    found: Specs = {}
    for i, kind in enumerate(types):
        layer = f"language_model.model.layers.{i}.self_attn.attn"
        if kind == "full_attention":
            found[layer] = FullAttentionSpec(
                block_size=BLOCK, num_kv_heads=full, head_size=FULL, dtype=torch.bfloat16
            )
        else:
            found[layer] = SlidingWindowSpec(
                block_size=BLOCK,
                num_kv_heads=sliding,
                head_size=SLIDING,
                dtype=torch.bfloat16,
                sliding_window=WINDOW,
            )
    return found


def engine(name: str, tp_size: int) -> Layout:
    return lay_out(
        model_of(name), lambda ranks: specs_of(name, ranks), tp_size, f"{name}-tp{tp_size}", blocks=2
    )


class Describing(unittest.TestCase):
    def each(self) -> Any:
        for name in LOCAL:
            for tp_size in LOCAL[name]:
                with self.subTest(name, tp_size=tp_size):
                    yield name, tp_size, engine(name, tp_size)

    def test_every_layer_has_the_heads_of_its_kind(self) -> None:
        for name, _, found in self.each():
            layers = set()
            for group in found.engine.model.groups:
                kind = 0 if group.window_tokens else 1
                size = (SLIDING, FULL)[kind]
                self.assertEqual(group.kind, GroupKind.TOKENS)
                self.assertEqual(group.window_tokens, (WINDOW, 0)[kind])
                self.assertEqual(
                    [(part.name, part.units, part.cell_elements) for part in group.parts],
                    [("k", TOTAL[name][kind], size), ("v", TOTAL[name][kind], size)],
                )
                self.assertEqual({layer % 6 == 5 for layer in group.layers}, {kind == 1})
                layers |= set(group.layers)
            self.assertEqual(layers, set(range({"gemma-4-26b-a4b": 30, "gemma-4-31b": 60}[name])))

    def test_ranks_hold_runs_of_heads_or_copies_of_one(self) -> None:
        for name, tp_size, found in self.each():
            for number, rank in enumerate(found.ranks):
                for group in rank.geometry.groups:
                    kind = 0 if group.window_tokens else 1
                    local, total = LOCAL[name][tp_size][kind], TOTAL[name][kind]
                    copies = local * tp_size // total  # ranks that hold the same heads
                    first = number // copies * local
                    for share in group.shares:
                        self.assertEqual(share.units, range(first, first + local))
                        self.assertEqual((share.replica, share.replica_count), (number % copies, copies))

    def test_block_sizes_are_those_that_vllm_chose_for_each_kind(self) -> None:
        for name, tp_size, found in self.each():
            for group in found.ranks[0].geometry.groups:
                kind = 0 if group.window_tokens else 1
                self.assertEqual(group.tokens_per_block, BLOCKS[name][tp_size][kind])

    def test_pages_are_where_vllm_puts_them(self) -> None:
        """On one rank of 26B at TP 2: four heads of 16 tokens, or one head of 32 tokens, with K and V of 2
        bytes."""
        for group in engine("gemma-4-26b-a4b", 2).ranks[1].geometry.groups:
            tokens, size = ((16, 256), (32, 512))[0 if group.window_tokens else 1]
            page = 65536
            self.assertEqual(4 * 16 * 2 * 256 * 2, page)
            self.assertEqual(1 * 32 * 2 * 512 * 2, page)
            for number, layer in enumerate(group.layers):
                key, value = layer.placements
                self.assertEqual(key.offset, number * 2 * page)  # for two blocks
                self.assertEqual(value.offset, key.offset + size * 2)
                for place in layer.placements:
                    self.assertEqual(place.block_stride, page)
                    self.assertEqual(place.row_stride, 2 * size * 2)
                    self.assertEqual(place.unit_stride, tokens * 2 * size * 2)

    def test_engines_of_unlike_sizes_fit(self) -> None:
        """The ranks that are read, by hand: those that hold a head; of copies, each reader reads another
        one."""
        for there, here, wanted in (
            (4, 2, [[0, 1], [2, 3]]),
            (2, 4, [[0], [0], [1], [1]]),
            (1, 8, [[0]] * 8),
            # A rank of two wants four of eight heads, one from each rank; these also have the other kind's
            # head.
            (8, 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ):
            with self.subTest(there=there, here=here):
                prefill, decode = (engine("gemma-4-26b-a4b", tp_size) for tp_size in (there, here))
                plans = [Plan(decode.engine.shard(rank), prefill.engine) for rank in range(here)]
                for plan in plans:
                    plan.verify()
                self.assertEqual([plan.sources for plan in plans], wanted)


class Counting(unittest.TestCase):
    def test_the_published_file_has_the_numbers_that_were_used_here(self) -> None:
        for name, (sliding, full) in TOTAL.items():
            stated = model_of(name).model_arch_config
            for i in range(stated.total_num_hidden_layers):
                self.assertEqual(stated[i].total_num_kv_heads, full if i % 6 == 5 else sliding)
                self.assertEqual(stated[i].head_size, FULL if i % 6 == 5 else SLIDING)

    def heads(self, local: int, tp_size: int, stated: int = 4, **fields: Any) -> int:
        """The KV heads of a layer, with more fields in the model's configuration than vLLM reads."""
        layer = SimpleNamespace(total_num_kv_heads=stated, total_num_attention_heads=32)
        fields = {"num_key_value_heads": stated, **fields}
        model = SimpleNamespace(
            model_arch_config=[layer], hf_text_config=SimpleNamespace(to_dict=lambda: fields)
        )
        return total_kv_heads(model, "layers.0.attn", 0, local, tp_size)

    def test_what_a_rank_holds_must_agree(self) -> None:
        self.assertEqual(self.heads(2, 2), 4)
        self.assertEqual(self.heads(1, 16), 4)
        with self.assertRaisesRegex(
            UnsupportedError, r"layers\.0\.attn has 3 KV heads on each of 2 ranks.* 4 "
        ):
            self.heads(3, 2)
        with self.assertRaisesRegex(UnsupportedError, "none of them gives that"):
            self.heads(1, 3)

    def test_numbers_of_single_layers_are_found_in_other_fields(self) -> None:
        self.assertEqual(self.heads(4, 2, swa_num_key_value_heads=8), 8)
        self.assertEqual(self.heads(2, 2, swa_num_key_value_heads=8), 4)
        self.assertEqual(self.heads(8, 1, attention_other_setting={"num_attention_groups": 8}), 8)
        self.assertEqual(self.heads(8, 1, block_configs=[{"attention": {"n_heads_in_group": 4}}]), 8)

    def test_a_layer_that_may_have_either_number_is_refused(self) -> None:
        for fields in (
            {"swa_num_key_value_heads": 8},
            {"attention_other_setting": {"num_attention_groups": 8}},
            {
                "block_configs": [
                    {"attention": {"n_heads_in_group": None}},
                    {"attention": {"n_heads_in_group": 4}},
                ]
            },
        ):
            with self.subTest(fields), self.assertRaisesRegex(UnsupportedError, "4 .*, 8 .*: more than one"):
                self.heads(1, 8, **fields)

    def test_a_layer_that_the_configuration_lacks_is_refused(self) -> None:
        model = model_of("gemma-4-31b")
        with self.assertRaisesRegex(UnsupportedError, r"layers\.60\.attn is not in vLLM's configuration"):
            total_kv_heads(model, "layers.60.attn", 60, 1, 16)


if __name__ == "__main__":
    unittest.main()
