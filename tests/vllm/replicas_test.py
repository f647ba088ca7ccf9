"""Data-parallel replicas without servers: engines that come and go independently, though vLLM numbers all
ranks.

Each replica is a separate engine (many_ranks.py), with the groups of ranks that vLLM's own function makes for
all replicas: rank 0 of the second of two replicas with TP 2 is rank 2 of the world.
"""

from __future__ import annotations

import unittest
from typing import Any

from halves import LAYERS, steps
from many_ranks import ManyRanks, groups_of_ranks

TOKENS = 45
THERE = [3, 1, 7, 12, 5, 9, 14, 2, 11, 4, 8, 13]
HERE = [6, 2, 10, 15, 4, 8, 1, 12, 3, 14, 7, 5]


class Replicas(unittest.TestCase):
    def engine(self, name: str, **options: Any) -> ManyRanks:
        engine = ManyRanks(name, **options)
        self.addCleanup(engine.close)
        engine.start()
        return engine

    def hand_over(self, prefill: ManyRanks, decode: ManyRanks, request: str) -> None:
        """Moves a request; before that, all its cells are wrong."""
        prefill.write(THERE, range(TOKENS))
        for caches in decode.caches:
            for cache in caches.values():
                cache.fill_(-1.0)
        self.assertEqual(
            decode.wrong(HERE, range(TOKENS)), decode.tp * decode.pcp // decode.dcp * self.cells(decode)
        )
        decode.want(request, TOKENS, prefill.serve(request, TOKENS, THERE), HERE)
        steps(prefill, decode, until=lambda: request in decode.received and request in prefill.sent)
        self.assertEqual((decode.failed, decode.invalid), (set(), set()))
        self.assertEqual(decode.wrong(HERE, range(TOKENS)), 0)

    def cells(self, engine: ManyRanks) -> int:
        """How many cells of the request the ranks of an engine keep."""
        return TOKENS * LAYERS * max(1, engine.heads // engine.tp)

    def test_vllm_counts_the_ranks_of_all_replicas(self) -> None:
        groups = groups_of_ranks(2, 1, 1, replicas=2)
        self.assertEqual(groups["tp"], [[0, 1], [2, 3]])

    def test_a_replica_comes_while_another_serves_and_one_goes(self) -> None:
        first = self.engine("p_dp0", block_size=8, tp=2, replica=(0, 2))  # no other replica exists yet
        decode = self.engine("d", block_size=4)
        self.hand_over(first, decode, "a")
        second = self.engine("p_dp1", block_size=8, tp=2, replica=(1, 2))
        for request, engine in (("b", second), ("c", first), ("d", second)):
            self.hand_over(engine, decode, request)
        first.close()
        self.hand_over(second, decode, "e")

    def test_a_request_of_a_replica_that_has_gone_fails_by_name_and_others_go_on(self) -> None:
        patience = {"kv_load_patience": 1.0}
        first = self.engine("p_dp0", block_size=8, tp=2, replica=(0, 2))
        second = self.engine("p_dp1", block_size=8, tp=2, replica=(1, 2))
        decode = self.engine("d", block_size=4, tp=2, replica=(0, 2), **patience)
        self.hand_over(first, decode, "a")
        params = first.serve("gone", TOKENS, THERE)
        first.close()
        with self.assertLogs("vllm.kvferry", "WARNING") as log:
            decode.want("gone", TOKENS, params, HERE)
            steps(second, decode, until=lambda: "gone" in decode.received)
        self.assertTrue(decode.failed or decode.invalid)
        self.assertIn("p_dp0", "\n".join(log.output))
        decode.failed.clear()
        decode.invalid.clear()
        self.hand_over(second, decode, "b")


if __name__ == "__main__":
    unittest.main()
