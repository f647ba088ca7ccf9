"""vLLM's prefix cache after a load, for layers with a window or chunks: what vLLM finds must have been loaded.

vLLM's own cache manager gives out the blocks, and says what it would find for later prompts.
"""

from __future__ import annotations

import unittest
from collections.abc import Sequence
from typing import Any, ClassVar

from halves import LAYERS, Half, steps
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

WINDOW = 32
CHUNK = 32
LENGTHS = range(29, 99)  # tokens: with windows that begin at each token of a block, and before the first one
OTHER = 7777  # a token of no prompt
Engine = tuple[Half, KVCacheManager]
Tables = Sequence[list[int]]


def a_request(name: str, prompt: list[int], block: int, params: dict[str, Any] | None = None) -> Request:
    found = Request(
        name,
        prompt,
        SamplingParams(max_tokens=1),
        None,
        block_hasher=get_request_block_hasher(block, sha256),
    )
    found.kv_transfer_params = params
    return found


class Windows(unittest.TestCase):
    """One load after the other, of all lengths."""

    sizes: ClassVar[dict[str, int]] = {"window": WINDOW}

    @staticmethod
    def first_seen(token: int) -> int:
        """The first token that a token sees in layers with a window."""
        return max(0, token + 1 - WINDOW)

    @classmethod
    def setUpClass(cls) -> None:
        init_none_hash(sha256)

    def engine(self, name: str, block: int, mode: str) -> Engine:
        half = Half(name, block, blocks=64, transfer_mode=mode, **self.sizes)
        self.addCleanup(half.close)
        manager = KVCacheManager(half.cache, 1024, block, block)
        half.scheduling.bind(manager)
        return half, manager

    def compute(self, prefill: Half, manager: KVCacheManager, name: str, prompt: list[int]) -> Tables:
        """Computes a prompt at the prefill engine; returns its blocks without those that vLLM has freed."""
        request = a_request(name, prompt, prefill.block_size)
        self.assertIsNotNone(manager.allocate_slots(request, len(prompt)))
        computed = manager.get_block_ids(name)
        for layer in range(LAYERS):
            prefill.write(layer, computed[layer > 0], range(len(prompt)))
        manager.remove_skipped_blocks(name, len(prompt))
        return manager.get_block_ids(name)

    def load(self, prompt: list[int], name: str, prefill: Engine, decode: Engine) -> None:
        """Loads a prompt, as vLLM's scheduler does, and frees its blocks, which can be found then."""
        (there, manager_there), (here, manager) = prefill, decode
        computed = self.compute(there, manager_there, name, prompt)
        # The request that is served here has other tokens.
        params = {**there.serve(name, len(prompt), *computed), "kvferry_prompt": None}
        request = a_request(name, prompt, here.block_size, params)
        here.scheduling.add(request)
        self.assertEqual(here.scheduling.match(request, 0), (len(prompt), True))
        room = manager.allocate_slots(
            request, 0, num_external_computed_tokens=len(prompt), delay_cache_blocks=True
        )
        self.assertIsNotNone(room)
        here.scheduling.allocated(request, manager.get_blocks(name), len(prompt))
        steps(there, here, until=lambda: name in here.received)
        self.assertNotIn(name, here.failed)
        self.seen(here, manager.get_block_ids(name), len(prompt) - 1)  # what its last token sees
        manager.cache_blocks(request, len(prompt))
        manager.free(request)
        manager_there.free(a_request(name, prompt, there.block_size))

    def seen(self, half: Half, tables: Tables, tokens: int) -> None:
        """Requires the cells that the next token after some sees."""
        window = range(self.first_seen(tokens), tokens)
        wrong = half.wrong(0, tables[0], range(tokens))
        wrong += sum(half.wrong(layer, tables[1], window) for layer in range(1, LAYERS))
        self.assertEqual(wrong, 0, f"after {tokens} tokens")

    def found(self, decode: Engine, prompt: list[int]) -> int:
        """How many tokens vLLM finds for a prompt; requires their cells."""
        half, manager = decode
        blocks, tokens, *_ = manager.get_computed_blocks(a_request("later", prompt, half.block_size))
        self.seen(half, blocks.get_block_ids(), tokens)
        return tokens

    def test_nothing_is_found_that_was_not_loaded(self) -> None:
        for there, here, mode in ((32, 16, "pull"), (16, 16, "push"), (16, 32, "pull"), (32, 64, "push")):
            prefill, decode = self.engine("prefill", there, mode), self.engine("decode", here, mode)
            found = 0
            for count in LENGTHS:
                with self.subTest(there=there, here=here, count=count):
                    decode[1].reset_prefix_cache()
                    for layer in decode[0].layers.values():
                        layer.zero_()
                    prompt = [1000 * count + token for token in range(count)]
                    self.load(prompt, f"r{count}", prefill, decode)
                    for same in range(here, count + 1, here):
                        found += self.found(decode, [*prompt[:same], OTHER]) > 0
            if here <= WINDOW:
                self.assertGreater(found, 0, f"blocks of {there} and {here} tokens: nothing was ever found")


class Chunks(Windows):
    """The same with chunks: the last token of a prompt that ends with a chunk sees all of that chunk."""

    sizes: ClassVar[dict[str, int]] = {"chunk": CHUNK}

    @staticmethod
    def first_seen(token: int) -> int:
        """The first token that a token sees in layers with chunks."""
        return token // CHUNK * CHUNK
