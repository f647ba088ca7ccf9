"""The servers behind the proxy: which are up, how busy each is, and which beginnings of prompts it has seen.

A server is chosen by one number: what it has to do already, and what of the new prompt it has not seen, both in
bytes of prompts. So a server that has computed a conversation before gets its next turn, unless others are that
much freer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("kvferry.proxy")

#: Beginnings of prompts are told apart in steps of so many bytes, which are about a hundred tokens.
CHUNK_BYTES = 512
#: So many of them are remembered for each kind of server: prompts of 32 MiB.
MOST_CHUNKS = 65536
#: What a request costs beyond its prompt.
REQUEST_BYTES = 64
#: Of the parameters that a prefill server answers with, those of a request. The others speak of its engine.
OF_REQUEST = frozenset(
    {
        "do_remote_prefill",
        "do_remote_decode",
        "remote_block_ids",
        "remote_request_id",
        "remote_num_tokens",
        "remote_blocks_expiry_time",
        "kvferry_transfer_id",
    }
)


@dataclass(frozen=True)
class Prompt:
    """What is known of a prompt without a tokenizer.

    Attributes:
        size: in bytes of text; a token id counts as four
        beginnings: a hash of its first chunk, of its first two, and so on
    """

    size: int
    beginnings: tuple[bytes, ...]


def read_prompt(body: dict[str, Any]) -> Prompt:
    """The prompt of a completion or a chat."""
    said = body.get("messages", body.get("prompt"))
    if isinstance(said, str):
        content = said.encode(errors="replace")
    elif isinstance(said, list) and said and all(type(item) is int and 0 <= item < 2**32 for item in said):
        content = array("I", said).tobytes()
    elif isinstance(said, list):  # message by message, so that a longer conversation begins like a shorter one
        content = b"".join(json.dumps(item, sort_keys=True).encode() for item in said)
    else:
        content = b""
    # Prompts of other models or salts have no cache in common.
    running = json.dumps([body.get("model"), body.get("cache_salt")]).encode()
    beginnings = []
    for begin in range(0, len(content) - CHUNK_BYTES + 1, CHUNK_BYTES):
        running = hashlib.blake2b(running + content[begin : begin + CHUNK_BYTES], digest_size=16).digest()
        beginnings.append(running)
    return Prompt(len(content), tuple(beginnings))


#: Of these, what changes while an engine goes on: how often its caches have come back after a sleep.
OF_TIME = frozenset({"remote_registration_generation"})
#: So many answers in a row of one engine: no others take turns with it behind its URL any more.
SETTLED_ANSWERS = 32


class Server:
    """One server of vLLM.

    Attributes:
        url: without a path
        up: whether it answered when it was last asked
        load: bytes of prompts that it is busy with
        now, total, failed: requests under way, so far, and of them those that failed
        lent: of a prefill server: requests whose cache a decode server has not loaded yet
        drains: an operator has said that it gets no new requests
        engine: what a decode server has to know of its engine to announce blocks to it; None: not known, or it
            does not write to those who announce
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.up = True
        self.drains = False
        self.load = self.now = self.total = self.failed = self.lent = 0
        self.engine: dict[str, Any] | None = None
        self._latest: dict[str, Any] | None = None  # who answered
        self._unsettled = 0  # answers to wait for until it is believed that nobody else does

    def learn(self, params: dict[str, Any]) -> None:
        """From the parameters of an answer. Where several engines take turns, who is next is not known.

        Engines may come and go behind one URL, as data-parallel ones do.
        """
        engine = {name: value for name, value in params.items() if name not in OF_REQUEST}
        latest = {name: value for name, value in engine.items() if name not in OF_TIME}
        if self._latest not in (None, latest):
            self._unsettled = SETTLED_ANSWERS
        self._unsettled = max(0, self._unsettled - 1)
        self._latest = latest
        writes = params.get("transfer_mode") == "push" and params.get("kvferry_transfer_id")
        self.engine = engine if writes and not self._unsettled else None

    def forget(self) -> None:
        """It was down: what comes back may be another engine."""
        self.engine, self._latest, self._unsettled = None, None, 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing of it is under way: it may end."""
        return self.now == 0 and self.lent == 0

    @contextlib.contextmanager
    def lends(self) -> Iterator[None]:
        """While a decode server still wants a cache that it has."""
        self.lent += 1
        try:
            yield
        finally:
            self.lent -= 1

    @contextlib.contextmanager
    def busy(self, prompt: Prompt) -> Iterator[None]:
        """While it answers a request."""
        cost = prompt.size + REQUEST_BYTES
        self.load += cost
        self.now += 1
        self.total += 1
        try:
            yield
        finally:
            self.load -= cost
            self.now -= 1


class Servers:
    """All servers of one kind."""

    def __init__(self, kind: str, urls: Sequence[str]) -> None:
        self.kind = kind
        self.all = [Server(url) for url in urls]
        self._seen: OrderedDict[bytes, set[Server]] = OrderedDict()  # by beginning; the latest last

    def choose(self, prompt: Prompt, tried: Collection[Server] = ()) -> Server | None:
        """The one that should have it done first: of those that are up and were not tried, if there are any.

        None: no server is up, but for those that drain. One that was tried may be tried again, for it may have
        been the request's parameters that failed.
        """
        up = [server for server in self.all if server.up and not server.drains]
        seen = self._seen_of(prompt)
        return min(
            [server for server in up if server not in tried] or up,
            key=lambda server: (server.load - seen.get(server, 0), server.total),
            default=None,
        )

    def why_none(self) -> str:
        """Why there is none to choose."""
        drain = [server.url for server in self.all if server.up and server.drains]
        return f"no {self.kind} server is up" + (
            f", but for those that drain: {', '.join(drain)}" if drain else ""
        )

    def remember(self, server: Server, prompt: Prompt) -> None:
        """It has computed or loaded this prompt."""
        for beginning in prompt.beginnings:
            self._seen.setdefault(beginning, set()).add(server)
            self._seen.move_to_end(beginning)
        while len(self._seen) > MOST_CHUNKS:
            self._seen.popitem(last=False)

    def found(self, server: Server, up: bool) -> None:
        """Whether it answers. One that does not may come back with nothing in its cache."""
        if up == server.up:
            return
        server.up = up
        server.forget()
        logger.warning("%s server %s is %s", self.kind, server.url, "up" if up else "down")
        for servers in self._seen.values():
            servers.discard(server)

    def _seen_of(self, prompt: Prompt) -> dict[Server, int]:
        """How many bytes of a prompt each server has seen."""
        found: dict[Server, int] = {}
        going = set(self.all)
        for i, beginning in enumerate(prompt.beginnings):
            going = going & self._seen.get(beginning, set())
            if not going:
                break
            found.update(dict.fromkeys(going, (i + 1) * CHUNK_BYTES))
        return found
