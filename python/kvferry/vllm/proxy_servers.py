"""The servers behind the proxy: which are up, how busy each is, and which beginnings of prompts it has seen.

A server is chosen by one number: its present load plus the part of the new prompt that it has not seen, both in
bytes of prompts. So a server that has computed a conversation before gets its next turn, unless another server
is that much less busy.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("kvferry.proxy")

#: Beginnings of prompts are compared in steps of this many bytes, about a hundred tokens.
CHUNK_BYTES = 512
#: Most of these steps remembered for each kind of server: prompts of 32 MiB.
MOST_CHUNKS = 65536
#: The load of a request beyond its prompt.
REQUEST_BYTES = 64
#: Parameters of a prefill server's answer that are about the request. The others are about its engine.
OF_REQUEST = frozenset(
    {
        "do_remote_prefill",
        "do_remote_decode",
        "remote_block_ids",
        "remote_request_id",
        "remote_num_tokens",
        "remote_prefill_cached_tokens",
        "kvferry_prompt",
        "remote_blocks_expiry_time",
        "kvferry_transfer_id",
    }
)


@dataclass(frozen=True)
class Prompt:
    """What is known of a prompt without a tokenizer.

    Attributes:
        content: text or token ids; those of a longer conversation begin with those of a shorter one
        kind: what else it must have in common with another one: prompts of other models or salts share no cache
        beginnings: a hash of its first chunk, of its first two, and so on
    """

    content: bytes
    kind: bytes
    beginnings: tuple[bytes, ...]

    @property
    def size(self) -> int:
        """In bytes of text; a token id counts as four."""
        return len(self.content)

    def digests(self, sizes: Sequence[int]) -> list[bytes]:
        """Hashes of its first bytes: of so many each time, in rising order."""
        running, begin, found = hashlib.blake2b(self.kind, digest_size=16), 0, []
        for end in sizes:
            running.update(self.content[begin:end])
            found.append(running.digest())
            begin = end
        return found


def read_prompt(body: dict[str, Any]) -> Prompt:
    """The prompt of a completion or a chat."""
    said = body.get("messages", body.get("prompt"))
    if isinstance(said, str):
        content = said.encode(errors="replace")
    elif isinstance(said, list) and said and all(type(item) is int and 0 <= item < 2**32 for item in said):
        content = array("I", said).tobytes()
    elif isinstance(said, list):  # message by message, so that a longer conversation begins as a shorter one
        content = b"".join(json.dumps(item, sort_keys=True).encode() for item in said)
    else:
        content = b""
    kind = running = json.dumps([body.get("model"), body.get("cache_salt")]).encode()
    beginnings = []
    for begin in range(0, len(content) - CHUNK_BYTES + 1, CHUNK_BYTES):
        running = hashlib.blake2b(running + content[begin : begin + CHUNK_BYTES], digest_size=16).digest()
        beginnings.append(running)
    return Prompt(content, kind, tuple(beginnings))


#: Engine parameters that change while an engine runs: how often its caches have come back after a sleep.
OF_TIME = frozenset({"remote_registration_generation"})
#: After this many answers in a row from one engine, no other engine is assumed to share its URL.
SETTLED_ANSWERS = 32
#: Seconds for which a server that has refused a request gets no others, unless it went down meanwhile.
REFUSES_SECONDS = 10.0


class Server:
    """One server of vLLM.

    Attributes:
        url: without a path
        up: whether it answered the last health check
        load: bytes of prompts that it is busy with
        now, total, failed: numbers of requests: under way, in all, and failed ones among them
        lent: of a prefill server: requests whose cache a decode server has not loaded yet
        drains: an operator has said that it gets no new requests
        engine: what a decode server must know of its engine to announce blocks to it; None: not known, or it
            does not write to decode servers that announce blocks
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.up = True
        self.drains = False
        self.load = self.now = self.total = self.failed = self.lent = 0
        self.engine: dict[str, Any] | None = None
        self._latest: dict[str, Any] | None = None  # the engine that answered
        self._unsettled = 0  # answers still to come before only one engine is assumed
        self._refuses_until = 0.0

    def learn(self, params: dict[str, Any]) -> None:
        """Learns the engine from an answer's parameters. If several take turns, the next one is not known.

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
        """Forgets the engine: the server was down, and may come back with another one."""
        self.engine, self._latest, self._unsettled = None, None, 0
        self._refuses_until = 0.0

    def refuse(self) -> None:
        """It has refused a request, because its engine drains: the next would be in vain, too."""
        self._refuses_until = time.monotonic() + REFUSES_SECONDS

    @property
    def refuses(self) -> bool:
        """Whether it has refused a request lately."""
        return time.monotonic() < self._refuses_until

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing under way, and may be ended."""
        return self.now == 0 and self.lent == 0

    @contextlib.contextmanager
    def lends(self) -> Iterator[None]:
        """Counts a cache as lent while a decode server still needs it."""
        self.lent += 1
        try:
            yield
        finally:
            self.lent -= 1

    @contextlib.contextmanager
    def busy(self, prompt: Prompt) -> Iterator[None]:
        """Counts a request while the server answers it."""
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
        """The server that should be done first: of those that are up, preferably one that was not tried.

        None: no server is up, except ones that drain or refuse. A server may be tried again, because the
        failure may have been due to the request's parameters.
        """
        up = [server for server in self.all if server.up and not server.drains and not server.refuses]
        seen = self._seen_of(prompt)
        return min(
            [server for server in up if server not in tried] or up,
            key=lambda server: (server.load - seen.get(server, 0), server.total),
            default=None,
        )

    def why_none(self) -> str:
        """Why there is no server to choose."""
        drain = [server.url for server in self.all if server.up and server.drains]
        return f"no {self.kind} server is up" + (f"; these drain: {', '.join(drain)}" if drain else "")

    def remember(self, server: Server, prompt: Prompt) -> None:
        """Records that a server has computed or loaded this prompt."""
        for beginning in prompt.beginnings:
            self._seen.setdefault(beginning, set()).add(server)
            self._seen.move_to_end(beginning)
        while len(self._seen) > MOST_CHUNKS:
            self._seen.popitem(last=False)

    def found(self, server: Server, up: bool) -> None:
        """Records whether a server answers. If it does not, it may come back with an empty cache."""
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
