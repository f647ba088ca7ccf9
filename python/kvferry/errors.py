"""What can go wrong: one exception for each status of the library.

Every exception has the status and the library's sentence about what was wrong: the field, its value and what is
allowed. `except KvferryError` catches all of them.
"""

from __future__ import annotations

import enum

from kvferry._binding import ffi, lib


class Status(enum.IntEnum):
    """The outcome of an operation, see kvferry/status.h."""

    OK = lib.KVF_OK
    INVALID = lib.KVF_E_INVALID
    RANGE = lib.KVF_E_RANGE
    OVERFLOW = lib.KVF_E_OVERFLOW
    OVERLAP = lib.KVF_E_OVERLAP
    MISMATCH = lib.KVF_E_MISMATCH
    UNCOVERED = lib.KVF_E_UNCOVERED
    NOT_FOUND = lib.KVF_E_NOT_FOUND
    EXISTS = lib.KVF_E_EXISTS
    NOT_EXPRESSIBLE = lib.KVF_E_NOT_EXPRESSIBLE
    UNSUPPORTED = lib.KVF_E_UNSUPPORTED
    PARSE = lib.KVF_E_PARSE
    NOMEM = lib.KVF_E_NOMEM
    IO = lib.KVF_E_IO
    PERMISSION = lib.KVF_E_PERMISSION
    NOT_REGISTERED = lib.KVF_E_NOT_REGISTERED
    PEER_LOST = lib.KVF_E_PEER_LOST
    CANCELLED = lib.KVF_E_CANCELLED
    AGAIN = lib.KVF_E_AGAIN
    TIMEOUT = lib.KVF_E_TIMEOUT
    EMPTY = lib.KVF_E_EMPTY
    LIMIT = lib.KVF_E_LIMIT
    IN_PROGRESS = lib.KVF_IN_PROGRESS


class ConfigWarning(UserWarning):
    """A field of a configuration may decide a size and was not read: the model may be another one."""


class KvferryError(Exception):
    """The base of everything kvferry raises.

    Attributes:
        status: which status of the library it stands for
        detail: one sentence: which field, which value, what was allowed
        refusal: for the connector's named quantities: its word for the reason, such as "tp_not_divisible"
    """

    status: Status = Status.INVALID
    refusal: str = "none"

    def __init__(self, detail: str, status: Status | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        if status is not None:
            self.status = status


class InvalidError(KvferryError, ValueError):
    """An argument has no meaning: missing, zero, negative, contradictory."""

    status = Status.INVALID


class ClosedError(InvalidError):
    """The object was closed, or what it belongs to was."""


class OutOfRangeError(KvferryError, ValueError):
    """A number is outside the allowed range: a block id, token, layer, rank, byte."""

    status = Status.RANGE


class SizeOverflowError(KvferryError, ValueError):
    """An address or size does not fit in what holds it."""

    status = Status.OVERFLOW


class OverlapError(KvferryError, ValueError):
    """Two cells would share a byte."""

    status = Status.OVERLAP


class MismatchError(KvferryError, ValueError):
    """Two sides describe different models."""

    status = Status.MISMATCH


class UncoveredError(KvferryError):
    """Some wanted cells are held by no rank."""

    status = Status.UNCOVERED


class NotFoundError(KvferryError, LookupError):
    """No such name, rank, engine, file, request."""

    status = Status.NOT_FOUND


class ExistsError(KvferryError):
    """The name is taken, or the block is in use."""

    status = Status.EXISTS


class NotExpressibleError(KvferryError):
    """A named quantity has no value for this shape; a plan may still exist."""

    status = Status.NOT_EXPRESSIBLE


class UnsupportedError(KvferryError):
    """This build, machine or transport cannot do it."""

    status = Status.UNSUPPORTED


class ParseError(KvferryError, ValueError):
    """Text or bytes from outside are malformed."""

    status = Status.PARSE


class OutOfMemoryError(KvferryError, MemoryError):
    """Memory could not be allocated."""

    status = Status.NOMEM


class InputOutputError(KvferryError):
    """A system call failed; the detail has its name and error."""

    status = Status.IO


class NotPermittedError(KvferryError):
    """The kernel or the peer forbids it."""

    status = Status.PERMISSION


class NotRegisteredError(KvferryError):
    """No registration covers the memory."""

    status = Status.NOT_REGISTERED


class PeerLostError(KvferryError):
    """The peer died, closed, or was replaced."""

    status = Status.PEER_LOST


class CancelledError(KvferryError):
    """Cancelled by its owner."""

    status = Status.CANCELLED


class AgainError(KvferryError):
    """Not now; make progress, then call again: nothing has been changed."""

    status = Status.AGAIN


class DeadlineError(KvferryError):
    """A deadline the caller gave has passed."""

    status = Status.TIMEOUT


class EmptyError(KvferryError):
    """There is nothing to take."""

    status = Status.EMPTY


class LimitError(KvferryError):
    """An option's limit is reached; the detail names it."""

    status = Status.LIMIT


CLASSES: dict[int, type[KvferryError]] = {
    int(kind.status): kind
    for kind in (
        InvalidError,
        OutOfRangeError,
        SizeOverflowError,
        OverlapError,
        MismatchError,
        UncoveredError,
        NotFoundError,
        ExistsError,
        NotExpressibleError,
        UnsupportedError,
        ParseError,
        OutOfMemoryError,
        InputOutputError,
        NotPermittedError,
        NotRegisteredError,
        PeerLostError,
        CancelledError,
        AgainError,
        DeadlineError,
        EmptyError,
        LimitError,
    )
}


def error_of(status: int, detail: str) -> KvferryError:
    """The exception for a status; a status of a newer library becomes a plain KvferryError."""
    kind = CLASSES.get(status)
    name = ffi.string(lib.kvf_status_name(status)).decode()
    return kind(detail or name) if kind else KvferryError(f"{name} ({status}): {detail}")


def check(status: int) -> None:
    """Raises the exception for a status, with the detail of this thread's last failure; nothing for KVF_OK."""
    if status != 0:
        raise error_of(status, ffi.string(lib.kvf_error_detail()).decode(errors="replace"))
