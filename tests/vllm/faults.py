"""What goes wrong between two servers: the decode server must answer all the same, and go on."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from servers import Server

NEW_TOKENS = 8
TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
Judge = Callable[..., None]


def tokens_of(found: dict[str, Any]) -> list[int]:
    """The tokens of an answer."""
    tokens: list[int] = found["choices"][0]["token_ids"]
    return tokens


class Faults:
    """Runs one fault after the other; the last one leaves no prefill server."""

    def __init__(self, name: str, judge: Judge, prefill: Server, decode: Server) -> None:
        self._name, self._judge = name, judge
        self._prefill, self._decode = prefill, decode
        self._chance = random.Random(11)

    def run(self) -> None:
        """All of them."""
        self.handed_over("before any fault")
        self.wrong_params()
        self.aborted()
        self.handed_over("after an abort")
        self.killed()

    def _prompt(self) -> list[int]:
        return [self._chance.randrange(3, 500) for _ in range(150)]

    def _params(self, prompt: list[int]) -> dict[str, Any]:
        params: dict[str, Any] = self._prefill.ask(prompt, 1, dict(TO_PREFILL))["kv_transfer_params"]
        return params

    def _same(self, what: str, prompt: list[int], params: dict[str, Any], loads: bool) -> None:
        """The answer is the right one, and the cache was loaded, or computed here."""
        want = tokens_of(self._decode.ask(prompt, NEW_TOKENS))
        begun = time.monotonic()
        got = tokens_of(self._decode.ask(prompt, NEW_TOKENS, params))
        seconds = time.monotonic() - begun
        self._judge(self._name, f"{what}: same tokens ({seconds:.1f} s)", got == want, f"{got} not {want}")
        self._judge(self._name, f"{what}: within a minute", seconds < 60, f"{seconds:.0f} s")

    def handed_over(self, what: str) -> None:
        """No fault: what comes before or after one."""
        prompt = self._prompt()
        self._same(what, prompt, self._params(prompt), True)

    def wrong_params(self) -> None:
        """What a proxy passes on is wrong."""
        prompt = self._prompt()
        params = self._params(prompt)
        self._same("a port where nobody listens", prompt, {**params, "remote_port": 9}, False)
        own = {**params, "remote_port": self._decode.port}
        self._same("a port where something else listens", prompt, own, False)
        self._same("another engine's name", prompt, {**params, "remote_engine_id": "nobody"}, False)
        self._same("no port", prompt, {**params, "remote_port": None}, False)
        self._same("after all of these", prompt, params, True)

    def aborted(self) -> None:
        """A client goes away while its request waits for the cache."""
        prompt = self._prompt()
        params = self._params(prompt)
        self._prefill.signal(signal.SIGSTOP)
        try:
            self._decode.ask(prompt, NEW_TOKENS, params, timeout=2)
            waited = False
        except OSError:
            waited = True
        self._prefill.signal(signal.SIGCONT)
        self._judge(self._name, "a request waits for a stopped prefill server", waited)
        want = len(tokens_of(self._decode.ask(self._prompt(), NEW_TOKENS)))
        self._judge(self._name, "the decode server goes on after an abort", want == NEW_TOKENS)

    def killed(self) -> None:
        """The prefill server is killed while a request waits for its cache."""
        prompt = self._prompt()
        params = self._params(prompt)
        want = tokens_of(self._decode.ask(prompt, NEW_TOKENS))
        self._prefill.signal(signal.SIGSTOP)
        found: list[list[int]] = []
        begun = time.monotonic()
        asking = threading.Thread(
            target=lambda: found.append(tokens_of(self._decode.ask(prompt, NEW_TOKENS, params)))
        )
        asking.start()
        time.sleep(1)
        self._judge(self._name, "a request waits for a stopped prefill server again", not found)
        self._prefill.signal(signal.SIGKILL)
        asking.join()
        seconds = time.monotonic() - begun
        self._judge(
            self._name, f"prefill server killed: same tokens ({seconds:.1f} s)", found == [want], str(found)
        )
