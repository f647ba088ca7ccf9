"""A pair with prefix caches: a prompt, a longer one that begins with it, the longer one again.

Less and less is loaded. An earlier transfer has filled the blocks of the prefix, so all cells are compared each
time, not only the loaded ones. When the decode server computes alone, the prompt has another salt, so that vLLM
uses no block of the transfers for it.
"""

from __future__ import annotations

import random

from pair import answer
from prompts import NEW_TOKENS, HandOver

SHORTER, LONGER, LONGEST = 130, 300, 400
LAST_BLOCKS = 64  # tokens that are loaded again: the block that is not full


class Prefixes(HandOver):
    """Runs one case."""

    def run(self) -> None:
        """Runs all steps."""
        chance = random.Random(5)
        prompt = [chance.randrange(3, 500) for _ in range(LONGEST)]
        self._step(prompt[:SHORTER], "a new prompt", SHORTER, SHORTER)
        self._step(prompt[:LONGER], "a longer one that begins with it", 1, LONGER - LAST_BLOCKS)
        self._step(prompt[:LONGER], "the same again", 0, LAST_BLOCKS)
        other = [chance.randrange(3, 500) for _ in range(LONGER - 1)] + prompt[LONGER - 1 : LONGER]
        self._step(other, "another prompt", LONGER, LONGER)
        differs = self._alone(other) != self._alone(prompt[:LONGER])
        self._judge(self._name, "another prompt: other tokens", differs)
        self._corrupted(prompt)

    def _alone(self, prompt: list[int]) -> list[int]:
        return answer(self._pair.decode.ask(prompt, NEW_TOKENS, salt="alone")).tokens

    def _step(self, prompt: list[int], what: str, low: int, high: int) -> None:
        what = f"{len(prompt)} tokens, {what}"
        want = self._alone(prompt)
        before = self._pair.decode.loaded_tokens()
        got = self._pair.through(prompt, NEW_TOKENS).tokens
        loaded = self._pair.decode.loaded_tokens() - before
        good = low <= loaded <= high
        self._judge(self._name, f"{what}: {loaded} were loaded", good, f"expected {low} to {high}")
        self._judge(self._name, f"{what}: same tokens", got == want, f"{got} not {want}")
        if loaded:
            self._pair.wait_for_readout()
            self._judge_cells(what, len(prompt))

    def _corrupted(self, prompt: list[int]) -> None:
        """The control: changes a block that the longest prompt finds or loads."""
        self._pair.corrupt.write_text("attention")
        self._pair.through(prompt, NEW_TOKENS)
        self._pair.wait_for_readout()
        self._pair.corrupt.unlink()
        noticed = self._cells("kv_consumer", LONGEST) != self._cells("kv_producer", LONGEST)
        self._judge(self._name, f"{LONGEST} tokens: a corrupted block has other bytes", noticed)
