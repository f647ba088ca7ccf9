"""A drain as vLLM's scheduler knows it: what it has accepted for peers is computed and kept, nothing else."""

from __future__ import annotations

import logging
import math
import time
import unittest
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest import mock

from commands_test import HERE, LOGGER, PATIENCE, THERE, TOKENS, Engines, place, tell
from halves import LAYERS, Half, a_request, blocks_of, output_of, steps
from many_ranks import ManyRanks

from kvferry.commands import DRAIN, RESUME, Reply, ask
from kvferry.errors import Status
from kvferry.vllm import draining
from kvferry.vllm.commands import LATE
from kvferry.vllm.draining import DRAINS, REFUSED

TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
OTHER = [8, 9, 10, 11]  # further blocks of the prefill engine


class Scheduled(Engines):
    """Requests come to a prefill engine as vLLM's scheduler has them."""

    def arrives(self, prefill: Any, name: str = "r") -> Any:
        """A request that is to be computed for peers."""
        request = a_request(name, TOKENS, dict(TO_PREFILL))
        prefill.scheduling.add(request)
        return request

    def is_scheduled(self, prefill: Any, request: Any) -> bool:
        """Whether vLLM schedules the request in this step; otherwise it asks again in the next one."""
        tokens, waits = prefill.scheduling.match(request, 0)
        self.assertIn((tokens, waits), ((0, False), (None, False)))
        return tokens is not None

    def schedule(self, prefill: Any, name: str = "r") -> Any:
        """A request that comes, and is scheduled when the workers have reported."""
        request = self.arrives(prefill, name)
        if not self.is_scheduled(prefill, request):
            prefill.step()
            self.assertTrue(self.is_scheduled(prefill, request), "after a report it is known")
        return request

    def finish(self, prefill: Any, request: Any, blocks: list[int] = THERE, well: bool = True) -> Any:
        """vLLM has computed the request; returns the parameters of its answer."""
        request.num_computed_tokens = TOKENS
        keep, params = prefill.scheduling.finished(request, [blocks], well)
        self.assertEqual(keep, params is not None and REFUSED not in params)
        return params

    def is_refused(self, prefill: Any, name: str) -> None:
        """A request that comes is computed for nobody else, and its answer says why."""
        with self.assertLogs(LOGGER, logging.WARNING) as log:
            request = self.schedule(prefill, name)
        self.assertIn(f"request {name} is not kept for peers: {DRAINS}", "\n".join(log.output))
        self.assertEqual(self.finish(prefill, request), {REFUSED: DRAINS})
        self.assertEqual(prefill.scheduling.finished(request, [THERE], True), (False, None))  # it is forgotten

    def drain(self, prefill: Half, **options: Any) -> Future[Reply]:
        """Lets another thread drain an engine that computes; returns when its scheduler's half knows."""
        asked = self.begin_drain(prefill, **options)
        prefill.step()
        self.assertTrue(prefill.scheduling._accepting.drains)
        return asked


