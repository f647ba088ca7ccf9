"""Connects Python objects with those of the library: ownership, and C structs made from Python values."""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, NoReturn, TypeVar, Union

import numpy as np
from numpy.typing import NDArray

from kvferry._binding import ffi, lib
from kvferry._values import (
    checked,
    encoded,
    for_c,
    listed,
    of_type,
    real_number,
    shown,
    whole_number,
    wrong_type,
)
from kvferry.errors import ClosedError, InvalidError, OutOfRangeError, check

Self = TypeVar("Self", bound="Handle")

# Half open, as everywhere in kvferry: a range of step 1, or a pair (begin, end).
Span = Union[range, "tuple[int, int]"]
# Block ids, ranks ...: any integers; arrays of uint32 are read where they lie.
Ids = Union[Sequence[int], "NDArray[Any]"]


# What Python and NumPy count as integers, and no id is.
_BOOLEANS = frozenset((bool, np.bool_))
# Of what bytes() makes a copy: bytes(7) would be seven zeros.
BYTES = (bytes, bytearray, memoryview)


class Resource:
    """One object of the library. It is freed when nothing uses it, and after everything that depends on it.

    References alone do not ensure that order: Python finalises the objects of a cycle in any order.
    """

    __slots__ = ("_dependents", "_dropped", "_parents", "_release", "pointer")

    def __init__(
        self, pointer: Any, release: Callable[[Any], None], parents: tuple[Resource, ...] = ()
    ) -> None:
        self.pointer = pointer
        self._release = release
        self._dependents = 0
        self._dropped = False
        self._parents: tuple[Resource, ...] = ()
        with _LOCK:
            for parent in parents:  # one by one: a signal handler may raise before the last
                parent._dependents += 1
                self._parents += (parent,)

    @classmethod
    def owner_of(cls, others: Iterable[Resource], pointer: Any, release: Callable[[Any], None]) -> Resource:
        """An object of the library that has just taken others over, and frees them.

        If a signal handler raises an exception meanwhile, it is never freed, rather than others twice.
        """
        owner = cls(pointer, _freed_by_others)
        with _LOCK:
            for other in others:
                other._release, other._parents = _freed_by_others, (*other._parents, owner)
                owner._dependents += 1
        owner._release = release
        return owner

    @property
    def borrowed(self) -> bool:
        """Whether another object of the library frees this one."""
        return self._release is _freed_by_others

    @classmethod
    def borrow(cls, pointer: Any, owner: Resource) -> Resource:
        """A part of another object of the library; the part keeps that object alive."""
        return cls(pointer, _freed_by_others, (owner,))

    def __del__(self) -> None:
        with _LOCK:
            self._dropped = True
            self._free_if_unused()

    def _free_if_unused(self) -> None:
        if self._dropped and self._dependents == 0:
            self._release(self.pointer)
            for parent in self._parents:
                parent._dependents -= 1
                parent._free_if_unused()
            self._parents = ()


# Reentrant, because a garbage collection may begin, and drop other objects, at any point.
_LOCK = threading.RLock()


def _renew_lock() -> None:
    global _LOCK
    _LOCK = threading.RLock()


# The thread that held it is not in the child.
os.register_at_fork(after_in_child=_renew_lock)


class CallLock:
    """Lets one thread at a time call the library about an object.

    The thread that holds it during fork() is not in the child, where its call never ends, and the object may be
    half changed: the child is refused, rather than left to wait for ever.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = os.getpid()

    @property
    def lock(self) -> threading.Lock:
        """To be held during a call.

        It is entered as it is: an exception that a signal handler raises at the end of an __enter__ in Python
        would leave it held.
        """
        if self._process != os.getpid():
            self._inherit()
        return self._lock

    def _inherit(self) -> None:
        with _LOCK:
            if self._process == os.getpid():
                return  # another thread of the child was first
            if self._lock.locked():
                raise ClosedError(
                    f"a thread of process {self._process} used this object when it forked this process, which "
                    "cannot use it: make another one"
                )
            self._process = os.getpid()


def _freed_by_others(_pointer: Any) -> None:
    """Does nothing: the owner frees its parts."""


class OfOneProcess:
    """A Python object that stands for one of the library: a copy would be a second owner of it."""

    def __reduce__(self) -> NoReturn:
        raise InvalidError(
            f"a {type(self).__name__} can be neither copied nor pickled: pass what it was made from, and make "
            "another"
        )


class Handle(OfOneProcess):
    """A Python object that stands for an object of the library.

    Closing it gives up the Python object; objects that depend on it keep the library's object alive as long as
    they need it. close() may be called again; using a closed object raises ClosedError. All handles are context
    managers.
    """

    _resource: Resource | None = None

    def _own(self, pointer: Any, release: Callable[[Any], None], *parents: Resource) -> None:
        self._resource = Resource(pointer, release, parents)

    def _get(self) -> Resource:
        """The library's object, for the length of a call. The returned reference keeps the object alive."""
        resource = self._resource
        if resource is None:
            raise ClosedError(f"this {type(self).__name__} was closed")
        return resource

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._resource is None

    def close(self) -> None:
        """Gives the object up. Calling it again does nothing."""
        self._resource = None

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class OneAtATime(Handle):
    """A handle of an object that the library allows one thread at a time."""

    _calls: CallLock

    def _own(self, pointer: Any, release: Callable[[Any], None], *parents: Resource) -> None:
        self._calls = CallLock()
        super()._own(pointer, release, *parents)

    @property
    def _lock(self) -> threading.Lock:
        return self._calls.lock


