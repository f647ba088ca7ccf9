"""Asks a server for a stream of tokens, and measures the time until the first."""

from __future__ import annotations

import http.client
import json
import time
from dataclasses import dataclass
from typing import Any

from servers import greedy


class Refusal(Exception):
    """The server answered with an error."""


@dataclass(frozen=True)
class Answer:
    """Tokens, and the seconds from sending the request until the first and until the last token arrived."""

    tokens: tuple[int, ...]
    first_seconds: float
    last_seconds: float


def stream(
    port: int, prompt: list[int], tokens: int, timeout: float, params: dict[str, Any] | None = None
) -> Answer:
    """Greedy tokens for a prompt.

    Args:
        timeout: seconds for the whole answer
        params: kv_transfer_params

    Raises Refusal, with the server's message, and OSError if nothing comes in time.
    """
    body = greedy(prompt, tokens, params) | {"stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        begun = time.monotonic()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise Refusal(f"HTTP {response.status}: {_message(response.read().decode(errors='replace'))}")
        found: list[int] = []
        first = last = 0.0
        for line in response:
            data = line.decode().strip().removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise Refusal(_message(data))
            last = time.monotonic() - begun
            if last > timeout:
                raise TimeoutError(f"no end after {timeout:.0f} s")
            new = event["choices"][0].get("token_ids") or []
            if new and not found:
                first = last
            found += new
    finally:
        connection.close()
    if len(found) != tokens:
        raise Refusal(f"{len(found)} tokens of {tokens}")
    return Answer(tuple(found), first, last)


def _message(text: str) -> str:
    try:
        said = json.loads(text)["error"]["message"]
    except (KeyError, TypeError, ValueError):
        return text
    return str(said)
