"""The blocks of one request: which they are, and which of them are ready.

SGLang names pages of the tokens that the decode engine lacks, chunk by chunk, and with the last chunk the
blocks of all other components.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import MismatchError
from kvferry.request import BlockTable, GroupSteps
from kvferry.sglang.geometry import Blocks, Component

Ids = NDArray[np.uint32]


def block_ids(given: Any) -> Ids:
    """Block ids as SGLang has them: an array, a number, or a list of one array."""
    return np.asarray(given, dtype=np.uint32).reshape(-1)


def steps_of(
    components: Sequence[Component], first: int, counts: Sequence[int], ids: Sequence[Ids] | None = None
) -> list[GroupSteps]:
    """What a request has of each component.

    Args:
        first: the first page; the decode engine has those before
        counts: numbers of blocks, one for each component
        ids: the blocks; None: they come later
    """
    end = first + counts[0]
    found = []
    for i, component in enumerate(components):
        if component.blocks is Blocks.SLOT:
            begin, last, size = 0, counts[i], 1
        else:
            begin, last, size = end - counts[i], end, component.tokens_per_block
        table = BlockTable(() if ids is None else ids[i], begin)
        found.append(GroupSteps(table, begin * size, last * size))
    return found


class Chunks:
    """The blocks of a request that a prefill rank computes."""

    def __init__(self, components: Sequence[Component], first: int, counts: Sequence[int]) -> None:
        self._components = components
        self._first = first
        self._counts = counts
        self._pages: Ids = np.empty(0, np.uint32)
        self._said = first
        # SGLang names the pages with a window only at the end, so tokens in it wait until then.
        windows = [
            n for component, n in zip(components, counts, strict=True) if component.blocks is Blocks.LAST
        ]
        self._limit = first + counts[0] - max(windows, default=0)

    def add(self, pages: Any, others: Sequence[Any] | None) -> tuple[tuple[int, int], list[BlockTable]] | None:
        """A chunk was computed. Returns which tokens are ready, and their blocks; None if there are none.

        Args:
            others: last chunk: the blocks of the other components

        Raises MismatchError: the decode engine has another number of blocks.
        """
        self._pages = np.concatenate([self._pages, block_ids(pages)])
        begin, end = self._said, self._first + len(self._pages)
        if others is not None or len(self._pages) > self._counts[0]:
            self._check(0, self._pages)
        if others is None:
            end = min(end, self._limit)
            if end <= begin:
                return None
        fresh = BlockTable(self._pages[begin - self._first : end - self._first], begin)
        tables = [fresh]
        for i, component in enumerate(self._components[1:], start=1):
            ids = None if others is None else block_ids(others[i - 1])
            if ids is not None:
                self._check(i, ids)
            if component.blocks is Blocks.ALL:
                tables.append(fresh)
            elif ids is None:
                tables.append(BlockTable())
            else:
                tables.append(BlockTable(ids, 0 if component.blocks is Blocks.SLOT else end - len(ids)))
        self._said = end
        size = self._components[0].tokens_per_block
        return (begin * size, end * size), tables

    def _check(self, i: int, ids: Ids) -> None:
        name = self._components[i].name
        if len(ids) != self._counts[i]:
            raise MismatchError(
                f"the request has {len(ids)} blocks of {name} in the prefill server, and {self._counts[i]} "
                "in the decode server; allowed: the same number, as equal prompts have"
            )
        if i and self._components[i].blocks is Blocks.ALL and not np.array_equal(ids, self._pages):
            raise MismatchError(f"the request has other pages of {name} than of {self._components[0].name}")
