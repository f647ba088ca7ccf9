"""Faults in the middle of a copy: some bytes have arrived, but not all.

The model has large caches and the two servers have different block sizes, so that a copy takes long enough to
be interrupted; interrupting.py logs how much had arrived. Where both servers are asked at once, the first bytes
arrive while the prefill server still computes the prompt.
"""

from __future__ import annotations

import multiprocessing
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from faults import NEW_TOKENS, Asking, Judge
from pair import Pair, answer

TOKENS = 3008  # fills its blocks on the receiving side
TRIES = 8
WAIT_SECONDS = 30


class Copying(Asking):
    """Runs one fault after the other."""

    def __init__(self, judge: Judge, pair: Pair) -> None:
        super().__init__(judge, pair, TOKENS)

    def run(self) -> None:
        """Runs all faults."""
        self.handed_over("before any fault")
        self.aborted()
        self.handed_over("after an abort")
        self.killed()
        self.restarted()

    def _begin(self, pool: ThreadPoolExecutor, prompt: list[int]) -> dict[str, Any]:
        """Asks the prefill server, which may never answer; returns the parameters for the decode server."""
        if not self._pair.case.at_once:
            return self._pair.params(prompt)
        there, here = self._pair.announced()
        pool.submit(self._prefill.ask, prompt, 1, there)
        return here

    def _moments(self, log: int) -> dict[str, tuple[int, int]]:
        """For each moment in the log since `log`: how many pages had begun to arrive, and of how many."""
        found = re.findall(r"interrupting: (\w+) after (\d+) of (\d+) pages", self.log_since(log))
        return {when: (int(arrived), int(total)) for when, arrived, total in found}

    def _wait_for(self, log: int, when: str) -> None:
        until = time.monotonic() + WAIT_SECONDS
        while when not in self._moments(log) and time.monotonic() < until:
            time.sleep(0.05)

    def aborted(self) -> None:
        """A client goes away when the first bytes have arrived."""
        moments: dict[str, tuple[int, int]] = {}
        for _ in range(TRIES):
            prompt = self.prompt()
            log = self.log_size()
            self._pair.interrupt.write_text("tell")
            with ThreadPoolExecutor(1) as pool:
                params = self._begin(pool, prompt)
                client = multiprocessing.Process(target=self._decode.ask, args=(prompt, NEW_TOKENS, params))
                client.start()
                until = time.monotonic() + WAIT_SECONDS
                while self._pair.interrupt.exists() and time.monotonic() < until:
                    time.sleep(0.001)
                client.kill()
                client.join()
                self._wait_for(log, "ended")
            moments = self._moments(log)
            if within(moments.get("cancelled")):
                break
            print(f"       {self._name}: too late, once more: {moments}", flush=True)
        self.judge(f"a client goes away in the middle of a copy: {moments}", within(moments.get("cancelled")))
        self.judge("the decode server goes on after that", len(self.alone(self.prompt())) == NEW_TOKENS)

    def killed(self) -> None:
        """The prefill server is killed when the first bytes have arrived."""
        moments: dict[str, tuple[int, int]] = {}
        for attempt in range(TRIES):
            if attempt:
                self._prefill.start()
                self._prefill.ready()
            prompt = self.prompt()
            want = self.alone(prompt)
            log = self.log_size()
            self._pair.interrupt.write_text(f"kill {self._prefill.group}")
            with ThreadPoolExecutor(1) as pool:
                params = self._begin(pool, prompt)
                begun = time.monotonic()
                got: Any = answer(self._decode.ask(prompt, NEW_TOKENS, params)).tokens
                seconds = time.monotonic() - begun
            self._prefill.stop()
            self.judge(
                f"prefill server killed: same tokens ({seconds:.1f} s)", got == want, f"{got} not {want}"
            )
            moments = self._moments(log)
            if within(moments.get("killed")) and within(moments.get("ended")):
                break
        good = within(moments.get("killed")) and within(moments.get("ended"))
        self.judge(f"it was killed in the middle of the copy: {moments}", good)
        # Either the fabric or the connection of the sessions notices it first; each has its own sentence.
        said = re.findall(
            r'"kind":"(?:pull".*"bytes":[1-9]\d*,|expect").*"status":"KVF_E_PEER_LOST","detail":"([^"]+)"',
            self.log_since(log),
        )
        self.judge(f"the log says why the load failed: {said}", bool(said))
        self.judge("the decode server goes on after that", len(self.alone(self.prompt())) == NEW_TOKENS)

    def restarted(self) -> None:
        """Another prefill server replaces the killed one."""
        self._prefill.start()
        self._prefill.ready()
        self.handed_over("the prefill server was started again")


def within(moment: tuple[int, int] | None) -> bool:
    """Whether some pages had arrived, but not all."""
    return moment is not None and 0 < moment[0] < moment[1]
