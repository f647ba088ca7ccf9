"""Each server runs two data-parallel replicas: engines of their own, which vLLM gives requests in turn.

A decode replica must find the prefill replica that has the prompt, whoever answers, also after the whole server
was killed and started again under its old name. vLLM 0.32 ends a server when one of its replicas ends.
"""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from asking import LOADS, NEW_TOKENS, Asking
from pair import engine_of

IN_TURN = 8
THROUGH_PROXY, AT_ONCE = 24, 8


class Replicas(Asking):
    """Runs all of it."""

    def run(self) -> None:
        """Runs all of it."""
        engines = self.in_turn("two replicas")
        self.another_replica(engines)
        self.through_proxy()
        self.killed()
        self.in_turn("after the prefill server was started again")

    def in_turn(self, what: str) -> dict[str, dict[str, Any]]:
        """Hands prompts over, one after the other; returns what names each prefill replica, by its name."""
        engines: dict[str, dict[str, Any]] = {}
        for number in range(IN_TURN):
            prompt = self.prompt()
            want, params = self.alone(prompt), self._pair.params(prompt)
            engine = params["remote_engine_id"]
            engines[engine] = engine_of(params)
            self.same(f"{what}: prompt {number} of {engine}", prompt, params, loads=True, want=want)
        names = {f"{self._prefill.transfer['engine_id']}_dp{replica}" for replica in range(2)}
        self.judge(f"{what}: both answered", set(engines) == names, str(set(engines)))
        return engines

    def another_replica(self, engines: dict[str, dict[str, Any]]) -> None:
        """The control: the replica that did not compute the prompt does not have it."""
        prompt = self.prompt()
        want, params = self.alone(prompt), self._pair.params(prompt)
        other = next(engine for name, engine in engines.items() if name != params["remote_engine_id"])
        self.same("the other replica is asked", prompt, {**params, **other}, loads=False, want=want)

    def through_proxy(self) -> None:
        """Many at once through the proxy, which does not know beforehand which replica will answer."""
        prompts = [self.prompt() for _ in range(THROUGH_PROXY)]
        wants = [self.alone(prompt) for prompt in prompts]
        before = self._decode.counter(LOADS)
        with self._pair.proxy() as proxy, ThreadPoolExecutor(AT_ONCE) as pool:
            found = list(pool.map(lambda prompt: proxy.tokens(prompt, NEW_TOKENS), prompts))
        right = sum(got == want for got, want in zip(found, wants, strict=True))
        self.judge(f"through the proxy: {right} of {THROUGH_PROXY} right", right == THROUGH_PROXY)
        loads = self._decode.counter(LOADS) - before
        self.judge(f"through the proxy: {loads} were loaded", loads == THROUGH_PROXY)
        self.judge("through the proxy: prompts differ", len({tuple(want) for want in wants}) > 1)

    def killed(self) -> None:
        """The prefill server is killed, with both replicas, while it keeps a prompt, and started again."""
        prompt = self.prompt()
        want, params = self.alone(prompt), self._pair.params(prompt)
        self._prefill.signal(signal.SIGKILL)
        self.same("the prefill server is killed", prompt, params, loads=False, want=want)
        self.start_again(self._prefill)
        self.same("its next life does not have the prompt", prompt, params, loads=False, want=want)
