"""Clients and servers that go away: every request ends, and the next one is right."""

from __future__ import annotations

import secrets
import signal
import time

from handing import TOKENS, Judged
from pair import ROOMS, Asking
from servers import Refused, Server

LONG = 1500
MANY = 6


class Faults(Judged):
    """One fault after the other, with the same servers."""

    def run(self) -> None:
        """Asks and judges."""
        self._next("before any fault")
        self._only(self.pair.decode)
        self._only(self.pair.prefill)
        self._aborted()
        self._killed(self.pair.prefill, self.pair.decode)
        self._killed(self.pair.decode, self.pair.prefill)

    def _next(self, when: str) -> None:
        """A request that must be right."""
        prompt = self.prompt(100)
        room = self.hand_over(when, prompt)
        self.judge(f"{when}: all cells equal", self.cells_equal(room, len(prompt)))

    def _ends(self, what: str, asked: Asking) -> None:
        try:
            self.judge(f"{what}: the request fails", False, asked.tokens())
        except Refused as why:
            self.judge(f"{what}: the request fails", "timed out" not in str(why) or "Request" in str(why), why)

    def _only(self, server: Server) -> None:
        """A client that asks one server alone."""
        what = f"only the {server.mode} server is asked"
        with Asking(server, self.prompt(100), TOKENS, secrets.randbelow(ROOMS) + 1) as asked:
            self._ends(what, asked)
        self._next(f"after {what}")

    def _aborted(self) -> None:
        """Requests that clients abort while they are computed and moved."""
        prompts = [self.prompt(LONG) for _ in range(MANY)]
        rooms = [secrets.randbelow(ROOMS) + 1 for _ in prompts]
        asked = [
            Asking(server, prompt, TOKENS, room, rid=f"aborted-{room}")
            for prompt, room in zip(prompts, rooms, strict=True)
            for server in (self.pair.prefill, self.pair.decode)
        ]
        for one in asked:
            one.start()
        for i, room in enumerate(rooms):
            time.sleep(0.05 * i)
            server = (self.pair.prefill, self.pair.decode)[i % 2]
            server.post("/abort_request", {"rid": f"aborted-{room}"})
        for one in asked:
            one.join()
        self.judge("aborted requests end", True)
        self._next("after aborts")

    def _killed(self, server: Server, other: Server) -> None:
        """A server that is killed while requests move, and one that takes its place."""
        what = f"the {server.mode} server is killed"
        asked = []
        for _ in range(MANY):
            prompt, room = self.prompt(LONG), secrets.randbelow(ROOMS) + 1
            asked += [Asking(one, prompt, TOKENS, room) for one in (server, other)]
        for one in asked:
            one.start()
        time.sleep(0.3)
        server.signal(signal.SIGKILL)
        server.stop()
        for one in asked:
            one.join()
        self.judge(f"{what}: all requests end", True)
        self.judge(f"{what}: the other server lives on", other.is_running)
        server.start()
        server.ready()
        self._next(f"after {what}, and another has started")
