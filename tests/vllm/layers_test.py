"""Requests that are written while they are computed, layer by layer and chunk by chunk, without servers.

The decode engine announces its blocks first. The prefill engine computes, in caches that vLLM lays out, and the
tests check between its layers what has arrived.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import pathlib
import time
import unittest
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import latent_state_test as kimi
import torch
from computing import Computing, bytes_of, steps
from fake_device import Device, Event
from halves import Layers, a_request, output_of
from layouts import Layout, Specs, lay_out
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from kvferry.agent_requests import ALL_LAYERS
from kvferry.commands import DRAIN, HAND_OVER, ask
from kvferry.contact import Contact
from kvferry.errors import Status
from kvferry.plan import CostModel
from kvferry.scheduler import InstructionKind
from kvferry.vllm.connector import KvferryConnector
from kvferry.vllm.draining import DRAINS, REFUSED
from kvferry.vllm.marks import DeviceMarks
from kvferry.vllm.messages import Chunk
from kvferry.vllm.pushing import LayerOrder, LayerPushes, Pieces

LOGGER = "vllm.kvferry"
LAYERS, HEADS, SIZE = 4, 2, 8
TOKENS = 100
WAIT_SECONDS = 60.0
TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "kvferry_transfer_id": "ab12"}
THERE, HERE = [3, 7, 5, 1], [9, 2, 4, 8, 6, 10, 11]  # blocks of 32 and of 16 tokens


def dense_model() -> Any:
    """The part of vLLM's configuration that the connector reads."""
    return SimpleNamespace(
        model_arch_config=Layers(LAYERS),
        hf_text_config=SimpleNamespace(to_dict=lambda: {"num_key_value_heads": HEADS}),
    )


def dense(tp: int, block: int, name: str, window: int = 0) -> Layout:
    """Grouped-query attention; with a window, the odd layers have it."""

    def specs(ranks: int) -> Specs:
        common: Any = {
            "num_kv_heads": HEADS // ranks,
            "head_size": SIZE,
            "dtype": torch.float32,
            "block_size": block,
        }
        full, slides = FullAttentionSpec(**common), SlidingWindowSpec(**common, sliding_window=window or 1)
        return {f"model.layers.{i}.self_attn.attn": slides if window and i % 2 else full for i in range(LAYERS)}

    return lay_out(dense_model(), specs, tp, name, blocks=16)


def tokens_of(engine: Computing, name: str, layer: str, tokens: range) -> list[bytes]:
    """The bytes of some tokens of a layer, with the heads of all ranks."""
    found = []
    for token in tokens:
        heads = []
        for rank in engine.layout.ranks:
            group, spec = rank.specs()[layer]
            block, at = divmod(token, spec.block_size)
            heads.append(bytes_of(rank)[layer][engine.tables[name][group][block], :, at])
        found.append(bytes(torch.cat(heads).flatten().tolist()))
    return found


