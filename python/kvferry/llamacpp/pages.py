"""The pages of an agent, and the cells of states that are copied into them and out of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import LimitError
from kvferry.llamacpp.state import LayerCells, SequenceCache
from kvferry.request import BlockTable

_ALL = slice(None)


class Pages:
    """Memory for the cells of several sequences, in the order of elements that other engines have.

    Safe to use from several threads.

    Args:
        layers: whose cells are here
        regions: of the agent: the keys of each of these layers, and then the values of each, unless keys are
            latents
        tokens_per_page: of each page
    """

    def __init__(
        self,
        cache: SequenceCache,
        layers: Sequence[int],
        regions: Sequence[NDArray[np.uint8]],
        tokens_per_page: int,
    ) -> None:
        self._tokens, self._layers = tokens_per_page, layers
        each_side = [side for side in cache.sides for _ in layers]
        self._sides = [
            region.view(f"<u{kind.unit.bits // 8}").reshape(-1, cache.kv_heads, kind.units(size))
            for region, (_, kind, size) in zip(regions, each_side, strict=True)
        ]
        half = cache.key_size // 2
        # Units of a key in a page, and in a state.
        self._of_keys = (
            [(slice(half), slice(0, None, 2)), (slice(half, None), slice(1, None, 2))]
            if cache.interleaved
            else [(_ALL, _ALL)]
        )
        self._count = len(self._sides[0]) // tokens_per_page
        self._free = list(range(self._count))
        self._lock = threading.Lock()

    def take(self, first: int, end: int) -> BlockTable:
        """Pages for these tokens of a sequence. Raises LimitError: there are not enough free ones."""
        begin = first // self._tokens
        wanted = -(-end // self._tokens) - begin
        with self._lock:
            left = len(self._free) - wanted
            if left < 0:
                raise LimitError(
                    f"{end - first} tokens need {wanted} pages of {self._tokens} tokens; allowed: "
                    f"{len(self._free)}, as the others of {self._count} are in use"
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
            for of_page, of_row in self._of_keys:
                yield self._sides[i], slots, layer.keys, of_page, of_row
            if len(self._sides) > len(mine):
                yield self._sides[len(mine) + i], slots, layer.values, _ALL, _ALL
