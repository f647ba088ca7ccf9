"""Commands that an operator gives to a rank: to drain, to resume, to list what it keeps for peers, and to hand
that over.

vLLM takes a worker's results when it steps, and an idle vLLM does not step. So a thread takes the events of the
worker's agent as they come. It does what commands ask for; all other events wait here, in their order, until
the worker takes them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from kvferry.agent import Agent
from kvferry.commands import DRAIN, HAND_OVER, LIST, RESUME, TAKE_OVER, Command, kept_record
from kvferry.errors import (
    CancelledError,
    ClosedError,
    KvferryError,
    NotFoundError,
    OutOfMemoryError,
    Status,
    UnsupportedError,
)
from kvferry.events import Event, EventKind
from kvferry.records import Record
from kvferry.vllm.compat import init_logger
from kvferry.vllm.draining import QUIET_SECONDS, SURE_REPORTS

logger = init_logger("vllm.kvferry")

# Why a drain has failed.
LATE = "vLLM was still computing requests for peers when the time to drain was over"

#: The record of a reply to HAND_OVER: the parameters as JSON.
PARAMS = "kv_transfer_params"


class Kept(NamedTuple):
    """A request that a rank keeps for a peer: its ticket, and the parameters by which the peer finds it."""

    ticket: int
    params: dict[str, Any]


def how_ended(event: Event) -> str:
    """What became of a request that was kept, as the end of a sentence."""
    return "its consumers have it" if event.kind == EventKind.DONE else event.detail


class Commands:
    """Heeds the commands that an agent gets, and passes its other events on.

    Args:
        find: finds a request that is kept, by vLLM's name of it; raises KvferryError, which says why it is not
            kept. Called by this object's thread
        name: finds vLLM's name of a request by its ticket; None: it has just ended. Called by the same thread
    """

    def __init__(self, agent: Agent, find: Callable[[str], Kept], name: Callable[[int], str | None]) -> None:
        self._agent, self._find, self._name = agent, find, name
        self._waiting: deque[Event] = deque()
        self._change = threading.Condition()
        self._drains: list[Command] = []  # that have not been replied to
        self._until = math.inf  # when the agent drains, although requests are being computed for peers
        self._computes = False  # such requests
        self._stepped = -math.inf  # when vLLM was last known to step
        self._told = 0  # how often the scheduler's half was told of this drain
        self._is_late = False  # they were not computed in time
        self._ends = False  # the thread ends, and the worker takes the events itself
        self.drains = False  # by a command that was not taken back
        self.has_drained = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kvferry commands", daemon=True)
        self._thread.start()

    # ---- for the worker

    def wait(self, timeout: float) -> bool:
        """Waits until there is an event, at most `timeout` seconds; returns whether there is."""
        if self._ends and not self._waiting:
            return self._agent.wait(timeout)
        with self._change:
            return self._change.wait_for(lambda: bool(self._waiting), timeout)

    def events(self) -> Iterator[Event]:
        """Takes all events that have come so far, except commands."""
        if self._ends:
            self._sort()
        while True:
            with self._change:
                if not self._waiting:
                    return
                event = self._waiting.popleft()
            yield event

    def computes(self, whether: bool) -> None:
        """Says in a step whether vLLM computes what it has accepted for peers: a drain waits for that."""
        self._computes, self._stepped = whether, time.monotonic()
        if self._until != math.inf:
            self._signal()

    def report(self) -> bool:
        """Whether it drains, for the scheduler's half: at the end of each step."""
        self._stepped = time.monotonic()
        self._told += self.drains
        return self.drains

    def close(self) -> None:
        """Ends the thread, before the agent is closed. May be called again.

        From here on commands are refused, and events come only when the worker takes them.
        """
        if self._wake < 0:
            return
        self._ends = True
        self._signal()
        self._thread.join()
        os.close(self._wake)
        self._wake = -1

    def _signal(self) -> None:
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    # ---- events

    def _run(self) -> None:
        ready = select.poll()
        ready.register(self._agent.fileno(), select.POLLIN)
        ready.register(self._wake, select.POLLIN)
        try:
            while not self._ends:
                ready.poll(self._milliseconds())
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                self._sort()
                self._begin_drain()
        except ClosedError:  # the interpreter ends
            pass
        except Exception:
            logger.exception("commands are refused from here on")
        self._ends = True

    def _sort(self) -> None:
        for event in self._agent.events():
            if event.command is not None:
                self._heed(event.command)
                continue
            if event.kind == EventKind.DRAINED and event.status != Status.CANCELLED:
                self.has_drained = True
                if self._is_late:
                    self._reply_drained(Status.TIMEOUT, f"{LATE}; {event.detail}" if event.detail else LATE)
                else:
                    self._reply_drained(event.status, event.detail)
            with self._change:
                self._waiting.append(event)
                self._change.notify_all()

    # ---- commands

    def _heed(self, command: Command) -> None:
        try:
            if self._ends:
                raise CancelledError("this worker ends")
            self._do(command)
        except KvferryError as error:
            self._reply(command, error.status, str(error))

    def _do(self, command: Command) -> None:
        if command.verb == DRAIN:
            self._drain(command)
        elif command.verb == RESUME:
            self._resume(command)
        elif command.verb == LIST:
            self._list(command)
        elif command.verb == HAND_OVER:
            self._hand_over(command)
        elif command.verb == TAKE_OVER:
            raise UnsupportedError(
                "vLLM takes a request over with the request itself: send it to this server's HTTP port, with "
                f"the {PARAMS} that the other engine replied to {HAND_OVER}"
            )
        else:
            raise UnsupportedError(
                f"vLLM does not {command.verb}; this worker takes {DRAIN}, {RESUME}, {LIST} and {HAND_OVER}"
            )

    def _drain(self, command: Command) -> None:
        if self.has_drained:
            self._reply(command, detail="it had drained before")
            return
        self._drains.append(command)
        self._until = time.monotonic() + command.deadline
        self.drains = True

    def _milliseconds(self) -> float | None:
        """Time until _begin_drain() has something to do without an event; None: for ever."""
        if self._until == math.inf:
            return None
        end = self._until if self._computes else min(self._until, self._stepped + QUIET_SECONDS)
        return max(0.0, 1000 * (end - time.monotonic()))

    def _begin_drain(self) -> None:
        """Lets the agent drain, once vLLM has computed what it has accepted for peers, or the time is over."""
        now = time.monotonic()
        left = self._until - now
        is_sure = self._told >= SURE_REPORTS or now - self._stepped >= QUIET_SECONDS
        if left == math.inf or (left > 0 and (self._computes or not is_sure)):
            return
        self._until = math.inf
        self._is_late = self._computes
        try:
            self._agent.drain(max(0.0, left))
        except KvferryError as error:
            self.drains = False
            self._reply_drained(error.status, str(error))

    def _resume(self, command: Command) -> None:
        self._agent.resume()
        self._until, self._is_late, self._told = math.inf, False, 0
        self.drains = self.has_drained = False
        self._reply_drained(Status.CANCELLED, "it was resumed")
        self._reply(command)

    def _list(self, command: Command) -> None:
        names = command.request.decode(errors="replace")
        found = ((self._name(kept.ticket) or "", kept) for kept in self._agent.kept())
        record = kept_record((name, kept) for name, kept in found if name and name.startswith(names))
        self._reply(command, records=[record])

    def _hand_over(self, command: Command) -> None:
        name = command.request.decode(errors="replace")
        kept = self._find(name)
        with self._change:
            ended = [event for event in self._waiting if event.ticket == kept.ticket]
        if ended:  # the worker does not know it yet
            raise NotFoundError(f"request {name} is not kept any more: {how_ended(ended[0])}")
        record = Record(PARAMS, json.dumps(kept.params).encode())
        self._reply(command, records=[record])

    def _reply_drained(self, status: Status, detail: str) -> None:
        commands, self._drains = self._drains, []
        for command in commands:
            self._reply(command, status, detail)

    def _reply(
        self, command: Command, status: Status = Status.OK, detail: str = "", records: Sequence[Record] = ()
    ) -> None:
        # The agent replies itself if the command's time is over.
        with contextlib.suppress(NotFoundError, OutOfMemoryError):
            self._agent.reply(command, status, detail, records)
