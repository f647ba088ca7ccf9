"""A proxy in front of vLLM servers that prefill and servers that decode.

    python -m kvferry.vllm.proxy --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

The proxy sends a request to a prefill server first, for one token. It then sends the request with the
`kv_transfer_params` of that answer to a decode server, and passes on the decode server's answer as it comes. If
a prefill server writes (its `transfer_mode` is "push") and has answered before, so that its engine is known,
the proxy asks both at once: it names the transfer, and the prefill server writes while it computes. If a decode
server has kept its answer to the turn before, the prefill server is told where.
Servers are chosen by load and by how much of the prompt they have seen. A request that fails is tried on
another server as long as the client has received nothing, and the decode server computes a prompt whose cache
cannot be loaded. A prefill server that refuses requests, because its engine drains, is left alone for a while.
When a client disconnects, its requests are cancelled.

Needs aiohttp, which vLLM brings, and not vLLM itself. `GET /health` and `GET /metrics` are the proxy's own.

    proxy_servers.py    the servers, and how one is chosen
    proxy_requests.py   a client's request, and what each server is asked for it
    proxy_answers.py    how an answer gets to the client, and how it may fail
    proxy_turns.py      where the answer to the turn before is kept
    proxy_metrics.py    what is counted
    proxy_operator.py   the operator's port, where servers are drained
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import socket
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import aiohttp
from aiohttp import web

from kvferry.vllm.draining import REFUSED
from kvferry.vllm.proxy_answers import (
    Broken,
    ClientGone,
    Failed,
    Passing,
    Refused,
    error_answer,
    first_to_last,
)
from kvferry.vllm.proxy_metrics import Metrics
from kvferry.vllm.proxy_operator import Operator
from kvferry.vllm.proxy_requests import Work, passed_on, read_work
from kvferry.vllm.proxy_servers import Server, Servers, read_prompt
from kvferry.vllm.proxy_turns import Listener, Turns

logger = logging.getLogger("kvferry.proxy")

PATHS = ("/v1/completions", "/v1/chat/completions")
ATTEMPTS = 3
MOST_BODY_BYTES = 64 << 20
CONNECT_SECONDS = 5.0
PATIENCE = 600.0
END_SECONDS = 1.0  # for which a prefill server may go on after the decode server's answer has ended


class Proxy:
    """Takes requests, asks servers, passes answers on.

    Args:
        prefill, decode: URLs of servers, such as http://127.0.0.1:8100
        patience: seconds for which a server may be silent before it counts as failed; a server that does not
            stream is silent until its answer is complete
        health: seconds between two health checks of a server
    """

    def __init__(
        self,
        prefill: Sequence[str],
        decode: Sequence[str],
        *,
        patience: float = PATIENCE,
        health: float = 2.0,
    ) -> None:
        self.prefill, self.decode = Servers("prefill", prefill), Servers("decode", decode)
        self._patience, self._health = patience, health
        self._metrics, self._turns = Metrics(), Turns()
        self._session: aiohttp.ClientSession

    def app(self) -> web.Application:
        """To be run with `handler_cancellation`, by which servers learn that a client has gone away."""
        app = web.Application(client_max_size=MOST_BODY_BYTES)
        app.add_routes([web.post(path, self.generate) for path in PATHS])
        app.add_routes(
            [
                web.get("/v1/models", self.models),
                web.get("/health", self.health),
                web.get("/metrics", self.metrics),
            ]
        )
        app.cleanup_ctx.append(self._running)
        return app

    async def _running(self, app: web.Application) -> AsyncIterator[None]:
        # A new connection each time: a server may close an old one just when the proxy uses it, and the proxy
        # could not tell whether the server got the request.
        connections = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(sock_connect=CONNECT_SECONDS, sock_read=self._patience)
        async with aiohttp.ClientSession(connector=connections, timeout=timeout) as self._session:
            watching = [asyncio.create_task(self._watch(kind)) for kind in (self.prefill, self.decode)]
            yield
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)

    async def _watch(self, kind: Servers) -> None:
        """Checks at intervals whether the servers of a kind are up."""

        async def look(server: Server) -> None:
            try:
                timeout = aiohttp.ClientTimeout(total=max(1.0, self._health))
                async with self._session.get(server.url + "/health", timeout=timeout) as answer:
                    up = answer.status < 500
            except (aiohttp.ClientError, TimeoutError, asyncio.TimeoutError):
                up = False
            kind.found(server, up)

        while True:
            await asyncio.gather(*map(look, kind.all))
            await asyncio.sleep(self._health)

    # ---- requests

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """A completion or a chat."""
        outcome, begun = "failed", time.monotonic()
        try:
            work = read_work(request.path, await request.read(), request.headers)
            if not work.alone:
                work = replace(work, before=self._turns.take(work.prompt))
            to = Passing(request)
            answer = await self._at_once(to, work, begun)
            if answer is None:  # not "or": an answer is a mapping, and an empty one, before aiohttp 3.12
                answer = await self._in_turn(to, work, begun)
            outcome = "answered" if answer.status < 400 else outcome
            return answer
        except Refused as refused:
            outcome = "refused"
            return refused.answer
        except Broken as broken:
            outcome = "broken"
            return broken.answer
        except RecursionError:  # of json, which reads it here and writes it for servers
            outcome = "refused"
            return error_answer(400, "the body has too many lists or objects in each other")
        except ClientGone:
            outcome = "client_gone"
            return web.Response(status=499)  # the client is gone and does not read it
        except asyncio.CancelledError:
            outcome = "client_gone"
            raise
        finally:
            self._metrics.ended(outcome)

    async def _in_turn(self, to: Passing, work: Work, begun: float) -> web.StreamResponse:
        """Asks a prefill server, and then a decode server with the parameters of its answer."""
        reason, tried = work.alone, list[Server]()
        params: dict[str, Any] | None = None
        lent = contextlib.ExitStack()
        while not reason and not params:
            server = self.prefill.choose(work.prompt, tried)
            if server is None or server in tried or len(tried) == ATTEMPTS:
                reason = "no_prefill_server"
                break
            try:
                params = await self._prefill(replace(work, name=f"{work.name}-p{len(tried)}"), server)
                reason = "" if params else "no_parameters"  # its connector does not hand caches over
                if params:
                    lent.enter_context(server.lends())
            except Failed as failed:
                self._note(self.prefill, server, work, failed)
                tried.append(server)
                work = replace(work, before=None)  # may be used up
        way = "with_turn_before" if work.before else "in_turn"
        self._count_way(way if params else "", reason)
        with lent:
            return await self._decode(to, work, params, begun, lent)

    async def _prefill(self, work: Work, server: Server, transfer: str = "") -> dict[str, Any] | None:
        """Has the server compute the prompt; returns the parameters of the answer, if there are any."""
        async with self._ask(self.prefill, server, work, work.for_prefill(transfer)) as answer:
            found = await answer.json()
        params = found.get("kv_transfer_params") if isinstance(found, dict) else None
        if not isinstance(params, dict) or not params:
            return None
        if REFUSED in params:
            server.refuse()
            raise Failed(f"refuses: {params[REFUSED]}")
        server.learn(params)
        self.prefill.remember(server, work.prompt)
        return params

    async def _at_once(self, to: Passing, work: Work, begun: float) -> web.StreamResponse | None:
        """Asks both servers at once. None: the prefill server cannot, or has failed; the client got nothing."""
        server = None if work.alone or work.before else self.prefill.choose(work.prompt)
        if server is None or server.engine is None:
            return None
        transfer = uuid.uuid4().hex
        announced = {
            **server.engine,
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_request_id": work.name,
            "kvferry_transfer_id": transfer,
        }
        prefill = asyncio.create_task(self._prefill(replace(work, name=f"{work.name}-p"), server, transfer))
        lent = contextlib.ExitStack()
        lent.enter_context(server.lends())
        decode = asyncio.create_task(self._decode(to, work, announced, begun, lent))
        try:
            await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
            params = None
            if not decode.done() and not to.begun:  # the decode server still waits for the announced push
                try:
                    params = await prefill
                except (Failed, Refused) as failed:
                    if isinstance(failed, Failed):
                        self._note(self.prefill, server, work, failed)
                    return None
                if not params or params.get("kvferry_transfer_id") != transfer or server.engine is None:
                    await _end(decode)
                    self._count_way("in_turn" if params else "", "no_parameters")
                    return await self._decode(to, work, params, begun, lent)
            answer = await decode
            self._count_way("at_once")
            await asyncio.wait((prefill,), timeout=END_SECONDS)
            return answer
        finally:
            await _end(decode, prefill)
            lent.close()

    async def _decode(
        self,
        to: Passing,
        work: Work,
        params: dict[str, Any] | None,
        begun: float,
        lent: contextlib.ExitStack,
    ) -> web.StreamResponse:
        """Gets an answer and passes it on; `lent` is closed when the cache is no longer needed."""
        tried: list[Server] = []
        why = self.decode.why_none()
        while len(tried) < ATTEMPTS and (server := self.decode.choose(work.prompt, tried)):
            try:
                named = replace(work, name=f"{work.name}-d{len(tried)}")
                listener = Listener(work.is_stream)
                async with self._ask(self.decode, server, named, work.for_decode(params)) as answer:
                    async for piece in first_to_last(answer, work.is_stream):
                        if not to.begun:
                            lent.close()
                            self._metrics.first_byte(time.monotonic() - begun)
                        if kept := listener.hear(piece):  # before the client can go on with it
                            self._turns.keep(server, work.prompt, kept)
                        await to.write(answer, work.name, piece)
                self.decode.remember(server, work.prompt)
                return await to.end()
            except Failed as failed:
                self._note(self.decode, server, work, failed)
                why = f"{server.url}: {failed}"
                if to.begun:
                    raise Broken(await to.break_off(why)) from None
                tried.append(server)
                if failed.heard and params:
                    params = None  # they may be used up
                    self._metrics.computed("tried_again")
        return error_answer(502 if tried else 503, why)

    @contextlib.asynccontextmanager
    async def _ask(
        self, kind: Servers, server: Server, work: Work, body: dict[str, Any]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Asks one server; raises Failed or Refused."""
        headers = work.headers | {"X-Request-Id": work.name}
        with server.busy(work.prompt):
            try:
                async with self._session.post(server.url + work.path, json=body, headers=headers) as answer:
                    if answer.status >= 500 or answer.status == 429:
                        raise Failed(f"{answer.status}: {(await answer.text())[:300]}")
                    if answer.status >= 400:
                        content = await answer.read()
                        raise Refused(
                            web.Response(status=answer.status, body=content, content_type=answer.content_type)
                        )
                    yield answer
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                kind.found(server, False)  # until it answers the next question
                raise Failed(f"no connection: {error}", heard=False) from None
            except (aiohttp.ClientError, TimeoutError, asyncio.TimeoutError, ValueError) as error:
                raise Failed(f"{type(error).__name__}: {error}") from None

    def _count_way(self, way: str, reason: str = "") -> None:
        """Counts how a prompt's cache got to a decode server, or why it is computed there."""
        if way:
            self._metrics.handed_over(way)
        else:
            self._metrics.computed(reason)

    def _note(self, kind: Servers, server: Server, work: Work, failed: Failed) -> None:
        server.failed += 1
        logger.warning("request %s: %s server %s: %s", work.name, kind.kind, server.url, failed)

    # ---- the proxy's own pages

    async def models(self, request: web.Request) -> web.StreamResponse:
        """Passes on a decode server's list."""
        body: dict[str, Any] = {}
        server = self.decode.choose(read_prompt(body))
        if server is None:
            return error_answer(503, self.decode.why_none())
        try:
            headers = passed_on(request.headers)
            async with self._session.get(server.url + request.path, headers=headers) as answer:
                return web.Response(
                    status=answer.status, body=await answer.read(), content_type=answer.content_type
                )
        except (aiohttp.ClientError, TimeoutError, asyncio.TimeoutError) as error:
            return error_answer(502, f"{server.url}: {error}")

    async def health(self, request: web.Request) -> web.StreamResponse:
        """200 while a decode server takes requests: without prefill servers it computes by itself."""
        found = {
            kind.kind: {server.url: server.up for server in kind.all} for kind in (self.prefill, self.decode)
        }
        serves = any(server.up and not server.drains for server in self.decode.all)
        return web.json_response(found, status=200 if serves else 503)

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        """Counters in the text form of Prometheus."""
        return web.Response(text=self._metrics.page((self.prefill, self.decode)))


