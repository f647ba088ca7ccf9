"""Looking into an agent: its blocks, peers and statistics, and what it has in common with other engines."""

from __future__ import annotations

from typing import Any

from kvferry._binding import ffi, lib
from kvferry._native import Arena, call, string
from kvferry._session import Session
from kvferry.errors import Status, check
from kvferry.events import AgentStats, BlockClaim, BlockState, ClockOffset, LogLevel, read_stats
from kvferry.kept import KeptRequest, read_kept
from kvferry.model import Agreement, GroupMatch
from kvferry.peers import AgentPeer, read_peer

_PART = 64  # kept requests that are read at a time


def _read_match(match: Any) -> GroupMatch:
    def number(value: int) -> int | None:
        return None if value == 2**32 - 1 else int(value)

    return GroupMatch(
        string(match.name),
        number(match.ours),
        number(match.theirs),
        Agreement(match.agreement),
        match.layers_both,
        match.layers_ours,
        match.layers_theirs,
        string(match.detail),
    )


class Looks:
    """The part of an Agent that shows its state."""

    _session: Session

    def match(self, engine: str) -> list[GroupMatch]:
        """What a met engine and ours have in common, group by group.

        The groups of our model come first, in order, then groups that only theirs has. A request needs only the
        groups whose steps it names. Raises NotFoundError: no engine of this name was met.
        """
        found: list[GroupMatch] = []
        arena = Arena()
        with self._session.using() as pointer:
            match = arena.new("kvf_group_match")
            name = arena.text(engine)
            call(lib.kvf_agent_match, pointer, name, 0, match)
            while True:
                found.append(_read_match(match))
                status = lib.kvf_agent_match(pointer, name, len(found), match)
                if status == Status.NOT_FOUND:
                    return found
                check(status)

    def block(self, group: int, block: int) -> BlockClaim:
        """The agent's claim on a block. Raises OutOfRangeError if there is no such block."""
        with self._session.using() as pointer:
            state, requests = ffi.new("kvf_block_state *"), ffi.new("uint32_t *")
            call(lib.kvf_agent_block, pointer, group, block, state, requests)
            return BlockClaim(BlockState(state[0]), requests[0])

    def explain(self, engine: str | None = None, level: LogLevel = LogLevel.INFO) -> str:
        """Describes which rank reads what from which, by which transport, and how long a request should take.

        Args:
            engine: an engine that was met, or that reads from here; None: this agent, and all engines it knows
            level: INFO: a summary; DEBUG: the summary, then every rank and every piece

        Raises NotFoundError: the agent does not know the engine.
        """
        arena = Arena()
        return self._text(lib.kvf_agent_explain, arena.text(engine), level)

    def metrics(self) -> str:
        """The agent's counters as text for Prometheus, to be added to the engine's page of metrics."""
        return self._text(lib.kvf_agent_metrics)

    def trace(self) -> str:
        """The times of the latest requests, also of those under way, as the text of a file that Perfetto opens.

        kvferry.trace joins those of several agents. Raises InvalidError: `trace_requests` was 0.
        """
        return self._text(lib.kvf_agent_trace)

    def _text(self, function: Any, *arguments: Any) -> str:
        """A text that a function of the library writes into a buffer."""
        length, size = ffi.new("size_t *"), 0
        while True:  # it may become longer between two calls
            text = ffi.new("char[]", size + 1)
            with self._session.using() as pointer:
                call(function, pointer, *arguments, text, size + 1, length)
            if length[0] <= size:
                return string(text)
            size = length[0]

    def peers(self) -> list[AgentPeer]:
        """The peers: first those with a session, then those that were lost lately."""
        count, room = ffi.new("uint32_t *"), 8
        with self._session.using() as pointer:
            while True:  # there may be more, and more may come meanwhile
                peers = ffi.new("kvf_agent_peer[]", room)
                peers[0].struct_size = ffi.sizeof("kvf_agent_peer")
                call(lib.kvf_agent_peers, pointer, peers, room, count)
                if count[0] <= room:
                    return [read_peer(peers[i]) for i in range(count[0])]
                room = count[0]

    def kept(self) -> list[KeptRequest]:
        """What is kept for other engines, by rising tickets: holds and pushes that have not ended."""
        found: list[KeptRequest] = []
        count, part = ffi.new("uint32_t *"), ffi.new("kvf_kept_request[]", _PART)
        while True:
            part[0].struct_size = ffi.sizeof("kvf_kept_request")
            with self._session.using() as pointer:
                after = found[-1].ticket if found else 0
                call(lib.kvf_agent_kept_requests, pointer, after, part, _PART, count)
            found += [read_kept(part[i]) for i in range(min(count[0], _PART))]
            if count[0] <= _PART:
                return found

    @property
    def stats(self) -> AgentStats:
        """What the agent has counted."""
        with self._session.using() as pointer:
            stats = Arena().new("kvf_agent_stats")
            call(lib.kvf_agent_get_stats, pointer, stats)
            return read_stats(stats)

    def clock_offset(self, engine: str, rank: int) -> ClockOffset:
        """A peer's clock minus ours. NotFoundError: there is no session with that rank."""
        with self._session.using() as pointer:
            offset, error = ffi.new("int64_t *"), ffi.new("uint64_t *")
            call(lib.kvf_agent_clock_offset, pointer, Arena().text(engine), rank, offset, error)
            return ClockOffset(offset[0], error[0])
