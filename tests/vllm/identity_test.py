"""An engine's weights, and the versions of the parameters that it understands: others are refused by name."""

from __future__ import annotations

import json
import logging
import pathlib
import tempfile
import unittest
from types import SimpleNamespace
from typing import Any

from halves import LAYERS, Half, a_request, steps

from kvferry.errors import InvalidError, MismatchError
from kvferry.model import GroupKind
from kvferry.shard import PartShare
from kvferry.transfer_params import VERSIONS
from kvferry.vllm.geometry import GroupGeometry, LayerGeometry, RankGeometry
from kvferry.vllm.identity import rotation_of, scale_facts, weights_of

TOKENS = 40
THERE, HERE = [3, 7], [9, 2, 4]  # blocks of 32 and of 16 tokens
LOGGER = "vllm.kvferry"


def save(file: pathlib.Path, tensors: dict[str, bytes], dtype: str = "U8") -> None:
    """Writes a safetensors file."""
    header, at = {}, 0
    for name, content in tensors.items():
        header[name] = {"dtype": dtype, "shape": [len(content)], "data_offsets": [at, at + len(content)]}
        at += len(content)
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))


class Checkpoints(unittest.TestCase):
    def folder(self, **files: dict[str, bytes]) -> str:
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        for name, tensors in files.items():
            save(pathlib.Path(made.name) / f"{name}.safetensors", tensors)
        return made.name

    def test_the_same_tensors_in_other_files_are_the_same_weights(self) -> None:
        a, b = bytes(range(200)), bytes(300)
        whole = weights_of("checkpoint", self.folder(model={"a": a, "b": b}))
        self.assertEqual(weights_of("checkpoint", self.folder(one={"b": b}, two={"a": a})), whole)
        self.assertEqual(len(whole), 32)

    def test_other_names_shapes_and_content_are_other_weights(self) -> None:
        a = bytes(range(200))
        found = {
            weights_of("checkpoint", self.folder(model=tensors))
            for tensors in (
                {"a": a},
                {"b": a},
                {"a": a + b"\0"},
                {"a": b"\1" + a[1:]},
                {"a": a[:100] + b"\1" + a[101:]},
                {"a": a, "c": b""},
            )
        }
        self.assertEqual(len(found), 6)

    def test_a_name_by_the_operator_is_taken_as_it_is(self) -> None:
        self.assertEqual(weights_of("v7", "no such folder"), "v7")
        self.assertEqual(weights_of("", "no such folder"), "")

    def test_a_folder_that_is_no_checkpoint_is_refused(self) -> None:
        with self.assertRaisesRegex(InvalidError, "tiny is not a folder with safetensors files"):
            Half("engine", 16, weights="checkpoint")
        wrong = (
            b"[]",
            b'{"a":{}}',
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[-1,1]}}',
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[4,1]}}',
        )
        for content in (b"", b"\xff" * 64, *(len(text).to_bytes(8, "little") + text for text in wrong)):
            folder = self.folder()
            (pathlib.Path(folder) / "model.safetensors").write_bytes(content)
            with self.subTest(content), self.assertRaisesRegex(InvalidError, "not a safetensors file"):
                weights_of("checkpoint", folder)
        with self.assertRaisesRegex(InvalidError, "weights is 7; allowed"):
            Half("engine", 16, weights=7)


class Rotations(unittest.TestCase):
    def config(self, longest: int = 4096, **fields: Any) -> Any:
        return SimpleNamespace(max_model_len=longest, hf_text_config=SimpleNamespace(**fields))

    def test_other_settings_are_other_rotations(self) -> None:
        plain = {"rope_type": "default", "rope_theta": 1e4}
        scaled = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
        found = [rotation_of(self.config(rope_parameters=said)) for said in (plain, scaled, dict(plain))]
        self.assertEqual((found[0] == found[1], found[0] == found[2], len(found[0])), (False, True, 32))
        self.assertEqual(rotation_of(self.config(32768, rope_parameters=plain)), found[0])
        self.assertEqual(rotation_of(self.config()), "")

    def test_the_longest_prompt_decides_which_factors_longrope_has(self) -> None:
        said = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096}
        found = [rotation_of(self.config(longest, rope_parameters=said)) for longest in (2048, 4096, 4097)]
        self.assertEqual((found[0] == found[1], found[0] == found[2]), (True, False))