def resource_of(kind: type[Handle], value: Any) -> Resource:
    """The library's object of an argument that must be of this class; see Handle._get()."""
    return of_type(kind, value)._get()


class Arena:
    """C values made from Python ones, for the length of one call: keep the arena while they are in use."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def keep(self, value: Any) -> Any:
        self._kept.append(value)
        return value

    def text(self, value: str | None) -> Any:
        """A zero-terminated string; NULL for None."""
        if value is None:
            return ffi.NULL
        data = encoded(value)
        if b"\0" in data:
            raise InvalidError(f"text {value!r} has a zero byte in it")
        return self.keep(ffi.new("char[]", data))

    def texts(self, values: Iterable[str]) -> Any:
        """An array of zero-terminated strings; never NULL, even if there are none."""
        pointers = [self.text(of_type(str, value)) for value in listed(values, "texts")]
        return self.keep(ffi.new("char const *[]", pointers or 1))

    def data(self, value: bytes) -> tuple[Any, int]:
        """Bytes, and how many; never NULL, even if there are none."""
        data = bytes_of(value)
        return self.keep(ffi.new("char[]", data)), len(data)

    def numbers(self, element: str, values: Iterable[Any], name: str = "a number") -> Any:
        """An array of numbers; one that does not fit raises OutOfRangeError. `name`: of one, for errors."""
        kind = ffi.typeof(element)
        given = listed(values, "numbers")
        found = [value if type(value) is int else for_c(kind, value, name) for value in given]
        try:
            return self.keep(ffi.new(f"{element}[]", found or 1))
        except OverflowError:  # cffi has found that out, but does not say of what
            for value in found:
                for_c(kind, value, name)
            raise

    def ids(self, values: Ids) -> tuple[Any, int]:
        """Block ids as uint32_t, and how many; an array of uint32 is not copied."""
        try:
            array = np.asarray(values)
        except (TypeError, ValueError) as error:
            raise InvalidError(f"ids are no list of numbers: {error}") from None
        if array.ndim != 1:
            raise InvalidError(f"ids have {array.ndim} dimensions; allowed: 1")
        if array.size == 0:
            return ffi.NULL, 0
        mixed = isinstance(values, (list, tuple)) and not _BOOLEANS.isdisjoint(map(type, values))
        if array.dtype.kind not in "iu" or mixed:
            if array is values:
                raise InvalidError(f"ids are of type {array.dtype}; allowed: integers")
            # Something is no integer, or too large; of True and 3 NumPy makes integers.
            array = np.array([whole_number(value, "an id") for value in values], dtype=object)
        if array.dtype != np.uint32:
            low, high = int(array.min()), int(array.max())
            if low < 0 or high > 0xFFFFFFFF:
                raise OutOfRangeError(f"id {low if low < 0 else high}; allowed: 0 to {0xFFFFFFFF}")
        array = np.require(array, np.uint32, ["C_CONTIGUOUS", "ALIGNED"])
        return self.keep(ffi.from_buffer("uint32_t[]", array)), int(array.size)

    def new(self, type_name: str, **fields: Any) -> Any:
        """A pointer to a zeroed struct with these fields set, and its struct_size if it has one."""
        value = _zeroed(type_name)
        fill(value, **fields)
        return self.keep(value)

    def array(self, type_name: str, items: Sequence[dict[str, Any]]) -> Any:
        """An array of structs from their fields; NULL for none."""
        if not items:
            return ffi.NULL
        value = ffi.new(f"{type_name}[]", len(items))
        for i, item in enumerate(items):
            fill(value[i], **item)
        return self.keep(value)


def _zeroed(type_name: str) -> Any:
    """A pointer to a zeroed value, with struct_size set if the struct has one."""
    value, kind = ffi.new(f"{type_name} *"), ffi.typeof(type_name)
    if kind.kind == "struct" and "struct_size" in dict(kind.fields or ()):
        value.struct_size = ffi.sizeof(type_name)
    return value


def fill(struct: Any, **fields: Any) -> None:
    """Sets fields of a C struct; errors name the field."""
    kinds = _field_types(ffi.typeof(struct))
    for name, value in fields.items():
        kind = kinds[name]
        if kind is not None and type(value) is not int:
            value = for_c(kind, value, name)
        try:
            setattr(struct, name, value)
        except OverflowError:  # cffi has found that out, but does not say of what
            for_c(kind, value, name)
            raise


@functools.cache
def _field_types(kind: Any) -> dict[str, Any]:
    """The types of a struct's fields, None where nothing is checked; `kind` may be a pointer to it."""
    struct = kind.item if kind.kind == "pointer" else kind
    return {name: checked(field.type) for name, field in struct.fields}