class Idle(Scheduled):
    """vLLM has not stepped since the drain."""

    def test_the_first_request_after_it_is_refused(self) -> None:
        prefill, _ = self.pair()
        self.assertEqual(tell(prefill, DRAIN).status, Status.OK)
        for name in ("r", "q"):
            self.is_refused(prefill, name)
        prefill.step()
        self.assertEqual((prefill.worker._jobs, prefill.sent), ({}, set()))

    def test_it_accepts_requests_again(self) -> None:
        prefill, decode = self.pair()
        self.assertEqual(tell(prefill, DRAIN).status, Status.OK)
        self.is_refused(prefill, "r")
        self.assertEqual(tell(prefill, RESUME).status, Status.OK)
        with mock.patch.object(draining, "CURRENT_SECONDS", 0.0):
            request = self.schedule(prefill, "q")
        for layer in range(LAYERS):
            prefill.write(layer, THERE, range(TOKENS))
        params = self.finish(prefill, request)
        prefill.step()
        self.load(decode, params, "q")
        self.assert_loaded(decode)

    def test_a_request_waits_for_one_report_and_no_longer(self) -> None:
        prefill, _ = self.pair()
        request = self.arrives(prefill)
        for _ in range(3):
            self.assertFalse(self.is_scheduled(prefill, request))
        prefill.step()
        self.assertTrue(self.is_scheduled(prefill, request))
        self.assertTrue(self.is_scheduled(prefill, request))  # again, if it is preempted

    def test_it_waits_for_none_where_vllm_has_just_stepped(self) -> None:
        prefill, _ = self.pair()
        with mock.patch.object(draining, "CURRENT_SECONDS", PATIENCE):
            prefill.step()
            self.assertTrue(self.is_scheduled(prefill, self.arrives(prefill)))
        with mock.patch.object(draining, "CURRENT_SECONDS", 0.0):
            self.assertFalse(self.is_scheduled(prefill, self.arrives(prefill, "q")))

    def test_it_waits_for_none_where_nobody_may_give_commands(self) -> None:
        prefill, _ = self.pair(local_commands=False)
        self.assertTrue(self.is_scheduled(prefill, self.arrives(prefill)))
        self.assertIsNone(prefill.worker.report())


