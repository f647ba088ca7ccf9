"""Functions on an agent's tickets, for the adapters of all engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Protocol

from kvferry.agent import Agent
from kvferry.errors import NotFoundError, Status
from kvferry.events import Event, EventKind

# Events are taken at least this often.
WAIT_SECONDS = 0.05
# After the time to drain, what was cancelled is still reported to peers.
REPORT_SECONDS = 1.0


class EventSource(Protocol):
    """Where a worker gets its events: from the agent, or from Commands, which heeds an operator's."""

    def wait(self, timeout: float) -> bool:
        """Waits until there is an event, at most `timeout` seconds; returns whether there is."""

    def events(self) -> Iterator[Event]:
        """Takes all events that have come so far."""


def cancel(agent: Agent, ticket: int) -> None:
    """Cancels a request that may have ended meanwhile; if so, its event, not taken yet, says how."""
    try:
        agent.cancel(ticket)
    except NotFoundError:
        pass


def work(source: EventSource, note: Callable[[Event], None], seconds: float, until: Callable[[], bool]) -> None:
    """Passes events to `note` until a condition holds, or the time is over."""
    end = time.monotonic() + seconds
    while not until():
        left = end - time.monotonic()
        if left <= 0:
            return
        source.wait(min(left, WAIT_SECONDS))
        for event in source.events():
            note(event)


def drain(agent: Agent, source: EventSource, note: Callable[[Event], None], seconds: float) -> None:
    """Accepts nothing new, and returns when everything has ended, or was cancelled after `seconds`.

    A peer may still be in the middle of a copy then: closing the agent ends that.
    """
    drained = False

    def look(event: Event) -> None:
        nonlocal drained
        drained |= event.kind == EventKind.DRAINED and event.status != Status.CANCELLED
        note(event)

    agent.drain(seconds)
    work(source, look, seconds + REPORT_SECONDS, lambda: drained)
