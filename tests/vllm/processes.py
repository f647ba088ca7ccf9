"""Processor time and memory of the servers' processes."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator

_TICK = os.sysconf("SC_CLK_TCK")
_KINDS = {"anonymous": "RssAnon", "files": "RssFile", "shared": "RssShmem"}


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


def resident_mib(*groups: int) -> dict[str, int]:
    """Resident memory of the process groups, in MiB, by kind: anonymous (what processes allocate), of files,
    and shared. What several processes use counts for each."""
    found = dict.fromkeys(_KINDS, 0)
    for folder in _each(set(groups)):
        try:
            status = (folder / "status").read_text()
        except OSError:
            continue
        lines = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        for kind, name in _KINDS.items():
            found[kind] += int(lines.get(name, "0 kB").split()[0])  # a process that has ended has no memory
    return {kind: kib >> 10 for kind, kib in found.items()}
