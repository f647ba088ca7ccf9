"""What an agent knows of its peers."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from kvferry._binding import lib
from kvferry._native import string

__all__ = ["AgentPeer", "PeerRole", "PeerState", "read_peer"]


class PeerRole(enum.IntEnum):
    """What a peer is to an agent."""

    PRODUCER = lib.KVF_PEER_PRODUCER  # this rank takes blocks from it
    CONSUMER = lib.KVF_PEER_CONSUMER  # it takes blocks from this rank


class PeerState(enum.IntEnum):
    """The state of an agent's session with a peer."""

    GREETING = lib.KVF_PEER_GREETING  # it was greeted and has not answered yet
    OPEN = lib.KVF_PEER_OPEN
    BROKEN = lib.KVF_PEER_BROKEN  # the connection to it broke, and may come back
    LOST = lib.KVF_PEER_LOST  # it is gone; the latest of these are remembered until they come back


@dataclass(frozen=True)
class AgentPeer:
    """One rank of another engine; see kvf_agent_peer in kvferry/agent.h. Times: nanoseconds since 1970, UTC."""

    role: PeerRole
    state: PeerState
    rank: int
    rank_count: int
    engine: str
    fabric: str
    way: str
    passed_over: str
    bytes_read: int
    bytes_written: int
    bytes_received: int
    round_trip_ns: int
    since_ns: int
    failed_ns: int
    failure: str
    bytes_packed: int


def read_peer(peer: Any) -> AgentPeer:
    """The dataclass of a kvf_agent_peer."""
    return AgentPeer(
        role=PeerRole(peer.role),
        state=PeerState(peer.state),
        rank=peer.rank,
        rank_count=peer.rank_count,
        engine=string(peer.engine),
        fabric=string(peer.fabric),
        way=string(peer.way),
        passed_over=string(peer.passed_over),
        bytes_read=peer.bytes_read,
        bytes_written=peer.bytes_written,
        bytes_received=peer.bytes_received,
        round_trip_ns=peer.round_trip_ns,
        since_ns=peer.since_ns,
        failed_ns=peer.failed_ns,
        failure=string(peer.failure),
        bytes_packed=peer.bytes_packed,
    )
