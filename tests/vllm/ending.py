"""A prefill server that sleeps and wakes, and then ends, each time while it keeps a request for the other."""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from faults import Asking
from pair import DRAIN_SECONDS

LONG = 120.0


class Ending(Asking):
    """Puts the prefill server to sleep, wakes it, and ends it."""

    def run(self) -> None:
        """Does it."""
        self.handed_over("before")
        for level in (1, 2):
            self._sleeps(level)
        self._ends()

    def _sleeps(self, level: int) -> None:
        """vLLM falls asleep when peers have what the server keeps for them. On the CPU the memory stays."""
        prompt = self.prompt()
        params = self._pair.params(prompt)
        with ThreadPoolExecutor(1) as pool:
            asleep = pool.submit(self._post, f"/sleep?level={level}&mode=wait")
            self.same(f"kept when it is told to sleep at level {level}", prompt, params, loads=True)
            asleep.result(LONG)
        self.judge(
            f"level {level}: vLLM says that it sleeps", self._get("/is_sleeping") == {"is_sleeping": True}
        )
        ignored = "sleep mode is not supported on CPU, ignore it."
        said = self._log().count(ignored)  # also when it wakes
        self.judge(f"level {level}: its worker says: {ignored}", said == 2 * level - 1, f"{said} times")
        self._post("/wake_up")
        self.handed_over(f"awake again after level {level}")

    def _ends(self) -> None:
        """The server and its workers get a signal at the same time, as in a terminal."""
        prompt = self.prompt()
        params = self._pair.params(prompt)
        self._prefill.signal(signal.SIGTERM)
        says = f"the engine ends: peers have {DRAIN_SECONDS} s for the 1 requests kept for them"
        self._wait(lambda: says in self._log(), says)
        self.same("kept when it ends", prompt, params, loads=True)
        self._wait(lambda: not self._prefill.is_running, "the prefill server has ended")
        self.same("asked for after its end", prompt, params, loads=False)

    def _wait(self, until: Any, what: str) -> None:
        end = time.monotonic() + LONG
        while not until() and time.monotonic() < end:
            time.sleep(0.1)
        self.judge(what, until())

    def _log(self) -> str:
        return self._prefill.log.read_text(errors="replace")

    def _post(self, path: str) -> None:
        request = urllib.request.Request(f"http://127.0.0.1:{self._prefill.port}{path}", b"", method="POST")
        urllib.request.urlopen(request, timeout=LONG).close()

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._prefill.port}{path}", timeout=LONG) as answer:
            return json.load(answer)
