"""The caches of models that vLLM serves on GPUs only: Qwen 4, MiniMax M3, Step 5 and Inkling.

The specifications are those that vLLM's classes for these models give, and vLLM's own functions group and lay
out the caches. No server ran such a model: vLLM's kernels for them are CUDA's.
"""

from __future__ import annotations

import itertools
import unittest
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from layouts import Layout, Specs, lay_out, move
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvferry.errors import UnsupportedError

BLOCKS = 24
TOKENS = 130
TYPE = torch.bfloat16
ORDERS = [KVCacheLayout.BLHNC, KVCacheLayout.BLNHC]
LAYER = "model.layers.{}.self_attn"

#: By layer, head or channel, and row: a token, an entry, or an input of a convolution.
Cells = dict[tuple[str, int, int], bytes]


def keys(block_size: int, heads: int, size: int) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=block_size, num_kv_heads=heads, head_size=size, head_size_v=size, dtype=TYPE
    )


def is_replicated(spec: Any) -> bool:
    """Whether every rank keeps all of it."""
    if isinstance(spec, MambaSpec):
        return bool(spec.tp_replicated)
    return isinstance(spec, (MLAAttentionSpec, CircularBufferSpec)) or spec.tokens_per_state != 1


def engine(
    text: Any, heads: int, specs_of: Callable[[int], Specs], tp_size: int, name: str, order: KVCacheLayout
) -> Layout:
    layer = SimpleNamespace(total_num_kv_heads=heads, total_num_attention_heads=16)
    model = SimpleNamespace(hf_text_config=text, model_arch_config=[layer] * 8)
    return lay_out(model, specs_of, tp_size, name, BLOCKS, order)


