"""Functions on an agent's tickets, for all parts of a worker."""

from __future__ import annotations

from kvferry.agent import Agent
from kvferry.errors import NotFoundError


def cancel(agent: Agent, ticket: int) -> None:
    """Cancels a request that may have ended meanwhile; if so, its event, not taken yet, says how."""
    try:
        agent.cancel(ticket)
    except NotFoundError:
        pass