async def _end(*tasks: asyncio.Task[Any]) -> None:
    """Ends tasks that may have ended, and ignores their results."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _listen(host: str, port: int) -> list[socket.socket]:
    """Sockets at all addresses of a host: aiohttp's log has their ports, and before 3.14 only theirs."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    addresses = dict.fromkeys((family, address) for family, _, _, _, address in found)
    return [socket.create_server(address, family=family) for family, address in addresses]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a proxy until it is ended by a signal."""
    parser = argparse.ArgumentParser(
        prog="python -m kvferry.vllm.proxy",
        description="A proxy in front of vLLM servers that prefill and servers that decode.",
    )
    parser.add_argument(
        "--prefill", nargs="*", default=[], metavar="URL", help="prefill servers; none: decode servers do all"
    )
    parser.add_argument("--decode", nargs="+", required=True, metavar="URL", help="decode servers")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; by default this machine only"
    )
    parser.add_argument(
        "--port", type=int, default=8000, help="port to listen on, 8000; 0: any free one, which the log names"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE,
        metavar="S",
        help=f"seconds of silence after which a server counts as failed; {PATIENCE:g}",
    )
    parser.add_argument(
        "--health",
        type=float,
        default=2.0,
        metavar="S",
        help="seconds between health checks of the servers; 2",
    )
    parser.add_argument(
        "--operator-port",
        type=int,
        metavar="PORT",
        help="port of this machine for draining servers: POST /drain?server=URL&seconds=S, /resume?server=URL; "
        "0 is any free port",
    )
    given = parser.parse_args(arguments)
    for url in (*given.prefill, *given.decode):
        if not url.startswith(("http://", "https://")):
            parser.error(f"{url} is not a URL; allowed: http://HOST:PORT")
    if given.patience <= 0 or given.health <= 0:
        parser.error("--patience and --health must be seconds above 0")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    proxy = Proxy(given.prefill, given.decode, patience=given.patience, health=given.health)
    app = proxy.app()
    if given.operator_port is not None:
        app.cleanup_ctx.append(Operator((proxy.prefill, proxy.decode)).door(given.operator_port))
    web.run_app(
        app,
        sock=_listen(given.host, given.port),
        handler_cancellation=True,
        access_log=None,
        print=logger.info,
    )


if __name__ == "__main__":
    main()
