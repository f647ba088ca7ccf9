"""Conversations without servers: only the tokens that an answer has added go back to the prefill server.

The decode server keeps an answer (`bidirectional_kv_xfer`), and says where it is; the prefill server that gets
the next turn reads what its own prefix cache lacks, computes the new tokens, and hands over. The tests count
moved bytes, and compare cell by cell; blocks have 32 tokens there and 16 here.
"""

from __future__ import annotations

import logging
import unittest
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import halves
from connector_test import HERE, LOGGER, THERE, Pairs
from halves import HEADS, LAYERS, SIZE, Half, a_request, blocks_of, output_of, steps

from kvferry.scheduler import InstructionKind
from kvferry.vllm.scheduling import Scheduling

OTHERS = [1, 3, 5, 7, 12, 13, 14]  # blocks other than HERE, which are still kept
TOKENS = 60
CACHED_THERE, CACHED_HERE = 32, 64  # whole cached blocks: of the prompt there, of the answer here
TOKEN_BYTES = LAYERS * HEADS * 2 * SIZE * 4
ANSWERED = TOKENS + 20  # the last token is sampled, but not computed
NEXT = ANSWERED + 20


def bytes_read(half: Half) -> float:
    stats = half.worker.take_stats()
    return stats.data["bytes"] if stats else 0


class Turns(Pairs):
    def start(self, **extra: Any) -> tuple[Half, Half]:
        """Starts two engines, and makes a first turn: its prompt is handed over and answered."""
        prefill = self.engine("prefill", 32, bidirectional_kv_xfer=True, **extra)
        decode = self.engine("decode", 16, blocks=32, bidirectional_kv_xfer=True)
        self.write(prefill, THERE, range(TOKENS))
        params = prefill.serve("one-p", TOKENS, THERE)
        self.assertTrue(params["do_remote_prefill"])
        self.params = self.answer(prefill, decode, "one", TOKENS, params, 0, ANSWERED)
        return prefill, decode

    @staticmethod
    def write(half: Half, blocks: list[int], tokens: range) -> None:
        for layer in range(LAYERS):
            half.write(layer, blocks, tokens)

    def same(self, half: Half, blocks: list[int], tokens: int) -> None:
        for layer in range(LAYERS):
            self.assertEqual(half.wrong(layer, blocks, range(tokens)), 0)

    def answer(
        self,
        prefill: Half,
        decode: Half,
        name: str,
        tokens: int,
        params: Any,
        cached: int,
        end: int,
        blocks: list[int] = HERE,
        **how: Any,
    ) -> Any:
        """Lets the decode server load a prompt, answer, and end; returns what a proxy gets for the next
        turn."""
        request = a_request(name, tokens, params)
        decode.scheduling.add(request)
        load, _ = decode.scheduling.match(request, cached)
        self.assertEqual(load, tokens - cached)
        decode.scheduling.allocated(request, blocks_of(blocks), load)
        steps(prefill, decode, until=lambda: name in decode.received and f"{name}-p" in prefill.sent)
        self.same(decode, blocks, tokens)
        self.write(decode, blocks, range(tokens, end - 1))
        request.num_computed_tokens, request.num_tokens = how.get("computed", end - 1), end
        request.all_token_ids = list(range(end))
        keep, found = decode.scheduling.finished(request, [blocks], how.get("well", True))
        self.assertEqual(keep, how.get("kept", True))
        return found

    def turn(self, prefill: Half, cached: int, params: Any = None, **changed: Any) -> tuple[Any, int]:
        """The next turn has arrived at the prefill server; it loads what it needs of the answer."""
        request = a_request("two-p", NEXT, dict(params or self.params))
        vars(request).update(changed)
        prefill.scheduling.add(request)
        load, _ = prefill.scheduling.match(request, cached)
        prefill.scheduling.allocated(request, blocks_of(THERE), load)
        return request, load

    def finish(self, prefill: Half, request: Any) -> Any:
        request.num_computed_tokens = NEXT
        keep, params = prefill.scheduling.finished(request, [THERE], True)
        self.assertTrue(keep)
        return params