@functools.cache
def _argument_types(function: Any) -> tuple[Any, ...]:
    """The types of a function's arguments, None where nothing is checked."""
    return tuple(checked(kind) for kind in ffi.typeof(function).args)


def result_of(function: Any, *arguments: Any) -> Any:
    """Calls a function of the library; errors name the function and which argument it is."""
    given = list(arguments)
    kinds = _argument_types(function)
    for i, kind in enumerate(kinds):
        if kind is not None and type(given[i]) is not int:
            given[i] = for_c(kind, given[i], _argument_name(function, i))
    try:
        return function(*given)
    except OverflowError:  # cffi has found that out, but does not say of what
        for i, kind in enumerate(kinds):
            if kind is not None:
                for_c(kind, given[i], _argument_name(function, i))
        raise


def _argument_name(function: Any, i: int) -> str:
    return f"{function.__name__}: argument {i + 1}"


def call(function: Any, *arguments: Any) -> None:
    """Calls a function of the library and raises the exception of its status."""
    check(result_of(function, *arguments))


def take(function: Any, type_name: str, *arguments: Any, undo: Callable[[Any], object] | None = None) -> Any:
    """Calls a function whose last argument receives a value, and returns that value.

    undo: called with a pointer that the library gave and that is not returned, because a signal handler raised
    an exception, such as KeyboardInterrupt: it comes when the call of the library is over.
    """
    out = _zeroed(type_name)
    try:
        call(function, *arguments, out)
    except BaseException:
        if undo is not None and out[0] != ffi.NULL:
            undo(out[0])
        raise
    return out[0]


def string(pointer: Any) -> str:
    """The text at a pointer; "" for NULL."""
    return "" if pointer == ffi.NULL else ffi.string(pointer).decode(errors="replace")


def data_at(pointer: Any, size: int) -> bytes:
    """A copy of bytes owned by the library."""
    return bytes(ffi.buffer(pointer, size)) if size else b""


def id_fields(name: bytes | str, arena: Arena) -> dict[str, Any]:
    """The fields of a kvf_request_id; text is encoded as UTF-8."""
    data, size = arena.data(id_bytes(name))
    return {"data": data, "size": size}


def id_out(name: Any) -> bytes:
    """A copy of a kvf_request_id."""
    return data_at(name.data, name.size)


def ends(value: Span) -> tuple[int, int]:
    """Both ends of a half-open range."""
    if isinstance(value, range):
        if value.step != 1:
            raise InvalidError(f"{value} has a step of {value.step}; allowed: 1")
        return value.start, max(value.start, value.stop)
    try:
        begin, end = value
    except (TypeError, ValueError):
        raise wrong_type(value, "a range, or a pair of numbers (begin, end)") from None
    return begin, end


def span(value: Span) -> Any:
    """A kvf_range."""
    begin, end = ends(value)
    return Arena().new("kvf_range", begin=begin, end=end)[0]


def to_range(value: Any) -> range:
    """A Python range from a kvf_range."""
    return range(value.begin, value.end)


def id_bytes(value: bytes | str) -> bytes:
    """A request id: bytes as they are, text in UTF-8."""
    if isinstance(value, str):
        return encoded(value)
    if not isinstance(value, BYTES):
        raise InvalidError(f"a request id is {shown(value)}; allowed: bytes, and text")
    return bytes(value)


def bytes_of(value: Any, allowed: str = "bytes") -> bytes:
    """A copy of bytes that a caller gave."""
    if not isinstance(value, BYTES):
        raise wrong_type(value, allowed)
    return bytes(value)


def nanoseconds(seconds: float | None, name: str) -> int:
    """The duration that an argument of this name gives; 0 for None: the library uses its default."""
    if seconds is None:
        return 0
    seconds = real_number(seconds, name)
    if not 0 <= seconds < 1.8e10:
        raise OutOfRangeError(f"{name} is {seconds} s; allowed: 0 to 1.8e10")
    # A duration that rounds to 0 must not become the default.
    return max(round(seconds * 1e9), 1)


def over_at(timeout: float | None) -> float | None:
    """When a wait of so many seconds is over, by time.monotonic(); None for None: never."""
    if timeout is None:
        return None
    return time.monotonic() + seconds_of(timeout)


def seconds_of(timeout: float) -> float:
    """How long to wait; no time is after one that is no number."""
    seconds = real_number(timeout, "timeout")
    if math.isnan(seconds):
        raise OutOfRangeError(f"timeout is {timeout}; allowed: seconds, and None (no limit)")
    return seconds


def version() -> str:
    """The version of the library inside this package, such as "0.1.0"."""
    return string(lib.kvf_version())
