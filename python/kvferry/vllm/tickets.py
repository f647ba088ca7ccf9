"""Functions on an agent's tickets, for all parts of a worker."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvferry.agent import Agent
from kvferry.errors import NotFoundError
from kvferry.events import Event, EventKind

# Events are taken at least this often.
WAIT_SECONDS = 0.05
# After the time to drain, what was cancelled is still reported to peers.
REPORT_SECONDS = 1.0


def cancel(agent: Agent, ticket: int) -> None:
    """Cancels a request that may have ended meanwhile; if so, its event, not taken yet, says how."""
    try:
        agent.cancel(ticket)
    except NotFoundError:
        pass


def work(agent: Agent, note: Callable[[Event], None], seconds: float, until: Callable[[], bool]) -> None:
    """Passes events to `note` until a condition holds, or the time is over."""
    end = time.monotonic() + seconds
    while not until():
        left = end - time.monotonic()
        if left <= 0:
            return
        agent.wait(min(left, WAIT_SECONDS))
        for event in agent.events():
            note(event)


def drain(agent: Agent, note: Callable[[Event], None], seconds: float) -> None:
    """Accepts nothing new, and returns when everything has ended, or was cancelled after `seconds`.

    A peer may still be in the middle of a copy then: closing the agent ends that.
    """
    drained = False

    def look(event: Event) -> None:
        nonlocal drained
        drained |= event.kind == EventKind.DRAINED
        note(event)

    agent.drain(seconds)
    work(agent, look, seconds + REPORT_SECONDS, lambda: drained)
