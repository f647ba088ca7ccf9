"""SGLang's queue of requests to be written, with a cache that has all tokens of each prompt."""

from __future__ import annotations

import unittest
from types import SimpleNamespace
from typing import Any

from sglang.srt.disaggregation.decode import DecodePreallocQueue
from sglang.srt.mem_cache.base_prefix_cache import MatchResult

from kvferry.sglang.prefixes import lack_last_tokens


class Cache:
    """Has the first tokens of each prompt in memory, and all others in storage.

    Attributes:
        most: how many it has in memory
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.enable_storage, self.hicache_storage_pass_prefix_keys = True, False
        self.found = 0

    def match_prefix(self, params: Any) -> MatchResult:
        """What is in memory."""
        self.found = min(len(params.key), self.most)
        return MatchResult(self.found, "node", "node", "node")

    def query_storage_hit_length(self, node: Any, tokens: Any, *_: Any, **__: Any) -> int:
        """How many tokens are in storage."""
        return len(tokens)

    def prefix_device_indices(self, req: Any) -> range:
        """One slot for each token in memory."""
        return range(self.found)

    def supports_mamba(self) -> bool:
        """Nothing but tokens."""
        return False

    def swa_reprefill_tail_tokens(self, req: Any) -> int:
        """All that is found may be used."""
        return 0

    def lock(self, node: Any) -> str:
        """Nobody takes it away."""
        return "lock"

    def is_backuped(self, node: Any) -> bool:
        """All that is in memory is in storage, too."""
        return True

    def get_last_hash_value(self, node: Any) -> str:
        """Nobody looks at it."""
        return ""


class Queue(DecodePreallocQueue):
    """SGLang's queue without a server.

    Attributes:
        limit: how many tokens of a prompt it looks for; None: it does not say
    """

    def __init__(self, most: int, limit: int | None) -> None:
        self.tree_cache = Cache(most)
        self.scheduler = SimpleNamespace(enable_decode_hicache=True)
        self.limit = limit

    def _uses_swa_tail_prealloc(self) -> bool:
        return self.limit is not None

    def _swa_tail_len(self, seq_len: int) -> int:
        return seq_len - (self.limit or 0)

    def found(self, tokens: int) -> int:
        """How many tokens of a prompt need not be written."""
        req = SimpleNamespace(
            origin_input_ids=[7] * tokens,
            output_ids=[],
            extra_key=None,
            cache_salt=None,
            kv=SimpleNamespace(cache_protected_len=0),
            _compute_max_prefix_len=lambda length: length - 1,
        )
        return int(self._match_prefix_and_lock(req).decode_prefix_len)


class Prefixes(unittest.TestCase):
    """See above."""

    def test_the_last_token_is_always_written(self) -> None:
        lack_last_tokens()
        for most in (0, 3, 100):  # in storage, in both, in memory
            for tokens, limit, found in ((12, None, 11), (1, None, 0), (12, 5, 5), (12, 12, 11)):
                with self.subTest(most=most, tokens=tokens, limit=limit):
                    self.assertEqual(Queue(most, limit).found(tokens), found)


if __name__ == "__main__":
    unittest.main()
