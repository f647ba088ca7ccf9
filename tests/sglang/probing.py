"""Reads out, or spoils, what the backend moves.

Each rank writes the blocks of a request to a file: a prefill rank before it says that the last chunk is ready,
a decode rank when all has arrived.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

import kvferry.sglang

#: Where to write; while it has a file "spoil", decode ranks lose what has arrived of the component that the
#: file names, or of all.
FOLDER = "KVFERRY_TEST_READOUT"
SPOIL = "spoil"
#: The component that has states.
STATES = "mamba"


def install() -> None:
    """Puts the manager below in the place of the backend's."""
    found = kvferry.sglang._class_of

    def class_of(others: Any, transfer_backend: Any, class_type: Any) -> Any:
        chosen = found(others, transfer_backend, class_type)
        if chosen is not None and chosen.__name__ == "KvferryManager":
            return probing_manager(chosen)
        return chosen

    kvferry.sglang._class_of = class_of


def probing_manager(base: Any) -> Any:
    """The backend's manager, which also reads out."""

    class ProbingManager(base):  # type: ignore[misc]
        """See above."""

        def __init__(self, *args: Any) -> None:
            self._folder = pathlib.Path(os.environ[FOLDER])
            self._pages: dict[int, list[int]] = {}  # by room
            self._others: dict[int, Any] = {}
            super().__init__(*args)

        def add_transfer_request(
            self,
            bootstrap_room: int,
            kv_indices: Any,
            index_slice: slice,
            is_last_chunk: bool,
            aux_index: Any = None,
            state_indices: Any = None,
            **more: Any,
        ) -> None:
            pages = self._pages.setdefault(bootstrap_room, [])
            pages += [int(page) for page in kv_indices]
            if is_last_chunk:
                self._others[bootstrap_room] = state_indices
                self._read_out("prefill", bootstrap_room)
            super().add_transfer_request(
                bootstrap_room, kv_indices, index_slice, is_last_chunk, aux_index, state_indices, **more
            )

        def expect(self, room: int, contact: Any, pages: Any, others: Any, prefix: int, row: int) -> None:
            self._pages[room], self._others[room] = [int(page) for page in pages], others
            super().expect(room, contact, pages, others, prefix, row)

        def update_status(self, room: int, status: Any) -> None:
            decodes = self.disaggregation_mode.value == "decode"
            if decodes and status == 4 and room in self._pages:  # success
                if (self._folder / SPOIL).exists():
                    lost = (self._folder / SPOIL).read_text()
                    for name, cells, blocks in self._cells(room):
                        if lost in ("", name):
                            cells[blocks] = 0
                self._read_out("decode", room)
            super().update_status(room, status)

        def _cells(self, room: int) -> Iterator[tuple[str, Any, list[int]]]:
            """Of each buffer: its component, it as an array of blocks, and which of these a request has."""
            buffers = iter(self._buffers)
            for component in self._components:
                blocks = self._pages[room]
                if component.source:
                    blocks = [int(block) for block in self._others[room][component.source - 1]]
                for length in component.buffers.items:
                    buffer = next(buffers)
                    yield component.name, buffer[: len(buffer) // length * length].reshape(-1, length), blocks

        def _read_out(self, side: str, room: int) -> None:
            name = f"{side}.{room}.{self.pp_rank}.{self.attn_tp_rank}.npz"
            found: dict[str, Any] = {}
            for component, cells, blocks in self._cells(room):
                found[f"{component} {len(found)}"] = cells[blocks]
            del self._pages[room], self._others[room]
            with (self._folder / f"{name}.part").open("wb") as file:
                np.savez(file, **found)
            (self._folder / f"{name}.part").rename(self._folder / name)

    return ProbingManager