class Conversations(Turns):
    def test_the_last_answer_is_named_when_the_next_prefill_is_asked(self) -> None:
        self.start()
        self.assertEqual(
            {
                name: self.params[name]
                for name in ("do_remote_prefill", "do_remote_decode", "remote_num_tokens")
            },
            {"do_remote_prefill": False, "do_remote_decode": True, "remote_num_tokens": ANSWERED - 1},
        )
        self.assertEqual((self.params["remote_engine_id"], self.params["transfer_mode"]), ("decode", "pull"))

    def test_only_what_is_new_moves_there_and_back(self) -> None:
        for mode in ("pull", "push"):
            with self.subTest(mode):
                self.go_there_and_back(*self.start(transfer_mode=mode), mode)

    def go_there_and_back(self, prefill: Half, decode: Half, mode: str) -> None:
        bytes_read(prefill), bytes_read(decode)
        request, load = self.turn(prefill, CACHED_THERE)
        self.assertEqual(load, ANSWERED - 1 - CACHED_THERE)
        steps(prefill, decode, until=lambda: "two-p" in prefill.received and "one" in decode.sent)
        self.same(prefill, THERE, ANSWERED - 1)
        self.assertEqual(bytes_read(prefill), load * TOKEN_BYTES)
        self.write(prefill, THERE, range(ANSWERED - 1, NEXT))
        params = self.finish(prefill, request)
        self.assertTrue(params["do_remote_prefill"])
        self.assertEqual(params["transfer_mode"], mode)
        self.answer(prefill, decode, "two", NEXT, params, CACHED_HERE, NEXT + 4)
        moved = bytes_read(decode) if mode == "pull" else self.written(prefill)
        self.assertEqual(moved, (NEXT - CACHED_HERE) * TOKEN_BYTES)

    @staticmethod
    def written(half: Half) -> float:
        stats = half.worker.take_stats()
        return stats.data["written_bytes"] if stats else 0

    def test_an_answer_that_is_cached_there_is_let_go_of(self) -> None:
        prefill, decode = self.start()
        bytes_read(prefill)
        _, load = self.turn(prefill, ANSWERED - 1)
        self.assertEqual(load, 0)
        steps(prefill, decode, until=lambda: "one" in decode.sent)
        self.assertEqual(bytes_read(prefill), 0)

    def test_a_step_too_many_is_not_said_to_be_computed(self) -> None:
        prefill, decode = self.start()
        self.write(prefill, THERE, range(TOKENS))
        params = prefill.serve("more-p", TOKENS, THERE)
        found = self.answer(prefill, decode, "more", TOKENS, params, 0, ANSWERED, OTHERS, computed=ANSWERED)
        self.assertEqual(found["remote_num_tokens"], ANSWERED - 1)

    def test_an_answer_that_was_broken_off_is_not_kept(self) -> None:
        prefill, decode = self.start()
        params = prefill.serve("more-p", TOKENS, THERE)
        found = self.answer(
            prefill, decode, "more", TOKENS, params, 0, ANSWERED, OTHERS, well=False, kept=False
        )
        self.assertIsNone(found)

    def test_an_answer_is_kept_for_as_long_as_it_is_said(self) -> None:
        prefill, decode = self.start()
        prefill_request, _ = self.turn(prefill, ANSWERED - 1)
        steps(prefill, decode, until=lambda: "one" in decode.sent)
        self.write(prefill, THERE, range(NEXT))
        params = self.finish(prefill, prefill_request)
        self.answer(prefill, decode, "two", NEXT, params, CACHED_HERE, NEXT + 4)
        (item,) = (item for item in decode.step().instructions if item.kind == InstructionKind.HOLD)
        self.assertEqual(item.deadline, 480)

    def test_without_the_setting_nothing_is_kept(self) -> None:
        prefill, decode = self.pair()
        self.write(prefill, THERE, range(TOKENS))
        params = prefill.serve("one-p", TOKENS, THERE)
        self.assertIsNone(self.answer(prefill, decode, "one", TOKENS, params, 0, ANSWERED, kept=False))

    def test_a_turn_that_cannot_be_found_is_computed_and_handed_over(self) -> None:
        prefill, decode = self.start()
        with self.assertLogs(LOGGER, logging.ERROR) as log:
            request, load = self.turn(prefill, CACHED_THERE, {**self.params, "remote_port": "none"})
        self.assertIn("the turn before is computed again: remote_port is 'none'", "\n".join(log.output))
        self.assertEqual(load, 0)
        self.write(prefill, THERE, range(NEXT))
        params = self.finish(prefill, request)
        self.answer(prefill, decode, "two", NEXT, params, 0, NEXT + 4, OTHERS)

    def test_an_answer_of_other_tokens_is_not_read(self) -> None:
        """A proxy knows texts: a text may become other tokens than those that were generated."""
        same = list(range(NEXT))
        image = SimpleNamespace(identifier="an image", mm_position=SimpleNamespace(offset=3))
        others: tuple[dict[str, Any], ...] = (
            {"all_token_ids": [*same[: ANSWERED - 2], 7, *same[ANSWERED - 1 :]]},
            {"all_token_ids": same[: ANSWERED - 2], "num_prompt_tokens": ANSWERED - 2},
            {"lora_request": SimpleNamespace(lora_name="adapter")},
            {"cache_salt": "another"},
            {"mm_features": [image]},
            {"prompt_embeds": "embeddings", "all_token_ids": [0] * NEXT},
        )
        for changed in others:
            with self.subTest(changed=list(changed)):
                prefill, decode = self.start()
                with self.assertLogs(LOGGER, logging.INFO) as log:
                    request, load = self.turn(prefill, CACHED_THERE, **changed)
                self.assertEqual(load, 0)
                self.finish(prefill, request)
                # It is let go of, because nobody will ask for it again.
                steps(prefill, decode, until=lambda decode=decode: "one" in decode.sent)
                self.assertIn("does not go on with the tokens of the turn before", " ".join(log.output))
        prefill, _ = self.start()
        _, load = self.turn(prefill, CACHED_THERE, {**self.params, "kvferry_content": None})
        self.assertEqual(load, 0)
        image.mm_position.offset = ANSWERED - 1  # behind what was kept
        prefill, _ = self.start()
        _, load = self.turn(prefill, CACHED_THERE, mm_features=[image])
        self.assertEqual(load, ANSWERED - 1 - CACHED_THERE)

    def test_a_turn_is_read_where_the_setting_says_so(self) -> None:
        self.start()
        asked = self.turn(self.engine("other", 32), CACHED_THERE)
        self.assertEqual(asked[1], 0)

    def test_answers_of_models_with_states_are_not_kept(self) -> None:
        with mock.patch.object(Scheduling, "_has_state", property(lambda _: True)):
            prefill, decode = self.pair(bidirectional_kv_xfer=True)
            self.assertFalse(decode.scheduling._keeps_turns)
            said: Any = SimpleNamespace(request_id="r")
            self.assertIsNone(prefill.scheduling._turn_before(said, {"remote_request_id": "r"}))


