"""How an answer gets to a client, and how it may fail on its way."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web

#: How the line of an event in a stream begins.
EVENT = b"data: "


class Failed(Exception):
    """A server did not do what the proxy asked.

    Attributes:
        heard: it may have begun the request, so that the request's parameters may be used up
    """

    def __init__(self, what: str, heard: bool = True) -> None:
        super().__init__(what)
        self.heard = heard


class Refused(Exception):
    """A server says that the request is wrong; all others would say the same."""

    def __init__(self, answer: web.Response) -> None:
        super().__init__(answer.status)
        self.answer = answer


class ClientGone(Exception):
    """The client has disconnected."""


class Broken(Exception):
    """An answer ended in the middle."""

    def __init__(self, answer: web.StreamResponse) -> None:
        super().__init__("the answer ended in the middle")
        self.answer = answer


def error_answer(status: int, message: str) -> web.Response:
    """An error in the form of OpenAI's interface."""
    return web.json_response(
        {"error": {"message": message, "type": "kvferry_proxy", "code": status}}, status=status
    )


async def first_to_last(answer: aiohttp.ClientResponse, is_stream: bool) -> AsyncIterator[bytes]:
    """The pieces of an answer as they come; an answer that is not a stream comes whole.

    Raises Failed if a stream begins with an error, as it does if a cache could not be loaded and vLLM was told
    not to compute it: the client has received nothing yet. The stream of a chat begins with a role whatever
    follows, so that waits for the event behind it.
    """
    if not is_stream:
        yield await answer.read()
        return
    held, looked, begun = b"", 0, False
    async for piece in answer.content.iter_any():
        held += piece
        while not begun and (end := held.find(b"\n", looked) + 1):
            begun = _says_something(held[looked:end])
            looked = end
        if begun:
            yield held
            held = b""
    if held:
        yield held
    elif not begun:
        raise Failed("the answer ended before it began")


def _says_something(line: bytes) -> bool:
    """Whether a line of a stream has anything for the client beyond a role. Raises Failed if it is an error."""
    if line.startswith(b'data: {"error"'):
        raise Failed(line[:300].decode(errors="replace").rstrip())
    if not line.startswith(EVENT):
        return False
    try:
        choices = json.loads(line.removeprefix(EVENT))["choices"]
        return not choices or any(
            choice.get("finish_reason")
            or any(value for name, value in choice["delta"].items() if name != "role")
            for choice in choices
        )
    except (ValueError, TypeError, KeyError, AttributeError):  # it is no piece of a chat
        return True


class Passing:
    """The answer to a client, which begins with the first piece of a server's answer."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None

    @property
    def begun(self) -> bool:
        """Whether anything has been sent to the client."""
        return self._response is not None

    async def write(self, answer: aiohttp.ClientResponse, name: str, piece: bytes) -> None:
        """Passes a piece on; `name` is the request's."""
        try:
            if self._response is None:
                self._response = web.StreamResponse(status=answer.status)
                self._response.headers["Content-Type"] = answer.headers.get("Content-Type", "application/json")
                self._response.headers["X-Request-Id"] = name
                await self._response.prepare(self._request)
            await self._response.write(piece)
        except ConnectionError:
            raise ClientGone from None

    async def end(self) -> web.StreamResponse:
        """All of it was passed on."""
        assert self._response is not None
        try:
            await self._response.write_eof()
        except ConnectionError:
            raise ClientGone from None
        return self._response

    async def break_off(self, why: str) -> web.StreamResponse:
        """Tells the client that nothing more will come: by an event, and by a connection that breaks off."""
        assert self._response is not None
        event = {"error": {"message": why, "type": "kvferry_proxy", "code": 502}}
        with contextlib.suppress(ConnectionError):
            await self._response.write(f"data: {json.dumps(event)}\n\n".encode())
        if self._request.transport is not None:
            self._request.transport.close()
        return self._response