class Pairs(unittest.TestCase):
    def start(self, layout: Layout, model: Any, name: str, unhooked: Any = (), **extra: Any) -> Computing:
        engine = Computing(layout, model, name, unhooked, transfer_mode="push", **extra)
        self.addCleanup(engine.close)
        return engine

    def pair(self, there: int = 1, here: int = 1, window: int = 0, **extra: Any) -> tuple[Computing, Computing]:
        return (
            self.start(dense(there, 32, "prefill", window), dense_model(), "prefill", **extra),
            self.start(dense(here, 16, "decode", window), dense_model(), "decode", **extra),
        )

    @contextlib.contextmanager
    def layers_each(self, count: int) -> Iterator[None]:
        """Sends `count` layers at a time, whatever that costs."""
        with mock.patch.object(Pieces, "layers_each", lambda *_: count):
            yield

    def announced(self, prefill: Computing, name: str = "r", **changed: Any) -> dict[str, Any]:
        """The parameters that a proxy sends to the decode server if it asks both servers at once."""
        known = prefill.scheduling
        assert known._directory is not None
        host, _, port = known._directory.endpoint.removeprefix("tcp://").rpartition(":")
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "prefill",
            "remote_request_id": name,
            "remote_host": host,
            "remote_port": int(port),
            "transfer_mode": "push",
            "kvferry_transfer_id": TO_PREFILL["kvferry_transfer_id"],
            **changed,
        }

    def begin(self, prefill: Computing, decode: Computing, there: Any, here: Any, tokens: int = TOKENS) -> None:
        """Gives the request to the prefill engine, and lets the decode engine announce its blocks."""
        prefill.add("r", tokens, there, dict(TO_PREFILL))
        self.assertEqual(decode.want("r", tokens, here, self.announced(prefill)), tokens)
        decode.step()

    def end(self, prefill: Computing, decode: Computing) -> None:
        """Finishes a computed request, as vLLM does; its blocks must be kept until they are written."""
        self.assertFalse(prefill.all_have("sent", "r"), "vLLM would free blocks of a request that runs")
        keep, params = prefill.finish("r")
        self.assertTrue(keep)
        assert params is not None
        self.assertEqual(params["kvferry_transfer_id"], TO_PREFILL["kvferry_transfer_id"])
        steps(prefill, decode, until=lambda: self.both_ended(prefill, decode))
        self.assertFalse(decode.invalid or any(found["failed"] for found in decode.results))

    @staticmethod
    def both_ended(prefill: Computing, decode: Computing, name: str = "r") -> bool:
        return prefill.all_have("sent", name) and decode.all_have("received", name)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Waits for a condition: the agents move bytes by themselves, and no engine steps meanwhile."""
        until = time.monotonic() + WAIT_SECONDS
        while not condition():
            self.assertLess(time.monotonic(), until, what)
            time.sleep(0.001)

    def same(self, prefill: Computing, decode: Computing, layer: str, tokens: range) -> bool:
        return tokens_of(prefill, "r", layer, tokens) == tokens_of(decode, "r", layer, tokens)

    def arrives(self, prefill: Computing, decode: Computing, layer: str, tokens: range) -> None:
        self.wait(lambda: self.same(prefill, decode, layer, tokens), f"{layer}, {tokens} did not come")

    def untouched(self, decode: Computing, layer: str, tokens: range) -> bool:
        return not any(map(any, tokens_of(decode, "r", layer, tokens)))


def names(engine: Computing) -> list[str]:
    """The layers, in order."""
    return sorted(engine.layout.ranks[0].caches)


class LayerByLayer(Pairs):
    def test_a_layer_has_arrived_before_the_next_is_computed(self) -> None:
        for there, here in ((1, 1), (2, 1), (1, 2)):
            with self.subTest(there=there, here=here), self.layers_each(1):
                self.layers_arrive(*self.pair(there, here))

    def layers_arrive(self, prefill: Computing, decode: Computing) -> None:
        self.begin(prefill, decode, [THERE], [HERE])
        every, seen = range(TOKENS), []

        def between(layer: str) -> bool:
            at = names(prefill).index(layer)
            if at < LAYERS - 1:  # the last layer goes with the end of the step
                self.arrives(prefill, decode, layer, every)
                seen.append(layer)
            for later in names(prefill)[at + 1 :]:
                self.assertTrue(self.untouched(decode, later, every), f"{later} came too early")
            return False

        prefill.step({"r": TOKENS}, between=between)
        self.assertEqual(len(seen), LAYERS - 1)
        self.end(prefill, decode)
        for layer in names(prefill):
            self.assertTrue(self.same(prefill, decode, layer, every))

    def test_short_prompts_go_as_one(self) -> None:
        prefill, decode = self.pair()
        self.begin(prefill, decode, [THERE], [HERE])
        (worker,) = prefill.workers
        assert worker._agent is not None
        with mock.patch.object(worker._agent, "push_ready", wraps=worker._agent.push_ready) as said:
            prefill.step({"r": TOKENS})
        self.assertEqual(len(said.mock_calls), 2)  # its blocks, and its end
        self.end(prefill, decode)
        for layer in names(prefill):
            self.assertTrue(self.same(prefill, decode, layer, range(TOKENS)))

    def test_a_changed_byte_is_noticed(self) -> None:
        prefill, decode = self.pair()
        self.begin(prefill, decode, [THERE], [HERE])
        prefill.step({"r": TOKENS})
        self.end(prefill, decode)
        layer = names(decode)[1]
        bytes_of(decode.layout.ranks[0])[layer][HERE[-1], 0, 0, 0] ^= 1
        self.assertFalse(self.same(prefill, decode, layer, range(TOKENS)))

    def test_two_requests_of_a_step(self) -> None:
        prefill, decode = self.pair()
        self.begin(prefill, decode, [THERE], [HERE])
        prefill.add("s", 40, [[8, 9]], {**TO_PREFILL, "kvferry_transfer_id": "cd"})
        decode.want("s", 40, [[12, 13, 14]], self.announced(prefill, "s", kvferry_transfer_id="cd"))
        decode.step()
        with self.layers_each(1):
            prefill.step({"r": TOKENS, "s": 40})
        prefill.finish("s")
        self.end(prefill, decode)
        steps(prefill, decode, until=lambda: self.both_ended(prefill, decode, "s"))
        for layer in names(prefill):
            self.assertTrue(self.same(prefill, decode, layer, range(TOKENS)))
            self.assertEqual(
                tokens_of(prefill, "s", layer, range(40)), tokens_of(decode, "s", layer, range(40))
            )

    def test_layers_that_run_again_or_in_another_order_go_at_the_end_of_the_step(self) -> None:
        """As in models with loops. The first request was written too early, which is noticed then."""
        for passes in ([0, 1, 2, 1, 2, 3], [0, 1, 1, 2, 3], [0, 1, 3, 2]):
            with self.subTest(passes=passes), self.layers_each(1):
                prefill = self.start(dense(1, 32, "prefill"), dense_model(), "prefill", passes=passes)
                decode = self.start(dense(1, 16, "decode"), dense_model(), "decode")
                self.written_too_early(prefill, decode)
                self.write_again(prefill, decode)
                prefill.close()
                decode.close()

    def written_too_early(self, prefill: Computing, decode: Computing) -> None:
        self.begin(prefill, decode, [THERE], [HERE])
        with self.assertLogs(LOGGER, "WARNING") as log:
            prefill.step({"r": TOKENS})
            prefill.finish("r")
            steps(prefill, decode, until=lambda: self.both_ended(prefill, decode))
        self.assertIn("ran again, or after later ones", "".join(log.output))
        self.assertTrue(decode.invalid)

    def write_again(self, prefill: Computing, decode: Computing) -> None:
        decode.invalid.clear()
        tables = [8, 9, 10, 11], [12, 13, 14, 15, 5, 7, 3]
        prefill.add("s", TOKENS, [tables[0]], {**TO_PREFILL, "kvferry_transfer_id": "cd"})
        decode.want("s", TOKENS, [tables[1]], self.announced(prefill, "s", kvferry_transfer_id="cd"))
        decode.step()
        prefill.step({"s": TOKENS})
        self.assertTrue(prefill.finish("s")[0])
        steps(prefill, decode, until=lambda: self.both_ended(prefill, decode, "s"))
        self.assertFalse(decode.invalid)
        for layer in names(prefill):
            self.assertEqual(*(tokens_of(engine, "s", layer, range(TOKENS)) for engine in (prefill, decode)))

    def test_nobody_has_announced_anything_yet(self) -> None:
        prefill, decode = self.pair()
        prefill.add("r", TOKENS, [THERE], dict(TO_PREFILL))
        with self.layers_each(1):
            prefill.step({"r": TOKENS})
        decode.want("r", TOKENS, [HERE], self.announced(prefill))
        self.end(prefill, decode)
        for layer in names(prefill):
            self.assertTrue(self.same(prefill, decode, layer, range(TOKENS)))


class ChunkByChunk(Pairs):
    def test_a_chunk_has_arrived_before_the_next_is_computed(self) -> None:
        """The request gets the blocks of later chunks only then; chunks end within blocks."""
        for each in (1, LAYERS):
            with self.subTest(layers_each=each), self.layers_each(each):
                prefill, decode = self.pair()
                self.begin(prefill, decode, [THERE[:2]], [HERE])
                done = 0
                for count, blocks in ((40, 2), (40, 3), (20, 4)):
                    prefill.tables["r"] = [THERE[:blocks]]
                    prefill.step({"r": count})
                    done += count
                    for layer in names(prefill):
                        self.arrives(prefill, decode, layer, range(done))
                        self.assertTrue(self.untouched(decode, layer, range(done, TOKENS)))
                self.end(prefill, decode)

    def test_a_prefix_that_is_cached_goes_with_the_first_chunk(self) -> None:
        prefill, decode = self.pair()
        self.begin(prefill, decode, [THERE], [HERE])
        prefill.requests["r"].num_computed_tokens = 0
        for layer in names(prefill):
            prefill._compute(0, layer, "r", range(64))
        prefill.requests["r"].num_computed_tokens = 64
        prefill.step({"r": 36})
        self.end(prefill, decode)
        for layer in names(prefill):
            self.assertTrue(self.same(prefill, decode, layer, range(TOKENS)))

    def test_a_prefix_that_another_request_of_the_step_computes(self) -> None:
        """vLLM's prefix cache has a block from when it is scheduled."""
        prefill, decode = self.pair()
        shared, own = range(64), range(64, TOKENS)
        prefill.add("other", 64, [THERE[:2]], None)
        self.begin(prefill, decode, [THERE], [HERE])
        prefill.requests["r"].num_computed_tokens = len(shared)

        def between(layer: str) -> bool:
            at = names(prefill).index(layer)
            if at < LAYERS - 1:
                self.arrives(prefill, decode, layer, own)
                self.arrives(prefill, decode, layer, shared)
            return False

        with self.layers_each(1):
            prefill.step({"other": len(shared), "r": len(own)}, between=between)
        self.end(prefill, decode)
        for layer in names(prefill):
            self.assertTrue(self.same(prefill, decode, layer, range(TOKENS)))

    def test_microbatches_of_a_step(self) -> None:
        """With dual batch overlap, each calls the hook of a layer."""
        prefill, decode = self.pair(microbatches=2)
        self.begin(prefill, decode, [THERE], [HERE])
        with self.layers_each(1):
            prefill.step({"r": 70})
            prefill.step({"r": TOKENS - 70})
        self.end(prefill, decode)
        for layer in names(prefill):
            self.assertTrue(self.same(prefill, decode, layer, range(TOKENS)))

    def test_a_stage_that_is_not_told_of_a_steps_end(self) -> None:
        prefill, decode = self.pair()
        self.begin(prefill, decode, [THERE], [HERE])
        (worker,) = prefill.workers
        with mock.patch.object(worker, "seal"), self.layers_each(1):
            for count in (40, 60):
                prefill.step({"r": count})
            self.end(prefill, decode)
        for layer in names(prefill):
            self.assertTrue(self.same(prefill, decode, layer, range(TOKENS)))

    def test_windows_whose_blocks_vllm_takes_away(self) -> None:
        prefill, decode = self.pair(window=32)
        groups = prefill.layout.ranks[0].specs()
        full = groups[names(prefill)[0]][0]
        window = groups[names(prefill)[1]][0]

        def tables(whole: list[int], slides: list[int]) -> list[list[int]]:
            return [whole if group == full else slides for group in range(2)]

        prefill.add("r", TOKENS, tables(THERE, [4, 6, 8, 9]), dict(TO_PREFILL))
        here = tables(HERE, [0, 0, 0, 0, 12, 13, 14])
        self.assertEqual(decode.want("r", TOKENS, here, self.announced(prefill)), TOKENS)
        decode.step()
        with self.layers_each(1):
            prefill.step({"r": 70})
            prefill.tables["r"] = tables(THERE, [0, 6, 8, 9])
            prefill.step({"r": 20})
            prefill.tables["r"] = tables(THERE, [0, 0, 8, 9])
            prefill.step({"r": 10})
        self.end(prefill, decode)
        for layer in names(prefill):
            needed = range(TOKENS - 32 if groups[layer][0] == window else 0, TOKENS)
            self.assertTrue(self.same(prefill, decode, layer, needed))
            self.assertFalse(bytes_of(decode.layout.ranks[0])[layer][0].any(), "the null block was written")


