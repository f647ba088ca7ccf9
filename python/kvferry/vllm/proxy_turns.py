"""Conversations: where decode servers keep the caches of their answers, for the prefill of the next turn.

A decode server that keeps an answer says so in its `kv_transfer_params`. The next turn's prompt begins with the
prompt before it, so it is recognised by that. Whether it also goes on with the same answer, token by token, is
found out by the prefill server, which has the tokens.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from kvferry.vllm.proxy_answers import EVENT
from kvferry.vllm.proxy_servers import Prompt, Server

#: Most answers that are remembered. The time that a request takes to look for one grows with it.
MOST_TURNS = 1024
#: How long they are remembered: as long as a decode server keeps them by default (`decoder_kv_blocks_ttl`).
KEPT_SECONDS = 480.0
SAYS = b'"kv_transfer_params"'


@dataclass(frozen=True)
class Turn:
    """An answer that is kept, with the length of its prompt, its parameters, and when it is forgotten."""

    size: int
    server: Server
    params: dict[str, Any]
    until: float


class Turns:
    """The latest answers that decode servers keep."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, Turn] = OrderedDict()  # by a digest of the prompt; the latest last

    def keep(self, server: Server, prompt: Prompt, params: dict[str, Any]) -> None:
        """A decode server keeps its answer to this prompt, and says where."""
        if not prompt.content:  # every prompt begins with nothing
            return
        key = prompt.digests([len(prompt.content)])[0]
        self._kept.pop(key, None)
        self._kept[key] = Turn(len(prompt.content), server, params, time.monotonic() + KEPT_SECONDS)
        while len(self._kept) > MOST_TURNS:
            self._kept.popitem(last=False)

    def take(self, prompt: Prompt) -> dict[str, Any] | None:
        """The parameters of the turn before this prompt, which are for one use; None: there is none."""
        now = time.monotonic()
        while self._kept and next(iter(self._kept.values())).until <= now:
            self._kept.popitem(last=False)
        sizes = sorted({turn.size for turn in self._kept.values() if turn.size < len(prompt.content)})
        for digest in reversed(prompt.digests(sizes)):  # the longest beginning first
            turn = self._kept.get(digest)
            if turn is not None and turn.server.up:
                del self._kept[digest]
                return turn.params
        return None


class Listener:
    """Finds what a decode server says of its answer in the pieces that pass, of which it changes nothing."""

    def __init__(self, is_stream: bool) -> None:
        self._is_stream = is_stream
        self._line = b""  # of a stream, as far as it has come

    def hear(self, piece: bytes) -> dict[str, Any] | None:
        """The parameters, if the piece completes them and the answer is kept."""
        if not self._is_stream:
            return _kept(piece)
        *lines, self._line = (self._line + piece).split(b"\n")
        events = (line.removeprefix(EVENT) for line in lines if line.startswith(EVENT))
        return next(filter(None, map(_kept, events)), None)


def _kept(answer: bytes) -> dict[str, Any] | None:
    if SAYS not in answer:
        return None
    try:
        found = json.loads(answer)
    except ValueError:
        return None
    params = found.get("kv_transfer_params") if isinstance(found, dict) else None
    return params if isinstance(params, dict) and params.get("do_remote_decode") else None
