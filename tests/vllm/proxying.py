"""The proxy in front of two servers: right answers, streamed or not, and also when a client or a server goes
away.

Public proxies are not run, but their two requests are sent, with the keys in public_proxies.json.
"""

from __future__ import annotations

import json
import pathlib
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from faults import LOADS, NEW_TOKENS, Asking, Judge
from pair import Pair
from servers import ANSWER_SECONDS, greedy

WAIT_SECONDS = 60
MANY_TOKENS = 600  # more than a client waits for
RUNNING = "vllm:num_requests_running"


class Proxying(Asking):
    """Runs all cases."""

    def __init__(self, judge: Judge, pair: Pair) -> None:
        super().__init__(judge, pair)
        self._port = pair.port + 4
        self._log = pair.folder / f"{pair.name}.proxy.log"
        self._process: subprocess.Popen[bytes]

    def run(self) -> None:
        """Runs all cases."""
        self.public_proxies()
        with self.proxy():
            self.answers("not streamed", stream=False)
            self.answers("streamed", stream=True)
            self.client_gone()
            self.answers("after that", stream=True)
            self.prefill_gone()
        with self.proxy():
            self.answers("a proxy that was started anew", stream=False)
            self.proxy_gone()

    # ---- the proxy

    @contextmanager
    def proxy(self) -> Iterator[None]:
        """Runs the proxy during a block."""
        urls = [f"http://127.0.0.1:{server.port}" for server in (self._prefill, self._decode)]
        command = [sys.executable, "-m", "kvferry.vllm.proxy", "--port", str(self._port)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--prefill", urls[0], "--decode", urls[1]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            try:
                self._wait(lambda: self._post("/health", None) is not None)
                yield
            finally:
                self._process.terminate()
                self._process.wait()

    def _wait(self, condition: Any) -> bool:
        until = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < until:
            try:
                if condition():
                    return True
            except OSError:
                pass
            time.sleep(0.05)
        return False

    def _post(self, path: str, body: dict[str, Any] | None, timeout: float = ANSWER_SECONDS) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as found:
            content: bytes = found.read()
            return content

    def _tokens(self, prompt: list[int], stream: bool) -> list[int]:
        body = greedy(prompt, NEW_TOKENS, None)
        if not stream:
            return list(json.loads(self._post("/v1/completions", body))["choices"][0]["token_ids"])
        events = self._post("/v1/completions", {**body, "stream": True}).decode()
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

    def _goes_away(self, what: str, leave: Any) -> None:
        """While a request for many tokens is under way, a client or the proxy goes away; the decode server must
        end it."""
        body = greedy(self.prompt(), MANY_TOKENS, None) | {"stream": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        answered = urllib.request.urlopen(request, timeout=ANSWER_SECONDS)
        answered.readline()
        self.judge(f"{what}: a request is under way", self._decode.counter(RUNNING) == 1)
        leave(answered)
        ended = self._wait(lambda: self._decode.counter(RUNNING) == 0)
        self.judge(f"{what}: the decode server has ended it", ended)
        answered.close()
        self.judge(f"{what}: and goes on", len(self.alone(self.prompt())) == NEW_TOKENS)

    def client_gone(self) -> None:
        """A client goes away in the middle of an answer."""
        self._goes_away("a client goes away", lambda answered: answered.close())

    def proxy_gone(self) -> None:
        """The proxy is killed in the middle of an answer."""
        self._goes_away("the proxy is killed", lambda _: self._process.send_signal(signal.SIGKILL))

    def prefill_gone(self) -> None:
        """The only prefill server is killed, and started again."""
        self._prefill.signal(signal.SIGKILL)
        self.answers("the prefill server is gone", stream=True, loads=False)
        self._prefill.stop()
        self._prefill.start()
        self._prefill.ready()
        up = f'kvferry_proxy_server_up{{kind="prefill",server="http://127.0.0.1:{self._prefill.port}"}} 1'
        self.judge("it is back", self._wait(lambda: up in self._post("/metrics", None).decode()))
        self.answers("it is back", stream=True)