class Computing(Scheduled):
    """vLLM computes a request for peers when the drain begins."""

    def test_it_is_kept_and_handed_over_and_others_are_refused(self) -> None:
        for mode in ("pull", "push"):
            with self.subTest(mode):
                prefill, decode = self.pair(transfer_mode=mode)
                request = self.schedule(prefill)
                asked = self.drain(prefill, deadline=PATIENCE)
                self.is_refused(prefill, "q")
                self.assertFalse(asked.done())
                for layer in range(LAYERS):
                    prefill.write(layer, THERE, range(TOKENS))
                params = self.finish(prefill, request)
                prefill.step()
                self.assertEqual(len(prefill.worker._jobs), 1)
                self.is_refused(prefill, "p")
                self.load(decode, params)
                self.assertEqual(asked.result(PATIENCE), Reply(Status.OK, "", ()))
                self.assert_loaded(decode)

    def test_it_is_kept_though_the_command_comes_between_two_steps(self) -> None:
        """The scheduler's half has accepted it, and the worker does not know yet."""
        prefill, decode = self.pair()
        request = self.arrives(prefill)
        prefill.step()
        self.assertTrue(self.is_scheduled(prefill, request))
        commands = prefill.worker._commands
        assert commands is not None
        commands.computes(False)  # what a step has said in which the request was not there
        asked = self.begin_drain(prefill, deadline=PATIENCE)
        time.sleep(draining.QUIET_SECONDS / 2)
        prefill.step()  # it is computed from here on
        time.sleep(2 * draining.QUIET_SECONDS)
        self.assertFalse(asked.done())
        for layer in range(LAYERS):
            prefill.write(layer, THERE, range(TOKENS))
        params = self.finish(prefill, request)
        prefill.step()
        self.load(decode, params)
        self.assertEqual(asked.result(PATIENCE), Reply(Status.OK, "", ()))
        self.assert_loaded(decode)

    def test_it_is_kept_though_the_command_comes_while_its_step_runs(self) -> None:
        prefill, _ = self.pair()
        request = self.schedule(prefill)
        step = prefill.scheduling.step(output_of())
        prefill.worker.give_up(step)
        commands = prefill.worker._commands
        assert commands is not None
        commands._stepped = -math.inf  # it takes long
        asked = self.begin_drain(prefill, deadline=PATIENCE)
        time.sleep(0.2)
        self.assertFalse(asked.done())
        prefill.worker.start(step)
        self.assertNotIn(REFUSED, self.finish(prefill, request))
        prefill.step()
        self.assertEqual(len(prefill.worker._jobs), 1)
        self.assertEqual(tell(prefill, RESUME).status, Status.OK)

    def test_a_drain_of_an_engine_that_goes_on_stepping_begins(self) -> None:
        prefill, _ = self.pair()
        prefill.step()
        asked = self.begin_drain(prefill, deadline=PATIENCE)
        begun = time.monotonic()
        while not asked.done():
            prefill.step()
            self.assertLess(time.monotonic() - begun, PATIENCE / 2)
        self.assertEqual(asked.result(), Reply(Status.OK, "", ()))

    def test_the_last_of_several_lets_the_drain_end(self) -> None:
        prefill, _ = self.pair()
        requests = [self.schedule(prefill, name) for name in ("r", "q")]
        asked = self.drain(prefill, deadline=PATIENCE)
        for request in requests:
            time.sleep(0.05)
            prefill.step()
            self.assertFalse(asked.done())
            self.finish(prefill, request, well=False)  # aborted
        prefill.step()
        self.assertEqual(asked.result(PATIENCE), Reply(Status.OK, "", ()))

    def test_it_need_not_wait_for_a_refused_request(self) -> None:
        prefill, _ = self.pair()
        request = self.schedule(prefill)
        asked = self.drain(prefill, deadline=PATIENCE)
        with self.assertLogs(LOGGER, logging.WARNING):
            refused = self.schedule(prefill, "q")
        self.finish(prefill, request, well=False)
        prefill.step()
        self.assertEqual(asked.result(PATIENCE / 2).status, Status.OK)
        self.assertEqual(self.finish(prefill, refused), {REFUSED: DRAINS})

    def test_what_is_not_computed_in_time_is_not_kept(self) -> None:
        prefill, _ = self.pair()
        request = self.schedule(prefill)
        begun = time.monotonic()
        reply = tell(prefill, DRAIN, deadline=0.3)
        self.assertGreaterEqual(time.monotonic() - begun, 0.3)
        self.assertEqual((reply.status, reply.detail), (Status.TIMEOUT, LATE))
        self.assertNotIn(REFUSED, self.finish(prefill, request))
        with self.assertLogs(LOGGER, logging.ERROR) as log:
            prefill.step()
        self.assertIn("request r: HOLD: the agent drains", "\n".join(log.output))
        self.assertEqual(prefill.sent, {"r"})
        self.assertEqual(tell(prefill, DRAIN), Reply(Status.OK, "it had drained before", ()))

    def test_what_is_kept_already_is_cancelled_with_it(self) -> None:
        prefill, _ = self.pair()
        self.keep(prefill, "q")
        self.schedule(prefill)
        prefill.step()
        reply = tell(prefill, DRAIN, deadline=0.1)
        self.assertEqual(reply.status, Status.TIMEOUT)
        self.assertIn(LATE, reply.detail)
        self.assertIn("1 requests were cancelled", reply.detail)

    def test_a_drain_that_is_taken_back_refuses_nothing_more(self) -> None:
        prefill, decode = self.pair()
        request = self.schedule(prefill)
        asked = self.drain(prefill, deadline=PATIENCE)
        self.assertEqual(tell(prefill, RESUME).status, Status.OK)
        self.assertEqual(asked.result(PATIENCE), Reply(Status.CANCELLED, "it was resumed", ()))
        prefill.step()
        other = self.schedule(prefill, "q")
        for each, name, blocks in ((request, "r", THERE), (other, "q", OTHER)):
            for layer in range(LAYERS):
                prefill.write(layer, blocks, range(TOKENS))
            params = self.finish(prefill, each, blocks)
            prefill.step()
            self.load(decode, params, name)
            self.assert_loaded(decode)

    def test_an_engine_that_ends_keeps_the_time_of_its_end(self) -> None:
        prefill, _ = self.pair()
        self.schedule(prefill)
        asked = self.drain(prefill, deadline=PATIENCE)
        prefill.worker.close()
        self.assertEqual(asked.result(PATIENCE).status, Status.OK)


