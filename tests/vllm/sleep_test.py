"""An engine that sleeps: its caches go, and come back at the same place or elsewhere."""

from __future__ import annotations

import contextlib
import logging
import unittest
from collections.abc import Iterator
from typing import Any

import torch
from halves import LAYERS, SIZE, Half, steps

from kvferry.errors import UnsupportedError
from kvferry.vllm.connector import KvferryConnector

TOKENS = 100
THERE, HERE = [3, 7, 5, 1], [9, 2, 4, 8, 6, 10, 11]  # blocks of 32 and of 16 tokens
LOGGER = "vllm.kvferry"


class Sleeping(unittest.TestCase):
    """A prefill and a decode engine of one rank each."""

    def pair(self, **extra: Any) -> tuple[Half, Half]:
        pair = Half("prefill", 32, **extra), Half("decode", 16, **extra)
        for half in pair:
            self.addCleanup(half.close)
        return pair

    @contextlib.contextmanager
    def says(self, *texts: str) -> Iterator[None]:
        """Requires a warning with all of the texts."""
        with self.assertLogs(LOGGER, logging.WARNING) as log:
            yield
        self.assertTrue(any(all(text in line for text in texts) for line in log.output), log.output)

    def move_elsewhere(self, half: Half) -> dict[str, torch.Tensor]:
        """Takes the memory away, and registers new, empty memory. Returns the old memory, spoiled."""
        half.worker.sleep()
        before = half.layers
        for tensor in before.values():
            tensor.fill_(-7)
        half.layers = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
        half.register()
        return before

    def hand_over(self, prefill: Half, decode: Half, name: str, salt: int, has_moved: bool = False) -> None:
        """Moves a request and compares the cells.

        If one engine has moved its caches, and the other has not noticed yet, the first request fails.
        """
        for layer in range(LAYERS):
            prefill.write(layer, THERE, range(TOKENS), salt)
            self.assertGreater(decode.wrong(layer, HERE, range(TOKENS), salt), 0)
        params = prefill.serve(name, TOKENS, THERE)
        self.assertEqual(decode.want(name, TOKENS, params, HERE), TOKENS)
        steps(
            prefill,
            decode,
            until=lambda: name in decode.received and (name in prefill.sent or (has_moved and decode.invalid)),
        )
        if has_moved and decode.invalid:
            decode.invalid.clear()
            self.hand_over(prefill, decode, f"{name} again", salt)
            return
        self.assertEqual((decode.failed, decode.invalid), (set(), set()))
        for layer in range(LAYERS):
            self.assertEqual(decode.wrong(layer, HERE, range(TOKENS), salt), 0)

    def test_caches_that_come_back_elsewhere_are_met_anew(self) -> None:
        for mode in ("pull", "push"):
            for sleeper in (0, 1):
                with self.subTest(mode, sleeper=sleeper):
                    pair = self.pair(transfer_mode=mode)
                    self.hand_over(*pair, "before", 1)
                    old = self.move_elsewhere(pair[sleeper])
                    self.hand_over(*pair, "after", 2, has_moved=True)
                    for tensor in old.values():
                        self.assertTrue(bool((tensor == -7).all()), "what was there before was written")

    def test_caches_come_back_where_they_were(self) -> None:
        prefill, decode = self.pair()
        self.hand_over(prefill, decode, "before", 1)
        for half in (prefill, decode):
            for _ in range(2):  # doing it twice has no further effect
                half.worker.sleep()
            for _ in range(2):
                half.worker.wake()
        self.hand_over(prefill, decode, "after", 2, has_moved=True)

    def test_parameters_say_how_often_caches_came_back(self) -> None:
        prefill, decode = self.pair()
        field = "remote_registration_generation"
        self.assertEqual(prefill.serve("a", TOKENS, THERE)[field], 0)
        steps(prefill, until=lambda: prefill.worker._jobs)
        self.move_elsewhere(prefill)
        for layer in range(LAYERS):
            prefill.write(layer, THERE, range(TOKENS))
        params = prefill.serve("b", TOKENS, THERE)
        self.assertEqual(params[field], 1)
        decode.want("b", TOKENS, {**params, field: 12}, HERE)  # other engines may count differently
        steps(prefill, decode, until=lambda: "b" in decode.received)
        self.assertEqual((decode.failed, decode.invalid), (set(), set()))

    def test_a_request_kept_before_the_sleep_is_refused_at_once_after_it(self) -> None:
        prefill, decode = self.pair(kv_drain_duration=0.1)
        params = prefill.serve("r", TOKENS, THERE)
        steps(prefill, until=lambda: prefill.worker._jobs)
        with self.says("request r", "cancelled"):
            self.move_elsewhere(prefill)
        with self.says("prefill", "is not kept any more"):
            decode.want("r", TOKENS, params, HERE)
            steps(prefill, decode, until=lambda: "r" in decode.received)
        self.assertEqual(decode.invalid, set(HERE))
        self.assertIn("r", prefill.sent)

    def test_transfers_under_way_end_before_the_memory_goes(self) -> None:
        for mode in ("pull", "push"):
            for sleeper in (0, 1):
                with self.subTest(mode, sleeper=sleeper):
                    prefill, decode = pair = self.pair(transfer_mode=mode, kv_drain_duration=15)
                    for layer in range(LAYERS):
                        prefill.write(layer, THERE, range(TOKENS))
                    decode.want("r", TOKENS, prefill.serve("r", TOKENS, THERE), HERE)
                    prefill.step()
                    decode.step()
                    pair[sleeper].worker.sleep()
                    steps(
                        prefill, decode, until=lambda d=decode, p=prefill: "r" in d.received and "r" in p.sent
                    )
                    self.assertEqual((decode.failed, decode.invalid), (set(), set()))
                    for layer in range(LAYERS):
                        self.assertEqual(decode.wrong(layer, HERE, range(TOKENS)), 0)

    def test_a_load_that_cannot_end_is_given_up(self) -> None:
        prefill, decode = self.pair(kv_drain_duration=0.1, kv_lease_duration=1)
        params = prefill.serve("r", TOKENS, THERE)
        prefill.close()
        decode.want("r", TOKENS, params, HERE)
        decode.step()
        with self.says("request r", "cancelled"):
            decode.worker.sleep()
        steps(decode, until=lambda: "r" in decode.received)
        self.assertEqual(decode.invalid, set(HERE))

    def test_a_peer_that_sleeps_for_ever_is_named(self) -> None:
        limits = {"kv_load_patience": 1, "kv_load_deadline": 3}
        for mode in ("pull", "push"):
            with self.subTest(mode):
                prefill, decode = self.pair(transfer_mode=mode, kv_drain_duration=0.1, **limits)
                self.hand_over(prefill, decode, "before", 1)
                params = prefill.serve("r", TOKENS, THERE)
                prefill.step()
                prefill.worker.sleep()
                for name in ("q", "r"):  # the peer may notice only with the first request
                    decode.want(name, TOKENS, params, HERE)
                    with self.assertLogs(LOGGER, logging.WARNING) as log:
                        steps(decode, until=lambda name=name, d=decode: name in d.received)
                    self.assertEqual(decode.invalid, set(HERE))
                self.assertIn("prefill has unregistered its memory", "\n".join(log.output))
                prefill.worker.wake()
                decode.invalid.clear()
                self.hand_over(prefill, decode, "after", 2)

    def test_a_push_ends_though_its_peer_sleeps_for_ever(self) -> None:
        prefill, decode = self.pair(transfer_mode="push", kv_drain_duration=0.1, kv_load_deadline=2)
        self.hand_over(prefill, decode, "before", 1)
        decode.worker.sleep()
        params = prefill.serve("r", TOKENS, THERE)
        with self.says("request r", "0 of 1 consumers are served"):
            steps(prefill, until=lambda: "r" in prefill.sent)
        decode.worker.wake()
        with self.assertLogs(LOGGER, logging.WARNING) as log:
            decode.want("r", TOKENS, params, HERE)
            steps(prefill, decode, until=lambda: "r" in decode.received)
        self.assertIn("is not kept any more", "\n".join(log.output))
        self.assertEqual(decode.invalid, set(HERE))
        decode.invalid.clear()
        self.hand_over(prefill, decode, "after", 2, has_moved=True)

    def test_a_request_that_comes_meanwhile_is_met_when_the_peer_wakes(self) -> None:
        prefill, decode = self.pair()
        prefill.worker.sleep()
        params = prefill.serve("r", TOKENS, THERE)
        for layer in range(LAYERS):
            prefill.write(layer, THERE, range(TOKENS))
        decode.want("r", TOKENS, params, HERE)
        decode.step()
        prefill.worker.wake()
        steps(prefill, decode, until=lambda: "r" in decode.received)
        self.assertEqual((decode.failed, decode.invalid), (set(), set()))
        for layer in range(LAYERS):
            self.assertEqual(decode.wrong(layer, HERE, range(TOKENS)), 0)

    def test_caches_of_another_layout_are_refused(self) -> None:
        prefill, _ = self.pair()
        prefill.layers = {
            name: torch.zeros(16, 2, 32, 2 * SIZE + 2)[..., : 2 * SIZE] for name in prefill.layers
        }
        with self.assertRaisesRegex(UnsupportedError, "another layout"):
            prefill.register()

    def test_the_connector_passes_it_on(self) -> None:
        prefill, decode = self.pair()
        connector = KvferryConnector.__new__(KvferryConnector)
        connector._worker = prefill.worker
        connector.unregister_kv_caches()
        assert prefill.worker._caches is not None
        self.assertFalse(prefill.worker._caches.are_here)
        connector.restore_kv_caches()
        self.hand_over(prefill, decode, "r", 1)


if __name__ == "__main__":
    unittest.main()
