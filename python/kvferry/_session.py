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

# A call that a signal handler interrupted may not say that it has ended: close() looks at least this often.
LOOK_SECONDS = 0.05


def _is_on(stack: FrameType | None, sought: FrameType) -> bool:
    """Whether a frame is on a thread's stack."""
    while stack is not None and stack is not sought:
        stack = stack.f_back
    return stack is not None


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
        # Taken as it is, not by `change`: entering a Condition is Python code, and an exception that a signal
        # handler raises at its end would leave the lock held.
        self.lock = threading.RLock()
        self.change = threading.Condition(self.lock)
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
        try:
            with self.lock:
                if self.closing:
                    raise ClosedError("this Agent was closed")
                self.inside[call] = (threading.get_ident(), sys._getframe(2))  # whose `with` this is
            yield self.pointer
        finally:
            with self.lock:
                self.inside.pop(call, None)
                self.change.notify_all()

    # A call whose frame is gone is over: an exception of a signal handler, such as KeyboardInterrupt, may come
    # before the call is taken off the list.

    def _refuse_from_within(self) -> None:
        """Raises InvalidError if a call is under way on this thread, which then runs a signal handler."""
        if any(_is_on(sys._getframe(), of) for _, of in self.inside.values()):
            raise InvalidError("a signal handler may not close the agent that it interrupts")

    def _others_inside(self) -> bool:
        """Whether calls are under way on other threads."""
        stacks = sys._current_frames()
        stacks.pop(threading.get_ident(), None)
        return any(_is_on(stacks.get(thread), of) for thread, of in self.inside.values())

    @contextlib.contextmanager
    def waking(self, ready: asyncio.Event) -> Iterator[None]:
        """Sets `ready`, the event of a waiting task, if the agent is closed meanwhile."""
        with self.lock:
            if self.closing:
                raise ClosedError("this Agent was closed")
            self.awaiting[ready] = asyncio.get_running_loop()
        try:
            yield
        finally:
            with self.lock:
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
            with self.lock:
                self._refuse_from_within()
                self.closing = True
                for ready, loop in list(self.awaiting.items()):
                    with contextlib.suppress(RuntimeError):  # that loop is over, and its task with it
                        loop.call_soon_threadsafe(ready.set)
                # The agent is closed when this returns, also if another thread closes it. If a signal handler
                # raises an exception here, the next call closes it.
                while self._others_inside() or self.freeing:
                    self.change.wait(LOOK_SECONDS)
                pointer, self.pointer = self.pointer, None
                self.freeing = pointer is not None
            if pointer is not None:
                lib.kvf_agent_close(pointer)
                self.inside.clear()
                self.kept.clear()
                self.regions.clear()
        finally:
            if pointer is not None:
                with self.lock:
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
