"""Faults between two servers: the decode server must answer all the same, and go on, and nothing may be left.

The prefill server is asked first, or both at once, as the case has it. Where both servers have both roles, all
of it is done in both directions.
"""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
import re
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from asking import GONE, NEW_TOKENS, Asking, Judge, plain
from pair import Pair, answer
from processes import resident_mib
from servers import Server

HAND_OVERS = 8
SLOWEST = 10  # how many times the median the first hand-over may take
SECOND_USE_SECONDS = 5  # a server that was busy takes as long; a load that waits for a lease takes longer
WAITS_SECONDS = 1  # after which a request waits for a stopped server
# In a long run the prefill server is killed in each round of this number.
KILLED_EACH = 5
# By how much a server's memory may grow from the second round to the last: vLLM's own grows at first.
MOST_GROWTH_MIB = 16
#: What the decode server's log says of an id that the prefill server does not know, by who moves the bytes.
NOBODY = {"pull": "no lease on the request was granted", "push": "the deadline has passed: .* written"}
#: What the prefill server's log says of a request that no decode server takes.
NOT_TAKEN = {"pull": "the lease ran out before all consumers had", "push": "0 of 1 consumers are served"}
PROXIES = pathlib.Path(__file__).parent / "public_proxies.json"


def timed(what: Callable[[], object]) -> float:
    """The seconds that a call takes."""
    begun = time.monotonic()
    what()
    return time.monotonic() - begun


@dataclass
class Asked:
    """A request to a decode server, in a thread: the right tokens, and those found, or why there are none."""

    want: list[int]
    found: list[int] | str | None = None
    thread: threading.Thread = field(default_factory=threading.Thread)


