"""States beside attention in the axis orders of CUDA's attention backends: Mamba 2 and gated delta nets.

vLLM's own functions give the shapes of the states and lay out their pages, which share memory with those of
attention. The oracle of the tests with servers (cells.py) names the cells of states, and the tests of other
layouts (cuda_layouts_test.py) those of keys and values.
"""

from __future__ import annotations

import itertools
import math
import unittest
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from cells import expected_cells, state_cells
from cuda_layouts_test import HEADS, SIZE, TOKENS, attention, page_of
from layouts import Layout, Rank, Specs, lay_out, move
from probing import read_layer
from transformers import GraniteMoeHybridConfig, Qwen3NextConfig
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.attention.backends import utils
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

COMMON: dict[str, Any] = {
    "dtype": "bfloat16",
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": HEADS,
    "hidden_size": 8 * SIZE,
}
ATTENTION = (2, 5)  # these layers; the others keep states
KEY_LAYERS = [f"model.layers.{layer}.self_attn.attn" for layer in ATTENTION]
STATE_LAYERS = [f"model.layers.{layer}.mixer" for layer in (0, 1, 3, 4)]
BLOCKS = 9
SIZES = 32, 48  # tokens of a block there and here: room for a state, as vLLM chooses
FULL = [3, 1, 2], [5, 1]  # blocks of keys and values there and here
STATES = (6, 7)  # blocks of the groups of states, in order
#: vLLM takes only these where pages of unlike shapes share memory.
ORDERS = [order for order in KVCacheLayout if order.is_block_compact]

Cells = dict[tuple[str, str, int, int], bytes]  # by layer, part, head or channel, and token


@dataclass(frozen=True)
class Kind:
    """A kind of model: its configuration, and the shapes of a rank's states."""

    text: Any
    shapes: Any

    @property
    def fields(self) -> dict[str, Any]:
        """The configuration as cells.py reads it."""
        found: dict[str, Any] = self.text.to_dict()
        return found


def mamba2(groups: int) -> Kind:
    """Granite 4's kind of state. With one group, every rank has B and C."""
    text = GraniteMoeHybridConfig(
        **COMMON,
        layer_types=["attention" if layer in ATTENTION else "mamba" for layer in range(6)],
        mamba_n_heads=16,
        mamba_d_head=16,
        mamba_d_state=4,
        mamba_n_groups=groups,
        mamba_expand=2,
    )
    return Kind(
        text,
        lambda ranks: MambaStateShapeCalculator.mamba2_state_shape(
            ranks,
            intermediate_size=text.mamba_expand * text.hidden_size,
            n_groups=text.mamba_n_groups,
            num_heads=text.mamba_n_heads,
            head_dim=text.mamba_d_head,
            state_size=text.mamba_d_state,
            conv_kernel=text.mamba_d_conv,
        ),
    )


def gated_delta_net() -> Kind:
    """Qwen 3 Next's kind of state."""
    text = Qwen3NextConfig(
        **COMMON,
        head_dim=SIZE,
        layer_types=["full_attention" if layer in ATTENTION else "linear_attention" for layer in range(6)],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
    )
    return Kind(
        text,
        lambda ranks: MambaStateShapeCalculator.gated_delta_net_state_shape(
            ranks,
            text.linear_num_key_heads,
            text.linear_num_value_heads,
            text.linear_key_head_dim,
            text.linear_value_head_dim,
            text.linear_conv_kernel_dim,
        ),
    )


