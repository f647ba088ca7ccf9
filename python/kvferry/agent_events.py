"""The events of an agent: taking them, and waiting for them in threads, in asyncio and in other loops."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator, Sequence

from kvferry._binding import lib
from kvferry._native import Arena, call, over_at, take
from kvferry._session import Session
from kvferry._values import of_type
from kvferry.commands import Command
from kvferry.errors import Status, check
from kvferry.events import Event, read_event
from kvferry.records import Record, records_in

# A waiting thread checks at this interval for signals, and whether the agent is being closed.
WAIT_SECONDS = 0.05
NO_LIMIT = 2**64 - 1


class Events:
    """The part of an Agent that reports what became of requests, and makes progress."""

    _session: Session
    _own_thread: bool

    def next_event(self) -> Event | None:
        """Takes the next event; None when there is none."""
        with self._session.using() as pointer, self._session.events:
            event = Arena().new("kvf_event")
            status = lib.kvf_agent_next_event(pointer, event)
            if status == Status.EMPTY:
                return None
            check(status)
            return read_event(event)

    def events(self) -> Iterator[Event]:
        """Takes all events that have come so far."""
        while (event := self.next_event()) is not None:
            yield event

    def reply(
        self, command: Command, status: Status = Status.OK, detail: str = "", records: Sequence[Record] = ()
    ) -> None:
        """Replies to a command, whose asker waits. Five seconds after its deadline the agent does itself.

        Args:
            command: of an event
            status: OK: done as asked; otherwise why not. AGAIN and LIMIT are no replies
            detail: a sentence for the asker
            records: for the asker to pass on

        Raises NotFoundError (it has been replied to), InvalidError and OutOfRangeError (status, records).
        """
        arena = Arena()
        fields = records_in(records, arena)
        with self._session.using() as pointer:
            call(
                lib.kvf_agent_reply,
                pointer,
                of_type(Command, command).number,
                status,
                arena.text(detail),
                fields["records"],
                fields["record_count"],
            )

    def wait(self, timeout: float | None = None) -> bool:
        """Makes progress until there is an event to take, at most `timeout` seconds; returns whether there is.

        Other threads run meanwhile. Raises ClosedError when the agent is closed by one of them.
        """
        until = over_at(timeout)
        while True:
            left = WAIT_SECONDS if until is None else min(WAIT_SECONDS, max(until - time.monotonic(), 0.0))
            with self._session.using() as pointer:
                status = lib.kvf_agent_wait(pointer, int(left * 1e9))
                if status != Status.TIMEOUT:
                    check(status)
                    return True
            if until is not None and time.monotonic() >= until:
                return False

    def wait_event(self, timeout: float | None = None) -> Event | None:
        """Takes the next event, waiting for it at most `timeout` seconds; None if none came."""
        until = over_at(timeout)
        while (event := self.next_event()) is None:
            left = None if until is None else until - time.monotonic()
            if (left is not None and left <= 0) or not self.wait(left):
                return self.next_event()
        return event

    async def event(self) -> Event:
        """Takes the next event, in asyncio: other tasks run meanwhile. The agent needs no thread for it.

        Several tasks may wait; each event goes to one of them. Raises ClosedError when the agent is closed.
        """
        while (event := self._work_and_take()) is None:
            await self._readable()
        return event

    def _work_and_take(self) -> Event | None:
        if not self._own_thread:
            self.progress()
        return self.next_event()

    async def _readable(self) -> None:
        ready = asyncio.Event()
        loop = asyncio.get_running_loop()
        # A loop allows one reader for each descriptor, so every waiting task has its own descriptor.
        with self._session.using() as pointer:  # or another thread may close the agent, and its descriptor
            descriptor = os.dup(lib.kvf_agent_event_fd(pointer))
        try:
            with self._session.waking(ready):
                loop.add_reader(descriptor, ready.set)
                try:
                    await ready.wait()
                finally:
                    with contextlib.suppress(RuntimeError):  # the loop is over
                        loop.remove_reader(descriptor)
        finally:
            os.close(descriptor)

    def fileno(self) -> int:
        """A file descriptor that is readable while there are events to take. Do not read from it.

        Without `own_thread` it is also readable while progress() has something to do.
        """
        with self._session.using() as pointer:
            return int(lib.kvf_agent_event_fd(pointer))

    def timeout(self) -> float | None:
        """Seconds after which progress() must be called again at the latest; None: no limit.

        For loops that do not wait for fileno(), which becomes readable at that time.
        """
        with self._session.using() as pointer:
            left = int(lib.kvf_agent_timeout(pointer))
            return None if left == NO_LIMIT else left / 1e9

    def progress(self) -> bool:
        """Does what can be done now without waiting; returns whether there is more to do at once."""
        with self._session.using() as pointer:
            return bool(take(lib.kvf_agent_progress, "bool", pointer))
