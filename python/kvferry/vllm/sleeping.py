"""Caches whose memory goes away and comes back: an engine that sleeps, or moves its caches.

Before it goes, what is under way gets a while to end, and is cancelled then. While it is away peers are told so
by name, and wait as long as their patience; when it is back they meet this rank anew. What was kept for others
is not kept any more, and who asks for it is told at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from kvferry.agent import Agent
from kvferry.errors import AgainError
from kvferry.events import Event
from kvferry.vllm.tickets import cancel

# Events are looked for at least so often.
WAIT_SECONDS = 0.05
# A request that was cancelled ends when its readers' leases, or its writers' time, have run out. Messages about
# it get this much longer.
MARGIN_SECONDS = 10.0


class Caches:
    """The memory of a rank's caches, registered with its agent.

    Args:
        under_way: the requests that use it, by their tickets; `note` takes out what has ended
        note: is told every event
    """

    def __init__(
        self,
        agent: Agent,
        memory: Sequence[torch.Tensor],
        under_way: Mapping[int, object],
        note: Callable[[Event], None],
    ) -> None:
        agent.register(memory)
        self._agent, self._under_way, self._note = agent, under_way, note
        self._memory = list(memory)
        self._here = set(range(len(memory)))

    @property
    def are_here(self) -> bool:
        """Whether all of it is registered."""
        return len(self._here) == len(self._memory)

    def leave(self, drain: float, cancelled: float) -> None:
        """The memory goes: returns when nobody touches it any more. Does nothing where it is away.

        Args:
            drain: seconds for which the worker waits for requests to end; then it cancels the others
            cancelled: seconds for which it waits for those that it has cancelled

        Raises AgainError, which names what still uses the memory: it must not go. It can be called again.
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
        """The memory is there again; with `memory`, elsewhere. Does nothing where it is here."""
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
        """Notes events until something holds, or the time is over."""
        end = time.monotonic() + seconds
        while not until():
            left = end - time.monotonic()
            if left <= 0:
                return
            self._agent.wait(min(left, WAIT_SECONDS))
            for event in self._agent.events():
                self._note(event)
