"""A whole request that is moving. See kvferry/transport.h."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kvferry._binding import ffi, lib
from kvferry._native import OfOneProcess, over_at, string, take
from kvferry.errors import Status, error_of
from kvferry.request import Request

if TYPE_CHECKING:
    from kvferry.transport import Endpoint, Transport

POLL_SECONDS = 0.05

Self = TypeVar("Self", bound="Moving")


class Freed(Protocol):
    """The library's side of something that moves."""

    def end(self) -> None:
        """Frees it, and cancels it if it still moves."""


class Moving(OfOneProcess):
    """The base of transfers and of a stage's moves. It moves while its transport progresses.

    Close it (or leave its `with` block) before the request is set again.
    """

    _transport: Transport

    @property
    def status(self) -> Status:
        """OK when every byte is there, IN_PROGRESS while it moves, otherwise the first failure."""
        raise NotImplementedError

    @property
    def detail(self) -> str:
        """One sentence about the first failure: which source and peer, how far, and why; "" without one."""
        raise NotImplementedError

    @property
    def bytes(self) -> int:
        """Bytes moved so far."""
        raise NotImplementedError

    def wait(self, timeout: float | None = None) -> bool:
        """Makes progress until it has ended, at most `timeout` seconds; returns whether it has.

        Raises the error with which it failed.
        """
        until = over_at(timeout)
        while (status := self.status) == Status.IN_PROGRESS:
            left = POLL_SECONDS if until is None else min(POLL_SECONDS, until - time.monotonic())
            if left <= 0:
                return False
            self._transport.wait(left)
        if status != Status.OK:
            raise error_of(status, f"after {self.bytes} bytes: {self.detail}")
        return True

    def cancel(self) -> None:
        """Stops it: its status becomes CANCELLED once nothing on this side touches its memory any more."""
        raise NotImplementedError

    def close(self) -> None:
        """Gives it up, and cancels it if it still moves: its memory may then be touched until the transport
        (for a stage's move, the stage) or the peers are closed. May be called again."""
        raise NotImplementedError

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Begun:
    """The library's side of a request that moves; an owner keeps it until it is freed, also if Python drops it.

    Args:
        owners: those that the owner keeps
        kind: the library's type
    """

    def __init__(self, endpoint: Endpoint, request: Request, owners: set[Any], kind: str) -> None:
        self.endpoint = endpoint
        self.pointer: Any = None
        self._request = request
        self._kept = request._get()
        self._owners, self._kind = owners, kind

    def begin(self, function: Any, *arguments: Any) -> None:
        """Starts it. What the caller gets is there before: an interrupt must not leave it to nobody."""
        try:
            self._request._moves.add(self)
            self._owners.add(self)
            self.pointer = take(function, self._kind, *arguments, undo=self._free)
        except BaseException:
            self.end()
            raise

    @property
    def _free(self) -> Any:
        """The library's function that frees it: called as it is, as in Python an interrupt may come first."""
        raise NotImplementedError

    def _look_last(self) -> None:
        """Notes how far it has come: it is about to be freed, which cancels it if it still moves."""
        raise NotImplementedError

    def end(self) -> None:
        """Frees it, and cancels it if it still moves."""
        with self.endpoint.lock:
            self._look_last()
            free = self._free
            try:
                free(self.pointer or ffi.NULL)
            finally:  # a signal handler's exception comes when it is freed
                self.pointer = None
                self._request._moves.discard(self)
                self._owners.discard(self)


class Move(Begun):
    """The library's side of a transfer, which the endpoint keeps."""

    def __init__(self, endpoint: Endpoint, request: Request) -> None:
        super().__init__(endpoint, request, endpoint.moves, "kvf_transfer *")
        self._last: tuple[Status, int, int] = (Status.IN_PROGRESS, 0, 0)
        self._detail = ""

    def look(self) -> tuple[Status, int, int]:
        """Status, bytes and runs; the last known ones if it was freed."""
        with self.endpoint.lock:
            if self.pointer is not None:
                size, runs = ffi.new("uint64_t *"), ffi.new("uint64_t *")
                lib.kvf_transfer_counts(self.pointer, size, runs)
                self._last = (Status(lib.kvf_transfer_status(self.pointer)), size[0], runs[0])
            return self._last

    @property
    def detail(self) -> str:
        """The sentence about its failure; the last known one if it was freed."""
        with self.endpoint.lock:
            if self.pointer is not None:
                self._detail = string(lib.kvf_transfer_detail(self.pointer))
            return self._detail

    @property
    def _free(self) -> Any:
        return lib.kvf_transfer_free

    def _look_last(self) -> None:
        if self.pointer is not None:
            status, size, runs = self.look()
            self._last = (Status.CANCELLED if status == Status.IN_PROGRESS else status, size, runs)
            self._detail = self.detail


class Transfer(Moving):
    """A request that goes directly, one operation for each run."""

    def __init__(self, transport: Transport, move: Move) -> None:
        self._transport = transport
        self._move = move

    def __del__(self) -> None:
        # Not freed here, because a garbage collection may begin with any lock held.
        self._move.endpoint.forgotten.append(self._move)

    @property
    def status(self) -> Status:
        return self._move.look()[0]

    @property
    def detail(self) -> str:
        return self._move.detail

    @property
    def bytes(self) -> int:
        return self._move.look()[1]

    @property
    def runs(self) -> int:
        """Runs completed so far."""
        return self._move.look()[2]

    def cancel(self) -> None:
        with self._move.endpoint.lock:
            if self._move.pointer is not None:
                lib.kvf_transfer_cancel(self._move.pointer)

    def close(self) -> None:
        self._move.end()
