"""Records: small things that travel with a cache, such as the token that a producer has sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvferry._binding import ffi
from kvferry._native import Arena, data_at, string


@dataclass(frozen=True)
class Record:
    """What a producer knows of a request beside its cache; see kvferry/record.h.

    Attributes:
        name: what the data is, in words that both engines know: 1 to 64 bytes
        data: any bytes; up to 64 records of a rank have 128 KiB together
        begin, end: the tokens that it is about; they need not be among those that move
        rank: of the producer that gave it; not looked at where records are given
    """

    name: str
    data: bytes
    begin: int = 0
    end: int = 0
    rank: int = 0


def records_in(records: Sequence[Record], arena: Arena) -> dict[str, Any]:
    """The fields that a struct has for records."""
    items = [
        {
            "name": arena.text(record.name),
            "begin": record.begin,
            "end": record.end,
            "data": arena.data(record.data),
            "size": len(record.data),
        }
        for record in records
    ]
    return {"records": arena.array("kvf_record", items), "record_count": len(items)}


def records_out(records: Any, count: int) -> tuple[Record, ...]:
    """Copies of kvf_records, which are about to end."""
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
