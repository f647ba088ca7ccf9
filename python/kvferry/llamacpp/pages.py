"""The pages of an agent, and the cells of states that are copied into them and out of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import LimitError
from kvferry.llamacpp.state import SequenceCache

_ALL = slice(None)


class Pages:
    """Memory for the cells of several sequences, in the order of elements that other engines have.

    Safe to use from several threads.

    Args:
        regions: of the agent: the keys of each layer, and then the values of each
        tokens_per_page: of each page
    """

    def __init__(
        self, cache: SequenceCache, regions: Sequence[NDArray[np.uint8]], tokens_per_page: int
    ) -> None:
        self._tokens = tokens_per_page
        sizes = [(cache.key_type, cache.key_size)] * cache.layers
        sizes += [(cache.value_type, cache.value_size)] * cache.layers
        self._sides = [
            region.view(f"<u{kind.unit.bits // 8}").reshape(-1, cache.kv_heads, kind.units(size))
            for region, (kind, size) in zip(regions, sizes, strict=True)
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

    def take(self, tokens: int) -> list[int]:
        """Pages for so many tokens. Raises LimitError: there are not enough free ones."""
        wanted = -(-tokens // self._tokens)
        with self._lock:
            left = len(self._free) - wanted
            if left < 0:
                raise LimitError(
                    f"{tokens} tokens need {wanted} pages of {self._tokens} tokens; allowed: "
                    f"{len(self._free)}, as the others of {self._count} are in use"
                )
            taken = self._free[left:]
            del self._free[left:]
            return taken

    def give(self, pages: Sequence[int]) -> None:
        """Gives pages back that nobody reads or writes any more."""
        with self._lock:
            self._free += pages

    def write(self, pages: Sequence[int], keys: NDArray[Any], values: NDArray[Any]) -> None:
        """Copies the cells of a sequence, [layer][token][head][unit], into pages."""
        slots = self._slots(pages, keys.shape[1])
        for side, rows, of_page, of_row in self._pieces(keys, values):
            side[slots, :, of_page] = rows[..., of_row]

    def read(self, pages: Sequence[int], keys: NDArray[Any], values: NDArray[Any]) -> None:
        """Copies cells out of pages."""
        slots = self._slots(pages, keys.shape[1])
        for side, rows, of_page, of_row in self._pieces(keys, values):
            rows[..., of_row] = side[slots, :, of_page]

    def _slots(self, pages: Sequence[int], tokens: int) -> NDArray[np.intp]:
        """The places of a sequence's tokens."""
        first = np.asarray(pages, np.intp)[:, None] * self._tokens
        return (first + np.arange(self._tokens)).ravel()[:tokens]

    def _pieces(
        self, keys: NDArray[Any], values: NDArray[Any]
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any], slice, slice]]:
        """What is copied together: the memory of a layer's side, its cells, and which elements of both."""
        layers = len(keys)
        for side, rows in zip(self._sides[:layers], keys, strict=True):
            for of_page, of_row in self._of_keys:
                yield side, rows, of_page, of_row
        for side, rows in zip(self._sides[layers:], values, strict=True):
            yield side, rows, _ALL, _ALL
