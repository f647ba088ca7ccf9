"""The blocks of one request: which they are, and which of them are ready.

SGLang names pages of the tokens that the decode engine lacks, chunk by chunk, and with the last chunk the
blocks of all other components. Both engines have whole pages, whose sizes may differ; what lies behind the
prompt in the last page moves with it, and means nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import MismatchError
from kvferry.request import BlockTable, GroupSteps
from kvferry.sglang.geometry import Blocks, Component, pages_must_be_equal

Ids = NDArray[np.uint32]


def block_ids(given: Any) -> Ids:
    """Block ids as SGLang has them: an array, a number, or a list of one array."""
    return np.asarray(given, dtype=np.uint32).reshape(-1)


def blocks_of(components: Sequence[Component], pages: Any, others: Sequence[Any]) -> list[Ids]:
    """The blocks of each component, of those that SGLang names for the main one and for each kind of state.
    A draft model has those of the main one.

    Of pages of all tokens only those that move are taken: SGLang names them all for some kinds. Of a row, the
    first number names it, and others may say which places in it are in use.
    """
    main = block_ids(pages)
    found = [main]
    for component in components[1:]:
        ids = block_ids(others[component.source - 1]) if component.source else main
        if component.blocks is Blocks.ALL and len(ids) > len(main):
            ids = ids[len(ids) - len(main) :]
        elif component.blocks is Blocks.ROW:
            ids = ids[:1]
        found.append(ids)
    return found


@dataclass(frozen=True)
class Extent:
    """What a decode engine wants of a request.

    Attributes:
        begin, end: the tokens, from the first that it lacks to the end of its last page
        page_size: of the decode engine
        others: how many blocks it has of each component beside the main one
    """

    begin: int
    end: int
    page_size: int
    others: tuple[int, ...]

    def whole_pages(self, page_size: int) -> Extent:
        """The same, from the beginning of a page of the prefill engine."""
        return replace(self, begin=self.begin // page_size * page_size)

    @property
    def numbers(self) -> tuple[int, ...]:
        """For a message; Extent.read() reads them."""
        return (self.begin, self.end, self.page_size, *self.others)

    @classmethod
    def read(cls, numbers: Sequence[int]) -> Extent:
        """Reads what `numbers` gave."""
        begin, end, page_size, *others = numbers
        return cls(begin, end, page_size, tuple(others))


def extent_of(ids: Sequence[Ids], prefix: int, page_size: int) -> Extent:
    """What a decode engine wants that has so many tokens already, and blocks of each component."""
    return Extent(prefix, prefix + len(ids[0]) * page_size, page_size, tuple(len(blocks) for blocks in ids[1:]))


def steps_of(
    components: Sequence[Component], extent: Extent, ids: Sequence[Ids] | None = None
) -> list[GroupSteps]:
    """What a request has of each component; `ids`: the blocks; None: they come later."""
    found = []
    for i, component in enumerate(components):
        size = component.tokens_per_block
        if not component.blocks.of_tokens:
            begin, end = 0, extent.others[i - 1]
        elif component.blocks is Blocks.LAST:
            begin, end = extent.end - extent.others[i - 1] * size, extent.end
        else:
            begin, end = extent.begin, extent.end
        table = BlockTable(() if ids is None else ids[i], begin // size)
        each = component.tokens_per_step
        found.append(GroupSteps(table, begin // each, end // each))
    return found


class Chunks:
    """The blocks of a request that a prefill rank computes.

    Raises MismatchError: the decode engine has other kinds of blocks, or pages of another size where these are
    of several kinds.
    """

    def __init__(self, components: Sequence[Component], extent: Extent) -> None:
        self._components = components
        self._size = components[0].tokens_per_block
        self._check_kinds(extent)
        self._extent = extent.whole_pages(self._size)
        self._pages: Ids = np.empty(0, np.uint32)
        self._computed = self._said = self._extent.begin
        # SGLang names the pages with a window only at the end, so tokens in it wait until then.
        windows = [
            step.begin for step, of in zip(self.steps, components, strict=True) if of.blocks is Blocks.LAST
        ]
        self._limit = min(windows, default=extent.end)

    @property
    def steps(self) -> list[GroupSteps]:
        """What the prefill engine will have, without its blocks."""
        return steps_of(self._components, self._extent)

    @property
    def begin(self) -> int:
        """The first token that the prefill engine sends."""
        return self._extent.begin

    def add(
        self, pages: Any, tokens: int, others: Sequence[Any] | None
    ) -> tuple[tuple[int, int], list[BlockTable]] | None:
        """A chunk was computed. Returns which tokens are ready, and their blocks; None if there are none.

        Args:
            pages: those that its tokens lie in; none of them is in another chunk
            others: last chunk: the blocks of the other components

        Raises MismatchError: the decode engine has another number of tokens or blocks.
        """
        self._pages = np.concatenate([self._pages, block_ids(pages)])
        self._computed += tokens
        self._check_tokens(others is not None)
        begin, end = self._said, min(self._computed, self._limit)
        if others is not None:
            end = self._extent.end
            others = blocks_of(self._components, self._pages, others)[1:]
            self._check_others(others)
            missing = -(-(end - self._extent.begin) // self._size) - len(self._pages)
            if missing > 0:  # pages of the decode engine end later: it gets something that means nothing
                self._pages = np.append(self._pages, np.repeat(self._pages[-1:], missing))
        elif end <= begin:
            return None
        self._said = end
        return (begin, end), self._tables(begin, end, others)

    def _tables(self, begin: int, end: int, others: Sequence[Ids] | None) -> list[BlockTable]:
        first = self._extent.begin // self._size
        mine = range(begin // self._size, -(-end // self._size))
        fresh = BlockTable(self._pages[mine.start - first : mine.stop - first], mine.start)
        tables = [fresh]
        for i, (component, step) in enumerate(zip(self._components[1:], self.steps[1:], strict=True)):
            if component.blocks is Blocks.ALL:
                tables.append(fresh)
            elif others is None:
                tables.append(BlockTable())
            else:
                tables.append(BlockTable(others[i], step.begin // component.tokens_per_block))
        return tables

    def _check_kinds(self, extent: Extent) -> None:
        here, there = len(self._components), 1 + len(extent.others)
        if there != here:
            raise MismatchError(
                f"the cache has {here} kinds of blocks in the prefill server, and {there} in the decode "
                "server; allowed: the same, as equal models and draft models have"
            )
        if pages_must_be_equal(self._components) and extent.page_size != self._size:
            raise MismatchError(
                f"the page size is {self._size} in the prefill server, and {extent.page_size} in the decode "
                "server; allowed: the same, of a cache with pages of several kinds"
            )

    def _check_tokens(self, is_last: bool) -> None:
        low, high = self._extent.end - self._extent.page_size + 1, self._extent.end
        if self._computed > high or (is_last and self._computed < low):
            raise MismatchError(
                f"the prompt has {self._computed} tokens in the prefill server, and {low} to {high} in the "
                "decode server; allowed: equal prompts"
            )

    def _check_others(self, others: Sequence[Ids]) -> None:
        for component, ids, wanted in zip(self._components[1:], others, self._extent.others, strict=True):
            if component.source and len(ids) != wanted:
                raise MismatchError(
                    f"the request has {len(ids)} blocks of {component.name} in the prefill server, and "
                    f"{wanted} in the decode server; allowed: the same number, as equal prompts have"
                )
            if component.blocks is Blocks.ALL and not np.array_equal(ids, self._pages):
                raise MismatchError(
                    f"the request has other pages of {component.name} than of {self._components[0].name}"
                )
