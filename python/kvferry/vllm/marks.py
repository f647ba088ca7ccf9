"""File descriptors by which an agent waits until a device has done the work queued on it."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Iterator
from typing import Any, Protocol


class Waitable(Protocol):
    """An event of a device, made so that whoever waits for it sleeps (`blocking`)."""

    def record(self) -> None:
        """The event happens once the device has done all work queued so far."""

    def synchronize(self) -> None:
        """Waits until it has happened."""


class DeviceMarks:
    """Marks in a device's queue. A thread of this object waits for them, one after the other.

    Args:
        device: a module such as torch.cuda: its Event(blocking=True) is a Waitable
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._queue: queue.SimpleQueue[tuple[Waitable, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, name="kvferry marks", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def mark(self) -> Iterator[int]:
        """A descriptor that becomes readable when the device reaches the mark. Closed on exit: duplicate it."""
        event: Waitable = self._device.Event(blocking=True)  # or the thread would spin while it waits
        event.record()
        descriptor = os.eventfd(0)
        try:
            self._queue.put((event, os.dup(descriptor)))
            yield descriptor
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Ends the thread, once the device has reached all earlier marks."""
        self._queue.put(None)
        self._thread.join()

    def _wait(self) -> None:
        while (item := self._queue.get()) is not None:
            event, descriptor = item
            try:
                event.synchronize()
                os.eventfd_write(descriptor, 1)
            finally:
                os.close(descriptor)