def tables_of(layout: Layout, first: int) -> list[list[int]]:
    """A block table for each group of vLLM, with blocks of its own: groups may share memory."""
    found = []
    free = itertools.count(first)
    for group in layout.ranks[0].cache.kv_cache_groups:
        spec = getattr(group.kv_cache_spec, "first_spec", group.kv_cache_spec)
        one = isinstance(spec, (MambaSpec, CircularBufferSpec))
        tokens = spec.block_size
        needed = 1 if one else -(-TOKENS // tokens)
        if isinstance(spec, SlidingWindowSpec):  # what lies before the window has the block without content
            begin = (TOKENS - spec.sliding_window) // tokens
            found.append([0] * begin + [next(free) for _ in range(needed - begin)])
        else:
            found.append([next(free) for _ in range(needed)])
    return found


def fill(layout: Layout, seed: int) -> None:
    """Random bytes, others on every rank; of what is replicated, those of the first rank on all."""
    for number, rank in enumerate(layout.ranks):
        chance = torch.Generator().manual_seed(seed + number)
        for region in rank.memory:
            region.copy_(torch.randint(0, 256, region.shape, dtype=torch.uint8, generator=chance))
        for name, (_, spec) in rank.specs().items():
            if is_replicated(spec):
                rank.caches[name].copy_(layout.ranks[0].caches[name])


def rows_of(spec: AttentionSpec) -> range:
    """The tokens or entries of a request that are handed over."""
    if isinstance(spec, SlidingWindowSpec):
        return range(TOKENS - spec.sliding_window, TOKENS)
    return range(TOKENS // int(spec.tokens_per_state))


def cells(layout: Layout, tables: list[list[int]], states: dict[str, Callable[..., Any]]) -> Cells:
    """All cells of one request by their coordinates in the whole model.

    Args:
        states: by name of a layer, what finds the cells of its state: (channel, row, bytes)
    """
    found: Cells = {}

    def add(name: str, unit: int, row: int, content: torch.Tensor) -> None:
        held = content.contiguous().view(torch.uint8).numpy().tobytes()
        assert found.setdefault((name, unit, row), held) == held, f"{name}: copies differ"

    for number, rank in enumerate(layout.ranks):
        for name, (group, spec) in rank.specs().items():
            cache, blocks = rank.caches[name], tables[group]
            if isinstance(spec, MambaSpec):
                for unit, row, content in states[name](cache[blocks[0]], spec, number, len(layout.ranks)):
                    add(name, unit, row, content)
                continue
            if isinstance(spec, CircularBufferSpec):
                add(name, 0, 0, cache[blocks[0]])
                continue
            heads, per_block = cache.shape[1], cache.shape[2]
            first = 0 if is_replicated(spec) else number * heads
            for row, head in itertools.product(rows_of(spec), range(heads)):
                add(name, first + head, row, cache[blocks[row // per_block], head, row % per_block])
    return found


class NewerModels(unittest.TestCase):
    def hand_over(
        self, there: Layout, here: Layout, states: dict[str, Callable[..., Any]] | None = None
    ) -> Cells:
        """Moves one request and compares all cells; a byte that is spoilt must be noticed."""
        states = states or {}
        fill(there, 1)
        fill(here, 100)
        theirs, ours = tables_of(there, 1), tables_of(here, 3)
        sent, before = cells(there, theirs, states), cells(here, ours, states)
        self.assertEqual(sent.keys(), before.keys())
        self.assertGreater(sum(sent[cell] != before[cell] for cell in sent), 0.99 * len(sent))
        move(there, here, theirs, ours, [1 if len(table) == 1 else TOKENS for table in theirs])
        self.assertEqual(cells(here, ours, states), sent)
        for name, (group, spec) in here.ranks[0].specs().items():
            cache, blocks = here.ranks[0].caches[name], ours[group]
            whole = isinstance(spec, (MambaSpec, CircularBufferSpec))
            number, row = (0, 0) if whole else divmod(rows_of(spec)[-1], cache.shape[2])
            block = cache[blocks[number]].view(torch.uint8)
            block[0, row, 0] ^= 1
            try:
                wrong = {
                    cell[0] for cell, content in cells(here, ours, states).items() if content != sent[cell]
                }
            except AssertionError:  # ranks' copies differ
                wrong = {name}
            self.assertEqual(wrong, {name})
            block[0, row, 0] ^= 1
        return sent

    def ways(self) -> itertools.product[Any]:
        """Tensor-parallel sizes and orders of both sides."""
        return itertools.product(((1, 2), (2, 1), (2, 4), (4, 2)), ORDERS, ORDERS)

    def test_minimax_m3_has_index_keys_beside_heads(self) -> None:
        def specs_of(ranks: int) -> Specs:
            found: Specs = {f"{LAYER.format(i)}.attn": keys(32, 4 // ranks, 64) for i in range(3)}
            for i in (1, 2):
                found[f"{LAYER.format(i)}.indexer.index_cache"] = MLAAttentionSpec(
                    block_size=32, num_kv_heads=1, head_size=64, dtype=TYPE, cache_role=SparseCacheRole.INDEXER
                )
            return found

        text = CONFIG_MAPPING["minimax_m3_vl_text"](num_hidden_layers=3)
        for (there_tp, here_tp), *orders in self.ways():
            with self.subTest(tp=(there_tp, here_tp), orders=orders):
                there = engine(text, 4, specs_of, there_tp, "prefill", orders[0])
                here = engine(text, 4, specs_of, here_tp, "decode", orders[1])
                sent = self.hand_over(there, here)
                index = [cell for cell in sent if cell[0].endswith("index_cache")]
                self.assertEqual(len(index), 2 * TOKENS)

    def test_step_5_has_summaries_of_eight_tokens(self) -> None:
        def specs_of(ranks: int) -> Specs:
            found: Specs = {}
            for i in range(2):
                found[f"{LAYER.format(i)}.attn"] = keys(32, 8 // ranks, 192)
                found[f"{LAYER.format(i)}.attn.sparse_summary_cache"] = FullAttentionSpec(
                    block_size=32,
                    num_kv_heads=1,
                    head_size=256,
                    head_size_v=0,
                    dtype=torch.uint8,
                    tokens_per_state=8,
                )
            return found

        text = PreTrainedConfig(num_attention_groups=8)
        for (there_tp, here_tp), *orders in self.ways():
            with self.subTest(tp=(there_tp, here_tp), orders=orders):
                there = engine(text, 8, specs_of, there_tp, "prefill", orders[0])
                here = engine(text, 8, specs_of, here_tp, "decode", orders[1])
                sent = self.hand_over(there, here)
                summaries = {cell[2] for cell in sent if cell[0].endswith("summary_cache")}
                self.assertEqual(summaries, set(range(TOKENS // 8)))

    def test_summaries_of_several_heads_are_refused(self) -> None:
        spec = FullAttentionSpec(
            block_size=32, num_kv_heads=2, head_size=256, head_size_v=0, dtype=torch.uint8, tokens_per_state=8
        )
        with self.assertRaisesRegex(UnsupportedError, "an entry of 2 heads for 8 tokens; allowed: 1"):
            engine(PreTrainedConfig(), 8, lambda _: {f"{LAYER.format(0)}.summary": spec}, 1, "one", ORDERS[0])

    def test_inkling_has_the_inputs_of_convolutions_by_kv_head(self) -> None:
        """Layers with a window have 16 heads, others 8: their rows have other widths, and pages one size."""

        def specs_of(ranks: int) -> Specs:
            found: Specs = {}
            for i, (heads, width) in enumerate(((16, 256), (8, 512))):
                window = {"sliding_window": 64} if heads == 16 else {}
                kind: Any = SlidingWindowSpec if window else FullAttentionSpec
                found[f"{LAYER.format(i)}.attn"] = kind(
                    block_size=16 if window else 32,
                    num_kv_heads=heads // ranks,
                    head_size=64,
                    head_size_v=64,
                    dtype=TYPE,
                    **window,
                )
                found[f"model.layers.{i}.conv_state"] = SlidingWindowSpec(
                    block_size=4,
                    num_kv_heads=heads // ranks,
                    head_size=width,
                    head_size_v=0,
                    dtype=TYPE,
                    sliding_window=4,
                )
            return found

        text = CONFIG_MAPPING["inkling_text"](
            num_hidden_layers=2, num_key_value_heads=8, swa_num_key_value_heads=16
        )
        for (there_tp, here_tp), *orders in self.ways():
            with self.subTest(tp=(there_tp, here_tp), orders=orders):
                there = engine(text, 8, specs_of, there_tp, "prefill", orders[0])
                here = engine(text, 8, specs_of, here_tp, "decode", orders[1])
                sent = self.hand_over(there, here)
                convs = [cell for cell in sent if cell[0].endswith("conv_state")]
                self.assertEqual(len(convs), 4 * (16 + 8))

    def test_qwen_4_has_two_states_in_a_layer(self) -> None:
        """A gated delta net, which ranks share, and a convolution over streams, whose inputs all have."""
        text = CONFIG_MAPPING["qwen4_exp_text"](
            num_hidden_layers=4,
            hidden_size=32,
            num_attention_heads=16,
            num_key_value_heads=4,
            head_dim=64,
            linear_num_key_heads=4,
            linear_num_value_heads=8,
            linear_key_head_dim=8,
            linear_value_head_dim=16,
            hc_count=2,
            ple_layer_ids=[2],
            eos_token_id=2,
            dtype="bfloat16",
        )
        convolved = 9 * 64  # three taps before the last, three tokens apart, of two streams of 32

        def specs_of(ranks: int) -> Specs:
            attention = keys(64, 4 // ranks, 64)
            net = MambaSpec(
                block_size=1024,
                shapes=MambaStateShapeCalculator.gated_delta_net_state_shape(ranks, 4, 8, 8, 16, 4),
                dtypes=(TYPE, torch.float32),
                page_size_padded=attention.page_size_bytes,
            )
            streams = MambaSpec(
                block_size=1024,
                shapes=MambaStateShapeCalculator.short_conv_state_shape(1, 64, 10),
                dtypes=(TYPE,),
                page_size_padded=attention.page_size_bytes,
                tp_replicated=True,
            )
            found: Specs = {f"model.layers.{i}.linear_attn": net for i in range(3)}
            found["model.layers.1.ple"] = streams
            found[f"{LAYER.format(3)}.attn"] = attention
            return found

        def pages(page: torch.Tensor, spec: MambaSpec) -> list[torch.Tensor]:
            at, tensors = 0, []
            for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
                count = torch.Size(shape).numel() * dtype.itemsize
                tensors.append(page.flatten().view(torch.uint8)[at : at + count].view(dtype).view(shape))
                at += count
            return tensors

        def net_cells(page: torch.Tensor, spec: MambaSpec, rank: int, ranks: int) -> Any:
            """Queries and keys of 4 heads of 8, values of 8 heads of 16, each split; then the state by head."""
            conv, state = pages(page, spec)
            channels = conv if channels_first else conv.t()
            held = iter(channels)
            for begin, width in ((0, 32), (32, 32), (64, 128)):
                for channel in range(width // ranks):
                    yield begin + rank * (width // ranks) + channel, 0, next(held)
            for head in range(state.shape[0]):
                yield 1000 + rank * state.shape[0] + head, 0, state[head]

        def stream_cells(page: torch.Tensor, spec: MambaSpec, _rank: int, _ranks: int) -> Any:
            (conv,) = pages(page, spec)
            self.assertEqual(conv.numel(), convolved)
            for channel, inputs in enumerate(conv if channels_first else conv.t()):
                yield channel, 0, inputs

        states: dict[str, Callable[..., Any]] = {f"model.layers.{i}.linear_attn": net_cells for i in range(3)}
        states["model.layers.1.ple"] = stream_cells
        for (there_tp, here_tp), *orders in self.ways():
            for convolution in ("SD", "DS"):
                channels_first = convolution == "DS"
                with (
                    self.subTest(tp=(there_tp, here_tp), orders=orders, convolution=convolution),
                    mock.patch.object(mamba_utils, "get_conv_state_layout", lambda known=convolution: known),
                ):
                    there = engine(text, 4, specs_of, there_tp, "prefill", orders[0])
                    here = engine(text, 4, specs_of, here_tp, "decode", orders[1])
                    sent = self.hand_over(there, here, states)
                    self.assertEqual(sum(cell[0].endswith("ple") for cell in sent), 64)


if __name__ == "__main__":
    unittest.main()
