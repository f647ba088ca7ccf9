"""Context parallelism without servers: ranks that share the tokens of a sequence, and ranks that hold copies.

The tests call both halves of the connector, on engines of several ranks whose caches are laid out by vLLM's own
functions (many_ranks.py). They look up every cell on every rank that must keep it.
"""

from __future__ import annotations

import logging
import unittest
from typing import Any

from halves import LAYERS, steps
from many_ranks import ManyRanks, groups_of_ranks, rows_of

from kvferry.errors import UnsupportedError
from kvferry.shard import PartShare, TokenShare
from kvferry.vllm.ranks import Ranks

TOKENS = 45
LOGGER = "vllm.kvferry"
# : Block tables, long enough for one rank that keeps every token in blocks of 4.
THERE = [3, 1, 7, 12, 5, 9, 14, 2, 11, 4, 8, 13]
HERE = [6, 2, 10, 15, 4, 8, 1, 12, 3, 14, 7, 5]


def spec(kind: str, block_size: int, **sizes: Any) -> dict[str, Any]:
    """The specification of an engine."""
    return {"latent": kind == "latent", "block_size": block_size, **sizes}


class Places(unittest.TestCase):
    def test_tokens_are_shared_out_in_vllms_order(self) -> None:
        for tp, pcp, dcp in ((4, 1, 2), (4, 1, 4), (2, 2, 2), (2, 2, 4), (1, 2, 2), (2, 4, 8)):
            with self.subTest(tp=tp, pcp=pcp, dcp=dcp):
                places = {}
                for group in groups_of_ranks(tp, pcp, dcp)["dcp"]:
                    places |= {rank: share for share, rank in enumerate(group)}
                for rank, share in places.items():
                    ranks = Ranks(rank % tp, tp, 0, 1, rank // tp, pcp, dcp, 4)
                    self.assertEqual(ranks.tokens(16), TokenShare(share, dcp, 4))

    def test_rows_are_counted_as_vllm_counts_them(self) -> None:
        self.assertEqual(rows_of(7, 2, 0, 1), [0, None, 1, None, 2, None, 3])
        self.assertEqual(rows_of(9, 2, 1, 2), [None, None, 0, 1, None, None, 2, 3, None])

    def test_copies_of_a_head_are_told_apart_within_a_share_of_tokens(self) -> None:
        # 8 ranks, 2 heads, tokens shared by 2: each head is on 4 ranks, two for each share.
        found = [Ranks(rank, 8, 0, 1, dcp_size=2) for rank in range(8)]
        shares = [ranks.share(2, 2, ranks.tokens(16)) for ranks in found]
        self.assertEqual(
            shares, [PartShare(range(head, head + 1), copy, 2) for head in (0, 1) for copy in (0, 0, 1, 1)]
        )
        self.assertEqual([ranks.tokens(16).index for ranks in found], [0, 1, 0, 1, 0, 1, 0, 1])

    def test_shares_that_do_not_come_out_even_are_refused(self) -> None:
        with self.assertRaisesRegex(UnsupportedError, "decode_context_parallel_size is 4, and 6 ranks"):
            ranks = Ranks(0, 12, 0, 1, dcp_size=4)
            ranks.share(2, 2, ranks.tokens(16))
        with self.assertRaisesRegex(UnsupportedError, "cp_kv_cache_interleave_size is 3"):
            Ranks(0, 4, 0, 1, dcp_size=4, interleave=3).tokens(16)


class Moving(unittest.TestCase):
    def engine(self, name: str, **options: Any) -> ManyRanks:
        engine = ManyRanks(name, **options)
        self.addCleanup(engine.close)
        engine.start()
        return engine

    def hand_over(
        self, there: dict[str, Any], here: dict[str, Any], computed: int = 0, push: bool = False
    ) -> int:
        """Moves a request and compares every cell; returns how many of its cells the decode engine keeps."""
        prefill = self.engine("prefill", **there, **({"transfer_mode": "push"} if push else {}))
        decode = self.engine("decode", **here)
        prefill.write(THERE, range(TOKENS))
        wanted = range(computed, TOKENS)
        cells = decode.wrong(HERE, wanted)
        self.assertEqual(cells, sum(1 for _ in decode.cells(HERE, wanted)), "nothing is there before")
        params = prefill.serve("r", TOKENS, THERE)
        self.assertEqual(decode.want("r", TOKENS, params, HERE, computed), TOKENS - computed)
        steps(prefill, decode, until=lambda: "r" in decode.received and "r" in prefill.sent)
        self.assertEqual((decode.failed, decode.invalid), (set(), set()))
        self.assertEqual(decode.wrong(HERE, wanted), 0)
        self.assertEqual(decode.stray(HERE, wanted), 0)
        prefill.close()
        decode.close()
        return cells

    def test_heads_of_ranks_that_share_tokens(self) -> None:
        one = spec("heads", 8)
        shared = spec("heads", 4, tp=4, dcp=2)
        wide = spec("heads", 8, tp=4, dcp=2, interleave=4)
        for there, here in ((shared, one), (one, shared), (shared, wide), (wide, one), (one, wide)):
            with self.subTest(there=there, here=here):
                # 2 heads in 3 layers; with tokens shared, each token of a head is on one rank.
                self.assertEqual(self.hand_over(there, here), TOKENS * 2 * LAYERS)

    def test_latents_of_ranks_that_share_tokens(self) -> None:
        one = spec("latent", 8)
        some = spec("latent", 4, tp=4, dcp=2, interleave=2)
        every = spec("latent", 8, tp=4, dcp=4)
        for there, here, copies in ((some, one, 1), (every, one, 1), (one, some, 2), (some, every, 1)):
            with self.subTest(there=there, here=here):
                self.assertEqual(self.hand_over(there, here), TOKENS * copies * LAYERS)

    def test_ranks_of_prefill_context_parallelism_have_copies(self) -> None:
        one = spec("heads", 8)
        copies = spec("heads", 4, tp=2, pcp=2)
        self.assertEqual(self.hand_over(copies, one), TOKENS * 2 * LAYERS)
        self.assertEqual(self.hand_over(one, copies), 2 * TOKENS * 2 * LAYERS)

    def test_both_kinds_of_context_parallelism_at_once(self) -> None:
        one = spec("latent", 4)
        for tp, pcp, dcp in ((1, 2, 2), (2, 2, 2), (2, 2, 4)):
            both = spec("latent", 8, tp=tp, pcp=pcp, dcp=dcp, interleave=4)
            with self.subTest(tp=tp, pcp=pcp, dcp=dcp):
                self.assertEqual(self.hand_over(both, one), TOKENS * LAYERS)
                self.assertEqual(self.hand_over(one, both), tp * pcp // dcp * TOKENS * LAYERS)

    def test_a_prefix_that_is_cached_here_is_left_alone(self) -> None:
        self.hand_over(spec("latent", 8, tp=4, dcp=4), spec("heads", 4) | {"latent": True}, computed=16)
        self.hand_over(spec("heads", 8), spec("heads", 4, tp=4, dcp=2, interleave=2), computed=24)

    def test_producers_write_into_shares(self) -> None:
        self.hand_over(spec("heads", 8), spec("heads", 4, tp=4, dcp=2, interleave=2), push=True)
        self.hand_over(spec("latent", 8, tp=2, pcp=2, dcp=4), spec("latent", 4, tp=2, dcp=2), push=True)

    def test_another_interleave_than_the_caches_have_is_noticed(self) -> None:
        prefill = self.engine("prefill", **spec("latent", 8, tp=2, dcp=2, interleave=4), said_interleave=1)
        decode = self.engine("decode", **spec("latent", 4))
        prefill.write(THERE, range(TOKENS))
        decode.want("r", TOKENS, prefill.serve("r", TOKENS, THERE), HERE)
        steps(prefill, decode, until=lambda: "r" in decode.received)
        self.assertEqual(decode.failed, set())
        self.assertGreater(decode.wrong(HERE, range(TOKENS)), TOKENS // 2)

    def test_one_element_that_is_wrong_is_noticed(self) -> None:
        decode = self.engine("decode", **spec("latent", 4, tp=2, dcp=2))
        decode.write(HERE, range(TOKENS))
        self.assertEqual(decode.wrong(HERE, range(TOKENS)), 0)
        decode.caches[1][decode.layers[1][0]][HERE[0], 0, 0, 3] += 1
        self.assertEqual(decode.wrong(HERE, range(TOKENS)), 1)

    def test_blocks_that_failed_are_named_by_the_tokens_of_all_ranks(self) -> None:
        prefill = self.engine("prefill", **spec("latent", 8))
        decode = self.engine("decode", **spec("latent", 4, tp=2, dcp=2), kv_load_deadline=1)
        params = prefill.serve("r", TOKENS, THERE)
        prefill.close()
        with self.assertLogs(LOGGER, logging.WARNING):
            # Blocks of 4 tokens on each of 2 ranks: the decode engine has cached the first 2 blocks, and wants
            # 4 more.
            decode.want("r", TOKENS, params, HERE[:6], computed=16)
            steps(decode, until=lambda: "r" in decode.received)
        self.assertEqual((decode.invalid, decode.failed), (set(HERE[2:6]), set()))

    def test_tokens_in_another_order_are_refused(self) -> None:
        engine = ManyRanks("engine", **spec("latent", 8, tp=2, dcp=2))
        self.addCleanup(engine.close)
        engine.groups["dcp"] = [[1, 0]]
        with self.assertRaisesRegex(UnsupportedError, "keeps token share"):
            engine.start()


if __name__ == "__main__":
    unittest.main()
