"""What an agent keeps for other engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvferry._binding import ffi
from kvferry.events import RequestKind

__all__ = ["KeptRequest", "read_kept"]

_FOREVER = 2**64 - 1


@dataclass(frozen=True)
class KeptRequest:
    """A hold or a push that has not ended; see kvf_kept_request in kvferry/agent.h.

    Attributes:
        moves: a consumer has a lease on it, or it is being written to one
        consumers: engines that will take it
        served: those of them that have it, or have given it up
        tokens: that are there, or that the push will have; of the group with most
        age: seconds since the call that made it
        left: seconds until it fails, unless a consumer gives a sign of life, if it is a hold; None: no limit
    """

    ticket: int
    kind: RequestKind
    id: bytes
    moves: bool
    consumers: int
    served: int
    tokens: int
    age: float
    left: float | None


def read_kept(kept: Any) -> KeptRequest:
    """The dataclass of a kvf_kept_request."""
    return KeptRequest(
        ticket=kept.ticket,
        kind=RequestKind(kept.request_kind),
        id=bytes(ffi.buffer(kept.id, kept.id_bytes)),
        moves=kept.moves,
        consumers=kept.consumers,
        served=kept.served,
        tokens=kept.tokens,
        age=kept.age_ns / 1e9,
        left=None if kept.left_ns == _FOREVER else kept.left_ns / 1e9,
    )
