"""A prefill server that is given commands, sleeps, wakes and ends, while it keeps a request for the other."""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from asking import LOADS, NEW_TOKENS, Asking
from pair import DRAIN_SECONDS, answer

from kvferry.commands import DRAIN, HAND_OVER, LIST, RESUME, ask
from kvferry.contact import Contact
from kvferry.vllm.draining import DRAINS, REFUSED

LONG = 120.0
AT_ONCE = 8
DELAYS = (0.0, 0.03, 0.1)  # seconds from the requests to the drain


def place_of(params: dict[str, Any]) -> Contact:
    """Where the engine is met that has given these parameters."""
    return Contact(params["remote_engine_id"], f"tcp://{params['remote_host']}:{params['remote_port']}")


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
        place = place_of(params)
        (reply,) = ask(place, HAND_OVER, params["remote_request_id"], timeout=LONG)
        found = json.loads(reply.records[0].data) if reply.records else {}
        wanted = {**params, "remote_block_ids": []}
        wanted.pop("remote_prefill_cached_tokens", None)  # vLLM's own word to a proxy
        self.judge("told to hand over: the parameters", found == wanted, f"{reply.error}: {found}")
        listed = self._listed(place)
        good = [one["request"] for one in listed] == [params["remote_request_id"]]
        good &= [one["tokens"] for one in listed] == [len(prompt)]
        self.judge("told to list what it keeps: that request", good, str(listed))
        self.same("handed over by a command", prompt, found, loads=True)
        self.judge("told to list when it was loaded: nothing", self._listed(place) == [])
        self._drains(place)
        self._drains_while_it_computes(place)

    def _listed(self, place: Contact) -> list[dict[str, Any]]:
        """What the server keeps."""
        (reply,) = ask(place, LIST, "cmpl-", timeout=LONG)
        found: list[dict[str, Any]] = json.loads(reply.records[0].data)["kept"] if reply.records else []
        return found

    def _drains(self, place: Contact) -> None:
        """It refuses what comes after that, by name: the decode server computes it, also through the proxy."""
        (reply,) = ask(place, DRAIN, timeout=LONG)
        self.judge("told to drain: it has drained", reply.error is None, str(reply))
        prompt = self.prompt()
        params = self._pair.params(prompt)
        self.judge("asked for when it has drained: refused", params.get(REFUSED) == DRAINS, str(params))
        self.same("asked for when it has drained", prompt, params, loads=False)
        with self._pair.proxy() as proxy:
            prompt = self.prompt()
            want, before = self.alone(prompt), self._decode.counter(LOADS)
            got = proxy.tokens(prompt, NEW_TOKENS)
            self.judge("asked for by the proxy: same tokens", got == want, f"{got} not {want}")
            self.judge("asked for by the proxy: computed", self._decode.counter(LOADS) == before)
            said = 'kvferry_proxy_computed_total{reason="no_prefill_server"} 1'
            self.judge("asked for by the proxy: it says why", said in proxy.ask("/metrics").decode())
        (reply,) = ask(place, RESUME, timeout=LONG)
        self.judge("told to resume: it does", reply.error is None, str(reply))
        self.handed_over("resumed")

    def _drains_while_it_computes(self, place: Contact) -> None:
        """What it has accepted is kept and loaded; what comes later is refused."""
        for delay in DELAYS:
            prompts = [self.prompt() for _ in range(AT_ONCE)]
            wants = [self.alone(prompt) for prompt in prompts]
            before = self._decode.counter(LOADS)
            with ThreadPoolExecutor(AT_ONCE + 1) as pool:
                asked = [pool.submit(self._through, prompt) for prompt in prompts]
                time.sleep(delay)
                (reply,) = ask(place, DRAIN, timeout=LONG)
                found = [each.result(LONG) for each in asked]
            kept = sum(REFUSED not in params for params, _ in found)
            loaded = self._decode.counter(LOADS) - before
            what = f"told to drain {delay} s after {AT_ONCE} requests"
            self.judge(f"{what}: it has drained", reply.error is None, str(reply))
            self.judge(f"{what}: all {kept} that it kept were loaded", loaded == kept, f"{loaded} were")
            self.judge(f"{what}: same tokens", [tokens for _, tokens in found] == wants)
            (reply,) = ask(place, RESUME, timeout=LONG)
            self.judge(f"{what}, and to resume: it does", reply.error is None, str(reply))
        self.handed_over("resumed again")

    def _through(self, prompt: list[int]) -> tuple[dict[str, Any], list[int]]:
        """The parameters of the prefill server's answer, and the decode server's tokens."""
        params = self._pair.params(prompt)
        return params, answer(self._decode.ask(prompt, NEW_TOKENS, params)).tokens

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
        self._wait(lambda: self._listed(place_of(params)) != [], "its worker keeps a request")
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
