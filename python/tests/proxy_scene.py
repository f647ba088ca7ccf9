"""A proxy between a client and servers that are fakes: what the proxy's tests have in common."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import aiohttp
from aiohttp import web

from fake_vllm import FakeServer, running
from kvferry.vllm.proxy import Proxy

PATIENCE = 30.0
QUESTION = {"model": "tiny", "prompt": "what moves?", "max_tokens": 12, "temperature": 0}


class Scene:
    """Servers, the proxy and a client."""

    def __init__(self, prefill: int, decode: int, options: dict[str, Any]) -> None:
        self.prefill = [FakeServer(f"P{i}") for i in range(prefill)]
        self.decode = [FakeServer(f"D{i}") for i in range(decode)]
        self._options = options
        self.url = ""
        self.client: aiohttp.ClientSession

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Scene]:
        async with running(*self.prefill, *self.decode), aiohttp.ClientSession() as self.client:
            self.proxy = Proxy(
                [server.url for server in self.prefill],
                [server.url for server in self.decode],
                **{"patience": PATIENCE, "health": 60.0, **self._options},
            )
            runner = web.AppRunner(self.proxy.app(), handler_cancellation=True, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            try:
                await until(lambda: all(server.looks for server in (*self.prefill, *self.decode)))
                yield self
            finally:
                await runner.cleanup()

    async def ask(self, path: str = "/v1/completions", **fields: Any) -> tuple[int, str]:
        """Status and text of an answer that is no stream."""
        async with self.client.post(self.url + path, json={**QUESTION, **fields}) as answer:
            found = await answer.json()
            return answer.status, found["choices"][0]["text"] if answer.status == 200 else str(found)

    async def stream(self, **fields: Any) -> list[str]:
        """The events of a stream, to its end."""
        events: list[str] = []
        await self.stream_into(events, **fields)
        return events

    async def stream_into(self, events: list[str], path: str = "/v1/completions", **fields: Any) -> None:
        """The same, where it may end badly."""
        body = {**QUESTION, "stream": True, **fields}
        async with self.client.post(self.url + path, json=body) as answer:
            assert answer.status == 200, await answer.text()
            assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            async for line in answer.content:
                if line.startswith(b"data: "):
                    events.append(line[6:].decode().strip())

    async def metric(self, name: str) -> float:
        """A line of the metrics; 0 where there is none."""
        async with self.client.get(self.url + "/metrics") as answer:
            for line in (await answer.text()).splitlines():
                if line.startswith(f"kvferry_proxy_{name} "):
                    return float(line.split()[-1])
        return 0.0


def in_scene(prefill: int = 1, decode: int = 1, **options: Any) -> Callable[[Any], Callable[[], None]]:
    """A test that is a coroutine over a scene."""

    def wrap(test: Callable[[Scene], Coroutine[Any, Any, None]]) -> Callable[[], None]:
        def run() -> None:
            async def go() -> None:
                async with Scene(prefill, decode, options).running() as scene:
                    await asyncio.wait_for(test(scene), 120)

            asyncio.run(go())

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return wrap


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def texts(events: list[str]) -> list[str]:
    return [json.loads(event)["choices"][0]["text"] for event in events if event != "[DONE]"]


def writing(scene: Scene) -> None:
    """Prefill servers write to those who announce their blocks."""
    for server in scene.prefill:
        server.mode = "push"
    for server in scene.decode:
        server.meets = scene.prefill
