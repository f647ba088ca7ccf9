"""A device that is a list of events, which a test makes happen when it likes."""

from __future__ import annotations

import os
import threading

WAIT_SECONDS = 60.0


class Event:
    """An event of a device that is a list of events: a test makes them happen, or fail, one by one."""

    def __init__(self, device: Device, blocking: bool) -> None:
        assert blocking, "the thread that waits would spin"
        self._device = device
        self._happened = threading.Event()
        self._error: Exception | None = None
        self._readable = os.eventfd(0)

    def __del__(self) -> None:
        os.close(self._readable)

    def fileno(self) -> int:
        """An agent can wait for it, as for an event of CUDA."""
        return self._readable

    def record(self) -> None:
        self._device.events.append(self)

    def synchronize(self) -> None:
        assert getattr(self._device.chosen, "number", 0) == self._device.NUMBER, "device 0 would give memory"
        self._happened.wait(WAIT_SECONDS)
        if self._error is not None:
            raise self._error

    def happen(self, error: Exception | None = None) -> None:
        self._error = error
        self._happened.set()
        os.eventfd_write(self._readable, 1)


class Device:
    """Stands for a module such as torch.cuda, with the queue of one of its devices."""

    NUMBER = 3

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.chosen = threading.local()

    def Event(self, blocking: bool = False) -> Event:  # as torch calls it
        return Event(self, blocking)

    def set_device(self, number: int) -> None:
        self.chosen.number = number
