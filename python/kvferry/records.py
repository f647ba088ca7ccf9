"""Records: small things that travel with a cache, such as the token that a producer has sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvferry._binding import ffi
from kvferry._native import Arena, data_at, string
from kvferry._values import list_of


@dataclass(frozen=True)
class Record:
    """Data of a producer about a request, beside its cache; see kvferry/record.h.

    Attributes:
        name: what the data is, by a name that both engines know: 1 to 64 bytes
        data: any bytes; a rank gives up to 64 records, of 128 KiB together
        begin, end: the tokens that the data is about; they need not be among those that move
        rank: the producer's rank that gave it; ignored when records are given
    """

    name: str
    data: bytes
    begin: int = 0
    end: int = 0
    rank: int = 0


def records_in(records: Sequence[Record], arena: Arena) -> dict[str, Any]:
    """The fields of a struct that hold records."""
    items = []
    for record in list_of(Record, records):
        data, size = arena.data(record.data)
        name = arena.text(record.name)
        items.append({"name": name, "begin": record.begin, "end": record.end, "data": data, "size": size})
    return {"records": arena.array("kvf_record", items), "record_count": len(items)}


def records_out(records: Any, count: int) -> tuple[Record, ...]:
    """Copies of kvf_records, which are valid only as long as their event."""
    if records == ffi.NULL:
        return ()
    return tuple(
        Record(
            string(records[i].name),
            data_at(records[i].data, records[i].size),
            records[i].begin,
            records[i].end,
            records[i].rank,
        )
        for i in range(count)
    )
