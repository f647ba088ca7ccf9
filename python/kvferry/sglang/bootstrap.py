"""The prefill server's bootstrap server, which also tells decode ranks where kvferry's agents are met."""

from __future__ import annotations

import json

import requests
from aiohttp import web
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

from kvferry.contact import Contact
from kvferry.errors import InputOutputError

ROUTE_PATH = "/route"
CONTACT_PATH = "/kvferry"
ASK_SECONDS = 5


class KvferryBootstrapServer(CommonKVBootstrapServer):
    """SGLang's, with a path at which engines say where they are met, and others ask for that."""

    def _setup_routes(self) -> None:
        super()._setup_routes()
        self._contacts: dict[str, dict[str, str]] = {}  # by number of the engine in data parallelism
        self.app.router.add_put(CONTACT_PATH, self._put_contact)
        self.app.router.add_get(CONTACT_PATH, self._get_contact)

    async def _handle_route_get(self, request: web.Request) -> web.Response:
        """SGLang's answer, without the page size, which it wants to be equal on both sides."""
        answer = await super()._handle_route_get(request)
        found = json.loads(answer.text) if answer.status == 200 else {}
        return web.json_response({**found, "page_size": None}) if "page_size" in found else answer

    async def _put_contact(self, request: web.Request) -> web.Response:
        contact = await request.json()
        self._contacts[str(contact.pop("dp_rank"))] = contact
        return web.Response()

    async def _get_contact(self, request: web.Request) -> web.Response:
        dp_rank = request.query.get("dp_rank", "0")
        contact = self._contacts.get(dp_rank)
        if contact is None:
            return web.Response(status=404, text=f"no engine with dp_rank {dp_rank} uses kvferry here")
        return web.json_response(contact)


def ask_contact(address: str, dp_rank: int) -> Contact:
    """Asks a bootstrap server where the prefill engine of a number is met. Raises InputOutputError."""
    where = f"http://{address}{CONTACT_PATH}"
    try:
        answer = requests.get(where, params={"dp_rank": dp_rank}, timeout=ASK_SECONDS)
        if answer.status_code == 200:
            return Contact(**answer.json())
    except (requests.RequestException, TypeError, ValueError) as error:
        raise InputOutputError(f"{where} does not say where the prefill ranks are met: {error}") from None
    raise InputOutputError(
        f"{where} answers {answer.status_code} {answer.text}: the prefill server must have "
        "--disaggregation-transfer-backend kvferry, too"
    )
