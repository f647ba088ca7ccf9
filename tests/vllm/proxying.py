"""The proxy in front of two servers: right answers, streamed or not, and also when a client or a server goes
away.

Public proxies are not run, but their two requests are sent, with the keys in public_proxies.json.
"""

from __future__ import annotations

import json
import pathlib
import re
import signal
import urllib.request
from collections.abc import Callable
from typing import Any

from faults import LOADS, NEW_TOKENS, Asking
from proxies import RunningProxy, wait_for
from servers import ANSWER_SECONDS, greedy

MANY_TOKENS = 600  # more than anybody waits for
RUNNING = "vllm:num_requests_running"


class Proxying(Asking):
    """Runs all cases."""

    _proxy: RunningProxy

    def run(self) -> None:
        """Runs all cases."""
        self.public_proxies()
        with self.proxy() as self._proxy:
            self.answers("not streamed", stream=False)
            self.answers("streamed", stream=True)
            self.client_gone()
            self.answers("after that", stream=True)
            self.prefill_gone()
        with self.proxy() as self._proxy:
            self.answers("a proxy that was started anew", stream=False)
            self.proxy_gone()

    # ---- the proxy

    def proxy(self) -> RunningProxy:
        """One in front of both."""
        pair = self._pair
        return RunningProxy(
            pair.port + 4, [self._prefill], [self._decode], pair.folder / f"{pair.name}.proxy.log"
        )

    def _tokens(self, prompt: list[int], stream: bool) -> list[int]:
        body = greedy(prompt, NEW_TOKENS, None)
        if not stream:
            return list(json.loads(self._proxy.ask("/v1/completions", body))["choices"][0]["token_ids"])
        events = self._proxy.ask("/v1/completions", {**body, "stream": True}).decode()
        found: list[int] = []
        for event in re.findall(r"^data: (\{.*)$", events, re.M):
            found += json.loads(event)["choices"][0].get("token_ids") or []
        return found

    # ---- what it does

    def answers(self, what: str, stream: bool, loads: bool = True) -> None:
        """Requires the right tokens, from a cache that was loaded, or computed."""
        prompt = self.prompt()
        want, before = self.alone(prompt), self._decode.counter(LOADS)
        try:
            got: object = self._tokens(prompt, stream)
        except OSError as error:
            got = f"{type(error).__name__}: {error}"
        self.judge(f"{what}: same tokens", got == want, f"{got} not {want}")
        loaded = self._decode.counter(LOADS) - before
        self.judge(f"{what}: {'loaded' if loads else 'computed'}", loaded == loads * self._pair.case.decode.tp)

    def public_proxies(self) -> None:
        """Sends the two requests of each public proxy."""
        file = pathlib.Path(__file__).parent / "public_proxies.json"
        for proxy in json.loads(file.read_text()):
            prompt = self.prompt()
            found = self._ask(self._prefill.port, greedy(prompt, 1, None) | proxy["prefill"])
            params = proxy.get("only") or {**found["kv_transfer_params"], **proxy["decode"]}
            self.same(proxy["proxy"], prompt, params, proxy["loads"], proxy.get("says"))

    @staticmethod
    def _ask(port: int, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answered:
            found: dict[str, Any] = json.load(answered)
            return found

    def _goes_away(self, what: str, leave: Callable[[Any], None]) -> None:
        """A request of many tokens is under way; then somebody leaves, and the decode server is to notice."""
        body = greedy(self.prompt(), MANY_TOKENS, None) | {"stream": True}
        answered = self._proxy.open("/v1/completions", body)
        answered.readline()
        self.judge(f"{what}: a request is under way", self._decode.counter(RUNNING) == 1)
        leave(answered)
        ended = wait_for(lambda: self._decode.counter(RUNNING) == 0)
        self.judge(f"{what}: the decode server has ended it", ended)
        answered.close()
        self.judge(f"{what}: and goes on", len(self.alone(self.prompt())) == NEW_TOKENS)

    def client_gone(self) -> None:
        """A client goes away in the middle of an answer."""
        self._goes_away("a client goes away", lambda answered: answered.close())

    def proxy_gone(self) -> None:
        """The proxy is killed in the middle of an answer."""
        self._goes_away("the proxy is killed", lambda _: self._proxy.kill())

    def prefill_gone(self) -> None:
        """The only prefill server is killed, and started again."""
        self._prefill.signal(signal.SIGKILL)
        self.answers("the prefill server is gone", stream=True, loads=False)
        self._prefill.stop()
        self._prefill.start()
        self._prefill.ready()
        up = f'kvferry_proxy_server_up{{kind="prefill",server="http://127.0.0.1:{self._prefill.port}"}} 1'
        self.judge("it is back", wait_for(lambda: up in self._proxy.ask("/metrics").decode()))
        self.answers("it is back", stream=True)
