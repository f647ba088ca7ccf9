"""The proxy in front of two servers: right answers, streamed or not, and also when a client, a server or the
proxy goes away or a server stops for ever; nothing may be left in the servers.

Public proxies are not run, but their two requests are sent, with the keys in public_proxies.json.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import pathlib
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

from asking import GONE, LOADS, NEW_TOKENS, Asking
from proxies import RunningProxy, wait_for
from servers import ANSWER_SECONDS, Server, greedy

MANY_TOKENS = 600  # more than anybody waits for
PATIENCE = 10  # seconds
WAITS_SECONDS = 1  # after which a request waits for a stopped server
RUNNING = "vllm:num_requests_running"


class Client:
    """A client in a process of its own, which can leave at any moment."""

    def __init__(self, ask: Callable[[], object]) -> None:
        def run() -> None:
            try:
                ask()
            except GONE:
                sys.exit(1)

        self._process = multiprocessing.Process(target=run)
        self._process.start()

    @property
    def is_waiting(self) -> bool:
        """Whether it has got neither an answer nor an error."""
        return self._process.is_alive()

    def succeeds(self) -> bool:
        """Waits until it has got an answer, or an error."""
        self._process.join()
        return self._process.exitcode == 0

    def leave(self) -> None:
        """It goes away, if it has not."""
        self._process.kill()
        self._process.join()


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
            self.settled("a client and a server that went away")
            self.prefill_stops()
            self.client_gone_early()
            self.decode_gone()
        with self.proxy() as self._proxy:
            self.answers("a proxy that was started anew", stream=False)
            self.proxy_gone()
        with self.proxy() as self._proxy:
            self.answers("another one", stream=False)
            self.proxy_gone_early()

    def proxy(self) -> RunningProxy:
        """One in front of both, which waits for a silent server longer than a load may take."""
        return self._pair.proxy("--patience", str(PATIENCE))

    # ---- what it does

    def answers(self, what: str, stream: bool, loads: bool = True) -> None:
        """Requires the right tokens, from a cache that was loaded, or computed."""
        prompt = self.prompt()
        want, before = self.alone(prompt), self._decode.counter(LOADS)
        try:
            got: object = self._proxy.tokens(prompt, NEW_TOKENS, stream)
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
            want = self.alone(prompt)  # a push does not wait for long
            found = self._ask(self._prefill.port, greedy(prompt, 1, None) | proxy["prefill"])
            params = proxy.get("only") or {**found["kv_transfer_params"], **proxy["decode"]}
            self.same(proxy["proxy"], prompt, params, proxy["loads"], proxy.get("says"), want)

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
        self._comes_back("prefill", self._prefill)

    def decode_gone(self) -> None:
        """The only decode server is killed while a request waits there."""
        with self._waiting("the decode server is killed") as client:
            self._decode.signal(signal.SIGKILL)
            self.judge("the decode server is killed: its client is told", not client.succeeds())
        self.settled("the decode server is killed", self._prefill)
        self._comes_back("decode", self._decode)

    def _comes_back(self, kind: str, server: Server) -> None:
        self.start_again(server)
        self._is_up(kind, server)
        self.answers(f"the {kind} server is back", stream=True)

    def _is_up(self, kind: str, server: Server) -> None:
        up = f'kvferry_proxy_server_up{{kind="{kind}",server="http://127.0.0.1:{server.port}"}} 1'
        noticed = wait_for(lambda: up in self._proxy.ask("/metrics").decode())
        self.judge(f"the proxy notices that the {kind} server is up", noticed)

    # ---- before anything has moved

    @contextlib.contextmanager
    def _stopped(self) -> Iterator[None]:
        """The prefill server is stopped; at the end it goes on."""
        self._prefill.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._prefill.signal(signal.SIGCONT)

    @contextlib.contextmanager
    def _waiting(self, what: str) -> Iterator[Client]:
        """A client's request waits for the stopped prefill server, which goes on at the end."""
        prompt = self.prompt()
        with self._stopped():
            client = Client(lambda: self._proxy.tokens(prompt, NEW_TOKENS))
            time.sleep(WAITS_SECONDS)
            self.judge(f"{what}: a request waits for the prefill server", client.is_waiting)
            try:
                yield client
            finally:
                client.leave()

    def prefill_stops(self) -> None:
        """The prefill server stops for longer than anybody waits."""
        with self._stopped():
            self.answers("the prefill server stops", stream=False, loads=False)
        self._is_up("prefill", self._prefill)
        self.settled("the prefill server goes on")
        self.answers("the prefill server goes on", stream=False)

    def client_gone_early(self) -> None:
        """A client goes away while its request waits for the prefill server."""
        with self._waiting("a client goes away early") as client:
            client.leave()
        self._is_up("prefill", self._prefill)
        self.settled("a client goes away early")
        self.answers("a client has gone away early", stream=False)

    def proxy_gone_early(self) -> None:
        """The proxy is killed while a request waits for the prefill server."""
        with self._waiting("the proxy is killed early") as client:
            self._proxy.kill()
            self.judge("the proxy is killed early: its client notices", not client.succeeds())
        self.settled("the proxy is killed early")
        self.handed_over("the proxy was killed early")
