"""A draft model on one side or on both: the model's cells move, and a draft's if both have the same draft."""

from __future__ import annotations

import time
import unittest
from types import SimpleNamespace
from typing import Any

from fake_device import Device
from halves import LAYERS, Half, steps
from many_ranks import ManyRanks
from vllm.distributed.kv_transfer.kv_connector.utils import clip_ssm_state_blocks

from kvferry.errors import UnsupportedError
from kvferry.model import GroupKind
from kvferry.vllm.layers import place_layer
from kvferry.vllm.messages import KvferryStep
from kvferry.vllm.pushing import LayerOrder
from kvferry.vllm.scheduling import _table

TOKENS = 21
THERE, HERE = [3, 1, 7], [5, 2, 6, 4, 8, 9]


def config_of(layers: int, drafts: bool = True, small: bool = False) -> Any:
    """The configuration by which the connector tells layers apart; `small`: the draft is a small model."""
    model = SimpleNamespace(model_arch_config=SimpleNamespace(total_num_hidden_layers=layers))
    speculative = SimpleNamespace(draft_model_config="the draft's", uses_draft_model=lambda: small)
    return SimpleNamespace(model_config=model, speculative_config=speculative if drafts else None)


class Numbers(unittest.TestCase):
    """The numbers of layers."""

    def test_layers_counted_on_from_the_models_are_the_drafts(self) -> None:
        config = config_of(32)
        own, drafts = (
            place_layer(config, "model.layers.31.self_attn"),
            place_layer(config, "model.layers.33.attn"),
        )
        self.assertEqual((own.number, own.index, own.draft), (31, 31, False))
        self.assertIs(own.model, config.model_config)
        self.assertEqual((drafts.number, drafts.index, drafts.draft), (33, 1, True))
        self.assertEqual(drafts.model, "the draft's")

    def test_drafts_with_numbers_of_their_own_follow_the_models(self) -> None:
        config = config_of(32)
        for name in ("draft_model.model.layers.2.attn", "mtp.layers.2.self_attn.attn"):
            place = place_layer(config, name)
            self.assertEqual((place.number, place.index, place.draft), (34, 2, True))
        self.assertEqual(place_layer(config, "draft_model.model.layers.40.attn").number, 72)
        self.assertEqual(place_layer(config, "mtp.layers.32.attn").number, 32)

    def test_beside_a_small_model_only_layers_that_are_called_so_are_the_drafts(self) -> None:
        """A model with loops (IQuest Loop Coder) has more layers than its configuration says."""
        config, names = config_of(2, small=True), [f"model.layers.{i}.self_attn.attn" for i in range(4)]
        places = [place_layer(config, name) for name in names]
        self.assertEqual([(place.number, place.draft) for place in places], [(i, False) for i in range(4)])
        drafts = "draft_model.model.layers.1.attn"
        self.assertTrue(place_layer(config, drafts).draft)
        order = LayerOrder(config, [*names, drafts])  # a draft runs after all layers of the model
        self.assertEqual([order.complete(name) for name in names], [1, 2, 3, 3])

    def test_without_a_draft_model_no_layer_is_a_drafts(self) -> None:
        place = place_layer(config_of(32, drafts=False), "model.layers.40.attn")
        self.assertEqual((place.number, place.draft), (40, False))
        with self.assertRaisesRegex(UnsupportedError, "2 numbers"):
            place_layer(config_of(32), "model.1.layers.40")


class Drafts(unittest.TestCase):
    """Both halves of the connector, on engines of which one or both have a draft model."""

    def pair(self, there: int, here: int, push: bool = False) -> tuple[Half, Half]:
        """A prefill and a decode engine with `there` and `here` draft layers; the first has written a cache."""
        p = Half("prefill", 8, draft=there, **({"transfer_mode": "push"} if push else {}))
        self.addCleanup(p.close)
        d = Half("decode", 4, draft=here)
        self.addCleanup(d.close)
        for layer in range(LAYERS + there):
            p.write(layer, THERE, range(TOKENS))
        return p, d

    def move(self, p: Half, d: Half) -> dict[str, Any]:
        """Serves the request, and loads it."""
        params = p.serve("a", TOKENS, THERE)
        self.assertGreater(d.wrong(0, HERE, range(TOKENS)), 0)
        self.assertEqual(d.want("a", TOKENS, params, HERE), TOKENS)
        steps(p, d, until=lambda: "a" in d.received and "a" in p.sent)
        self.assertEqual(d.failed, set())
        for layer in range(LAYERS):
            self.assertEqual(d.wrong(layer, HERE, range(TOKENS)), 0)
        return params

    def untouched(self, half: Half, layer: int) -> bool:
        return not half.layers[f"model.layers.{layer}.attn"].any()

    def test_layers_of_a_draft_are_a_group_of_their_own(self) -> None:
        _, d = self.pair(0, 1)
        introduction = d.worker.handshake()
        assert introduction is not None
        groups = introduction.geometry.groups
        self.assertEqual([group.name for group in groups], ["000.0", "draft.000"])
        self.assertEqual([[layer.layer for layer in group.layers] for group in groups], [[0, 1, 2], [3]])
        self.assertEqual([group.source for group in groups], [0, 0])

    def test_a_consumer_with_a_draft_gets_what_both_have(self) -> None:
        for push in (False, True):
            with self.subTest(push=push):
                p, d = self.pair(0, 1, push)
                self.assertIsNone(self.move(p, d)["kvferry_draft"])
                self.assertTrue(self.untouched(d, LAYERS))

    def test_a_producer_with_a_draft_gives_what_both_have(self) -> None:
        for push in (False, True):
            with self.subTest(push=push):
                p, d = self.pair(2, 0, push)
                self.move(p, d)

    def test_the_same_draft_on_both_sides_is_moved(self) -> None:
        for push in (False, True):
            with self.subTest(push=push):
                p, d = self.pair(1, 1, push)
                self.move(p, d)
                self.assertEqual(d.wrong(LAYERS, HERE, range(TOKENS)), 0)

    def test_a_draft_that_is_still_computed_is_waited_for(self) -> None:
        """vLLM ends a request with its last token, and computes drafts after it."""
        for push in (False, True):
            with self.subTest(push=push):
                p, d = self.pair(1, 1, push)
                p.layers[f"model.layers.{LAYERS}.attn"].zero_()
                p.worker._device = device = Device()
                p.worker.seal(KvferryStep())
                (drafted,) = device.events
                params = p.serve("a", TOKENS, THERE)
                d.want("a", TOKENS, params, HERE)
                until = time.monotonic() + 0.3
                steps(p, d, until=lambda until=until: time.monotonic() > until)
                self.assertEqual(d.received, set())
                p.write(LAYERS, THERE, range(TOKENS))
                drafted.happen()
                steps(p, d, until=lambda p=p, d=d: "a" in d.received and "a" in p.sent)
                self.assertEqual(d.failed, set())
                self.assertEqual(d.wrong(LAYERS, HERE, range(TOKENS)), 0)

    def test_another_draft_is_left_alone(self) -> None:
        p, d = self.pair(1, 2)
        self.move(p, d)
        self.assertTrue(self.untouched(d, LAYERS) and self.untouched(d, LAYERS + 1))


