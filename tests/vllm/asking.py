"""Asks two servers the same, and judges their answers and what is left in the servers afterwards."""

from __future__ import annotations

import http.client
import random
import re
import time
from collections.abc import Callable
from typing import Any

from pair import Pair, answer
from servers import Server

NEW_TOKENS = 8
LOADS = "vllm:kvferry_loads_total"
# Above the times after which servers give up what a lost peer has not taken or written: see pair.py.
SETTLE_SECONDS = 90
#: Values of vLLM's metrics that are 0 when nothing is under way.
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
#: What a client sees of a server or a proxy that dies, or does not answer in time.
GONE = (OSError, http.client.HTTPException)
Judge = Callable[..., None]


class Asking:
    """Asks two servers the same, and judges their answers."""

    def __init__(self, judge: Judge, pair: Pair, length: int = 150) -> None:
        self._judge, self._pair, self._name = judge, pair, pair.name
        self._prefill, self._decode = pair.prefill, pair.decode
        self._chance = random.Random(11)
        self._length = length

    def judge(self, what: str, good: bool, detail: str = "") -> None:
        """Records one judgement."""
        self._judge(self._name, what, good, detail)

    def record(self, what: str) -> None:
        """Prints what is not judged."""
        print(f"record {self._name}: {what}", flush=True)

    def prompt(self) -> list[int]:
        """A new prompt each time."""
        return [self._chance.randrange(3, 500) for _ in range(self._length)]

    def alone(self, prompt: list[int]) -> list[int]:
        """The tokens that the decode server computes itself."""
        return answer(self._decode.ask(prompt, NEW_TOKENS)).tokens

    def same(
        self,
        what: str,
        prompt: list[int],
        params: dict[str, Any],
        loads: bool | None = None,
        says: str | None = None,
        want: list[int] | None = None,
        within: float = 60,
    ) -> None:
        """Requires the right answer.

        Args:
            loads: whether the cache must be loaded, or computed; None: not judged
            says: what the decode server's log must say about the request, a regular expression
            want: the right tokens; None: the decode server is asked for them first
            within: seconds
        """
        if want is None:
            want = self.alone(prompt)
        log = self.log_size()
        before = self._decode.counter(LOADS)
        begun = time.monotonic()
        try:
            got: object = answer(self._decode.ask(prompt, NEW_TOKENS, params)).tokens
        except OSError as error:
            got = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - begun
        self.judge(f"{what}: same tokens ({seconds:.1f} s)", got == want, f"{got} not {want}")
        self.judge(f"{what}: within {within:g} s", seconds < within, f"{seconds:.1f} s")
        if loads is not None:
            # Not vLLM's count of tokens from another engine, which counts loads when they begin.
            loaded = self._decode.counter(LOADS) - before
            self.judge(
                f"{what}: {'loaded' if loads else 'computed'}",
                loaded == loads * self._decode.side.tp,
                f"{loaded} loads",
            )
        if says is not None:
            said = [
                line
                for line in self.log_since(log).splitlines()
                if re.search(r"request \S+( is computed here)?: ", line)
            ]
            found = [line for line in said if re.search(says, line)]
            self.judge(f"{what}: the log says so: {plain(found)}", bool(found), f"{says!r} is not in {said}")

    def handed_over(self, what: str, prefill: Server | None = None) -> None:
        """A hand-over without a fault, before or after one."""
        prompt = self.prompt()
        want = self.alone(prompt)
        with self._pair.begun(prompt, prefill or self._prefill) as params:
            self.same(what, prompt, params, loads=True, want=want)

    def start_again(self, server: Server) -> None:
        """Starts a server in the place of one that was killed or stopped."""
        server.stop()
        server.start()
        server.ready()
        server.ask(self.prompt(), NEW_TOKENS)  # vLLM's first step may take longer than a load may

    def settled(self, what: str, *servers: Server) -> None:
        """Requires that nothing is left in the servers, by default both, of the requests before: no blocks,
        leases or tickets."""
        begun = time.monotonic()
        while True:
            left = {server.port: found for server in servers or self._both if (found := self._left(server))}
            seconds = time.monotonic() - begun
            if not left or seconds > SETTLE_SECONDS:
                break
            time.sleep(0.5)
        self.judge(f"{what}: nothing is left of it (after {seconds:.0f} s)", not left, str(left))

    @property
    def _both(self) -> tuple[Server, Server]:
        return self._prefill, self._decode

    def _left(self, server: Server) -> dict[str, float]:
        """What a server keeps."""
        server.ask([5, 6, 7], 1)  # a step, so that all of its parts report
        found = {name: value for name in GAUGES if (value := server.metric(name))}
        return found | self._pair.kept(server)

    def log_size(self, server: Server | None = None) -> int:
        """The end of a server's log, by default the decode server's."""
        return (server or self._decode).log.stat().st_size

    def log_since(self, size: int, server: Server | None = None) -> str:
        """The lines added to it since."""
        with (server or self._decode).log.open("rb") as log:
            log.seek(size)
            return log.read().decode(errors="replace")


def plain(lines: list[str]) -> str:
    """The text of a line of the log, without its time and its source."""
    return lines[0].partition("] ")[2] if lines else ""