def specs_of(kind: Kind, ranks: int, block_size: int) -> Specs:
    """The caches of a rank. As in vLLM, a state is padded to a page of attention."""
    keys = attention(block_size, HEADS // ranks, torch.bfloat16)
    state = MambaSpec(
        block_size=1024,
        shapes=kind.shapes(ranks),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=keys.page_size_bytes,
    )
    return dict.fromkeys(KEY_LAYERS, keys) | dict.fromkeys(STATE_LAYERS, state)


def engine(
    kind: Kind, tp_size: int, block_size: int, name: str, order: KVCacheLayout, convolution: str
) -> Layout:
    """An engine whose convolutions have steps before channels ("SD") or channels before steps ("DS")."""
    layer = SimpleNamespace(total_num_kv_heads=HEADS, total_num_attention_heads=8)
    model = SimpleNamespace(hf_text_config=kind.text, model_arch_config=[layer] * 6)
    with mock.patch.object(mamba_utils, "get_conv_state_layout", lambda: convolution):
        return lay_out(model, lambda ranks: specs_of(kind, ranks, block_size), tp_size, name, BLOCKS, order)


def tables_of(layout: Layout, full: list[int]) -> list[list[int]]:
    """A block table for each group: groups share memory, so their blocks differ."""
    states = iter(STATES)
    return [
        [next(states)] if isinstance(group.kv_cache_spec, MambaSpec) else full
        for group in layout.ranks[0].cache.kv_cache_groups
    ]


def convolution_of(rank: Rank, name: str) -> torch.Tensor:
    """The convolution's state in every block of a layer, as vLLM takes it from the pages."""
    _, spec = rank.specs()[name]
    assert isinstance(spec, MambaSpec)
    pages = rank.caches[name].squeeze((1, 2))
    held = pages[:, : math.prod(spec.shapes[0]) * spec.dtypes[0].itemsize].view(spec.dtypes[0])
    return held.view(-1, *spec.shapes[0])


def fill(layout: Layout, seed: int, kind: Kind) -> None:
    """Fills the caches with random bytes; B and C of one group are the same on all ranks, and here x, too."""
    for number, rank in enumerate(layout.ranks):
        chance = torch.Generator().manual_seed(seed + number)
        for region in rank.memory:
            region.copy_(torch.randint(0, 256, region.shape, dtype=torch.uint8, generator=chance))
        if kind.fields.get("mamba_n_groups") == 1:
            for name in STATE_LAYERS:
                convolution_of(rank, name).copy_(convolution_of(layout.ranks[0], name))


def cells(layout: Layout, tables: list[list[int]], kind: Kind) -> Cells:
    """All cells of one request, by their coordinates in the whole model."""
    found: Cells = {}
    for number, rank in enumerate(layout.ranks):
        where = {"rank": number, "tp_size": len(layout.ranks)}
        for name, (group, spec) in rank.specs().items():
            if name in STATE_LAYERS:
                layer = read_layer(rank.caches[name], spec, tables[group], BLOCKS)
                for part, unit, content in state_cells(layer, where, kind.fields):
                    assert found.setdefault((name, part, unit, 0), content) == content, f"{name} {part} {unit}"
                continue
            for token in range(TOKENS):
                for head, content in enumerate(page_of(rank, name, tables[group], token).cpu().numpy()):
                    found[name, "kv", number * spec.num_kv_heads + head, token] = content.tobytes()
    return found


def expected(kind: Kind) -> set[tuple[str, str, int, int]]:
    """The coordinates of the whole model, from its configuration alone."""
    states = expected_cells(kind.fields, set(STATE_LAYERS), set(STATE_LAYERS))
    keys = itertools.product(KEY_LAYERS, ("kv",), range(HEADS), range(TOKENS))
    return {(*cell, 0) for cell in states} | set(keys)


class StatesBesideAttention(unittest.TestCase):
    def hand_over(self, kind: Kind, there: Layout, here: Layout) -> None:
        """Moves one request and compares the cells; then spoils single bytes, which must be noticed."""
        fill(there, 1, kind)
        fill(here, 100, kind)
        theirs, ours = (tables_of(*each) for each in zip((there, here), FULL, strict=True))
        sent = cells(there, theirs, kind)
        self.assertEqual(sent.keys(), expected(kind))
        before = cells(here, ours, kind)
        self.assertGreater(sum(before[cell] != sent[cell] for cell in sent), 0.99 * len(sent))
        others = sorted(set(range(BLOCKS)).difference(*ours))
        untouched = [cache[others].clone() for rank in here.ranks for cache in rank.caches.values()]
        move(there, here, theirs, ours, [1 if len(table) == 1 else TOKENS for table in theirs])
        self.assertEqual(cells(here, ours, kind), sent)
        after = [cache[others] for rank in here.ranks for cache in rank.caches.values()]
        for one, other in zip(untouched, after, strict=True):
            self.assertTrue(torch.equal(one.view(torch.uint8), other.view(torch.uint8)), "nobody's block")
        self.controls(kind, here, ours, sent)

    def controls(self, kind: Kind, here: Layout, ours: list[list[int]], sent: Cells) -> None:
        rank = here.ranks[-1]
        for name in (STATE_LAYERS[1], KEY_LAYERS[1]):
            group, _ = rank.specs()[name]
            page = rank.caches[name][ours[group][0]].view(torch.uint8)
            for element in (
                0,
                page.shape[-1] - 1,
            ):  # of a state: in the convolution, and in the recurrent state
                page[0, 0, element] ^= 1
                try:
                    received = cells(here, ours, kind)
                    wrong = {cell[0] for cell in sent if sent[cell] != received[cell]}
                except AssertionError:  # ranks' copies differ
                    wrong = {name}
                self.assertEqual(wrong, {name})
                page[0, 0, element] ^= 1

    def test_states_and_keys_arrive_from_every_order_in_every_other(self) -> None:
        kinds = {"mamba2": mamba2(2), "mamba2, one group": mamba2(1), "gated delta net": gated_delta_net()}
        ways = itertools.cycle(itertools.product(((1, 2), (2, 1)), itertools.product(("SD", "DS"), repeat=2)))
        for (what, kind), there_order, here_order in itertools.product(kinds.items(), ORDERS, ORDERS):
            (there_tp, here_tp), (there_steps, here_steps) = next(ways)
            with self.subTest(
                what,
                there=(there_order.name, there_tp, there_steps),
                here=(here_order.name, here_tp, here_steps),
            ):
                there = engine(kind, there_tp, SIZES[0], "prefill", there_order, there_steps)
                here = engine(kind, here_tp, SIZES[1], "decode", here_order, here_steps)
                self.hand_over(kind, there, here)

    def test_vllm_has_no_other_orders_where_states_share_memory_with_keys(self) -> None:
        kind = gated_delta_net()
        self.assertEqual(len(ORDERS), 4)
        for order in KVCacheLayout:
            config: Any = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_layout=None))
            specs = specs_of(kind, 1, SIZES[0]).values()
            with (
                self.subTest(order.name),
                mock.patch.object(utils, "get_kv_connector_cache_layout", lambda _: None),
            ):
                if order in ORDERS:
                    self.assertEqual(utils.resolve_kv_cache_layout(config, [[order.name]], specs), order)
                else:
                    with self.assertRaisesRegex(ValueError, "block-compact"):
                        utils.resolve_kv_cache_layout(config, [[order.name]], specs)


if __name__ == "__main__":
    unittest.main()