class Both(Scheduled):
    """An engine that computes for peers and loads from them."""

    def test_a_load_that_comes_while_it_drains_fails_at_once(self) -> None:
        one, other = self.pair()
        self.schedule(one)
        asked = self.drain(one, deadline=PATIENCE)
        params = other.serve("s", TOKENS, HERE)
        other.step()
        request = a_request("s", TOKENS, params)
        one.scheduling.add(request)
        self.assertEqual(one.scheduling.match(request, 0), (TOKENS, True))
        with self.assertLogs(LOGGER, logging.ERROR) as log:
            one.scheduling.allocated(request, blocks_of(OTHER), TOKENS)
        self.assertIn(f"request s: {DRAINS}", "\n".join(log.output))
        one.step()
        self.assertEqual((one.received, one.failed), ({"s"}, {"s"}))
        self.assertEqual(one.scheduling.match(request, 0), (0, False))  # vLLM computes it
        self.assertEqual(one.scheduling.finished(request, [OTHER], True), (False, None))
        self.assertFalse(asked.done())
        self.assertEqual(tell(one, RESUME).status, Status.OK)

    def test_an_answer_that_ends_while_it_drains_is_not_kept(self) -> None:
        prefill, decode = self.pair(bidirectional_kv_xfer=True)
        answers = {}
        for name in ("r", "q"):
            params = self.keep(prefill, name)
            answers[name] = a_request(name, TOKENS, params)
            decode.scheduling.add(answers[name])
            decode.scheduling.allocated(
                answers[name], blocks_of(HERE), decode.scheduling.match(answers[name], 0)[0]
            )
            steps(prefill, decode, until=lambda n=name: n in decode.received)
            answers[name].num_computed_tokens, answers[name].num_tokens = TOKENS, TOKENS + 1
            answers[name].all_token_ids = list(range(TOKENS + 1))
        self.assertTrue(decode.scheduling.finished(answers["r"], [HERE], True)[0])  # without a drain
        decode.step()
        self.schedule(decode, "s")
        asked = self.begin_drain(decode, name="decode", deadline=PATIENCE)
        decode.step()
        self.assertFalse(asked.done())
        self.assertEqual(decode.scheduling.finished(answers["q"], [HERE], True), (False, None))
        self.assertEqual(tell(decode, RESUME, name="decode").status, Status.OK)


class ManyRanksDrain(Scheduled):
    """Each rank gets the command by itself."""

    def test_an_engine_drains_if_one_of_its_ranks_does(self) -> None:
        prefill = ManyRanks("prefill", 32, tp=2, local_commands=True)
        self.addCleanup(prefill.close)
        prefill.start()
        _, second = prefill.workers
        assert second._commands is not None
        second._commands.drains = True
        self.is_refused(prefill, "r")
        second._commands.drains = False
        prefill.step()
        self.assertNotIn(REFUSED, self.finish(prefill, self.schedule(prefill, "q")))

    def test_each_rank_keeps_what_was_accepted(self) -> None:
        prefill = ManyRanks("prefill", 32, tp=2, local_commands=True)
        decode = ManyRanks("decode", 16, tp=1)
        for engine in (prefill, decode):
            self.addCleanup(engine.close)
            engine.start()
        request = self.schedule(prefill)
        prefill.step()
        pool = ThreadPoolExecutor(1)
        self.addCleanup(pool.shutdown)
        asked = pool.submit(ask, place(prefill), DRAIN, timeout=PATIENCE, deadline=PATIENCE)
        self.until(lambda: all(worker._commands.drains for worker in prefill.workers))  # type: ignore[union-attr]
        prefill.step()
        self.is_refused(prefill, "q")
        prefill.write(THERE, range(TOKENS))
        params = self.finish(prefill, request)
        prefill.step()
        self.assertEqual([len(worker._jobs) for worker in prefill.workers], [1, 1])
        self.assertEqual(decode.want("r", TOKENS, params, HERE), TOKENS)
        steps(decode, until=lambda: "r" in decode.received)  # type: ignore[arg-type]
        self.assertEqual([reply.status for reply in asked.result(PATIENCE)], [Status.OK] * 2)
        self.assertEqual((decode.failed, decode.invalid, decode.wrong(HERE, range(TOKENS))), (set(), set(), 0))


if __name__ == "__main__":
    unittest.main()
