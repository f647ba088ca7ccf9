"""A pair with prefix caches: a prompt, a longer one that begins with it, the longer one again.

Less and less is loaded, unless the model has a window: see WINDOWED. An earlier transfer has filled the blocks
of the prefix, so all cells are compared each time, not only the loaded ones. When the decode server computes
alone, the prompt has another salt, so that vLLM uses no block of the transfers for it.

Then a prefix moves before anybody needs it at the decode server: by the two requests of a proxy, for one token.
"""

from __future__ import annotations

import random

from pair import answer
from prompts import NEW_TOKENS, HandOver

# vLLM finds whole blocks of all groups: of 128 tokens here, at most. UNEVEN does not end with one.
SHORTER, LONGER, LONGEST, UNEVEN = 128, 384, 450, 300
LAST_BLOCKS = 64  # tokens that are loaded again: the block that is not full
# : Models with a window, of 64 tokens, in blocks of 128. What was only loaded is not found again.
WINDOWED = ("gemma4",)
FOUND = "vllm:prefix_cache_hits_total"  # tokens that a server found in its own cache


class Prefixes(HandOver):
    """Runs one case."""

    def run(self) -> None:
        """Runs all steps."""
        chance = random.Random(5)
        prompt, mine = ([chance.randrange(3, 500) for _ in range(LONGEST)] for _ in range(2))
        # Of the block in which a window begins only the end is loaded, so vLLM must not find it.
        is_windowed = self._pair.case.model in WINDOWED
        self._step(prompt[:SHORTER], "a new prompt", SHORTER, SHORTER)
        longer, again = (LONGER, LONGER) if is_windowed else (LONGER - SHORTER, LAST_BLOCKS)
        self._step(prompt[:LONGER], "a longer one that begins with it", 1, longer)
        self._step(prompt[:LONGER], "the same again", 0, again)
        self._pair.decode.ask(mine[: SHORTER + 1], 1)
        self._step(mine[:LONGER], "its beginning was computed here", 1, LONGER - SHORTER, loaded_only=False)
        other = [chance.randrange(3, 500) for _ in range(LONGER - 1)] + prompt[LONGER - 1 : LONGER]
        self._step(other, "another prompt", LONGER, LONGER)
        differs = self._alone(other) != self._alone(prompt[:LONGER])
        self._judge(self._name, "another prompt: other tokens", differs)
        self._corrupted(prompt)
        self._moved(0 if is_windowed else UNEVEN // 32 * 32, chance)

    def _alone(self, prompt: list[int]) -> list[int]:
        return answer(self._pair.decode.ask(prompt, NEW_TOKENS, salt="alone")).tokens

    def _step(self, prompt: list[int], what: str, low: int, high: int, loaded_only: bool = True) -> None:
        what = f"{len(prompt)} tokens, {what}"
        want = self._alone(prompt)
        before = self._pair.decode.loaded_tokens()
        got = self._pair.through(prompt, NEW_TOKENS).tokens
        loaded = self._pair.decode.loaded_tokens() - before
        good = low <= loaded <= high
        self._judge(self._name, f"{what}: {loaded} were loaded", good, f"expected {low} to {high}")
        self._judge(self._name, f"{what}: same tokens", got == want, f"{got} not {want}")
        if loaded and loaded_only:  # what is computed here may be rounded differently
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

    def _moved(self, there: int, chance: random.Random) -> None:
        """A prefix is moved by the two requests of a proxy; then the decode server continues it."""
        prefill = self._pair.prefill
        prompt = [chance.randrange(3, 500) for _ in range(LONGEST)]
        want = self._alone(prompt)
        prefill.ask(prompt[:UNEVEN], 1)  # somebody else asked it
        before = prefill.counter(FOUND)
        self._pair.hand_over(prompt[:UNEVEN], 1)
        found = prefill.counter(FOUND) - before
        self._judge(self._name, f"a prefix moves: {found} tokens were there", found >= UNEVEN - LAST_BLOCKS)
        self._continued("a prefix that moved", prompt, want, there)
        other = [4, *prompt[1:]]
        self._continued("another prefix", other, self._alone(other), 0)

    def _continued(self, what: str, prompt: list[int], want: list[int], there: int) -> None:
        decode = self._pair.decode
        before, loaded = decode.counter(FOUND), decode.loaded_tokens()
        got = answer(decode.ask(prompt, NEW_TOKENS)).tokens
        found = decode.counter(FOUND) - before
        self._judge(
            self._name, f"{what} is continued: {found} tokens were there", found == there, f"not {there}"
        )
        self._judge(self._name, f"{what} is continued: nothing is loaded", decode.loaded_tokens() == loaded)
        self._judge(self._name, f"{what} is continued: same tokens", got == want, f"{got} not {want}")
