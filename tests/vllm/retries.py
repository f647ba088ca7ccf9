"""Many requests at once, as proxies and clients that try again make them: some are aborted, some are never
taken, and the parameters of some are used a second time.

Everybody else must get the right tokens, and so must a second use, which is computed: at once, for the prefill
server remembers what it has handed over.
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from asking import LOADS, NEW_TOKENS, Asking
from pair import answer
from servers import ANSWER_SECONDS

REQUESTS = 160
AT_ONCE = 8
#: What some of the requests are, and how many of them, in percent.
ABORTED, NEVER_TAKEN, TWICE, PLAIN = "aborted", "never taken", "used twice", "others"
SHARES = {ABORTED: 12, NEVER_TAKEN: 8, TWICE: 5}
ABORTED_SECONDS = (0.01, 0.3)  # between these a client goes away
# A second use may take so long, or this many times as long as the slowest of the others.
SECOND_SECONDS, SECOND_TIMES = 1.0, 3.0


@dataclass(frozen=True)
class Answered:
    """What came of a request, or of its second use; no tokens: its client went away."""

    tokens: list[int]
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """A request with all its uses."""

    kind: str
    prompt: list[int]
    uses: list[Answered]


class Retries(Asking):
    """Runs them."""

    def run(self) -> None:
        """Runs all requests, so many at once, and judges them."""
        self.handed_over("before all of them")
        kinds = [kind for kind, percent in SHARES.items() for _ in range(REQUESTS * percent // 100)]
        kinds += [PLAIN] * (REQUESTS - len(kinds))
        self._chance.shuffle(kinds)
        requests = [(kind, self.prompt(), self._chance.uniform(*ABORTED_SECONDS)) for kind in kinds]
        before, begun = self._decode.counter(LOADS), time.monotonic()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            outcomes = list(pool.map(lambda request: self._request(*request), requests))
        seconds = time.monotonic() - begun
        loads = self._decode.counter(LOADS) - before
        self.record(f"{REQUESTS} requests, {AT_ONCE} at once, in {seconds:.1f} s")
        least = kinds.count(PLAIN) + kinds.count(TWICE)
        most = least + kinds.count(ABORTED)
        self.judge(f"{loads} requests were loaded: all but some aborted ones", least <= loads <= most)
        self._judge_all(outcomes)
        self.settled("all of them")
        self.handed_over("after all of them")

    def _request(self, kind: str, prompt: list[int], patience: float) -> Outcome:
        with self._pair.begun(prompt) as params:
            if kind == NEVER_TAKEN:
                return Outcome(kind, prompt, [])
            uses = [self._use(prompt, params, patience if kind == ABORTED else None)]
        if kind == TWICE:
            uses.append(self._use(prompt, params))
        return Outcome(kind, prompt, uses)

    def _use(self, prompt: list[int], params: dict[str, Any], patience: float | None = None) -> Answered:
        """Asks the decode server; with `patience` the client goes away after so many seconds."""
        begun = time.monotonic()
        try:
            found = self._decode.ask(prompt, NEW_TOKENS, params, patience or ANSWER_SECONDS)
        except OSError:
            if patience is None:
                raise
            return Answered([], time.monotonic() - begun)
        return Answered(answer(found).tokens, time.monotonic() - begun)

    def _judge_all(self, outcomes: list[Outcome]) -> None:
        used = {
            kind: [outcome for outcome in outcomes if outcome.kind == kind]
            for kind in (PLAIN, TWICE, ABORTED, NEVER_TAKEN)
        }
        gone = sum(not use.tokens for outcome in used[ABORTED] for use in outcome.uses)
        self.record(
            f"{gone} of {len(used[ABORTED])} clients went away before they had an answer; "
            f"{len(used[NEVER_TAKEN])} requests were never taken"
        )
        self.judge("clients went away", gone > 0)
        answered = [(outcome.prompt, use) for outcome in outcomes for use in outcome.uses if use.tokens]
        wrong = sum(use.tokens != self.alone(prompt) for prompt, use in answered)
        self.judge(f"{len(answered) - wrong} of {len(answered)} answers are right", not wrong)
        firsts = [outcome.uses[0].seconds for outcome in used[PLAIN] + used[TWICE]]
        seconds = [outcome.uses[1].seconds for outcome in used[TWICE]]
        for what, times in ((f"{len(firsts)} first uses", firsts), (f"{len(seconds)} second uses", seconds)):
            self.record(f"{what} took {statistics.median(times):.2f} s (median), at most {max(times):.2f} s")
        limit = max(SECOND_SECONDS, SECOND_TIMES * max(firsts))
        what = f"second uses are answered at once: the slowest after {max(seconds):.2f} s"
        self.judge(what, max(seconds) < limit, f"not within {limit:.2f} s")
