"""Processor time and memory of the servers' processes."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator

_TICK = os.sysconf("SC_CLK_TCK")


def _each(groups: set[int]) -> Iterator[pathlib.Path]:
    """The /proc folders of the present processes of some process groups."""
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(folder.name)) in groups:
                yield folder
        except OSError:  # the process has ended
            pass


def processor_seconds(*groups: int) -> float:
    """Processor time of all threads of the process groups so far, in user and system mode."""
    ticks = 0
    for folder in _each(set(groups)):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICK


def resident_mib(*groups: int) -> int:
    """Resident memory of the process groups, in MiB; shared memory counts for each process."""
    pages = 0
    for folder in _each(set(groups)):
        try:
            pages += int((folder / "statm").read_text().split()[1])
        except OSError:
            continue
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20