class GivingWay(Turns):
    """The decode server keeps two answers, of seven blocks of 16 tokens each; other requests lack blocks."""

    def setUp(self) -> None:
        super().setUp()
        self.prefill, self.decode = self.start()
        self.write(self.prefill, THERE, range(TOKENS))
        self.answer_again("more", OTHERS)
        self.decode.step()
        self.free = 0
        pool = SimpleNamespace(get_num_free_blocks=lambda: self.free)
        blocks: Any = SimpleNamespace(block_pool=pool, coordinator=SimpleNamespace(single_type_managers=[]))
        self.decode.scheduling.bind(blocks)

    def ask(self, tokens: int) -> None:
        """vLLM looks at a request that another engine knows nothing of, and has no blocks for it."""
        self.assertEqual(self.decode.scheduling.match(a_request("new", tokens, None), 0), (0, False))

    def leaving(self, runs: int = 0) -> list[str]:
        """Makes a step in which so many tokens are computed; returns the answers that give way."""
        scheduled = output_of(compute={"another": runs} if runs else None)
        with mock.patch.object(halves, "output_of", lambda **_: scheduled):
            step = self.decode.step()
        kinds = (InstructionKind.CANCEL, InstructionKind.HOLD)
        return [item.request.id.decode() for item in step.instructions if (item.kind, item.cancels) == kinds]

    def test_the_oldest_gives_way_to_a_request_that_waits(self) -> None:
        self.ask(16)
        self.assertEqual(self.leaving(), ["one"])
        steps(self.decode, until=lambda: "one" in self.decode.sent)
        self.assertNotIn("more", self.decode.sent)

    def test_as_many_give_way_as_have_the_blocks(self) -> None:
        for free, leave in ((0, ["one", "more"]), (1, ["one"]), (7, ["one"]), (8, [])):
            with self.subTest(free=free):
                self.free = free
                self.ask(8 * 16)
                self.assertEqual(self.leaving(runs=1), leave)
                self.doCleanups()
                self.setUp()

    def test_those_that_leave_count_until_they_have_left(self) -> None:
        self.ask(80)
        with mock.patch.object(self.decode.worker, "start"):  # a worker that does not carry it out yet
            self.assertEqual(self.leaving(), ["one"])
            self.ask(7 * 16)
            self.assertEqual(self.leaving(), [])
            self.ask(7 * 16 + 1)
            self.assertEqual(self.leaving(), ["more"])

    def test_what_runs_may_free_blocks_and_what_does_not_run_cannot(self) -> None:
        self.free = 100  # which vLLM keeps for other requests
        self.ask(96)
        self.assertEqual(self.leaving(runs=1), [])
        self.ask(96)
        self.assertEqual(self.leaving(), ["one"])

    def test_a_request_that_has_its_blocks_takes_none(self) -> None:
        self.ask(96)
        request = a_request("new", 96, None)
        self.decode.scheduling.allocated(request, blocks_of(OTHERS), 0)
        self.assertEqual(self.leaving(), [])
        self.assertEqual(self.leaving(), [])

    def test_a_request_that_runs_is_helped_before_another_loses_its_blocks(self) -> None:
        for name in ("one", "more"):
            self.assertTrue(self.decode.scheduling.gives_way())
            self.assertEqual(self.leaving(runs=1), [name])
            steps(self.decode, until=lambda name=name: name in self.decode.sent)
        self.assertFalse(self.decode.scheduling.gives_way())

    def test_a_reset_lets_go_of_all_answers_that_are_whole(self) -> None:
        self.free = 100
        self.answer_again("last", range(16, 23))
        self.assertEqual(self.leaving(), [])  # the workers are told to keep the last
        self.assertFalse(self.decode.scheduling.resets)
        self.decode.scheduling.reset()
        self.assertTrue(self.decode.scheduling.resets)
        self.assertEqual(self.leaving(), ["one", "more", "last"])
        steps(self.decode, until=lambda: not self.decode.scheduling.resets)
        self.assertLessEqual({"one", "more", "last"}, self.decode.sent)
        self.answer_again("later", range(23, 30))
        self.assertEqual(self.leaving(), [])

    def test_an_answer_that_the_workers_do_not_keep_yet_is_outdated_too(self) -> None:
        self.free = 100
        self.answer_again("last", range(16, 23))
        self.decode.scheduling.reset()
        self.assertEqual(self.leaving(), ["one", "more"])
        self.assertEqual(self.leaving(), ["last"])

    def answer_again(self, name: str, blocks: Iterable[int]) -> None:
        """Another answer, which the workers keep from the next step on."""
        params = self.prefill.serve(f"{name}-p", TOKENS, THERE)
        self.answer(self.prefill, self.decode, name, TOKENS, params, 0, ANSWERED, list(blocks))

    def test_the_next_turn_of_one_that_has_left_is_computed(self) -> None:
        self.ask(16)
        self.assertEqual(self.leaving(), ["one"])
        steps(self.decode, until=lambda: "one" in self.decode.sent)
        request, load = self.turn(self.prefill, CACHED_THERE)
        self.assertGreater(load, 0)
        steps(self.prefill, self.decode, until=lambda: "two-p" in self.prefill.received)
        self.assertTrue(self.prefill.invalid)
        self.write(self.prefill, THERE, range(NEXT))
        params = self.finish(self.prefill, request)
        self.answer(self.prefill, self.decode, "two", NEXT, params, 0, NEXT + 4)


if __name__ == "__main__":
    unittest.main()
