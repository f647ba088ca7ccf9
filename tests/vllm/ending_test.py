"""An engine that ends: peers get what it keeps for them, it takes nothing new, and there is a time limit."""

from __future__ import annotations

import contextlib
import logging
import threading
import unittest
from collections.abc import Callable, Iterator
from typing import Any

from halves import LAYERS, Half, steps

from kvferry.errors import CancelledError
from kvferry.vllm.connector import KvferryConnector

TOKENS = 100
THERE, HERE = [3, 7, 5, 1], [9, 2, 4, 8, 6, 10, 11]  # blocks of 32 and of 16 tokens
LOGGER = "vllm.kvferry"
LONG = 15.0  # seconds to drain, if all must end by itself


class Ending(unittest.TestCase):
    """A prefill engine that ends, and a decode engine of one rank each."""

    def pair(self, drain: float = LONG, **extra: Any) -> tuple[Half, Half]:
        pair = Half("prefill", 32, kv_drain_duration=drain, **extra), Half("decode", 16, **extra)
        for half in pair:
            self.addCleanup(half.close)
        return pair

    def keep(self, prefill: Half, name: str) -> dict[str, Any]:
        """A request that the prefill engine keeps for a peer. Returns its parameters."""
        for layer in range(LAYERS):
            prefill.write(layer, THERE, range(TOKENS))
        params = prefill.serve(name, TOKENS, THERE)
        prefill.step()
        self.assertEqual([job.request for job in prefill.worker._jobs.values()], [name])
        return params

    def load(self, decode: Half, name: str, params: dict[str, Any]) -> None:
        """Lets the decode engine load a request; it may fail."""
        self.assertEqual(decode.want(name, TOKENS, params, HERE), TOKENS)
        steps(decode, until=lambda: name in decode.received)

    def assert_loaded(self, decode: Half) -> None:
        self.assertEqual((decode.failed, decode.invalid), (set(), set()))
        for layer in range(LAYERS):
            self.assertEqual(decode.wrong(layer, HERE, range(TOKENS)), 0)

    @contextlib.contextmanager
    def while_it_ends(self, half: Half, act: Callable[[], None]) -> Iterator[None]:
        """Lets another thread act as soon as the engine, which ends in the block, has begun to drain."""
        agent = half.worker._agent
        assert agent is not None
        drain, begun, errors = agent.drain, threading.Event(), []

        def drains(deadline: float | None = None) -> None:
            drain(deadline)
            begun.set()

        def acts() -> None:
            begun.wait()
            try:
                act()
            except BaseException as error:
                errors.append(error)

        agent.drain = drains  # type: ignore[method-assign]
        thread = threading.Thread(target=acts)
        thread.start()
        try:
            yield
        finally:
            begun.set()
            thread.join()
        self.assertEqual(errors, [])

    def test_what_it_keeps_is_handed_over_before_it_ends(self) -> None:
        for mode in ("pull", "push"):
            with self.subTest(mode):
                prefill, decode = self.pair(transfer_mode=mode)
                params = self.keep(prefill, "r")
                with self.while_it_ends(prefill, lambda d=decode, p=params: self.load(d, "r", p)):
                    prefill.close()
                self.assert_loaded(decode)
                self.assertEqual(prefill.worker._jobs, {})

    def test_it_takes_nothing_new(self) -> None:
        prefill, decode = self.pair()
        params = self.keep(prefill, "r")

        def act() -> None:
            agent = prefill.worker._agent
            assert agent is not None
            with self.assertRaisesRegex(CancelledError, "drains"):
                agent.hold(b"another", [])
            unknown = {**params, "kvferry_transfer_id": "00" * 16}
            with self.assertLogs(LOGGER, logging.WARNING) as log:
                self.load(decode, "q", unknown)
            self.assertIn("the engine drains", "".join(log.output))
            self.assertEqual(decode.invalid, set(HERE))
            decode.invalid.clear()
            self.load(decode, "r", params)

        with self.while_it_ends(prefill, act):
            prefill.close()
        self.assert_loaded(decode)

    def test_what_no_peer_takes_is_cancelled_in_time(self) -> None:
        prefill, decode = self.pair(drain=0.1, kv_load_patience=1)
        params = self.keep(prefill, "r")
        with self.assertLogs(LOGGER, logging.INFO) as log:
            prefill.close()
        self.assertIn("peers have 0.1 s for the 1 requests kept for them", "\n".join(log.output))
        self.assertTrue(any("request r" in line and "time to drain was over" in line for line in log.output))
        self.assertEqual(prefill.worker._jobs, {})
        self.load(decode, "r", params)
        self.assertEqual(decode.invalid, set(HERE))

    def test_a_load_that_nothing_will_use_is_cancelled_at_once(self) -> None:
        prefill, _ = self.pair(drain=0.1)
        params = self.keep(prefill, "r")
        prefill.close()
        ending = Half("ending", 16, kv_drain_duration=LONG)
        self.addCleanup(ending.close)
        ending.want("r", TOKENS, params, HERE)
        ending.step()
        with self.assertLogs(LOGGER, logging.WARNING) as log:
            ending.close()
        self.assertTrue(any("request r" in line for line in log.output), log.output)
        self.assertFalse(any("time to drain" in line for line in log.output), log.output)

    def test_an_engine_without_requests_ends_at_once(self) -> None:
        prefill, _ = self.pair()
        worker = prefill.worker
        with self.assertNoLogs(LOGGER, logging.INFO):
            worker.close()
        worker.close()  # a second time has no further effect
        self.assertIsNone(worker._agent)

    def test_an_engine_that_sleeps_can_end(self) -> None:
        prefill, _ = self.pair()
        prefill.worker.sleep()
        prefill.close()
        self.assertIsNone(prefill.worker._agent)

    def test_the_connector_passes_it_on(self) -> None:
        prefill, decode = self.pair()
        params = self.keep(prefill, "r")
        connector = KvferryConnector.__new__(KvferryConnector)
        connector._worker, connector._scheduling = prefill.worker, None
        with self.while_it_ends(prefill, lambda: self.load(decode, "r", params)):
            connector.shutdown()
        self.assert_loaded(decode)


if __name__ == "__main__":
    unittest.main()
