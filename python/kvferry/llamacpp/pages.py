"""The pages of an agent, and the cells of states that are copied into them and out of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import LimitError
from kvferry.llamacpp.sections import Section
from kvferry.llamacpp.state import LayerCells
from kvferry.request import BlockTable

_ALL = slice(None)


class Pages:
    """Memory for the cells of several sequences, in the order of elements that other engines have.

    Safe to use from several threads.

    Args:
        section: what these layers keep
        layers: whose cells are here
        regions: of the agent: the keys of each of these layers, and then the values of each; none of what has
            no elements
        tokens_per_page: of each page
    """

    def __init__(
        self,
        section: Section,
        layers: Sequence[int],
        regions: Sequence[NDArray[np.uint8]],
        tokens_per_page: int,
    ) -> None:
        self._tokens, self._layers, self._recurrent = tokens_per_page, layers, section.recurrent
        count = len(layers)
        self._sides = []  # number, and the memory of each layer
        for number, side in enumerate(section.sides):
            if side.size:
                mine, regions = regions[:count], regions[count:]
                shape = -1, section.heads, side.kind.units(side.size)
                kind = f"<u{side.kind.unit.bits // 8}"
                self._sides.append((number, [region.view(kind).reshape(shape) for region in mine]))
        half = section.sides[0].size // 2
        # Units of a key in a page, and in a state.
        self._of_keys = (
            [(slice(half), slice(0, None, 2)), (slice(half, None), slice(1, None, 2))]
            if section.interleaved
            else [(_ALL, _ALL)]
        )
        self._count = len(self._sides[0][1][0]) // tokens_per_page
        self._free = list(range(self._count))
        self._lock = threading.Lock()

    def take(self, first: int, end: int) -> BlockTable:
        """Pages for these tokens of a sequence. Raises LimitError: there are not enough free ones."""
        begin = first // self._tokens
        wanted = -(-end // self._tokens) - begin
        with self._lock:
            left = len(self._free) - wanted
            if left < 0:
                need = (
                    f"recurrent layers need {wanted} state"
                    if self._recurrent
                    else f"{end - first} tokens need {wanted} pages of {self._tokens} tokens"
                )
                raise LimitError(
                    f"{need}; allowed: {len(self._free)}, as the others of {self._count} are in use"
                )
            taken = self._free[left:]
            del self._free[left:]
            return BlockTable(taken, begin)

    def give(self, pages: BlockTable) -> None:
        """Gives pages back that nobody reads or writes any more."""
        with self._lock:
            self._free += pages.ids

    def write(self, pages: BlockTable, cells: Sequence[LayerCells]) -> None:
        """Copies the cells of a sequence, of all layers of the model, into pages."""
        for side, slots, rows, of_page, of_row in self._pieces(pages, cells):
            side[slots, :, of_page] = rows[..., of_row]

    def read(self, pages: BlockTable, cells: Sequence[LayerCells]) -> None:
        """Copies cells out of pages."""
        for side, slots, rows, of_page, of_row in self._pieces(pages, cells):
            rows[..., of_row] = side[slots, :, of_page]

    def _pieces(
        self, pages: BlockTable, cells: Sequence[LayerCells]
    ) -> Iterator[tuple[NDArray[Any], NDArray[np.intp], NDArray[Any], slice, slice]]:
        """What is copied together: the memory of a layer's side, where in it, cells, and the units of both."""
        mine = [cells[layer] for layer in self._layers]
        first, count = mine[0].first, len(mine[0].keys)
        tokens = np.arange(first, first + count)
        ids = np.asarray(pages.ids, np.intp)
        slots = ids[tokens // self._tokens - pages.first_block] * self._tokens + tokens % self._tokens
        for i, layer in enumerate(mine):
            for number, memory in self._sides:
                rows = (layer.keys, layer.values)[number]
                for of_page, of_row in self._of_keys if number == 0 else [(_ALL, _ALL)]:
                    yield memory[i], slots, rows, of_page, of_row
