"""Which bytes move for one request: block tables of both sides and a token range. See kvferry/request.h."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry._binding import ffi, lib
from kvferry._native import Arena, Ids, OneAtATime, call, fill, resource_of, result_of, take
from kvferry._values import list_of, listed
from kvferry.errors import InvalidError
from kvferry.plan import Plan

if TYPE_CHECKING:
    from kvferry.transport import Endpoint

NO_BLOCK = int(lib.KVF_NO_BLOCK)
"""A table entry without memory behind it: a block before the sliding window."""

RUN_DTYPE = np.dtype(
    {
        "names": ["local_offset", "remote_offset", "bytes", "local_region", "remote_region"],
        "formats": [np.uint64, np.uint64, np.uint64, np.uint32, np.uint32],
        "offsets": [
            ffi.offsetof("kvf_run", field)
            for field in ("local_offset", "remote_offset", "bytes", "local_region", "remote_region")
        ],
        "itemsize": ffi.sizeof("kvf_run"),
    }
)
"""A run as an element of a NumPy array: the library's own struct."""

RUNS_AT_ONCE = 4096


@dataclass(frozen=True)
class BlockTable:
    """The blocks of one sequence in one group on one side.

    Attributes:
        ids: logical block ids in sequence order, NO_BLOCK where there is none; an array of uint32 is not copied
        first_block: which block of the sequence ids[0] is
    """

    ids: Ids = ()
    first_block: int = 0

    @classmethod
    def tail(cls, ids: Ids, tokens: int, tokens_per_block: int) -> BlockTable:
        """A table that ends where a sequence of `tokens` tokens ends, as engines have after a prefix hit.

        Args:
            tokens_per_block: of a logical block; where ranks share the tokens, times their number

        Raises OutOfRangeError if the list is longer than the sequence.
        """
        arena = Arena()
        pointer, count = arena.ids(ids)
        table = take(lib.kvf_block_table_tail, "kvf_block_table", pointer, count, tokens, tokens_per_block)
        return cls(ids, table.first_block)


Blocks = BlockTable | Ids


def table_fields(blocks: Blocks, arena: Arena) -> dict[str, Any]:
    """The fields of a kvf_block_table."""
    table = blocks if isinstance(blocks, BlockTable) else BlockTable(blocks)
    pointer, count = arena.ids(table.ids)
    return {"ids": pointer, "count": count, "first_block": table.first_block}


@dataclass(frozen=True)
class GroupSteps:
    """The blocks of one sequence in one group on one side, and which steps they hold or shall receive.

    Steps are tokens, compressed entries or states, see Group.step_count(). `begin == end` means no steps.
    """

    table: Blocks = ()
    begin: int = 0
    end: int = 0


def tables_in(tables: Sequence[Blocks] | None, arena: Arena) -> Any:
    """A kvf_block_table[]; NULL for None."""
    if tables is None:
        return ffi.NULL
    items = [table_fields(table, arena) for table in listed(tables, "block tables")]
    return arena.array("kvf_block_table", items)


def groups_in(groups: Sequence[GroupSteps] | None, arena: Arena) -> Any:
    """A kvf_group_steps[]; NULL for None."""
    if groups is None:
        return ffi.NULL
    groups = list_of(GroupSteps, groups)
    pointer = arena.keep(ffi.new("kvf_group_steps[]", len(groups)))
    for i, group in enumerate(groups):
        fill(pointer[i].table, **table_fields(group.table, arena))
        fill(pointer[i], begin=group.begin, end=group.end)
    return pointer


@dataclass(frozen=True)
class GroupRequest:
    """One group of a request: where the steps [begin, end) are on both sides. See Group.step_count().

    Attributes:
        local, remote: blocks of the side to fill, and of the source side
        begin: the first step wanted: earlier tokens are here already
        end: one past the last; equal to `begin`: nothing moves
    """

    local: Blocks = ()
    remote: Blocks = ()
    begin: int = 0
    end: int = 0


class Reading(Protocol):
    """The library's side of a transfer or a move that reads a request."""

    endpoint: Endpoint


class Request(OneAtATime):
    """The bytes of one request, by a plan. Made once, and set again for each request.

    Calls from several threads wait for one another.
    """

    def __init__(self, plan: Plan, groups: Sequence[GroupRequest] | None = None) -> None:
        resource = resource_of(Plan, plan)
        self._moves: set[Reading] = set()  # that have not been freed
        self._own(
            take(lib.kvf_request_create, "kvf_request *", resource.pointer), lib.kvf_request_free, resource
        )
        if groups is not None:
            self.set(groups)

    def set(self, groups: Sequence[GroupRequest]) -> None:
        """Says what moves: one entry for each group of the model. Tables are read during the call only.

        Raises OutOfRangeError (a block id beyond its cache, a table that does not reach: the detail names
        group, side, token and block) and InvalidError (wrong number of groups; a transfer of this request is
        not closed yet); the request is then as it was before.
        """
        resource = self._get()
        arena, groups = Arena(), list_of(GroupRequest, groups)
        pointer = arena.keep(ffi.new("kvf_group_request[]", len(groups)))
        for i, group in enumerate(groups):
            fill(pointer[i].local, **table_fields(group.local, arena))
            fill(pointer[i].remote, **table_fields(group.remote, arena))
            fill(pointer[i], begin=group.begin, end=group.end)
        for move in list(self._moves):
            move.endpoint.end_forgotten()
        with self._lock:
            if self._moves:
                raise InvalidError("the request is being moved: close its transfers before setting it again")
            call(lib.kvf_request_set, resource.pointer, pointer, len(groups))

    def steps(self, group: int) -> range:
        """The steps of a group that really move, after clipping to the window; empty for no such group."""
        resource = self._get()
        begin, end = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        with self._lock:
            result_of(lib.kvf_request_steps, resource.pointer, group, begin, end)
        return range(begin[0], end[0])

    def bytes(self, source: int) -> int:
        """Bytes that come from one source (an index of Plan.sources); 0 when there is no such source."""
        resource = self._get()
        with self._lock:
            return int(result_of(lib.kvf_request_bytes, resource.pointer, source))

    def run_count(self, source: int) -> int:
        """Number of runs of one source, after merging. Iterates over all of them."""
        resource = self._get()
        with self._lock:
            return int(result_of(lib.kvf_request_run_count, resource.pointer, source))

    def runs(self, source: int) -> NDArray[np.void]:
        """All runs of one source: an array of RUN_DTYPE, in the order in which they move.

        Raises UnsupportedError if the plan converts.
        """
        resource = self._get()
        cursor = ffi.new("kvf_run_cursor *")
        found = []
        with self._lock:
            call(lib.kvf_run_cursor_start, cursor, resource.pointer, source)
            while True:
                batch = np.empty(RUNS_AT_ONCE, dtype=RUN_DTYPE)
                target = ffi.cast("kvf_run *", batch.ctypes.data)
                count = lib.kvf_run_cursor_next(cursor, target, RUNS_AT_ONCE)
                found.append(batch[:count])
                if count < RUNS_AT_ONCE:
                    return np.concatenate(found)