class StatesAndLatents(Pairs):
    """A model like Kimi Linear, whose states have no hook."""

    def hand_over(self, there: int, here: int, chunks: list[int]) -> tuple[Computing, Computing]:
        prefill, decode = (
            self.start(kimi.engine(tp, block, "SD", name), kimi.model(), name, kimi.STATES)
            for tp, block, name in ((there, 64, "prefill"), (here, 48, "decode"))
        )
        for content in prefill.content[1:]:  # latents are the same on all ranks
            content.update({name: prefill.content[0][name] for name in kimi.LATENTS})
        tables = [self.tables(engine, latents) for engine, latents in ((prefill, [2, 1]), (decode, [1, 2]))]
        prompt = kimi.TOKENS + 1  # the last token is left to the decode engine
        request = prefill.add("r", prompt, tables[0], dict(TO_PREFILL))
        self.assertEqual(request.num_prompt_tokens, kimi.TOKENS)
        self.assertEqual(decode.want("r", prompt, tables[1], self.announced(prefill)), kimi.TOKENS)
        decode.step()
        with self.layers_each(1):
            for count in chunks:
                prefill.step({"r": count})
        self.end(prefill, decode)
        return prefill, decode

    @staticmethod
    def tables(engine: Computing, latents: list[int]) -> list[list[int]]:
        groups = {
            group: [3] if name in kimi.STATES else latents
            for name, (group, _) in engine.layout.ranks[0].specs().items()
        }
        return [groups[group] for group in sorted(groups)]

    def test_every_cell_arrives(self) -> None:
        for there, here in ((1, 1), (2, 1), (1, 2)):
            for chunks in ([kimi.TOKENS], [30, 40]):
                with self.subTest(there=there, here=here, chunks=chunks):
                    prefill, decode = self.hand_over(there, here, chunks)
                    sent = prefill.cells("r", kimi.FIELDS, kimi.TOKENS)
                    self.assertEqual(
                        sent.keys(),
                        kimi.expected_cells(kimi.FIELDS, kimi.STATES | kimi.LATENTS, kimi.STATES),
                    )
                    self.assertEqual(decode.cells("r", kimi.FIELDS, kimi.TOKENS), sent)
                    self.assertTrue(all(map(any, sent.values())))

    def test_a_producer_whose_state_is_after_too_many_tokens_is_told(self) -> None:
        engine = self.start(kimi.engine(1, 48, "SD", "decode"), kimi.model(), "decode", kimi.STATES)
        request = a_request("r", kimi.TOKENS, self.announced(engine, remote_num_tokens=kimi.TOKENS))
        with self.assertLogs(LOGGER, "ERROR") as log:
            engine.scheduling.add(request)
        self.assertIn("a state after these cannot be stepped back", "\n".join(log.output))
        told = engine.scheduling.step(output_of())
        self.assertEqual([item.kind for item in told.instructions], [InstructionKind.NOTIFY])

    def test_a_changed_byte_is_noticed(self) -> None:
        prefill, decode = self.hand_over(1, 1, [kimi.TOKENS])
        sent = prefill.cells("r", kimi.FIELDS, kimi.TOKENS)
        for layer in (min(kimi.STATES), min(kimi.LATENTS)):
            group, _ = decode.layout.ranks[0].specs()[layer]
            page = bytes_of(decode.layout.ranks[0])[layer][decode.tables["r"][group][0]]
            page[(0,) * page.dim()] ^= 1
            self.assertNotEqual(decode.cells("r", kimi.FIELDS, kimi.TOKENS), sent)
            page[(0,) * page.dim()] ^= 1


