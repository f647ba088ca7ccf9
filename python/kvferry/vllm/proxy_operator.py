"""The operator's interface to the proxy: gives a server no new requests, before it is ended.

It listens on a port of its own, which clients do not reach.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence

from aiohttp import web

from kvferry.vllm.proxy_servers import Server, Servers

logger = logging.getLogger("kvferry.proxy")

DRAIN_SECONDS, LONGEST_DRAIN = 300.0, 86400.0
LOOK_SECONDS = 0.05  # between two checks whether a server has become idle


class Operator:
    """Answers an operator.

    Args:
        kinds: all servers of the proxy
    """

    def __init__(self, kinds: Sequence[Servers]) -> None:
        self._kinds = kinds

    def app(self) -> web.Application:
        """The application with the operator's routes."""
        app = web.Application()
        app.add_routes([web.post("/drain", self.drain), web.post("/resume", self.resume)])
        return app

    def door(self, port: int) -> Callable[[web.Application], AsyncIterator[None]]:
        """Listens on this machine as long as another application runs; the log says where."""

        async def running(beside: web.Application) -> AsyncIterator[None]:
            runner = web.AppRunner(self.app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port).start()
            logger.info("the operator is heard at http://127.0.0.1:%d", runner.addresses[0][1])
            yield
            await runner.cleanup()

        return running

    async def drain(self, request: web.Request) -> web.StreamResponse:
        """A server gets no new requests; answers when those under way have ended, or `seconds` are over."""
        server = self._named(request)
        try:
            seconds = float(request.query.get("seconds", DRAIN_SECONDS))
        except ValueError:
            seconds = math.nan
        if not 0 <= seconds <= LONGEST_DRAIN:
            raise _wrong(f"seconds is {request.query['seconds']!r}; allowed: 0 to {LONGEST_DRAIN:g}")
        server.drains = True
        logger.warning("server %s drains: it gets no new requests", server.url)
        end = time.monotonic() + seconds
        while server.drains and not server.is_idle and time.monotonic() < end:
            await asyncio.sleep(LOOK_SECONDS)
        found = {"server": server.url, "drains": server.drains, "requests": server.now, "lent": server.lent}
        return web.json_response(found, status=200 if server.drains and server.is_idle else 504)

    async def resume(self, request: web.Request) -> web.StreamResponse:
        """A server gets requests again."""
        server = self._named(request)
        server.drains = False
        logger.warning("server %s gets requests again", server.url)
        return web.json_response({"server": server.url, "drains": False})

    def _named(self, request: web.Request) -> Server:
        known = {server.url: server for kind in self._kinds for server in kind.all}
        url = request.query.get("server", "").rstrip("/")
        if url not in known:
            raise _wrong(f"server is {url!r}; allowed: {', '.join(known)}")
        return known[url]


def _wrong(what: str) -> web.HTTPException:
    return web.HTTPBadRequest(text=json.dumps({"error": what}), content_type="application/json")
