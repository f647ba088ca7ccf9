"""Writing layer by layer compared with reading afterwards: time to the first token, and the exposed transfer.

There are a prefill and a decode server. Every prompt goes through both servers twice: the decode server reads,
and the prefill server writes; the two ways take turns to be first. The client does what the proxy does: it asks
one server after the other, or both at once.

The exposed transfer is the time from the end of the prompt's last layer until the last byte has arrived, as the
connectors report it (timing.py). It is also given as a multiple of the time of a layer of the same prompt: of
its last chunk, from the first layer's attention to the last one's.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import random
import secrets
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from processes import processor_seconds
from servers import Server, Side
from streaming import stream

from kvferry.vllm.proxy_servers import OF_REQUEST

MODEL = "llama_deep"
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
NEW_TOKENS = 4
REQUEST_SECONDS = 300
TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
TO_BE_READ = {"bench_pull": True}  # see timing.py
WAYS = ("pull", "push")

LEGEND = """\
Medians, in ms: time to the first token, read and written layer by layer; the median of the ratios of the pairs;
how long a layer took; how long bytes moved after the last layer, also in layers' times; and how long processors
worked for each server, which other work on the machine does not change much."""
COLUMNS = (
    f"{'tokens':>6} {'rounds':>6} {'pull':>9} {'push':>9} {'ratio':>6} {'layer':>8} "
    f"{'exposed: pull':>13} {'push':>8} {'layers: pull':>12} {'push':>6} "
    f"{'prefill: pull':>13} {'push':>7} {'decode: pull':>12} {'push':>7} {'equal':>7}"
)


@dataclass(frozen=True)
class Passage:
    """One prompt through two servers; times in seconds.

    Attributes:
        first: from the request until the first token
        layer: per layer, of its last chunk
        exposed: from the end of the last layer to the last byte
        there, here: processor time used by the prefill server and by the decode server
    """

    tokens: tuple[int, ...]
    first: float
    layer: float
    exposed: float
    there: float
    here: float


class Layerwise:
    """The two servers, and prompts that go through them."""

    def __init__(self, folder: pathlib.Path, port: int, longest: int) -> None:
        self._times = {name: folder / f"bench-layers.{name}.times" for name in ("prefill", "decode")}
        long = ("--max-model-len", str(longest + 64))
        self._servers = {
            name: Server(
                folder / MODEL,
                "float32",
                Side(64, arguments=long, environment=(("VLLM_CPU_OMP_THREADS_BIND", core),)),
                "kv_consumer" if name == "decode" else "kv_producer",
                port + i,
                folder / f"bench-layers.{name}.log",
                {"KVFERRY_TIMES": str(times), "PYTHONPATH": str(pathlib.Path(__file__).resolve().parent)},
                ("TimedConnector", "timing"),
                {
                    "kv_load_failure_policy": "fail",
                    "kv_connector_extra_config": {
                        "transfer_mode": "push",
                        "kv_load_deadline": REQUEST_SECONDS,
                    },
                },
            )
            for i, ((name, times), core) in enumerate(zip(self._times.items(), cores(), strict=False))
        }
        self._prefill, self._decode = self._servers["prefill"], self._servers["decode"]
        self._engine: dict[str, Any] = {}

    def __enter__(self) -> Layerwise:
        for times in self._times.values():
            times.write_text("")
        try:
            for server in self._servers.values():
                server.start()
            for server in self._servers.values():
                server.ready()
            self._meet()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers.values():
            server.stop()

    def _meet(self) -> None:
        """Lets each server, and the two together, do everything once, which is not measured."""
        prompt = make_prompt(LENGTHS[0], 0)
        self._pull(prompt)
        params = self._params(prompt, {})
        stream(self._decode.port, prompt, NEW_TOKENS, REQUEST_SECONDS, params)
        self._engine = {name: value for name, value in params.items() if name not in OF_REQUEST}

    def _params(self, prompt: list[int], more: dict[str, Any]) -> dict[str, Any]:
        found = self._prefill.ask(prompt, 1, TO_PREFILL | more, timeout=REQUEST_SECONDS)
        params: dict[str, Any] = found["kv_transfer_params"]
        return params

    def alone(self, prompt: list[int]) -> tuple[int, ...]:
        """The tokens that the decode server generates alone."""
        return stream(self._decode.port, prompt, NEW_TOKENS, REQUEST_SECONDS).tokens

    def through(self, way: str, prompt: list[int]) -> Passage:
        """Sends a prompt through both servers, in one of the ways."""
        there, here = self._times["prefill"], self._times["decode"]
        ends = there.stat().st_size, here.stat().st_size
        used = self._used()
        begun = time.monotonic()
        tokens, first = (self._pull if way == "pull" else self._push)(prompt)
        computed = [line for line in lines(there, ends[0]) if "computed" in line][-1]
        (loaded,) = (line["loaded"] for line in lines(here, ends[1]) if "loaded" in line)
        layers = computed["layers"]
        return Passage(
            tokens,
            first - begun,
            (layers[-1] - layers[0]) / (len(layers) - 1),
            loaded - computed["computed"],
            *(now - was for now, was in zip(self._used(), used, strict=True)),
        )

    def _used(self) -> tuple[float, float]:
        return processor_seconds(self._prefill.group), processor_seconds(self._decode.group)

    def _pull(self, prompt: list[int]) -> tuple[tuple[int, ...], float]:
        params = self._params(prompt, TO_BE_READ)
        asked = time.monotonic()
        answer = stream(self._decode.port, prompt, NEW_TOKENS, REQUEST_SECONDS, params)
        return answer.tokens, asked + answer.first_seconds

    def _push(self, prompt: list[int]) -> tuple[tuple[int, ...], float]:
        name = secrets.token_hex(16)
        announced = {
            **self._engine,
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_request_id": name,
            "kvferry_transfer_id": name,
        }
        with ThreadPoolExecutor(1) as pool:
            there = pool.submit(self._params, prompt, {"kvferry_transfer_id": name})
            asked = time.monotonic()
            answer = stream(self._decode.port, prompt, NEW_TOKENS, REQUEST_SECONDS, announced)
            there.result()
        return answer.tokens, asked + answer.first_seconds


def cores() -> Iterator[str]:
    """A core for each server to compute on, as far as there are several: vLLM binds its threads by default."""
    return itertools.cycle(map(str, sorted(os.sched_getaffinity(0))))


def lines(file: pathlib.Path, begin: int) -> list[dict[str, Any]]:
    """The lines of a file from a byte on."""
    with file.open("rb") as content:
        content.seek(begin)
        return [json.loads(line) for line in content]


def make_prompt(length: int, seed: int) -> list[int]:
    """A prompt, the same one every time."""
    chance = random.Random(seed * 100_000 + length)
    return [chance.randrange(3, 500) for _ in range(length)]


def row(length: int, found: dict[str, list[Passage]], equal: int) -> str:
    """A line of the table."""

    def median(values: list[float]) -> float:
        return statistics.median(values)

    pull, push = (found[way] for way in WAYS)
    ratio = median([b.first / a.first for a, b in zip(pull, push, strict=True)])
    layer = median([item.layer for item in push])
    exposed = [median([item.exposed for item in items]) for items in (pull, push)]
    share = [median([item.exposed / item.layer for item in items]) for items in (pull, push)]
    first = [median([item.first for item in items]) for items in (pull, push)]
    line = f"{length:>6} {len(pull):>6} {first[0] * 1e3:>9.1f} {first[1] * 1e3:>9.1f} {ratio:>6.3f} "
    line += f"{layer * 1e3:>8.2f} {exposed[0] * 1e3:>13.1f} {exposed[1] * 1e3:>8.1f} "
    line += f"{share[0]:>12.1f} {share[1]:>6.1f} "
    for name, width in (("there", 13), ("here", 12)):
        used = [median([getattr(item, name) for item in items]) for items in (pull, push)]
        line += f"{used[0] * 1e3:>{width}.0f} {used[1] * 1e3:>7.0f} "
    return line + f"{equal:>3}/{2 * len(pull)}"


def run(
    folder: pathlib.Path, port: int, lengths: Sequence[int], rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """Runs all lengths and prints the table; returns every figure.

    Args:
        lengths: of prompts, in tokens
        seconds: for each length; at least two pairs are run
    """
    print(LEGEND)
    print(COLUMNS, flush=True)
    all_found: list[dict[str, Any]] = []
    with Layerwise(folder, port, max(lengths)) as servers:
        for length in lengths:
            found: dict[str, list[Passage]] = {way: [] for way in WAYS}
            equal, until = 0, time.monotonic() + seconds
            for i in range(rounds):
                if i > 1 and time.monotonic() > until:
                    break
                prompt = make_prompt(length, i + 1)
                for way in WAYS if i % 2 else reversed(WAYS):
                    found[way].append(servers.through(way, prompt))
                wanted = servers.alone(prompt) if i == 0 else found["pull"][-1].tokens
                equal += sum(found[way][-1].tokens == wanted for way in WAYS)
            print(row(length, found, equal), flush=True)
            all_found += [
                {"tokens": length, "way": way, "equal": equal, "passages": [asdict(item) for item in items]}
                for way, items in found.items()
            ]
    return all_found