class Ends(Pairs):
    def stop_within(self, prefill: Computing, at: int = 1) -> Callable[[str], bool]:
        """A callback that ends the prefill engine's step in the middle, after layer `at`."""

        def between(layer: str) -> bool:
            return names(prefill).index(layer) == at

        return between

    def test_the_prefill_engine_goes_in_the_middle_of_its_layers(self) -> None:
        prefill, decode = self.pair()
        self.begin(prefill, decode, [THERE], [HERE])
        with self.layers_each(1):
            prefill.step({"r": TOKENS}, between=self.stop_within(prefill))
        self.wait(lambda: self.same(prefill, decode, names(prefill)[0], range(TOKENS)), "no layer came")
        for worker in prefill.workers:
            worker.close()
        with self.assertLogs(LOGGER, "WARNING"):
            steps(decode, until=lambda: decode.all_have("received", "r"))
        (worker,) = decode.workers
        self.assertEqual(worker._jobs, {})

    def test_the_request_is_aborted_in_the_middle_of_its_chunks(self) -> None:
        prefill, decode = self.pair()
        self.begin(prefill, decode, [THERE], [HERE])
        with self.layers_each(1):
            prefill.step({"r": 40})
        keep, params = prefill.finish("r", well=False)
        self.assertEqual((keep, params), (True, None))
        with self.assertLogs(LOGGER, "WARNING"):
            steps(
                prefill,
                decode,
                until=lambda: self.both_ended(prefill, decode),
            )
        self.assertEqual(prefill.workers[0]._jobs, {})

    def test_a_prompt_of_other_tokens_is_computed_by_the_decode_engine(self) -> None:
        """As with another chat template: parameters cannot say it before the prompt is computed."""
        for changed, there, here in ((None, 1, 1), (TOKENS - 1, 1, 1), (0, 2, 1), (50, 1, 2)):
            with self.subTest(changed=changed, there=there, here=here), self.layers_each(1):
                prefill, decode = self.pair(there, here)
                prefill.add("r", TOKENS, [THERE], dict(TO_PREFILL))
                decode.want("r", TOKENS, [HERE], self.announced(prefill), changed=changed)
                decode.step()
                prefill.step({"r": TOKENS})
                prefill.finish("r")
                steps(prefill, decode, until=lambda p=prefill, d=decode: self.both_ended(p, d))
                failed = [found["failed"] for found in decode.results]
                self.assertEqual(failed, [set() if changed is None else {"r"}] * here)
                prefill.close()
                decode.close()

    def test_the_decode_engine_wants_it_no_more_and_the_request_goes_on(self) -> None:
        prefill, decode = self.pair()
        self.begin(prefill, decode, [THERE], [HERE])
        with self.layers_each(1), self.assertLogs(LOGGER, "WARNING"):
            prefill.step({"r": 40})
            self.wait(lambda: self.same(prefill, decode, names(prefill)[0], range(40)), "nothing came")
            decode.finish("r", well=False)
            steps(decode, until=lambda: decode.all_have("received", "r"))
            self.wait(lambda: bool(prefill.workers[0]._tickets) and self.over(prefill), "the push goes on")
            prefill.step({"r": 60})
        self.assertFalse(prefill.all_have("sent", "r"), "vLLM would free blocks of a request that runs")
        keep, _ = prefill.finish("r")
        self.assertTrue(keep)
        steps(prefill, until=lambda: prefill.all_have("sent", "r"))

    @staticmethod
    def over(engine: Computing) -> bool:
        """Whether an event waits to be taken."""
        agent = engine.workers[0]._agent
        assert agent is not None
        return agent.wait(0)

    def test_a_push_that_no_decode_engine_expects_ends_at_its_deadline(self) -> None:
        prefill, _ = self.pair(kv_load_deadline=1)
        prefill.add("r", TOKENS, [THERE], dict(TO_PREFILL))
        with self.layers_each(1):
            prefill.step({"r": TOKENS})
        self.assertTrue(prefill.finish("r")[0])
        self.assertFalse(prefill.all_have("sent", "r"))
        with self.assertLogs(LOGGER, "WARNING") as log:
            steps(prefill, until=lambda: prefill.all_have("sent", "r"))
        self.assertIn("request r: the deadline has passed: 0 of 1 consumers are served", "\n".join(log.output))
        self.assertEqual(prefill.workers[0]._jobs, {})

    def test_blocks_into_which_no_prefill_engine_writes_are_given_up(self) -> None:
        prefill, decode = self.pair(kv_load_deadline=1)
        decode.want("r", TOKENS, [HERE], self.announced(prefill))
        with self.assertLogs(LOGGER, "WARNING") as log:
            steps(prefill, decode, until=lambda: decode.all_have("received", "r"))
        self.assertTrue(any("request r: " in line for line in log.output), log.output)
        self.assertEqual(decode.workers[0]._jobs, {})
        self.assertTrue(self.untouched(decode, names(decode)[0], range(TOKENS)))

    def test_everything_is_cached_at_the_decode_engine(self) -> None:
        prefill, decode = self.pair()
        prefill.add("r", TOKENS, [THERE], dict(TO_PREFILL))
        self.assertEqual(decode.want("r", TOKENS, [HERE], self.announced(prefill), computed=TOKENS), 0)
        decode.step()
        with self.layers_each(1):
            prefill.step({"r": 40})
            prefill.step({"r": 60})
        self.assertFalse(prefill.all_have("sent", "r"))
        self.assertTrue(prefill.finish("r")[0])
        steps(prefill, decode, until=lambda: prefill.all_have("sent", "r"))
        self.assertTrue(self.untouched(decode, names(decode)[0], range(TOKENS)))

    def test_a_request_that_loses_its_blocks_is_not_written_any_more(self) -> None:
        prefill, decode = self.pair()
        self.begin(prefill, decode, [THERE], [HERE])
        with self.layers_each(1):
            prefill.step({"r": 40})
            prefill.requests["r"].num_computed_tokens = 0
            with self.assertLogs(LOGGER, "WARNING"):
                prefill.step(lost=["r"])
                steps(prefill, decode, until=lambda: decode.all_have("received", "r"))
            prefill.tables["r"] = [[2, 4, 6, 8]]
            prefill.step({"r": TOKENS})
        self.assertEqual(prefill.finish("r"), (False, None))
        for _ in range(3):
            prefill.step()
        self.assertFalse(prefill.all_have("sent", "r"), "vLLM has freed these blocks before")

    def test_an_id_that_is_in_use_is_refused_and_the_other_request_goes_on(self) -> None:
        prefill, decode = self.pair()
        self.begin(prefill, decode, [THERE], [HERE])
        prefill.step({"r": 40})
        prefill.add("s", 40, [[8, 9]], dict(TO_PREFILL))
        with self.assertLogs(LOGGER, "ERROR") as log:
            prefill.step({"r": 60, "s": 40})
        self.assertIn("s: PUSH: a request with this id is being pushed already", "\n".join(log.output))
        self.assertFalse(prefill.all_have("sent", "s"))
        self.assertTrue(prefill.finish("s")[0])
        self.end(prefill, decode)
        steps(prefill, until=lambda: prefill.all_have("sent", "s"))
        for layer in names(prefill):
            self.assertTrue(self.same(prefill, decode, layer, range(TOKENS)))

    def test_with_windows_a_request_that_goes_on_after_its_prompt_is_not_written_meanwhile(self) -> None:
        """With each token vLLM frees blocks in front of the window, which may not be written yet."""
        for window in (0, 32):
            with self.subTest(window=window):
                prefill, _ = self.pair(window=window)
                tables = [THERE, [8, 9, 10, 11]][: 1 + bool(window)]
                if window:
                    with self.assertLogs(LOGGER, "ERROR") as log:
                        prefill.add("r", TOKENS, tables, dict(TO_PREFILL), max_tokens=2)
                    self.assertIn("request r is computed here: max_tokens is 2; allowed", log.output[0])
                else:
                    prefill.add("r", TOKENS, tables, dict(TO_PREFILL), max_tokens=2)
                prefill.step({"r": TOKENS})
                self.assertEqual(prefill.finish("r")[0], not window)

    def test_ids_that_are_no_ids(self) -> None:
        prefill, _ = self.pair()
        with self.assertLogs(LOGGER, "ERROR") as log:
            prefill.add("r", TOKENS, [THERE], {**TO_PREFILL, "kvferry_transfer_id": "not hexadecimal"})
        self.assertIn("kvferry_transfer_id is 'not hexadecimal'", "\n".join(log.output))
        prefill.step({"r": TOKENS})
        self.assertEqual(prefill.finish("r"), (False, None))


