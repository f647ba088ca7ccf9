"""Faults in the middle of a copy: some bytes have arrived, but not all.

The model has large caches and the two servers have different block sizes, so that a copy takes long enough to
be interrupted; interrupting.py logs how much had arrived. Where both servers are asked at once, the first bytes
arrive while the prefill server still computes the prompt. Clients ask the decode server themselves, or the
proxy, which is then killed too.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import time
from collections.abc import Callable, Iterator

from asking import GONE, NEW_TOKENS, Asking, Judge
from pair import Pair, answer
from proxies import RunningProxy, wait_for
from servers import Server

TOKENS = 3008  # fills its blocks on the receiving side
TRIES = 8
WAIT_SECONDS = 30
#: Asks for the answer to a request, and returns its tokens.
Client = Callable[[], list[int]]


class Copying(Asking):
    """Runs one fault after the other."""

    def __init__(self, judge: Judge, pair: Pair) -> None:
        super().__init__(judge, pair, TOKENS)
        self._proxy: RunningProxy | None = None

    def run(self) -> None:
        """Runs all faults."""
        self.handed_over("before any fault")
        with contextlib.ExitStack() as undo:
            if self._pair.case.proxied:
                self._proxy = undo.enter_context(self._pair.proxy())
                self._through("through the proxy")
            self.aborted()
            self.handed_over("after an abort")
            self.prefill_killed()
            self._started_again("prefill", self._prefill)
            self.decode_killed()
            self._started_again("decode", self._decode)
            if self._proxy is not None:
                self.proxy_killed(self._proxy)

    @contextlib.contextmanager
    def _begun(self, prompt: list[int]) -> Iterator[Client]:
        """A request has come; a prefill server that is killed meanwhile does not matter here."""
        proxy = self._proxy
        if proxy is not None:
            yield lambda: proxy.tokens(prompt, NEW_TOKENS)
            return
        with contextlib.suppress(*GONE), self._pair.begun(prompt) as params:
            yield lambda: answer(self._decode.ask(prompt, NEW_TOKENS, params)).tokens

    def _through(self, what: str) -> None:
        """A request without a fault, through the proxy."""
        assert self._proxy is not None
        prompt = self.prompt()
        want = self.alone(prompt)
        got = self._proxy.tokens(prompt, NEW_TOKENS)
        self.judge(f"{what}: same tokens", got == want, f"{got} not {want}")

    def _moments(self, log: int) -> dict[str, tuple[int, int]]:
        """For each moment in the log since `log`: how many pages had begun to arrive, and of how many."""
        found = re.findall(r"interrupting: (\w+) after (\d+) of (\d+) pages", self.log_since(log))
        return {when: (int(arrived), int(total)) for when, arrived, total in found}

    def _wait_for(self, log: int, when: str) -> None:
        until = time.monotonic() + WAIT_SECONDS
        while when not in self._moments(log) and time.monotonic() < until:
            time.sleep(0.05)

    def _interrupted(self, order: str, client: Client) -> list[int] | str:
        """Asks, and gives an order for when the first bytes have arrived: the tokens, or why there are none."""
        self._pair.interrupt.write_text(order)
        try:
            return client()
        except GONE as error:
            return f"{type(error).__name__}: {error}"
        finally:
            self._pair.interrupt.unlink(missing_ok=True)

    def aborted(self) -> None:
        """A client goes away when the first bytes have arrived."""
        moments: dict[str, tuple[int, int]] = {}
        for _ in range(TRIES):
            log = self.log_size()
            self._pair.interrupt.write_text("tell")
            with self._begun(self.prompt()) as ask:
                client = multiprocessing.Process(target=ask)
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
        self.settled("a client goes away in the middle of a copy")

    def prefill_killed(self) -> None:
        """The prefill server is killed when the first bytes have arrived."""
        moments: dict[str, tuple[int, int]] = {}
        for attempt in range(TRIES):
            if attempt:
                self.start_again(self._prefill)
            prompt = self.prompt()
            want = self.alone(prompt)
            log = self.log_size()
            with self._begun(prompt) as ask:
                begun = time.monotonic()
                got = self._interrupted(f"kill {self._prefill.group}", ask)
                seconds = time.monotonic() - begun
            self.judge(
                f"prefill server killed: same tokens ({seconds:.1f} s)", got == want, f"{got} not {want}"
            )
            moments = self._moments(log)
            if within(moments.get("killed")) and within(moments.get("ended")):
                break
        good = within(moments.get("killed")) and within(moments.get("ended"))
        self.judge(f"it was killed in the middle of the copy: {moments}", good)
        if self._proxy is None:  # which otherwise ends the request before the decode server gives up
            # Either the fabric or the connection of the sessions notices it first; each has its own sentence.
            said = re.findall(
                r'"kind":"(?:pull".*"bytes":[1-9]\d*,|expect").*"status":"KVF_E_PEER_LOST","detail":"([^"]+)"',
                self.log_since(log),
            )
            self.judge(f"the log says why the load failed: {said}", bool(said))
        self.judge("the decode server goes on after that", len(self.alone(self.prompt())) == NEW_TOKENS)
        self.settled("the prefill server is killed in the middle of a copy", self._decode)

    def decode_killed(self) -> None:
        """The decode server is killed when the first bytes have arrived."""
        moments: dict[str, tuple[int, int]] = {}
        for attempt in range(TRIES):
            if attempt:
                self.start_again(self._decode)
            log = self.log_size()
            with self._begun(self.prompt()) as ask:
                got = self._interrupted(f"kill {self._decode.group}", ask)
            moments = self._moments(log)
            if within(moments.get("told")):
                break
        good = within(moments.get("told"))
        self.judge(f"the decode server is killed in the middle of a copy: {moments}", good)
        self.judge(f"its client is told: {got}", isinstance(got, str))
        self.settled("the decode server is killed in the middle of a copy", self._prefill)

    def proxy_killed(self, proxy: RunningProxy) -> None:
        """The proxy is killed when the first bytes have arrived: both servers end the request."""
        moments: dict[str, tuple[int, int]] = {}
        for attempt in range(TRIES):
            if attempt:
                proxy.__exit__()
                proxy.__enter__()
            self._through("a proxy that knows both servers")
            log = self.log_size()
            with self._begun(self.prompt()) as ask:
                got = self._interrupted(f"kill {proxy.group}", ask)
            self.judge(f"the proxy is killed: its client notices: {got}", isinstance(got, str))
            self._wait_for(log, "ended")
            moments = self._moments(log)
            if within(moments.get("cancelled")):
                break
        good = within(moments.get("cancelled"))
        self.judge(f"the proxy is killed in the middle of a copy: {moments}", good)
        self.settled("the proxy is killed in the middle of a copy")
        self.handed_over("both servers go on after that")

    def _started_again(self, name: str, server: Server) -> None:
        """Another server replaces a killed one."""
        self.start_again(server)
        self.handed_over(f"the {name} server was started again")
        if self._proxy is not None:
            proxy, url = self._proxy, f"http://127.0.0.1:{server.port}"
            up = f'kvferry_proxy_server_up{{kind="{name}",server="{url}"}} 1'
            self.judge("the proxy notices", wait_for(lambda: up in proxy.ask("/metrics").decode()))
            self._through("through the proxy again")


def within(moment: tuple[int, int] | None) -> bool:
    """Whether some pages had arrived, but not all."""
    return moment is not None and 0 < moment[0] < moment[1]
