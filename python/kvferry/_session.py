"""What keeps an agent of the library alive while threads and tasks of Python use it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from kvferry._binding import ffi, lib
from kvferry.buffers import Allocations, Registered
from kvferry.errors import ClosedError, InvalidError
from kvferry.events import LogLine, read_line


class Session:
    """State that must live as long as the library's agent, also if the caller never closes the agent."""

    def __init__(self, log: Callable[[LogLine], object] | None) -> None:
        self.pointer: Any = None
        self.log = log
        self.kept: list[Any] = []
        self.regions = Registered()
        self.allocations = Allocations()
        self.process = os.getpid()
        self.inside: dict[object, tuple[int, FrameType]] = {}  # calls under way: each one's thread and frame
        self.closing = False
        self.freeing = False  # a thread is inside kvf_agent_close()
        self.change = threading.Condition()
        self.events = threading.Lock()
        self.logging: set[int] = set()  # threads that are inside `log`
        # Tasks to be told of the end: by what they wait for, which a loop that is over must not leave behind.
        self.awaiting: weakref.WeakKeyDictionary[asyncio.Event, asyncio.AbstractEventLoop]
        self.awaiting = weakref.WeakKeyDictionary()
        self.context = ffi.new_handle(self)

    @contextlib.contextmanager
    def using(self) -> Iterator[Any]:
        if self.process != os.getpid():  # asked first: a thread that is not here may have held the lock
            raise ClosedError(f"this Agent belongs to process {self.process}, which forked this one")
        call = object()
        with self.change:
            if self.closing:
                raise ClosedError("this Agent was closed")
            self.inside[call] = (threading.get_ident(), sys._getframe(2))  # whose `with` this is
        try:
            yield self.pointer
        finally:
            with self.change:
                self.inside.pop(call, None)
                self.change.notify_all()

    def _refuse_from_within(self) -> None:
        """Raises InvalidError if a call is under way on this thread, which then runs a signal handler.

        A call of this thread whose frame is gone is over: an exception of a signal handler, such as
        KeyboardInterrupt, may come before the call is taken off the list.
        """
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if any(frame is of for _, of in self.inside.values()):
                raise InvalidError("a signal handler may not close the agent that it interrupts")
            frame = frame.f_back

    def _others_inside(self) -> bool:
        return any(thread != threading.get_ident() for thread, _ in self.inside.values())

    @contextlib.contextmanager
    def waking(self, ready: asyncio.Event) -> Iterator[None]:
        """Sets `ready`, the event of a waiting task, if the agent is closed meanwhile."""
        with self.change:
            if self.closing:
                raise ClosedError("this Agent was closed")
            self.awaiting[ready] = asyncio.get_running_loop()
        try:
            yield
        finally:
            with self.change:
                self.awaiting.pop(ready, None)

    def forget(self) -> None:
        """Closes an agent that Python has dropped, which may happen in its own log function."""
        if threading.get_ident() in self.logging:
            threading.Thread(target=self.close).start()
        else:
            self.close()

    def close(self) -> None:
        if threading.get_ident() in self.logging:
            raise InvalidError("the log function of an agent may not close the agent")
        if self.process != os.getpid():
            return  # its threads are not here
        pointer = None
        try:
            with self.change:
                self._refuse_from_within()
                self.closing = True
                for ready, loop in list(self.awaiting.items()):
                    with contextlib.suppress(RuntimeError):  # that loop is over, and its task with it
                        loop.call_soon_threadsafe(ready.set)
                # The agent is closed when this returns, also if another thread closes it. If a signal handler
                # raises an exception here, the next call closes it.
                self.change.wait_for(lambda: not self._others_inside() and not self.freeing)
                pointer, self.pointer = self.pointer, None
                self.freeing = pointer is not None
            if pointer is not None:
                lib.kvf_agent_close(pointer)
                self.inside.clear()
                self.kept.clear()
                self.regions.clear()
        finally:
            if pointer is not None:
                with self.change:
                    self.freeing = False
                    self.change.notify_all()


@ffi.def_extern()  # type: ignore[untyped-decorator]
def python_log(context: Any, line: Any) -> None:
    session: Session = ffi.from_handle(context)
    if session.log is not None:
        session.logging.add(threading.get_ident())
        try:
            session.log(read_line(line))
        finally:
            session.logging.discard(threading.get_ident())
