"""Two servers with both roles at once, prefix caches, encryption, and little room.

A server's answer after a transfer is compared with the answer of the other server, which has computed the
prompt: the two agree without any transfer (see the cases of the same model).
"""

from __future__ import annotations

import threading

from asking import Asking, Judge
from pair import Pair, answer
from servers import Server

NEW_TOKENS = 12
MANY_TOKENS = 150
REQUESTS = 6


class Roles(Asking):
    """Runs all cases on two servers, each of which hands over to the other."""

    def __init__(self, judge: Judge, pair: Pair) -> None:
        super().__init__(judge, pair, 200)
        self._one, self._other = pair.prefill, pair.decode

    def run(self) -> None:
        """Runs all cases."""
        for there, here, what in ((self._one, self._other, "to and"), (self._other, self._one, "fro")):
            self.prefixes(there, here, what)
        self.little_room()

    def _hand_over(self, there: Server, here: Server, prompt: list[int], tokens: int) -> list[int]:
        return answer(here.ask(prompt, tokens, self._pair.params(prompt, there))).tokens

    def prefixes(self, there: Server, here: Server, what: str) -> None:
        """A prompt, a longer one that begins with it, and the longer one again: less and less is loaded."""
        prompt = self.prompt()
        for length, low, high, part in (
            (130, 130, 130, "all of a new prompt"),
            (200, 1, 199, "the rest of a known one"),
            (200, 0, 64, "next to nothing of the same again"),
        ):
            before, freed = here.loaded_tokens(), self._handed_over(there)
            got = self._hand_over(there, here, prompt[:length], NEW_TOKENS)
            loaded = here.loaded_tokens() - before
            want = answer(there.ask(prompt[:length], NEW_TOKENS)).tokens
            self.judge(f"{what}: {part}: same tokens", got == want, f"{got} not {want}")
            good = low <= loaded <= high
            self.judge(f"{what}: {part} is loaded", good, f"{loaded}; expected {low} to {high}")
            # A server notices that blocks are free only with its next request.
            there.ask(prompt[:5], 1)
            self.judge(f"{what}: {part}: the other server may free", self._handed_over(there) > freed)

    @staticmethod
    def _handed_over(server: Server) -> int:
        return server.counter("vllm:kvferry_handed_over_total")

    def little_room(self) -> None:
        """More requests at once than there is room for: some lose their blocks and are computed again."""
        prompts = [self.prompt()[:120] for _ in range(REQUESTS)]
        wants = [answer(self._one.ask(prompt, MANY_TOKENS)).tokens for prompt in prompts]
        before = self._other.counter("vllm:num_preemptions_total")
        found: list[list[int]] = [[] for _ in prompts]

        def go(i: int) -> None:
            found[i] = self._hand_over(self._one, self._other, prompts[i], MANY_TOKENS)

        threads = [threading.Thread(target=go, args=(i,)) for i in range(REQUESTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        preempted = self._other.counter("vllm:num_preemptions_total") - before
        self.judge(f"{preempted} requests lost their blocks", preempted > 0)
        for i, (got, want) in enumerate(zip(found, wants, strict=True)):
            self.judge(f"request {i} of {REQUESTS} at once: same tokens", got == want, f"{got}, {want}")
