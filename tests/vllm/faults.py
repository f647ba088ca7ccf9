"""Faults between two servers: the decode server must answer all the same, and go on."""

from __future__ import annotations

import functools
import random
import re
import signal
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from pair import Pair, answer
from servers import Server

NEW_TOKENS = 8
HAND_OVERS = 8
LOADS = "vllm:kvferry_loads_total"
SLOWEST = 10  # how many times the median the first hand-over may take
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
    ) -> None:
        """Requires the right answer.

        Args:
            loads: whether the cache must be loaded, or computed; None: not judged
            says: what the decode server's log must say about the request, a regular expression
        """
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
        self.judge(f"{what}: within a minute", seconds < 60, f"{seconds:.0f} s")
        if loads is not None:
            # Not vLLM's count of tokens from another engine, which counts loads when they begin.
            loaded = self._decode.counter(LOADS) - before
            self.judge(
                f"{what}: {'loaded' if loads else 'computed'}", loaded == loads * self._pair.case.decode.tp
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
        self.same(what, prompt, self._pair.params(prompt, prefill), loads=True)

    def log_size(self) -> int:
        """The end of the decode server's log."""
        return self._decode.log.stat().st_size

    def log_since(self, size: int) -> str:
        """The lines added to it since."""
        with self._decode.log.open("rb") as log:
            log.seek(size)
            return log.read().decode(errors="replace")


def timed(what: Callable[[], object]) -> float:
    """The seconds that a call takes."""
    begun = time.monotonic()
    what()
    return time.monotonic() - begun


def plain(lines: list[str]) -> str:
    """The text of a line of the log, without its time and its source."""
    return lines[0].partition("] ")[2] if lines else ""


class Faults(Asking):
    """Runs one fault after the other."""

    def run(self) -> None:
        """Runs all faults."""
        self.first()
        self.wrong_places()
        self.wrong_values()
        self.missing_values()
        self.handed_over("after all of these")
        self.used_twice()
        self.aborted()
        self.handed_over("after an abort")
        self.killed()
        self.judge("the decode server goes on after that", len(self.alone(self.prompt())) == NEW_TOKENS)
        self.restarted()

    def first(self) -> None:
        """Compares the first hand-over, in which the engines meet, with the following ones."""
        for server, name in ((self._prefill, "prefill"), (self._decode, "decode")):
            seconds = timed(functools.partial(server.ask, self.prompt(), NEW_TOKENS))
            print(
                f"record {self._name}: vLLM's first request without a transfer, {name}: {seconds:.2f} s",
                flush=True,
            )
        taken = []
        for _ in range(HAND_OVERS):
            prompt = self.prompt()
            taken.append(timed(functools.partial(self._pair.hand_over, prompt, NEW_TOKENS)))
        median = statistics.median(taken[1:])
        what = f"the first hand-over takes {taken[0]:.2f} s, those that follow {median:.2f} s"
        self.judge(what, taken[0] <= SLOWEST * median)

    def changed(
        self, what: str, change: dict[str, Any], loads: bool | None = None, says: str | None = None
    ) -> None:
        """Hands over with parameters that were changed on the way through the proxy."""
        prompt = self.prompt()
        self.same(what, prompt, {**self._pair.params(prompt), **change}, loads, says)

    def wrong_places(self) -> None:
        """The proxy's parameters lead nowhere."""
        own = self._decode.port
        self.changed("a port where nobody listens", {"remote_port": 9}, False, "127.0.0.1:9: no connection")
        self.changed(
            "a port where something else listens",
            {"remote_port": own},
            False,
            f"127.0.0.1:{own}: .* the handshake",
        )
        self.changed(
            "another engine's name", {"remote_engine_id": "nobody"}, False, "answers at .*, not nobody"
        )
        self.handed_over("after these")

    def wrong_values(self) -> None:
        """The proxy's parameters are out of range, or of the wrong type."""
        self.changed("more tokens than the prompt has", {"remote_num_tokens": 5000}, True)
        self.changed("no tokens", {"remote_num_tokens": 0})
        for tokens in (-5, "many", [7]):
            self.changed(f"tokens: {tokens}", {"remote_num_tokens": tokens}, False, "remote_num_tokens")
        for port in (-1, 0, 70000, "here"):
            self.changed(f"port: {port}", {"remote_port": port}, False, "remote_port")
        name = "kvferry_transfer_id"
        self.changed("an id that is not hexadecimal", {name: "not hexadecimal"}, False, name)
        self.changed("an id of nobody's", {name: "00" * 16}, False, "no lease on the request was granted")
        self.changed("block ids out of range, which nobody reads", {"remote_block_ids": [[10**9, -1]]}, True)
        shorter = self._pair.params(self.prompt()[:20])
        shorter["remote_num_tokens"] = 150
        self.changed(
            "the id of a shorter request", shorter, False, r"are wanted, but the producer holds \[0, 20\)"
        )

    def missing_values(self) -> None:
        """Some of the proxy's parameters are missing."""
        for name in ("remote_engine_id", "remote_request_id", "remote_host", "remote_port"):
            self.changed(f"no {name}", {name: None}, False, f"kv_transfer_params has no {name}")
        self.same("nothing else", self.prompt(), {"do_remote_prefill": True}, False, "has no .*remote_port")
        self.same("nothing", self.prompt(), {}, False)

    def used_twice(self) -> None:
        """The parameters of one request are used in a second one."""
        prompt = self.prompt()
        params = self._pair.params(prompt)
        self.same("the first use", prompt, params, True)
        self.same("a second use", prompt, params, False, "was handed over")

    def aborted(self) -> None:
        """A client goes away while its request waits for the cache."""
        prompt = self.prompt()
        params = self._pair.params(prompt)
        self._prefill.signal(signal.SIGSTOP)
        try:
            self._decode.ask(prompt, NEW_TOKENS, params, timeout=2)
            waited = False
        except OSError:
            waited = True
        self._prefill.signal(signal.SIGCONT)
        self.judge("a request waits for a stopped prefill server", waited)
        self.judge("the decode server goes on after an abort", len(self.alone(self.prompt())) == NEW_TOKENS)

    def killed(self) -> None:
        """The prefill server is killed while a request waits for its cache."""
        prompt = self.prompt()
        params = self._pair.params(prompt)
        want = self.alone(prompt)
        self._prefill.signal(signal.SIGSTOP)
        found: list[list[int]] = []
        begun = time.monotonic()
        asking = threading.Thread(
            target=lambda: found.append(answer(self._decode.ask(prompt, NEW_TOKENS, params)).tokens)
        )
        asking.start()
        time.sleep(1)
        self.judge("a request waits for a stopped prefill server again", not found)
        self._prefill.signal(signal.SIGKILL)
        asking.join()
        seconds = time.monotonic() - begun
        self.judge(f"prefill server killed: same tokens ({seconds:.1f} s)", found == [want], str(found))

    def restarted(self) -> None:
        """A prefill server with the same name and ports replaces the killed one."""
        self._prefill.stop()
        self._prefill.start()
        self._prefill.ready()
        self.handed_over("the prefill server was started again")
        self.handed_over("and once more")