class Slots(unittest.TestCase):
    """With speculative decoding further slots follow a state, for tokens that are not accepted yet."""

    def test_the_state_that_is_taken_is_the_public_connectors(self) -> None:
        for slots in (0, 1, 3):
            group: Any = SimpleNamespace(kind=GroupKind.STATE, speculative_blocks=slots)
            for before in ([], [0], [0, 0, 4], [4]):
                blocks = [*before, 7, *range(10, 10 + slots)]
                with self.subTest(blocks=blocks, slots=slots):
                    self.assertEqual(clip_ssm_state_blocks(blocks, slots), [7])
                    self.assertEqual(list(_table(group, blocks).ids), [7])


class Ranks(unittest.TestCase):
    """Drafts with other heads than the model, over several ranks, in a separate group of vLLM."""

    def hand_over(self, there: dict[str, Any], here: dict[str, Any], moved: bool) -> None:
        """Moves a request; the model's cells must arrive, and with `moved` the draft's."""
        p = ManyRanks("prefill", 8, **there)
        self.addCleanup(p.close)
        d = ManyRanks("decode", 4, **here)
        self.addCleanup(d.close)
        for engine in (p, d):
            engine.start()
        p.write(THERE, range(TOKENS))
        own, draft = range(LAYERS), range(LAYERS, LAYERS + 1)
        drafts = d.wrong(HERE, range(TOKENS), draft)
        self.assertGreater(d.wrong(HERE, range(TOKENS), own), 0)
        self.assertEqual(d.want("a", TOKENS, p.serve("a", TOKENS, THERE), HERE), TOKENS)
        steps(p, d, until=lambda: "a" in d.received and "a" in p.sent)
        self.assertEqual((d.failed, d.invalid), (set(), set()))
        self.assertEqual(d.wrong(HERE, range(TOKENS), own), 0)
        self.assertEqual(d.wrong(HERE, range(TOKENS), draft), 0 if moved else drafts)

    def test_a_draft_has_heads_of_its_own(self) -> None:
        for heads in (1, 4):
            with self.subTest(heads=heads):
                self.hand_over({"tp": 2, "draft_heads": heads}, {"draft_heads": heads}, moved=True)
                self.hand_over({"draft_heads": heads}, {"tp": 2, "draft_heads": heads}, moved=True)

    def test_a_draft_with_other_heads_is_left_alone(self) -> None:
        self.hand_over({"tp": 2, "draft_heads": 4}, {"draft_heads": 2}, moved=False)
        self.hand_over({"draft_heads": 4}, {"tp": 2, "draft_heads": 1}, moved=False)

    def test_a_draft_of_keys_and_values_beside_latents(self) -> None:
        alone = {"latent": True, "draft_heads": 2}
        self.hand_over({"tp": 2, **alone}, alone, moved=True)

    def test_a_draft_keeps_all_tokens_where_the_model_shares_them_out(self) -> None:
        shared = {"tp": 2, "dcp": 2, "latent": True, "draft_heads": 2, "draft_shared": False}
        alone = {"latent": True, "draft_heads": 2}
        self.hand_over(shared, alone, moved=True)
        self.hand_over(alone, shared, moved=True)

    def test_one_side_has_a_draft_in_a_group_before_the_models(self) -> None:
        self.hand_over({"draft_heads": 4}, {"tp": 2}, moved=False)
        self.hand_over({"tp": 2}, {"draft_heads": 4}, moved=False)


if __name__ == "__main__":
    unittest.main()
