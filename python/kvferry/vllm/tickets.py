"""Tickets of an agent, as all parts of a worker treat them."""

from __future__ import annotations

from kvferry.agent import Agent
from kvferry.errors import NotFoundError


def cancel(agent: Agent, ticket: int) -> None:
    """Cancels a request that may have ended meanwhile: then its event, which is still to be taken, says so."""
    try:
        agent.cancel(ticket)
    except NotFoundError:
        pass
