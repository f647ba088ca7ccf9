"""File descriptors by which an agent waits until a device has done the work queued on it."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol


class Waitable(Protocol):
    """An event of a device, made so that whoever waits for it sleeps (`blocking`)."""

    def record(self) -> None:
        """The event happens once the device has done all work queued so far."""

    def synchronize(self) -> None:
        """Waits until it has happened. Raises what the device's module raises when the device has failed."""


def record(device: Any) -> Waitable:
    """An event that happens once the device has done what is queued on it now.

    Args:
        device: a module such as torch.cuda: its Event(blocking=True) is a Waitable
    """
    event: Waitable = device.Event(blocking=True)  # or who waits would spin
    event.record()
    return event


@dataclass(frozen=True)
class _Mark:
    """A mark that the device has not reached yet. The pipe has nothing in it, and is the thread's to close."""

    event: Waitable
    readable: int
    writable: int
    failed: Callable[[str], None]


class DeviceMarks:
    """Marks in a device's queue. A thread of this object waits for them, one after the other.

    Args:
        device: as record() takes it
        number: which of these devices. The thread waits as this device's: a thread begins with device 0, and
            CUDA would give this process some 500 MB of that device's memory
    """

    def __init__(self, device: Any, number: int) -> None:
        self._device = device
        self._number = number
        self._queue: queue.SimpleQueue[_Mark | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, name="kvferry marks", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def mark(self, failed: Callable[[str], None]) -> Iterator[int]:
        """A descriptor that becomes readable when the device reaches the mark. Closed on exit: duplicate it.

        Args:
            failed: called by the thread, with the reason, if the device fails before it reaches the mark. Then
                the descriptor's other end is closed, and it never becomes readable
        """
        mark = _Mark(record(self._device), *os.pipe(), failed)
        try:
            yield mark.readable
        finally:
            self._queue.put(mark)

    def close(self) -> None:
        """Ends the thread, once the device has reached all earlier marks, or has failed."""
        self._queue.put(None)
        self._thread.join()

    def _wait(self) -> None:
        while (mark := self._queue.get()) is not None:
            try:
                self._device.set_device(self._number)
                mark.event.synchronize()
                os.write(mark.writable, b"1")
            except Exception as error:  # whatever it is, later marks are waited for too
                mark.failed(f"{type(error).__name__}: {error}".partition("\n")[0])
            finally:
                os.close(mark.writable)
                os.close(mark.readable)
