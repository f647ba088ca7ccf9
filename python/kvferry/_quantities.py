"""Calls for the connector's named quantities: lists of numbers, and the reason for a refusal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvferry._binding import ffi, lib
from kvferry._native import Arena, result_of, string
from kvferry._values import listed
from kvferry.errors import KvferryError, check


def call(function: Any, *arguments: Any) -> None:
    """Calls a function of the topology headers; an error also carries the reason that the connector names."""
    status = result_of(function, *arguments)
    try:
        check(status)
    except KvferryError as error:
        error.refusal = string(lib.kvf_refusal_name(lib.kvf_topology_refusal()))
        raise


def take(function: Any, type_name: str, *arguments: Any) -> Any:
    """The same for a function whose last argument receives a value."""
    out = ffi.new(f"{type_name} *")
    call(function, *arguments, out)
    return out[0]


def ids_in(values: Sequence[int], arena: Arena) -> dict[str, Any]:
    """The fields of a kvf_ids."""
    values = listed(values, "numbers")
    return {"at": arena.numbers("uint64_t", values), "count": len(values)}


def ids_pointer(values: Sequence[int], arena: Arena) -> Any:
    """A kvf_ids *."""
    return arena.array("kvf_ids", [ids_in(values, arena)])


def lists_in(lists: Sequence[Sequence[int]], arena: Arena) -> Any:
    """A kvf_block_lists *."""
    items = [ids_in(values, arena) for values in listed(lists, "lists of numbers")]
    return arena.new("kvf_block_lists", groups=arena.array("kvf_ids", items), count=len(items))


def ids_out(ids: Any) -> list[int]:
    """The numbers of a kvf_ids, whose owner does not change."""
    return list(ffi.unpack(ids.at, ids.count)) if ids.count else []


def lists_out(lists: Any) -> list[list[int]]:
    """The numbers of a kvf_block_lists, whose owner does not change."""
    return [ids_out(lists.groups[i]) for i in range(lists.count)]


def take_ids(function: Any, *arguments: Any) -> list[int]:
    """Calls a function whose last argument receives a kvf_ids."""
    out = ffi.new("kvf_ids *")
    try:
        call(function, *arguments, out)
        return ids_out(out)
    finally:
        lib.kvf_ids_free(out)


def take_lists(function: Any, *arguments: Any) -> list[list[int]]:
    """Calls a function whose last argument receives a kvf_block_lists."""
    out = ffi.new("kvf_block_lists *")
    try:
        call(function, *arguments, out)
        return lists_out(out)
    finally:
        lib.kvf_block_lists_free(out)


def take_two_lists(function: Any, *arguments: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Calls a function whose last two arguments each receive a kvf_block_lists."""
    first, second = ffi.new("kvf_block_lists *"), ffi.new("kvf_block_lists *")
    try:
        call(function, *arguments, first, second)
        return lists_out(first), lists_out(second)
    finally:
        lib.kvf_block_lists_free(first)
        lib.kvf_block_lists_free(second)


def take_text(function: Any, *arguments: Any) -> str:
    """Calls a function whose last argument receives a text to be freed."""
    out = ffi.new("char **")
    try:
        call(function, *arguments, out)
        return string(out[0])
    finally:
        lib.kvf_topology_free_text(out[0])


def kinds_in(kinds: Sequence[int], arena: Arena) -> Any:
    """A kvf_cache_kind[]."""
    return arena.numbers("kvf_cache_kind", kinds, "a kind")
