"""Checks values that callers give, and converts them to what C takes. InvalidError says what was wrong.

C would cut a number with a fraction, take True for 1, and fail for others with errors of Python's own.
"""

from __future__ import annotations

import functools
import operator
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

from kvferry._binding import ffi
from kvferry.errors import InvalidError, OutOfRangeError

T = TypeVar("T")


def shown(value: Any) -> str:
    """A value in an error's text: not the whole of a long one."""
    try:
        return reprlib.repr(value)
    except Exception:  # of an object that cannot show itself, or a number of more digits than Python writes
        return f"<{type(value).__name__}>"


def wrong_type(value: Any, allowed: str) -> InvalidError:
    return InvalidError(f"{shown(value)} is of type {type(value).__name__}; allowed: {allowed}")


def of_type(kind: type[T], value: Any) -> T:
    """A value that must be of a class."""
    if not isinstance(value, kind):
        raise wrong_type(value, kind.__name__)
    return value


def list_of(kind: type[T], values: Iterable[Any]) -> list[T]:
    """Several values of a class, as a list: for callers that gave any iterable."""
    return [of_type(kind, value) for value in listed(values, kind.__name__)]


def listed(values: Any, of: str = "values") -> list[Any]:
    """What a caller gave as a list."""
    try:
        return list(values)
    except TypeError:
        raise wrong_type(values, f"a list of {of}") from None


def mapping_of(values: Any) -> Mapping[Any, Any]:
    """What a caller gave as a mapping."""
    if not isinstance(values, Mapping):
        raise wrong_type(values, "a mapping")
    return values


def callback(function: Callable[..., object] | None) -> Any:
    """A function to be called later, when nobody would know who gave it; or None."""
    if function is not None and not callable(function):
        raise wrong_type(function, "a function")
    return function


def encoded(value: Any) -> bytes:
    """Text as UTF-8."""
    if not isinstance(value, str):
        raise wrong_type(value, "text")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise InvalidError(f"text {shown(value)} is not Unicode: {error}") from None


def whole_number(value: Any, name: str, allowed: str = "whole numbers") -> int:
    """A whole number, also one of NumPy or an array of a single one; name: what it is, for the error."""
    if not isinstance(value, (bool, np.bool_)):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise InvalidError(f"{name} is {shown(value)}, of type {type(value).__name__}; allowed: {allowed}")


def real_number(value: Any, name: str) -> float:
    """A number, also one of NumPy or an array of a single one."""
    if not isinstance(value, (bool, np.bool_, str, bytes, bytearray)):
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):
            pass
        except OverflowError as error:
            raise OutOfRangeError(f"{name} is {shown(value)}: {error}") from None
    raise InvalidError(f"{name} is {shown(value)}, of type {type(value).__name__}; allowed: numbers")


@functools.cache
def checked(kind: Any) -> Any:
    """A C type, if for_c() checks its values; None for pointers, structs and characters, which cffi checks."""
    numbers = kind.item if kind.kind == "array" else kind
    return kind if numbers.kind in ("primitive", "enum") and numbers.cname != "char" else None


@functools.cache
def limits(kind: Any) -> tuple[int, int] | None:
    """The smallest and the largest whole number of a C type; None for other types."""
    if kind.kind not in ("primitive", "enum") or kind.cname in ("float", "double"):
        return None
    if kind.cname == "_Bool":
        return 0, 1
    bits = 8 * ffi.sizeof(kind)
    return (0, 2**bits - 1) if int(ffi.cast(kind, -1)) > 0 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def for_c(kind: Any, value: Any, name: str) -> Any:
    """A number, or a list of them, as cffi takes it for a C type that is checked()."""
    ends = limits(kind)
    if ends is None:
        return _numbers(kind, value, name) if kind.kind == "array" else real_number(value, name)
    if kind.cname == "_Bool" and isinstance(value, (bool, np.bool_)):
        return bool(value)
    whole = value if type(value) is int else whole_number(value, name, _allowed(kind))
    if not ends[0] <= whole <= ends[1]:
        raise OutOfRangeError(f"{name} is {shown(whole)}; allowed: {ends[0]} to {ends[1]}")
    return whole


@functools.cache
def _allowed(kind: Any) -> str:
    if kind.kind != "enum":
        return "whole numbers"
    return ", ".join(name for _, name in sorted(kind.elements.items()))


def _numbers(kind: Any, given: Any, name: str) -> Any:
    if isinstance(given, ffi.CData):
        return given
    values = listed(given, "numbers")
    if len(values) > kind.length:
        raise InvalidError(f"{name} has {len(values)} entries; allowed: up to {kind.length}")
    return [for_c(kind.item, value, name) for value in values]
