"""Servers that answer over HTTP as vLLM does with a connector, and fail in the way that a test sets.

They compute nothing. The text that a decode server "generates" says where the cache came from, so that a test
sees which way a request went.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web

from kvferry.vllm.draining import DRAINS, REFUSED

WORDS = ("first", "second", "third", "fourth")

#: How the stream of a chat begins, whatever follows.
ROLE = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": null}]}\n\n'


class Does(enum.Enum):
    """What a server does with requests."""

    ANSWER = "the answer"
    WAIT = "the answer, once `go` is set"
    ERROR = "500"
    BUSY = "429"
    REFUSE = "400, as for a request that makes no sense"
    HANG = "nothing, ever"
    DIE = "the connection is lost after two pieces, or before an answer that is none"
    EVENT = "a stream that begins with an error, as where a load failed and vLLM is told not to compute"
    EMPTY = "a stream without anything"
    NO_PARAMETERS = "the answer of a server without a connector"
    DRAIN = "the answer of a prefill server whose engine drains"


class FakeServer:
    """One server.

    Attributes:
        asked: bodies of the requests that came, names: their X-Request-Id, and keys: the Authorization of all
        gone: how many requests their clients have left
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.does = Does.ANSWER
        self.first: list[Does] = []  # what it does with the first requests, before `does`
        self.asked: list[dict[str, Any]] = []
        self.names: list[str] = []
        self.keys: list[str] = []
        self.gone = 0
        self.go = asyncio.Event()
        self.mode = "pull"
        self.keeps = False  # decode servers: their answers, for the next turn
        self.before: list[dict[str, Any]] = []  # prefill servers: what they were told of the turn before
        self.engines = itertools.cycle((name,))  # that answer, in turn
        self.announced: list[dict[str, Any]] = []  # parameters with a name that a proxy has invented
        self.meets: list[FakeServer] = []  # decode servers: who may write to them
        self.written: set[tuple[str, str]] = set()  # by which engine of this server, under which name
        self.first_waits: Callable[[], Awaitable[None]] | None = None  # before they answer such a request
        self.healthy = True
        self.looks = 0  # how often its health was checked
        self.port = 0
        self._numbers = itertools.count()
        self._taken: set[str] = set()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """The URL at which it listens."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Begins to listen, at its earlier port if it had one."""
        app = web.Application()
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._generate)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stops listening."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, request: web.Request) -> web.Response:
        self.looks += 1
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("Authorization", ""))
        return web.json_response({"object": "list", "data": [{"id": self.name}]})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self.names.append(request.headers.get("X-Request-Id", ""))
        self.keys.append(request.headers.get("Authorization", ""))
        try:
            return await self._answer(request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.gone += 1
            raise

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await self._wait_for_writer(body.get("kv_transfer_params") or {})
        does = self.first.pop(0) if self.first else self.does
        if does is Does.WAIT:
            await self.go.wait()
        if does is Does.HANG:
            await asyncio.Event().wait()
        codes = {Does.ERROR: 500, Does.BUSY: 429, Does.REFUSE: 400}
        if does in codes:
            error = {"message": f"{self.name} says {codes[does]}", "code": codes[does]}
            return web.json_response({"error": error}, status=codes[does])
        params = body.get("kv_transfer_params") or {}
        if body.get("stream"):
            return await self._stream(request, does, params)
        if does is Does.DIE:
            assert request.transport is not None
            request.transport.abort()
            await asyncio.Event().wait()
        answer: dict[str, Any] = {
            "choices": [{"text": " ".join((self._source(params), *WORDS))}],
            "kv_transfer_params": None,
        }
        if params.get("do_remote_decode") and does is Does.DRAIN:
            answer["kv_transfer_params"] = {REFUSED: DRAINS}
        elif params.get("do_remote_decode") and does is not Does.NO_PARAMETERS:
            answer["kv_transfer_params"] = self._parameters(params)
        elif self.keeps and params.get("do_remote_prefill"):
            answer["kv_transfer_params"] = self._kept()
        return web.json_response(answer)

    async def _stream(self, request: web.Request, does: Does, params: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        if does is Does.EMPTY:
            return response
        if request.path.endswith("/chat/completions"):
            await response.write(ROLE)
            await asyncio.sleep(0.001)
        if does is Does.EVENT:
            await response.write(
                b'data: {"error": {"message": "the load failed", "code": 500}}\n\ndata: [DONE]\n\n'
            )
            return response
        for i, word in enumerate((self._source(params), *WORDS)):
            if does is Does.DIE and i == 2:
                assert request.transport is not None
                request.transport.abort()
                await asyncio.Event().wait()
            await response.write(f"data: {json.dumps({'choices': [{'text': word}]})}\n\n".encode())
            await asyncio.sleep(0.001)
        if self.keeps and params.get("do_remote_prefill"):
            last = f"data: {json.dumps({'choices': [], 'kv_transfer_params': self._kept()})}\n\n".encode()
            for piece in (last[:30], last[30:]):  # as a network may cut it
                await response.write(piece)
                await asyncio.sleep(0.001)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _wait_for_writer(self, params: dict[str, Any]) -> None:
        """A decode server whose blocks were announced waits until they are written."""
        name = params.get("kvferry_transfer_id")
        if params.get("do_remote_decode") and params.get("remote_request_id"):
            self.before.append(params)
        elif params.get("do_remote_decode") and name:
            self.announced.append(params)
            if self.first_waits is not None:
                await self.first_waits()
        if params.get("do_remote_prefill") and params.get("transfer_mode") == "push" and name != "00ff":
            self.announced.append(params)
            while not any((params["remote_engine_id"], name) in server.written for server in self.meets):
                await asyncio.sleep(0.001)

    def _parameters(self, asked: dict[str, Any]) -> dict[str, Any]:
        announced = {} if asked.get("remote_request_id") else asked
        engine, name = next(self.engines), announced.get("kvferry_transfer_id", "00ff")
        self.written.add((engine, name))
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2]],
            "remote_engine_id": engine,
            "remote_request_id": f"{self.name}-{next(self._numbers)}",
            "remote_host": "127.0.0.1",
            "remote_port": 1,
            "remote_num_tokens": 7,
            "remote_blocks_expiry_time": None,
            "transfer_mode": self.mode,
            "kvferry_transfer_id": name,
            "kvferry_weights": "w1",
            "kvferry_versions": [1, 1],
        }

    def _kept(self) -> dict[str, Any]:
        """What a decode server says of an answer that it keeps."""
        name = f"{self.name}-kept-{next(self._numbers)}"
        return {
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "remote_engine_id": self.name,
            "remote_request_id": name,
            "remote_host": "127.0.0.1",
            "remote_port": 2,
            "kvferry_transfer_id": name.encode().hex(),
        }

    def _source(self, params: dict[str, Any]) -> str:
        """Where the cache comes from. As with the connector, parameters load it only once."""
        name = str(params.get("remote_request_id"))
        if not params.get("do_remote_prefill") or name in self._taken:
            return "computed"
        self._taken.add(name)
        return f"loaded:{params['remote_engine_id']}"


@contextlib.asynccontextmanager
async def running(*servers: FakeServer) -> AsyncIterator[None]:
    """Lets the servers listen inside the `with` block."""
    async with contextlib.AsyncExitStack() as stack:
        for server in servers:
            stack.push_async_callback(server.stop)
            await server.start()
        yield