class Meeting(unittest.TestCase):
    def pair(self, there: str, here: str) -> tuple[Half, Half, dict[str, Any]]:
        """Two engines with the given weights, and a request of the first."""
        pair = Half("prefill", 32, weights=there), Half("decode", 16, weights=here)
        for half in pair:
            self.addCleanup(half.close)
        for layer in range(LAYERS):
            pair[0].write(layer, THERE, range(TOKENS))
        return *pair, pair[0].serve("r", TOKENS, THERE)

    def test_the_same_weights_hand_over(self) -> None:
        prefill, decode, params = self.pair("v1", "v1")
        self.assertEqual((params["kvferry_weights"], params["kvferry_versions"]), ("v1", list(VERSIONS)))
        decode.want("r", TOKENS, params, HERE)
        steps(prefill, decode, until=lambda: "r" in decode.received)
        self.assertEqual((decode.failed, decode.invalid), (set(), set()))
        for layer in range(LAYERS):
            self.assertEqual(decode.wrong(layer, HERE, range(TOKENS)), 0)

    def test_other_weights_are_refused_before_anything_is_asked(self) -> None:
        for there, here, text in (
            ("v1", "v2", "kvferry_weights is 'v1'; this engine's weights are 'v2'"),
            ("", "v2", "kvferry_weights is None; this engine's weights are 'v2'"),
            ("v1", "", "kvferry_weights is 'v1'; this engine's weights are None"),
        ):
            with self.subTest(there=there, here=here), self.assertLogs(LOGGER, logging.ERROR) as log:
                _, decode, params = self.pair(there, here)
                self.assertEqual(decode.want("r", TOKENS, params, HERE), 0)
                self.assertIn(text, "\n".join(log.output))

    def test_another_prompt_or_adapter_is_not_loaded(self) -> None:
        _, decode, params = self.pair("", "")
        self.assertEqual(len(params["kvferry_prompt"]), 32)
        lora = SimpleNamespace(lora_name="adapter")
        for changes, load in (
            ({}, TOKENS),
            ({"all_token_ids": [*range(TOKENS), 7]}, TOKENS),  # one more is not the other engine's
            ({"all_token_ids": [*range(TOKENS - 1), 7]}, 0),
            ({"lora_request": lora}, 0),
            ({"prompt_embeds": "given"}, TOKENS),
        ):
            with self.subTest(changes):
                name = f"request {len(changes)} {load} {[*changes]}"
                request = a_request(name, TOKENS, params)
                vars(request).update(changes)
                log = self.assertNoLogs if load else self.assertLogs
                with log(LOGGER, logging.ERROR):
                    decode.scheduling.add(request)
                self.assertEqual(decode.scheduling.match(request, 0)[0], load)

    def test_keys_that_are_rotated_in_another_way_are_not_loaded(self) -> None:
        _, decode, params = self.pair("", "")
        for there, here, load in (("a", "a", TOKENS), ("a", "b", 0), ("a", "", TOKENS), (None, "b", TOKENS)):
            decode.scheduling._rotation = here
            log = self.assertNoLogs if load else self.assertLogs
            with self.subTest(there=there, here=here), log(LOGGER, logging.ERROR):
                request = a_request(f"{there} {here}", TOKENS, {**params, "kvferry_rotation": there})
                decode.scheduling.add(request)
                self.assertEqual(decode.scheduling.match(request, 0)[0], load)

    def test_engines_refuse_each_other_whatever_parameters_say(self) -> None:
        for there, here in (("v1", "v2"), ("", "v2"), ("v1", "")):
            with self.subTest(there=there, here=here):
                prefill, decode, params = self.pair(there, here)
                with self.assertLogs(LOGGER, logging.WARNING) as log:
                    decode.want("r", TOKENS, {**params, "kvferry_weights": here}, HERE)
                    steps(prefill, decode, until=lambda decode=decode: "r" in decode.received)
                self.assertEqual(decode.invalid, set(HERE))
                self.assertTrue(any("weights" in line for line in log.output), log.output)
                self.assertFalse(any(tensor.any() for tensor in decode.layers.values()))

    def test_caches_in_fp8_with_other_scales_are_refused_and_nothing_is_written(self) -> None:
        for there, here in (
            ((0.5, 0.25), (0.5, 0.25)),
            ((0.5, 0.25), (0.5, 1)),
            ((1, 1), (0.5, 0.25)),
            (None, (0.5, 0.25)),  # float32, which may be converted
        ):
            with self.subTest(there=there, here=here):
                prefill, decode = (
                    Half(name, size, scales=scales, convert=True)
                    for name, size, scales in (("prefill", 32, there), ("decode", 16, here))
                )
                self.addCleanup(prefill.close)
                self.addCleanup(decode.close)
                for tensor in prefill.layers.values():
                    tensor.fill_(7)
                decode.want("r", TOKENS, prefill.serve("r", TOKENS, THERE), HERE)
                if there == here:
                    steps(prefill, decode, until=lambda decode=decode: "r" in decode.received)
                    self.assertEqual(decode.invalid, set())
                    self.assertTrue(all((tensor[HERE[:2]] == 7).all() for tensor in decode.layers.values()))
                    continue
                with self.assertLogs(LOGGER, logging.WARNING) as log:
                    steps(prefill, decode, until=lambda decode=decode: "r" in decode.received)
                self.assertEqual(decode.invalid, set(HERE))
                self.assertTrue(any(".scales" in line for line in log.output), log.output)
                self.assertFalse(any(tensor.any() for tensor in decode.layers.values()))

    def test_scales_of_heads_are_told_alike_however_ranks_share_the_heads(self) -> None:
        def engine(*scales: tuple[float, ...]) -> list[RankGeometry]:
            ranks = []
            for i, own in enumerate(scales):
                heads = range(i * len(own), (i + 1) * len(own))
                layer = LayerGeometry(0, (), (own, own))
                part = PartShare(heads)
                group = GroupGeometry(0, "0", GroupKind.TOKENS, (), (part, part), (layer,), 16, 1, 4)
                ranks.append(RankGeometry(i, len(scales), 0, 1, 1, range(1), (), (group,)))
            return ranks

        whole = scale_facts(engine((1.0, 2.0, 3.0, 4.0)))
        self.assertEqual(list(whole), ["0.scales"])
        self.assertEqual(scale_facts(engine((1.0, 2.0), (3.0, 4.0))), whole)
        self.assertEqual(scale_facts(engine((1.0,), (2.0,), (3.0,), (4.0,))), whole)
        self.assertNotEqual(scale_facts(engine((1.0, 2.0, 4.0, 3.0))), whole)
        self.assertEqual(scale_facts(engine((1.0,), (1.0,))), {})
        self.assertEqual(scale_facts(engine((1.0, 1.0), (1.0, 1.0))), {})
        one = engine((2.0,))
        with self.assertRaisesRegex(MismatchError, "k of head 0 is scaled by 2.0 on one rank and by 3.0"):
            scale_facts(one + engine((3.0,)))

    def test_versions_that_do_not_meet_are_refused(self) -> None:
        _, decode, params = self.pair("", "")
        newest = VERSIONS[1]
        for said, text in (
            ([newest + 1, newest + 2], f"kvferry_versions is {newest + 1} to {newest + 2}; this connector"),
            ([2, 1], "kvferry_versions is [2, 1]; allowed"),
            ([0, 1], "kvferry_versions is [0, 1]; allowed"),
            ("1-2", "kvferry_versions is '1-2'; allowed"),
            (["1", 2], "kvferry_versions is ['1', 2]; allowed"),
        ):
            with self.subTest(said=said), self.assertLogs(LOGGER, logging.ERROR) as log:
                self.assertEqual(decode.want("r", TOKENS, {**params, "kvferry_versions": said}, HERE), 0)
                self.assertIn(text, "\n".join(log.output))
        for i, said in enumerate(([1, newest + 5], None)):  # parameters from before versions existed have none
            self.assertEqual(decode.want(f"s{i}", TOKENS, {**params, "kvferry_versions": said}, HERE), TOKENS)


if __name__ == "__main__":
    unittest.main()
