"""Many requests at once: two servers behind the proxy, with kvferry or with the NixlConnector, compared with
one server.

A level is a number of clients. Each sends one request after the other, for a prompt of a pool, and gets the
answer as a stream. Times are the client's: until the first token, and between two tokens (of tokens in one
event, 0 for all but the first). Every answer is compared with the tokens that one server computed for that
prompt while nothing else ran.

After each level through the proxy the same level asks the decode server alone, while the other server is idle:
one server that does everything, on the same machine at nearly the same time. The setup "one" has no other, and
no connector: what its memory does is vLLM's own.

Memory is the resident memory of each server's processes, at the begin of a level, at half its time, and at its
end. What grows is also given by kind (/proc): anonymous is what processes allocate.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import random
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp
from connectors import CONNECTORS
from processes import resident_mib
from proxies import RunningProxy
from servers import Server, Side, greedy
from streaming import stream

MODEL = "llama"
LEVELS = (1, 4, 16, 64)
SETUPS = ("kvferry", "kvferry-push", "nixl", "one")
POOL = 24
NEW_TOKENS = 32
LENGTHS = (100, 900)
REQUEST_SECONDS = 120
# : Room for just the requests of the highest level: it is soon used up, so that memory can stay constant.
ROOM = ("--max-num-seqs", "64", "--num-gpu-blocks-override", "1100")

LEGEND = """\
Times in ms: until the first token, and between tokens. A level is so many clients that ask without a pause.
wrong: answers that are not what one server computes alone. MiB: resident memory of each server, the prefill
server first, at begin, middle and end of a level."""
COLUMNS = (
    f"{'setup':<13} {'level':>5} {'requests':>8} {'/s':>6} {'first p50':>9} {'p99':>8} "
    f"{'between p50':>11} {'p99':>8} {'errors':>6} {'wrong':>5} MiB"
)
Memory = dict[str, dict[str, int]]  # for each server: the kinds of resident memory, in MiB


@dataclass
class Level:
    """The results of a level; times in seconds, one per request, or one per token but the first."""

    clients: int
    seconds: float = 0.0
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    wrong: int = 0
    errors: list[str] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)  # begin, middle, end


def percentile(values: list[float], percent: int) -> str:
    """A percentile in ms, for a column."""
    ordered = sorted(values)
    return f"{ordered[(len(ordered) - 1) * percent // 100] * 1e3:.1f}" if ordered else "-"


def row(setup: str, level: Level) -> str:
    """A line of the table."""
    line = f"{setup:<13} {level.clients:>5} {len(level.first):>8} {len(level.first) / level.seconds:>6.1f}"
    for values, width in ((level.first, 9), (level.between, 11)):
        line += f" {percentile(values, 50):>{width}} {percentile(values, 99):>8}"
    line += f" {len(level.errors):>6} {level.wrong:>5} {', '.join(totals(level.memory))}"
    for message in sorted(set(level.errors))[:3]:
        line += f"\n{'':<13} {message}"
    return line


def totals(memory: list[Memory]) -> list[str]:
    """For each server: its resident memory at one moment after the other."""
    return [">".join(str(sum(at[server].values())) for at in memory) for server in memory[0]]


def growth(first: Memory, last: Memory) -> str:
    """For each server: how its resident memory has changed between two moments, by kind."""
    changes = []
    for server, kinds in first.items():
        each = (f"{kind} {last[server][kind] - mib:+}" for kind, mib in kinds.items())
        changes.append(f"{server}: {sum(kinds.values())}>{sum(last[server].values())} ({', '.join(each)})")
    return "; ".join(changes)


class Setup:
    """The servers of a setup, and the proxy if there are two; clients send requests to `port`."""

    def __init__(self, name: str, folder: pathlib.Path, port: int) -> None:
        self._folder, self._name = folder, name
        connector = CONNECTORS["nixl" if name == "nixl" else "kvferry"]
        loaded_by = None if name == "one" else (connector.name, connector.module)
        transfer = json.loads(json.dumps(connector.transfer))
        if name == "kvferry-push":
            transfer["kv_connector_extra_config"]["transfer_mode"] = "push"
        sides = {"one": ""} if name == "one" else {"prefill": "kv_producer", "decode": "kv_consumer"}
        self._servers = {
            side: Server(
                folder / MODEL,
                "float32",
                Side(64, arguments=ROOM),
                role,
                port + i,
                folder / f"bench-load-{name}.{side}.log",
                connector.environment(port + i),
                loaded_by,
                transfer,
            )
            for i, (side, role) in enumerate(sides.items())
        }
        self.alone = port + len(sides) - 1
        self.port = self.alone if name == "one" else port + 2

    def __enter__(self) -> Setup:
        with contextlib.ExitStack() as undo:
            servers = list(self._servers.values())
            for server in servers:
                server.start()
                undo.callback(server.stop)
            for server in servers:
                server.ready()
            if self.port != self.alone:
                log = self._folder / f"bench-load-{self._name}.proxy.log"
                undo.enter_context(RunningProxy(self.port, servers[:1], servers[1:], log))
            self._running = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def places(self) -> dict[str, int]:
        """Where clients ask: of two servers also the decode server alone, so that both see the same machine."""
        found = {self._name: self.port}
        if self.port != self.alone:
            found[f"{self._name.removesuffix('-push')} alone"] = self.alone
        return found

    def memory(self) -> Memory:
        """The resident memory of each server's processes."""
        return {name: resident_mib(server.group) for name, server in self._servers.items()}


