"""Caches whose memory goes away and comes back: an engine that sleeps, or moves its caches.

Before the memory goes, requests under way get some time to end, and are then cancelled. While it is away, peers
are told so, and wait as long as their patience allows; when it is back, they meet this rank anew. Requests kept
for consumers are dropped, and consumers that ask for them are told at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from kvferry.agent import Agent
from kvferry.errors import AgainError
from kvferry.events import Event
from kvferry.tickets import WAIT_SECONDS, EventSource, cancel, work

# A request that was cancelled ends when its readers' leases, or its writers' time, have run out. Messages about
# it get this much longer.
MARGIN_SECONDS = 10.0


class Caches:
    """The memory of a rank's caches, registered with its agent.

    Args:
        source: of the agent's events
        under_way: tickets of the requests that use it; `note` removes those that have ended
        note: called with every event
    """

    def __init__(
        self,
        agent: Agent,
        source: EventSource,
        memory: Sequence[torch.Tensor],
        under_way: Mapping[int, object],
        note: Callable[[Event], None],
    ) -> None:
        agent.register(memory)
        self._agent, self._source, self._under_way, self._note = agent, source, under_way, note
        self._memory = list(memory)
        self._here = set(range(len(memory)))

    @property
    def are_here(self) -> bool:
        """Whether all of it is registered."""
        return len(self._here) == len(self._memory)

    def leave(self, drain: float, cancelled: float) -> None:
        """The memory goes: returns when nothing touches it any more. Does nothing if it is away already.

        Args:
            drain: seconds for which the worker waits for requests to end; then it cancels the others
            cancelled: seconds for which it waits for the cancelled ones

        Raises AgainError, which names what still uses the memory: it must not go yet. May be called again.
        """
        if not self._here:
            return
        self._work(drain, lambda: not self._under_way)
        for ticket in list(self._under_way):
            cancel(self._agent, ticket)
        end = time.monotonic() + cancelled + MARGIN_SECONDS
        self._work(end - time.monotonic(), lambda: not self._under_way)
        for region in sorted(self._here):
            self._unregister(region, end)

    def come(self, memory: Sequence[torch.Tensor] | None = None) -> None:
        """The memory is there again; with `memory`, at other addresses. Does nothing if it is here already."""
        if memory is not None and not self._here:
            self._memory = list(memory)
        for region in set(range(len(self._memory))) - self._here:
            self._agent.register_region(region, self._memory[region])
            self._here.add(region)

    def _unregister(self, region: int, end: float) -> None:
        while True:
            try:
                self._agent.unregister_region(region)
                self._here.discard(region)
                return
            except AgainError:  # a peer is in the middle of a write
                if time.monotonic() >= end:
                    raise
            self._work(WAIT_SECONDS, lambda: False)

    def _work(self, seconds: float, until: Callable[[], bool]) -> None:
        work(self._source, self._note, seconds, until)
