"""Reads out, or spoils, what the backend moves.

Each rank writes the pages of a request to a file: a prefill rank before it says that the last chunk is ready, a
decode rank when all has arrived.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

import numpy as np

import kvferry.sglang

#: Where to write; while it has a file "spoil", decode ranks lose what has arrived, from the buffer on whose
#: number is in it.
FOLDER = "KVFERRY_TEST_READOUT"
SPOIL = "spoil"


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
            super().__init__(*args)

        def add_transfer_request(
            self, bootstrap_room: int, kv_indices: Any, index_slice: slice, is_last_chunk: bool, **more: Any
        ) -> None:
            pages = self._pages.setdefault(bootstrap_room, [])
            pages += [int(page) for page in kv_indices]
            if is_last_chunk:
                self._read_out("prefill", bootstrap_room, self._pages.pop(bootstrap_room))
            super().add_transfer_request(bootstrap_room, kv_indices, index_slice, is_last_chunk, **more)

        def expect(self, room: int, contact: Any, pages: Any, others: Any, prefix: int, row: int) -> None:
            self._pages[room] = [int(page) for page in pages]
            super().expect(room, contact, pages, others, prefix, row)

        def update_status(self, room: int, status: Any) -> None:
            decodes = self.disaggregation_mode.value == "decode"
            if decodes and status == 4 and room in self._pages:  # success
                pages = self._pages.pop(room)
                if (self._folder / SPOIL).exists():
                    for cells in self._cells()[int((self._folder / SPOIL).read_text()) :]:
                        cells[pages] = 0
                self._read_out("decode", room, pages)
            super().update_status(room, status)

        def _cells(self) -> list[Any]:
            """The buffers, as arrays of pages."""
            lengths = self.kv_args.kv_item_lens
            return [
                buffer[: len(buffer) // length * length].reshape(-1, length)
                for buffer, length in zip(self._buffers, lengths, strict=True)
            ]

        def _read_out(self, side: str, room: int, pages: list[int]) -> None:
            name = f"{side}.{room}.{self.pp_rank}.{self.attn_tp_rank}.npz"
            parts = {str(i): cells[pages] for i, cells in enumerate(self._cells())}
            with (self._folder / f"{name}.part").open("wb") as file:
                np.savez(file, **parts)
            (self._folder / f"{name}.part").rename(self._folder / name)

    return ProbingManager
