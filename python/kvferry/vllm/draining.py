"""What the scheduler's half knows of a drain, and which requests it accepts for peers.

An operator's command reaches the workers (commands.py), which report it with each step. From then on new
requests for peers are refused: they are computed, and their answers say why they have no parameters. Those that
were accepted before are under way: a worker lets its agent drain only when vLLM has computed them, which the
scheduler's half says with each step.

An idle vLLM does not step, so its scheduler's half hears nothing. A request for peers that comes then waits for
a step in which nothing runs, and is decided on when the workers have reported. Without a step for a while a
worker need not wait for one: it lets its agent drain, and its report comes in time for the next request.

Imports nothing of vLLM, as the proxy needs the names.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.vllm.messages import KvferryReport

#: Why a request is refused: the agents' own words for peers.
DRAINS = "the engine drains: it takes no new requests"
#: In the answer's parameters, the reason why there are no others.
REFUSED = "kvferry_refused"

# A report that is older does not count for a request that comes: vLLM has been idle.
CURRENT_SECONDS = 0.1
# Without a step for so long nothing is accepted before a worker has reported again. So it is longer than
# CURRENT_SECONDS, by more than the time from when a request is accepted until its step begins.
QUIET_SECONDS = 0.5
# After so many reports of a drain the scheduler's half has heard one: vLLM may schedule a step ahead.
SURE_REPORTS = 2


class Accepting:
    """Decides which requests are computed for peers.

    Attributes:
        drains: a worker has reported that it drains
    """

    def __init__(self, takes_commands: bool) -> None:
        """`takes_commands`: workers report; otherwise every request is accepted."""
        self._takes_commands = takes_commands
        self._reports = 0
        self._latest = 0.0  # when the last report came
        self._undecided: dict[str, int] = {}  # requests, and the number of reports that each waits for
        self._accepted: set[str] = set()
        self.drains = False

    def add(self, request: str) -> None:
        """A request has arrived that is to be computed for peers."""
        self._accepted.add(request)
        if self._takes_commands:
            is_idle = time.monotonic() - self._latest > CURRENT_SECONDS
            self._undecided[request] = self._reports + is_idle

    def decide(self, request: str) -> bool | None:
        """Whether a request is accepted. None: not known before the workers' next report."""
        if self._reports < self._undecided.get(request, 0):
            return None
        if self._undecided.pop(request, None) is not None and self.drains:
            self._accepted.discard(request)
            return False
        return True

    def has_accepted(self, request: str) -> bool:
        """Whether it is being computed for peers."""
        return request in self._accepted

    def ended(self, request: str) -> None:
        """A request has finished, was aborted, or is no longer computed for peers."""
        self._accepted.discard(request)
        self._undecided.pop(request, None)

    @property
    def computes(self) -> bool:
        """Whether any request is being computed for peers."""
        return bool(self._accepted)

    def reported(self, report: KvferryReport) -> None:
        """The workers have reported, all of them or those that were heard first."""
        self._reports += 1
        self._latest = time.monotonic()
        self.drains = report.drains
