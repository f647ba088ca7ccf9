"""A prefill server that is given commands, sleeps, wakes and ends, while it keeps a request for the other."""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from faults import Asking
from pair import DRAIN_SECONDS

from kvferry.commands import DRAIN, HAND_OVER, RESUME, ask
from kvferry.contact import Contact

LONG = 120.0


class Ending(Asking):
    """Gives the prefill server commands, puts it to sleep, wakes it, and ends it."""

    def run(self) -> None:
        """Does it."""
        self.handed_over("before")
        self._heeds()
        for level in (1, 2):
            self._sleeps(level)
        self._ends()

    def _heeds(self) -> None:
        """An operator gives commands to the idle server."""
        prompt = self.prompt()
        params = self._pair.params(prompt)
        place = Contact(params["remote_engine_id"], f"tcp://{params['remote_host']}:{params['remote_port']}")
        (reply,) = ask(place, HAND_OVER, params["remote_request_id"], timeout=LONG)
        found = json.loads(reply.records[0].data) if reply.records else {}
        wanted = {**params, "remote_block_ids": []}
        wanted.pop("remote_prefill_cached_tokens", None)  # vLLM's own word to a proxy
        self.judge("told to hand over: the parameters", found == wanted, f"{reply.error}: {found}")
        self.same("handed over by a command", prompt, found, loads=True)
        (reply,) = ask(place, DRAIN, timeout=LONG)
        self.judge("told to drain: it has drained", reply.error is None, str(reply))
        prompt = self.prompt()
        self.same("asked for when it has drained", prompt, self._pair.params(prompt), loads=False)
        (reply,) = ask(place, RESUME, timeout=LONG)
        self.judge("told to resume: it does", reply.error is None, str(reply))
        self.handed_over("resumed")

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