async def ask(session: aiohttp.ClientSession, port: int, prompt: list[int], level: Level) -> list[int]:
    """Sends one request and returns its tokens. Raises OSError, aiohttp.ClientError, ValueError."""
    body = greedy(prompt, NEW_TOKENS, None) | {"stream": True}
    begun = last = time.monotonic()
    tokens: list[int] = []
    between: list[float] = []
    async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise ValueError(f"HTTP {answer.status}")
        async for line in answer.content:
            data = line.decode().strip().removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise ValueError(event["error"]["message"])
            new = event["choices"][0].get("token_ids") or []
            now = time.monotonic()
            if new:
                between += [now - last] + [0.0] * (len(new) - 1)
                last = now
            tokens += new
    if len(tokens) != NEW_TOKENS:
        raise ValueError(f"{len(tokens)} tokens of {NEW_TOKENS}")
    level.first.append(between[0])
    level.between += between[1:]
    assert last >= begun
    return tokens


async def run_level(
    setup: Setup, port: int, clients: int, seconds: float, pool: list[tuple[list[int], tuple[int, ...]]]
) -> Level:
    """Runs a level: no client begins a request after `seconds`."""
    level, begun, chance = Level(clients), time.monotonic(), random.Random(clients)
    level.memory.append(setup.memory())
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    connections = aiohttp.TCPConnector(limit=0, force_close=True)

    async def client(session: aiohttp.ClientSession) -> None:
        while time.monotonic() - begun < seconds:
            prompt, wanted = chance.choice(pool)
            try:
                tokens = await ask(session, port, prompt, level)
                level.wrong += tuple(tokens) != wanted
            except (OSError, ValueError, aiohttp.ClientError, asyncio.TimeoutError) as error:
                level.errors.append(f"{type(error).__name__}: {error}"[:160])

    async def look_in_the_middle() -> None:
        await asyncio.sleep(seconds / 2)
        level.memory.append(setup.memory())

    async with aiohttp.ClientSession(connector=connections, timeout=timeout) as session:
        await asyncio.gather(look_in_the_middle(), *(client(session) for _ in range(clients)))
    level.seconds = time.monotonic() - begun
    level.memory.append(setup.memory())
    return level


def run(
    folder: pathlib.Path, port: int, names: list[str], levels: list[int], seconds: float
) -> list[dict[str, Any]]:
    """Runs all setups and prints the table; returns every figure.

    Args:
        seconds: for each level
    """
    print(LEGEND)
    print(COLUMNS, flush=True)
    chance = random.Random(7)
    prompts = [[chance.randrange(3, 500) for _ in range(chance.randrange(*LENGTHS))] for _ in range(POOL)]
    found = []
    for name in names:
        try:
            with Setup(name, folder, port) as setup:
                pool = [
                    (prompt, stream(setup.alone, prompt, NEW_TOKENS, REQUEST_SECONDS).tokens)
                    for prompt in prompts
                ]
                first = setup.memory()
                for clients in levels:
                    for where, port_asked in setup.places().items():
                        level = asyncio.run(run_level(setup, port_asked, clients, seconds, pool))
                        print(row(where, level), flush=True)
                        found.append({"setup": name, "where": where, **asdict(level)})
                print(f"{name:<13} MiB from begin to end: {growth(first, setup.memory())}", flush=True)
        except (RuntimeError, OSError) as error:
            print(f"{name:<13} {error}", flush=True)
            found.append({"setup": name, "error": str(error)})
    return found
