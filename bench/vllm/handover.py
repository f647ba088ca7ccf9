"""One shape with one connector: two servers, prompts that go through both, and the results."""

from __future__ import annotations

import pathlib
import random
import time
from dataclasses import dataclass, field

from connectors import Connector
from logs import cause, shortened
from servers import Server, Side
from streaming import Answer, Refusal, stream

NEW_TOKENS = 12
REQUEST_SECONDS = 60
# : A case stops after this many failed requests in a row.
FAILURES_IN_A_ROW = 3
TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass(frozen=True)
class Shape:
    """Two servers of one model."""

    model: str
    prefill: Side
    decode: Side
    dtype: str = "float32"
    has_state: bool = False  # the last prompt token is left to the decode server


@dataclass
class Result:
    """The results of one shape with one connector; times in seconds, one per request."""

    prompts: int = 0
    asked: int = 0
    equal: int = 0
    wrong: int = 0
    failed: int = 0
    started: bool = False
    servers_agree: int = 0  # prompts for which both servers compute the same tokens alone
    distinct: int = 0  # prompts whose tokens, computed alone, no other prompt has
    refused: bool = False
    messages: list[str] = field(default_factory=list)  # what went wrong, each message once
    alone: list[float] = field(default_factory=list)
    least: list[float] = field(default_factory=list)  # a prompt of one token, alone
    through: list[float | None] = field(default_factory=list)  # None: it failed
    prompt_tokens: int = 0
    loaded_tokens: int = 0
    bytes_read: int = 0
    boot_seconds: float = 0.0

    @property
    def answered(self) -> list[float]:
        """Times through both servers, of answered requests."""
        return [seconds for seconds in self.through if seconds is not None]

    @property
    def added(self) -> list[float]:
        """How much longer each answered request took than the prompt of one token just before it."""
        pairs = zip(self.through, self.least, strict=False)
        return [seconds - least for seconds, least in pairs if seconds is not None]

    def complain(self, message: str) -> None:
        """Records what went wrong."""
        if message not in self.messages:
            self.messages.append(message)

    @property
    def outcome(self) -> str:
        """The outcome in a word or two."""
        if not self.started:
            return "refused" if self.refused else "failed"
        if self.failed and not self.answered:
            return "refused" if self.refused else "failed"
        said = []
        if self.wrong:
            said.append("wrong tokens")
        if self.failed:
            said.append("failures")
        if self.loaded_tokens < self.prompt_tokens:
            said.append("not all loaded")
        return ", ".join(said) or "ok"


def make_prompts(count: int, shortest: int, longest: int) -> list[list[int]]:
    """Prompts that end in the middle of blocks, the same ones every time."""
    chance = random.Random(count)
    lengths = [chance.randrange(shortest, longest) for _ in range(count)]
    return [[chance.randrange(3, 500) for _ in range(length)] for length in lengths]