class HowMuchAtATime(unittest.TestCase):
    def pieces(self, tokens: int, price: float) -> int:
        layout = dense(1, 16, "prefill")
        found = Pieces(layout.engine, 0, range(LAYERS))
        return found.layers_each(tokens, CostModel(0.0, 1.0, price))

    def test_pieces_are_the_root_of_time_over_price(self) -> None:
        whole = 64 * LAYERS * 2 * HEADS * SIZE * 4  # bytes, one nanosecond each
        self.assertEqual(self.pieces(64, whole), LAYERS)
        self.assertEqual(self.pieces(64, whole / 3.9), LAYERS)
        self.assertEqual(self.pieces(64, whole / 4), LAYERS // 2)
        self.assertEqual(self.pieces(64, whole / 15.9), LAYERS // 2)
        self.assertEqual(self.pieces(64, whole / 16), 1)
        self.assertEqual(self.pieces(64, 1.0), 1)

    def test_layers_are_complete_with_the_last_of_their_caches_that_calls_a_hook(self) -> None:
        config: Any = SimpleNamespace(speculative_config=None, model_config=None)
        order = LayerOrder(
            config,
            ["model.layers.0.attn", "model.layers.1.mamba", "model.layers.2.attn", "model.layers.2.indexer"],
        )
        self.assertEqual(order.layers, range(3))
        self.assertEqual(order.complete("model.layers.0.attn"), 1)
        self.assertEqual(order.complete("model.layers.2.attn"), 2)
        self.assertEqual(order.complete("model.layers.7.attn"), 0)

    def test_pieces_of_a_later_stage_have_as_many_layers(self) -> None:
        said: list[int] = []
        agent: Any = SimpleNamespace(
            peers=list, push_ready=lambda ticket, tokens, layers, **_: said.append(layers)
        )
        order: Any = SimpleNamespace(layers=range(4, 8), complete=lambda name: int(name) + 1)
        pieces: Any = SimpleNamespace(layers_each=lambda tokens, cost: 2)
        pushes = LayerPushes(agent, order, pieces, "messages")
        pushes.begin([Chunk("r", 0, TOKENS, [])], {"r": 1})
        for layer in order.layers:
            pushes.layer_done(str(layer))
        pushes.seal()
        self.assertEqual(said, [0, 6, ALL_LAYERS])

    def test_pieces_of_graphs_are_asked_for_where_layers_are_written(self) -> None:
        self.assertTrue(KvferryConnector.requires_piecewise_for_cudagraph({"transfer_mode": "push"}))
        self.assertFalse(KvferryConnector.requires_piecewise_for_cudagraph({}))


class Devices(Pairs):
    def on_a_device(self, prefill: Computing) -> list[Event]:
        """The queue of the device on which the engine computes from here on."""
        device = Device()
        (worker,) = prefill.workers
        assert worker._layers is not None
        worker._layers._marks = DeviceMarks(device, device.NUMBER)
        return device.events

    def next_arrives(self, prefill: Computing, decode: Computing, events: list[Event]) -> None:
        """Another request, whose work the device does, arrives without a warning."""
        prefill.add("s", 40, [[8, 9]], {**TO_PREFILL, "kvferry_transfer_id": "cd"})
        decode.want("s", 40, [[12, 13, 14]], self.announced(prefill, "s", kvferry_transfer_id="cd"))
        decode.step()
        done = len(events)
        prefill.step({"s": 40})
        for event in events[done:]:
            event.happen()
        self.assertTrue(prefill.finish("s")[0])
        with self.assertNoLogs(LOGGER, "WARNING"):
            steps(prefill, decode, until=lambda: self.both_ended(prefill, decode, "s"))
        for layer in names(prefill):
            self.assertEqual(
                tokens_of(prefill, "s", layer, range(40)), tokens_of(decode, "s", layer, range(40))
            )

    def test_a_load_begins_once_the_device_has_filled_its_blocks_with_zeros(self) -> None:
        prefill, decode = self.pair()
        device = Device()
        (worker,) = decode.workers
        worker._device = device
        prefill.add("r", TOKENS, [THERE], dict(TO_PREFILL))
        decode.want("r", TOKENS, [HERE], self.announced(prefill))

        decode.step(to_zero=HERE)
        (filled,) = device.events
        prefill.step({"r": TOKENS})
        time.sleep(0.3)  # if the load had begun, something would have come
        for layer in names(decode):
            self.assertTrue(self.untouched(decode, layer, range(TOKENS)))
        filled.happen()
        self.end(prefill, decode)
        for layer in names(prefill):
            self.assertTrue(self.same(prefill, decode, layer, range(TOKENS)))
        decode.step()  # fills nothing
        self.assertEqual(len(device.events), 1)

    def test_layers_that_a_device_computes_later_are_waited_for(self) -> None:
        prefill, decode = self.pair()
        events = self.on_a_device(prefill)
        self.begin(prefill, decode, [THERE], [HERE])
        with self.layers_each(1):
            prefill.step({"r": TOKENS})
        self.assertEqual(len(events), 1 + LAYERS)  # the blocks, each layer but the last, the step
        for i, event in enumerate(events):
            for layer in names(prefill)[max(0, i - 1) :]:
                self.assertTrue(self.untouched(decode, layer, range(TOKENS)), f"{layer} before event {i}")
            event.happen()
            if 0 < i < LAYERS:
                layer = names(prefill)[i - 1]
                self.arrives(prefill, decode, layer, range(TOKENS))
        self.end(prefill, decode)

    def test_a_device_that_fails_fails_the_request_by_name_and_the_next_one_arrives(self) -> None:
        prefill, decode = self.pair()
        before = pipes()
        events = self.on_a_device(prefill)
        self.begin(prefill, decode, [THERE], [HERE])
        with self.layers_each(1):
            prefill.step({"r": TOKENS})
        for event in events[:2]:
            event.happen()
        self.arrives(prefill, decode, names(prefill)[0], range(TOKENS))
        with self.assertLogs(LOGGER, "WARNING") as log:
            for event in events[2:]:
                event.happen(RuntimeError("CUDA error: an illegal memory access\nCompile with `TORCH_USE`"))
            self.assertTrue(prefill.finish("r")[0])
            steps(prefill, decode, until=lambda: self.both_ended(prefill, decode))
        why = "the event will never happen: the other end of its file descriptor was closed"
        for said in (
            "request r: the device failed before it had computed the request: RuntimeError: CUDA error: an "
            f"illegal memory access ({why})",  # at the prefill engine
            f"request r: prefill rank 0: {why}",  # at the decode engine
        ):
            self.assertIn(f"WARNING:{LOGGER}:{said}", log.output)
        for layer in names(prefill)[1:]:
            self.assertTrue(self.untouched(decode, layer, range(TOKENS)))

        self.assertEqual(len(events), 1 + LAYERS)
        self.next_arrives(prefill, decode, events)
        (worker,) = prefill.workers
        assert worker._layers is not None
        worker._layers.close()
        self.assertEqual(pipes(), before)

    def test_no_descriptor_is_free_to_wait_for_the_device_and_only_that_request_fails(self) -> None:
        for at in (0, 2, LAYERS):  # with the blocks, after a layer, with the end of the step
            with self.subTest(at=at):
                self.run_out_of_descriptors(at, *self.pair())

    def run_out_of_descriptors(self, at: int, prefill: Computing, decode: Computing) -> None:
        events = self.on_a_device(prefill)
        self.begin(prefill, decode, [THERE], [HERE])
        numbers, pipe = itertools.count(), os.pipe

        def pipe_or_none() -> tuple[int, int]:
            if next(numbers) == at:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return pipe()

        with self.assertLogs(LOGGER, "WARNING") as log:
            with self.layers_each(1), mock.patch("os.pipe", pipe_or_none):
                prefill.step({"r": TOKENS})
            self.assertEqual(next(numbers), at + 1, "it goes on although the push is over")
            for event in events:
                event.happen()
            self.assertTrue(prefill.finish("r")[0])
            steps(prefill, decode, until=lambda: self.both_ended(prefill, decode))
        said = "request r: the device cannot be waited for: [Errno 24] Too many open files"
        self.assertTrue(any(said in line for line in log.output), log.output)

        self.next_arrives(prefill, decode, events)


def pipes() -> int:
    """How many ends of pipes this process has open."""
    found = 0
    for path in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the folder's own
            found += os.readlink(path).startswith("pipe:")
    return found


class Commanded(Pairs):
    def test_what_is_written_while_it_is_computed_is_not_handed_over(self) -> None:
        prefill, decode = self.pair(local_commands=True)
        self.begin(prefill, decode, [THERE], [HERE])
        prefill.step({"r": 64})
        directory = prefill.scheduling._directory
        assert directory is not None
        (reply,) = ask(Contact("prefill", directory.endpoint), HAND_OVER, "r", timeout=WAIT_SECONDS)
        self.assertEqual(reply.status, Status.NOT_FOUND)
        self.assertIn("request r is still being computed", reply.detail)
        prefill.step({"r": TOKENS - 64})
        self.end(prefill, decode)

    def test_what_is_written_while_it_is_computed_may_end_when_the_engine_drains(self) -> None:
        prefill, decode = self.pair(local_commands=True)
        self.begin(prefill, decode, [THERE], [HERE])
        prefill.step({"r": 40})
        directory = prefill.scheduling._directory
        assert directory is not None
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask, Contact("prefill", directory.endpoint), DRAIN, timeout=WAIT_SECONDS)
            self.wait(lambda: prefill.workers[0].report().drains, "it has no command")  # type: ignore[union-attr]
            prefill.step()
            late = prefill.add("s", 40, [[8, 9]], {**TO_PREFILL, "kvferry_transfer_id": "cd"})
            with self.assertLogs(LOGGER, "WARNING") as log:
                self.assertEqual(prefill.scheduling.match(late, 0), (0, False))
            self.assertIn(f"request s is not kept for peers: {DRAINS}", "\n".join(log.output))
            prefill.step({"r": 60, "s": 40})
            self.assertEqual(prefill.finish("s"), (False, {REFUSED: DRAINS}))
            self.assertFalse(asked.done())
            self.end(prefill, decode)
            self.assertEqual([reply.status for reply in asked.result(WAIT_SECONDS)], [Status.OK])
        for layer in names(prefill):
            self.assertTrue(self.same(prefill, decode, layer, range(TOKENS)))


if __name__ == "__main__":
    unittest.main()
