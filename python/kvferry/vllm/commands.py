"""Commands that an operator gives to a rank: to drain, to resume, and to hand over what it keeps for a peer.

vLLM takes a worker's results when it steps, and an idle vLLM does not step. So a thread takes the events of the
worker's agent as they come. It does what commands ask for; all other events wait here, in their order, until
the worker takes them.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from kvferry.agent import Agent
from kvferry.commands import DRAIN, HAND_OVER, RESUME, TAKE_OVER, Command
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

logger = init_logger("vllm.kvferry")

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
    """

    def __init__(self, agent: Agent, find: Callable[[str], Kept]) -> None:
        self._agent, self._find = agent, find
        self._waiting: deque[Event] = deque()
        self._change = threading.Condition()
        self._drains: list[Command] = []  # that have not been replied to
        self._ends = False  # the thread ends, and the worker takes the events itself
        self.has_drained = False  # by a command that was not taken back
        self._stop = os.eventfd(0)
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

    def close(self) -> None:
        """Ends the thread, before the agent is closed. May be called again.

        From here on commands are refused, and events come only when the worker takes them.
        """
        if self._stop < 0:
            return
        self._ends = True
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._stop)
        self._stop = -1

    # ---- events

    def _run(self) -> None:
        ready = select.poll()
        ready.register(self._agent.fileno(), select.POLLIN)
        ready.register(self._stop, select.POLLIN)
        try:
            while not self._ends:
                ready.poll()
                self._sort()
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
        elif command.verb == HAND_OVER:
            self._hand_over(command)
        elif command.verb == TAKE_OVER:
            raise UnsupportedError(
                "vLLM takes a request over with the request itself: send it to this server's HTTP port, with "
                f"the {PARAMS} that the other engine replied to {HAND_OVER}"
            )
        else:
            raise UnsupportedError(
                f"vLLM does not {command.verb}; this worker takes {DRAIN}, {RESUME} and {HAND_OVER}"
            )

    def _drain(self, command: Command) -> None:
        if self.has_drained:
            self._reply(command, detail="it had drained before")
            return
        self._agent.drain(command.deadline)
        self._drains.append(command)

    def _resume(self, command: Command) -> None:
        self._agent.resume()
        self.has_drained = False
        self._reply_drained(Status.CANCELLED, "it was resumed")
        self._reply(command)

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