class Faults(Asking):
    """Runs one fault after the other.

    Args:
        minutes: for which they are repeated; 0: each is tried once
    """

    def __init__(self, judge: Judge, pair: Pair, minutes: float = 0) -> None:
        super().__init__(judge, pair)
        self._minutes = minutes
        self._servers = [(pair.prefill, pair.decode)]
        if pair.case.both:
            self._servers.append((pair.decode, pair.prefill))

    def run(self) -> None:
        """Runs all faults."""
        for servers in self._servers:
            self._prefill, self._decode = servers
            if self._pair.case.at_once:
                self._pair.learn(self._prefill)
            self.first()
            if not self._minutes:
                self.all_survived()
                self.prefill_killed()
                self.decode_killed()
        if self._minutes:
            self.repeated()

    def all_survived(self) -> None:
        """All faults in which no server ends."""
        self.wrong_places()
        self.wrong_values()
        self.missing_values()
        self.other_connectors()
        self.handed_over("after all of these")
        self.settled("wrong parameters")
        self.used_twice()
        self.never_taken()
        self.aborted()
        self.handed_over("after an abort")
        self.prefill_stops()
        self.decode_stops()
        self.handed_over("after all that stopped")

    def first(self) -> None:
        """Compares the first hand-over, in which the engines meet, with the following ones."""
        for server, name in ((self._prefill, "prefill"), (self._decode, "decode")):
            seconds = timed(functools.partial(server.ask, self.prompt(), NEW_TOKENS))
            self.record(f"vLLM's first request without a transfer, {name}: {seconds:.2f} s")
        taken = [timed(self._through) for _ in range(HAND_OVERS)]
        median = statistics.median(taken[1:])
        what = f"the first hand-over takes {taken[0]:.2f} s, those that follow {median:.2f} s"
        self.judge(what, taken[0] <= SLOWEST * median)

    def _through(self) -> None:
        prompt = self.prompt()
        with self._pair.begun(prompt, self._prefill) as params:
            self._decode.ask(prompt, NEW_TOKENS, params)

    # ---- parameters

    def changed(
        self, what: str, change: dict[str, Any], loads: bool | None = None, says: str | None = None
    ) -> None:
        """Hands over with parameters that were changed on the way through the proxy."""
        self._asked(what, lambda params: {**params, **change}, loads, says)

    def _asked(
        self,
        what: str,
        change: Callable[[dict[str, Any]], dict[str, Any]],
        loads: bool | None,
        says: str | None,
        prefilled: int | None = None,
    ) -> None:
        """Asks the prefill server for a prompt or its first tokens, and the decode server with what `change`
        makes of the parameters."""
        prompt = self.prompt()
        want = self.alone(prompt)
        with self._pair.begun(prompt[:prefilled], self._prefill) as params:
            self.same(what, prompt, change(params), loads, says, want)

    def wrong_places(self) -> None:
        """The proxy's parameters lead nowhere."""
        own = self._decode.port
        self.changed("a port where nobody listens", {"remote_port": 9}, False, "127.0.0.1:9: no connection")
        self.changed(
            "a port where something else listens",
            {"remote_port": own},
            False,
            f"127.0.0.1:{own}: .*does not speak ZeroMQ's protocol",
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
        generation = "remote_registration_generation"
        self.changed("a generation that never was", {generation: 12}, True)
        self.changed("a generation: -1", {generation: -1}, False, f"{generation} is -1")
        name = "kvferry_transfer_id"
        self.changed("an id that is not hexadecimal", {name: "not hexadecimal"}, False, name)
        self.changed("an id of nobody's", {name: "00" * 16}, False, NOBODY[self._pair.case.mode])
        self.changed("block ids out of range, which nobody reads", {"remote_block_ids": [[10**9, -1]]}, True)
        self._asked(
            "the id of a shorter request",
            lambda params: {**params, "remote_num_tokens": 150, "kvferry_prompt": None},
            False,
            r"are wanted, but the producer (holds|has) \[0, 20\)",
            prefilled=20,
        )

        prompt, other = self.prompt(), self.prompt()
        want = self.alone(prompt)
        # Where both are asked at once, the digest comes with the cells, and not in the parameters.
        says = "other tokens than those of this prompt" if self._pair.case.at_once else "kvferry_prompt is"
        with self._pair.begun(other, self._prefill) as params:
            self.same("another prompt of that length", prompt, params, False, says, want)

    def missing_values(self) -> None:
        """Some of the proxy's parameters are missing."""
        for name in ("remote_engine_id", "remote_request_id", "remote_host", "remote_port"):
            self.changed(f"no {name}", {name: None}, False, f"kv_transfer_params has no {name}")
        self.same("nothing else", self.prompt(), {"do_remote_prefill": True}, False, "has no .*remote_port")
        self.same("nothing", self.prompt(), {}, False)

    def other_connectors(self) -> None:
        """The proxy's parameters are those of another connector."""
        for proxy in json.loads(PROXIES.read_text()):
            if only := proxy.get("only"):
                self._asked(proxy["proxy"], lambda _, only=only: only, False, proxy["says"])

    def used_twice(self) -> None:
        """The parameters of one request are used in a second one."""
        prompt = self.prompt()
        want = self.alone(prompt)
        with self._pair.begun(prompt, self._prefill) as params:
            self.same("the first use", prompt, params, True, want=want)
        self.same(
            "a second use", prompt, params, False, "was handed over", want=want, within=SECOND_USE_SECONDS
        )

    # ---- clients and servers that go away

    @contextlib.contextmanager
    def _stopped(self, prompt: list[int]) -> Iterator[dict[str, Any]]:
        """The prefill server has been asked and is stopped before anything has moved; at the end it goes on."""
        with contextlib.ExitStack() as undo:
            if self._pair.case.at_once:  # it does not see the request before it goes on
                self._prefill.signal(signal.SIGSTOP)
            params = undo.enter_context(self._pair.begun(prompt, self._prefill))
            undo.callback(self._prefill.signal, signal.SIGCONT)
            self._prefill.signal(signal.SIGSTOP)
            yield params

    @contextlib.contextmanager
    def _waiting(self, what: str) -> Iterator[Asked]:
        """A request waits at the decode server for the stopped prefill server, which goes on at the end."""
        prompt = self.prompt()
        asked = Asked(self.alone(prompt))

        def ask(params: dict[str, Any]) -> None:
            try:
                asked.found = answer(self._decode.ask(prompt, NEW_TOKENS, params)).tokens
            except GONE as error:
                asked.found = f"{type(error).__name__}: {error}"

        with self._stopped(prompt) as params:
            asked.thread = threading.Thread(target=ask, args=(params,))
            asked.thread.start()
            time.sleep(WAITS_SECONDS)
            self.judge(f"{what}: a request waits for the prefill server", asked.found is None)
            yield asked

    def _judge_tokens(self, what: str, asked: Asked) -> None:
        asked.thread.join()
        self.judge(f"{what}: same tokens", asked.found == asked.want, f"{asked.found} not {asked.want}")

    def never_taken(self) -> None:
        """No decode server takes what the prefill server keeps or writes."""
        log = self.log_size(self._prefill)
        with self._pair.begun(self.prompt(), self._prefill):
            pass
        self.settled("a request that no decode server takes")
        wanted = rf"request \S+: .*{NOT_TAKEN[self._pair.case.mode]}"
        said = [line for line in self.log_since(log, self._prefill).splitlines() if re.search(wanted, line)]
        self.judge(f"the prefill server's log says so: {plain(said)}", bool(said), f"not {wanted!r}")

    def aborted(self) -> None:
        """A client goes away while its request waits for the cache."""
        prompt = self.prompt()
        with self._stopped(prompt) as params:
            try:
                self._decode.ask(prompt, NEW_TOKENS, params, timeout=2)
                waited = False
            except OSError:
                waited = True
        self.judge("a client goes away: its request waited for a stopped prefill server", waited)
        self.judge("the decode server goes on after an abort", len(self.alone(self.prompt())) == NEW_TOKENS)
        self.settled("a client that goes away")

    def prefill_stops(self) -> None:
        """The prefill server stops for longer than anybody waits."""
        prompt = self.prompt()
        want = self.alone(prompt)
        with self._stopped(prompt) as params:
            self.same("the prefill server stops", prompt, params, False, "the deadline has passed", want=want)
        self.settled("the prefill server goes on")

    def decode_stops(self) -> None:
        """The decode server stops for longer than the prefill server waits for it."""
        with self._waiting("the decode server stops") as asked:
            self._decode.signal(signal.SIGSTOP)
        try:
            self.settled("the decode server stops", self._prefill)
        finally:
            self._decode.signal(signal.SIGCONT)
        self._judge_tokens("the decode server goes on", asked)
        self.settled("the decode server goes on")

    def prefill_killed(self) -> None:
        """The prefill server is killed while a request waits for its cache, and another replaces it."""
        begun = time.monotonic()
        with contextlib.suppress(*GONE), self._waiting("the prefill server is killed") as asked:
            self._prefill.signal(signal.SIGKILL)
            asked.thread.join()
        seconds = time.monotonic() - begun
        self._judge_tokens(f"the prefill server is killed ({seconds:.1f} s)", asked)
        self.settled("the prefill server is killed", self._decode)
        self._started_again("prefill", self._prefill)

    def decode_killed(self) -> None:
        """The decode server is killed while a request waits there, and another replaces it."""
        with self._waiting("the decode server is killed") as asked:
            self._decode.signal(signal.SIGKILL)
            asked.thread.join()
        self.judge(
            f"the decode server is killed: its client is told: {asked.found}", isinstance(asked.found, str)
        )
        self.settled("the decode server is killed", self._prefill)
        self._started_again("decode", self._decode)

    def _started_again(self, name: str, server: Server) -> None:
        """A server with the same name and ports replaces a killed one."""
        self.start_again(server)
        self.handed_over(f"the {name} server was started again")
        self.handed_over("and once more")
        self.settled(f"the {name} server was started again")

    # ---- for a long time

    def repeated(self) -> None:
        """Repeats the faults; the memory of servers that live through them must not grow."""
        until = time.monotonic() + 60 * self._minutes
        memory: dict[int, list[int]] = {}  # by process group: MiB after each round
        rounds = 0
        while time.monotonic() < until:
            rounds += 1
            for servers in self._servers:
                self._prefill, self._decode = servers
                self.all_survived()
            if rounds % KILLED_EACH == 0:
                self.prefill_killed()
            for server in self._both:
                memory.setdefault(server.group, []).append(resident_mib(server.group)["anonymous"])
                self.record(
                    f"round {rounds}: port {server.port}: anonymous memory {memory[server.group][-1]} MiB, of "
                    f"agents for peers {self._pair.agent_memory(server)} bytes"
                )
        self.record(f"{rounds} rounds in {self._minutes:g} minutes")
        for group, found in memory.items():
            what = f"memory of the server of group {group} after each round, in MiB: {found}"
            self.judge(what, found[-1] - found[min(1, len(found) - 1)] <= MOST_GROWTH_MIB)
