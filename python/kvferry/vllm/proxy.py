"""A proxy in front of vLLM servers that prefill and servers that decode.

    python -m kvferry.vllm.proxy --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

The proxy sends a request to a prefill server first, for one token. It then sends the request with the
`kv_transfer_params` of that answer to a decode server, and passes on the decode server's answer as it comes. If
a prefill server writes (its `transfer_mode` is "push") and has answered before, so that its engine is known,
the proxy asks both at once: it names the transfer, and the prefill server writes while it computes.
Servers are chosen by load and by how much of the prompt they have seen (proxy_servers.py). A request that fails
is tried on another server as long as the client has received nothing, and the decode server computes a prompt
whose cache cannot be loaded. When a client disconnects, its requests are cancelled.

Needs aiohttp, which vLLM brings, and not vLLM itself. `GET /health` and `GET /metrics` are the proxy's own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
from aiohttp import web

from kvferry.vllm.proxy_operator import Operator
from kvferry.vllm.proxy_servers import Prompt, Server, Servers, read_prompt

logger = logging.getLogger("kvferry.proxy")

PATHS = ("/v1/completions", "/v1/chat/completions")
TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
#: Fields that a prefill server does not get: it makes one token, which no client sees.
NOT_TO_PREFILL = ("stream_options", "min_tokens", "logprobs", "top_logprobs", "prompt_logprobs", "echo")
ATTEMPTS = 3
MOST_BODY_BYTES = 64 << 20
CONNECT_SECONDS = 5.0
PATIENCE = 600.0
END_SECONDS = 1.0  # for which a prefill server may go on after the decode server's answer has ended
BUCKETS = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


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


@dataclass(frozen=True)
class Work:
    """A request of a client."""

    path: str
    body: dict[str, Any]
    prompt: Prompt
    name: str
    headers: dict[str, str]

    @property
    def is_stream(self) -> bool:
        """Whether its answer comes piece by piece."""
        return bool(self.body.get("stream"))

    def for_prefill(self, transfer: str = "") -> dict[str, Any]:
        """The request to a prefill server; `transfer` names the transfer if both servers are asked at once."""
        body = {key: value for key, value in self.body.items() if key not in NOT_TO_PREFILL}
        body |= {"stream": False, "max_tokens": 1, "kv_transfer_params": dict(TO_PREFILL)}
        if transfer:
            body["kv_transfer_params"]["kvferry_transfer_id"] = transfer
        if "max_completion_tokens" in body:
            body["max_completion_tokens"] = 1
        return body

    def for_decode(self, params: dict[str, Any] | None) -> dict[str, Any]:
        """The request to a decode server; without parameters it computes the prompt."""
        return self.body | ({"kv_transfer_params": params} if params else {})


def why_not_handed_over(body: dict[str, Any]) -> str:
    """Why a decode server must compute the whole request; "": it need not.

    The parameters of a prefill server are for one prompt, and can be used once.
    """
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not all(type(item) is int for item in prompt):
        return "several_prompts"
    if body.get("use_beam_search") or any(body.get(name) not in (None, 1) for name in ("n", "best_of")):
        return "several_answers"
    if body.get("prompt_logprobs") is not None or (body.get("echo") and body.get("logprobs") is not None):
        return "prompt_logprobs"  # only the server that computes the prompt has them
    return ""


def error_answer(status: int, message: str) -> web.Response:
    """An error in the form of OpenAI's interface."""
    return web.json_response(
        {"error": {"message": message, "type": "kvferry_proxy", "code": status}}, status=status
    )


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
        self._count: Counter[tuple[str, str]] = Counter()  # by name and labels
        self._first = [0] * (len(BUCKETS) + 1)
        self._first_sum = 0.0
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
            work = await self._read(request)
            to = Passing(request)
            answer = await self._at_once(to, work, begun) or await self._in_turn(to, work, begun)
            outcome = "answered" if answer.status < 400 else outcome
            return answer
        except Refused as refused:
            outcome = "refused"
            return refused.answer
        except Broken as broken:
            outcome = "broken"
            return broken.answer
        except ClientGone:
            outcome = "client_gone"
            return web.Response(status=499)  # the client is gone and does not read it
        except asyncio.CancelledError:
            outcome = "client_gone"
            raise
        finally:
            self._count["requests", f'outcome="{outcome}"'] += 1

    async def _read(self, request: web.Request) -> Work:
        try:
            body = json.loads(await request.read())
        except ValueError as error:
            raise Refused(error_answer(400, f"the body is not JSON: {error}")) from None
        if not isinstance(body, dict):
            raise Refused(error_answer(400, "the body is not an object"))
        body.pop("kv_transfer_params", None)  # a client may not choose which servers speak with each other
        name = request.headers.get("X-Request-Id") or uuid.uuid4().hex
        headers = {key: request.headers[key] for key in ("Authorization",) if key in request.headers}
        return Work(request.path, body, read_prompt(body), name, headers)

    async def _in_turn(self, to: Passing, work: Work, begun: float) -> web.StreamResponse:
        """Asks a prefill server, and then a decode server with the parameters of its answer."""
        reason, tried = why_not_handed_over(work.body), list[Server]()
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
        self._count_way("in_turn" if params else "", reason)
        with lent:
            return await self._decode(to, work, params, begun, lent)

    async def _prefill(self, work: Work, server: Server, transfer: str = "") -> dict[str, Any] | None:
        """Has the server compute the prompt; returns the parameters of the answer, if there are any."""
        async with self._ask(self.prefill, server, work, work.for_prefill(transfer)) as answer:
            found = await answer.json()
        params = found.get("kv_transfer_params") if isinstance(found, dict) else None
        if not isinstance(params, dict) or not params:
            return None
        server.learn(params)
        self.prefill.remember(server, work.prompt)
        return params

    async def _at_once(self, to: Passing, work: Work, begun: float) -> web.StreamResponse | None:
        """Asks both servers at once. None: the prefill server cannot, or has failed; the client got nothing."""
        server = None if why_not_handed_over(work.body) else self.prefill.choose(work.prompt)
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

    def _count_way(self, way: str, reason: str = "") -> None:
        """Counts how a prompt's cache got to a decode server, or why it is computed there."""
        key = ("handed_over", f'way="{way}"') if way else ("computed", f'reason="{reason}"')
        self._count[key] += 1

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
                async with self._ask(self.decode, server, named, work.for_decode(params)) as answer:
                    async for piece in first_to_last(answer, work.is_stream):
                        if not to.begun:
                            lent.close()
                            self._note_first(time.monotonic() - begun)
                        await to.write(answer, work, piece)
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
                    self._count["computed", 'reason="tried_again"'] += 1
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

    def _note(self, kind: Servers, server: Server, work: Work, failed: Failed) -> None:
        server.failed += 1
        logger.warning("request %s: %s server %s: %s", work.name, kind.kind, server.url, failed)

    def _note_first(self, seconds: float) -> None:
        self._first_sum += seconds
        self._first[sum(seconds > limit for limit in BUCKETS)] += 1

    # ---- the proxy's own pages

    async def models(self, request: web.Request) -> web.StreamResponse:
        """Passes on a decode server's list."""
        body: dict[str, Any] = {}
        server = self.decode.choose(read_prompt(body))
        if server is None:
            return error_answer(503, self.decode.why_none())
        try:
            async with self._session.get(server.url + request.path) as answer:
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
        lines: list[str] = []

        def show(name: str, kind: str, what: str, values: dict[str, float]) -> None:
            lines.append(f"# HELP kvferry_proxy_{name} {what}")
            lines.append(f"# TYPE kvferry_proxy_{name} {kind}")
            lines.extend(f"kvferry_proxy_{name}{{{labels}}} {value:g}" for labels, value in values.items())

        def counted(name: str) -> dict[str, float]:
            return {labels: value for (key, labels), value in sorted(self._count.items()) if key == name}

        def of_servers(field: str) -> dict[str, float]:
            return {
                f'kind="{kind.kind}",server="{server.url}"': float(getattr(server, field))
                for kind in (self.prefill, self.decode)
                for server in kind.all
            }

        show("requests_total", "counter", "Requests of clients, by their result", counted("requests"))
        show(
            "handed_over_total",
            "counter",
            "Requests whose servers were asked in turn, or at once",
            counted("handed_over"),
        )
        show(
            "computed_total",
            "counter",
            "Requests whose prompt was left to a decode server, by the reason",
            counted("computed"),
        )
        show("server_up", "gauge", "Whether a server answers", of_servers("up"))
        show("server_drains", "gauge", "Whether a server drains: it gets no new requests", of_servers("drains"))
        show("server_lent", "gauge", "Caches of a server that are not loaded yet", of_servers("lent"))
        show("server_requests", "gauge", "Requests that a server is busy with", of_servers("now"))
        show("server_requests_total", "counter", "Requests sent to a server", of_servers("total"))
        show("server_failures_total", "counter", "Requests that failed at a server", of_servers("failed"))
        name, total = "kvferry_proxy_first_byte_seconds", 0
        lines += [f"# HELP {name} From a request to the first byte of its answer", f"# TYPE {name} histogram"]
        for limit, count in zip((*map(str, BUCKETS), "+Inf"), self._first, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{limit}"}} {total}')
        lines += [f"{name}_sum {self._first_sum:g}", f"{name}_count {total}"]
        return web.Response(text="\n".join(lines) + "\n")


async def _end(*tasks: asyncio.Task[Any]) -> None:
    """Ends tasks that may have ended, and ignores their results."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def first_to_last(answer: aiohttp.ClientResponse, is_stream: bool) -> AsyncIterator[bytes]:
    """The pieces of an answer as they come; an answer that is not a stream comes whole.

    Raises Failed if a stream begins with an error, as it does if a cache could not be loaded and vLLM was told
    not to compute it: the client has received nothing yet.
    """
    if not is_stream:
        yield await answer.read()
        return
    first = True
    async for piece in answer.content.iter_any():
        if first and piece.startswith(b'data: {"error"'):
            raise Failed(piece[:300].decode(errors="replace").partition("\n")[0])
        first = False
        yield piece
    if first:
        raise Failed("the answer ended before it began")


class Passing:
    """The answer to a client, which begins with the first piece of a server's answer."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None

    @property
    def begun(self) -> bool:
        """Whether anything has been sent to the client."""
        return self._response is not None

    async def write(self, answer: aiohttp.ClientResponse, work: Work, piece: bytes) -> None:
        """Passes a piece on."""
        try:
            if self._response is None:
                self._response = web.StreamResponse(status=answer.status)
                self._response.headers["Content-Type"] = answer.headers.get("Content-Type", "application/json")
                self._response.headers["X-Request-Id"] = work.name
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


class Broken(Exception):
    """An answer ended in the middle."""

    def __init__(self, answer: web.StreamResponse) -> None:
        super().__init__("the answer ended in the middle")
        self.answer = answer


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
    parser.add_argument("--port", type=int, default=8000)
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
        help="port of this machine for draining servers: POST /drain?server=URL&seconds=S, /resume?server=URL",
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
    web.run_app(app, host=given.host, port=given.port, handler_cancellation=True, access_log=None)


if __name__ == "__main__":
    main()