class Handover:
    """Runs one shape with one connector."""

    def __init__(self, shape: Shape, connector: Connector, folder: pathlib.Path, name: str, port: int) -> None:
        self._shape = shape
        self._connector = connector
        self.result = Result()
        self._logs = {role: folder / f"bench-{name}.{role}.log" for role in ("prefill", "decode")}

        def server(role: str, side: Side, port: int) -> Server:
            return Server(
                folder / shape.model,
                shape.dtype,
                side,
                "kv_producer" if role == "prefill" else "kv_consumer",
                port,
                self._logs[role],
                connector.environment(port),
                (connector.name, connector.module),
                connector.transfer,
            )

        self._prefill = server("prefill", shape.prefill, port)
        self._decode = server("decode", shape.decode, port + 1)

    def run(self, prompts: list[list[int]], rounds: int, seconds: float) -> Result:
        """Runs it.

        Args:
            rounds: how often each prompt goes through both servers
            seconds: no request begins later than this after the servers are ready
        """
        result = self.result
        result.prompts = len(prompts)
        begun = time.monotonic()
        try:
            self._prefill.start()
            self._decode.start()
            try:
                self._prefill.ready()
                self._decode.ready()
            except RuntimeError as error:
                why = self._cause({}) or shortened(str(error))
                result.complain(f"a server did not start: {why}")
                result.refused = _refuses(why)
                return result
            result.started = True
            result.boot_seconds = time.monotonic() - begun
            try:
                self._measure(prompts, rounds, time.monotonic() + seconds)
            except (Refusal, OSError) as error:
                result.failed += 1
                result.complain(shortened(f"then a prompt without a transfer: {error}"))
        finally:
            self._decode.stop()
            self._prefill.stop()
        return result

    def _measure(self, prompts: list[list[int]], rounds: int, until: float) -> None:
        result = self.result
        ports = (self._prefill.port, self._decode.port)
        for port in ports:  # the first request of a server is not measured
            stream(port, prompts[0], NEW_TOKENS, REQUEST_SECONDS)
        self._prefill.ask(prompts[0], 1, timeout=2 * REQUEST_SECONDS)
        there, alone = ([self._alone(port, prompt) for prompt in prompts] for port in ports)
        result.servers_agree = sum(a == b for a, b in zip(there, alone, strict=True))
        result.distinct = sum(alone.count(tokens) == 1 for tokens in alone)
        loaded, read = self._decode.loaded_tokens(), self._decode.counter(self._connector.bytes_read)
        in_a_row = 0
        for _ in range(rounds):
            for prompt, wanted in zip(prompts, alone, strict=True):
                if time.monotonic() > until or in_a_row == FAILURES_IN_A_ROW:
                    break
                result.least.append(stream(ports[1], prompt[-1:], 1, REQUEST_SECONDS).first_seconds)
                result.alone.append(stream(ports[1], prompt, NEW_TOKENS, REQUEST_SECONDS).first_seconds)
                in_a_row = 0 if self._ask(prompt, wanted) else in_a_row + 1
        result.loaded_tokens = self._decode.loaded_tokens() - loaded
        result.bytes_read = self._decode.counter(self._connector.bytes_read) - read

    def _alone(self, port: int, prompt: list[int]) -> tuple[int, ...]:
        return stream(port, prompt, NEW_TOKENS, REQUEST_SECONDS).tokens

    def _ask(self, prompt: list[int], wanted: tuple[int, ...]) -> bool:
        """Sends one prompt through both servers; whether there was an answer."""
        result = self.result
        result.asked += 1
        ends = {role: log.stat().st_size for role, log in self._logs.items()}
        try:
            prefilled = self._prefill.ask(prompt, 1, dict(TO_PREFILL), timeout=REQUEST_SECONDS)
            answer = self._through(prompt, prefilled["kv_transfer_params"])
        except (Refusal, OSError) as error:
            result.failed += 1
            result.through.append(None)
            why = self._cause(ends)
            result.complain(shortened(f"{error}; {why}" if why else str(error), 240))
            result.refused |= _refuses(why)
            return False
        result.through.append(answer.first_seconds)
        result.prompt_tokens += len(prompt) - self._shape.has_state
        if answer.tokens == wanted:
            result.equal += 1
        else:
            result.wrong += 1
        return True

    def _through(self, prompt: list[int], params: dict[str, object]) -> Answer:
        return stream(self._decode.port, prompt, NEW_TOKENS, REQUEST_SECONDS, params)

    def _cause(self, begins: dict[str, int]) -> str:
        """The cause of a failure from the logs, the decode server's first, since it loads."""
        found = (cause(self._logs[role], begins.get(role, 0)) for role in ("decode", "prefill"))
        return next(filter(None, found), "")


def _refuses(message: str) -> bool:
    """Whether a message says that the connector does not support this, rather than that it failed."""
    words = ("NotImplemented", "not support", "unsupported", "must be", "AssertionError")
    return any(word.lower() in message.lower() for word in words)
