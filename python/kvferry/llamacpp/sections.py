"""The saved state of a sequence of llama.cpp, whose cells kvferry moves.

llama.cpp gives and takes the cache of a sequence as one piece of bytes (`llama_state_seq_get_data()` and
`llama_state_seq_set_data()`). It has no version and does not say which model it is of, but for given numbers of
layers, heads and cells it is a struct with fixed places:

    magic, sequence, number of streams
    for each cell: position, number of sequences (1), sequence
    are values transposed, number of layers[, rotation of keys, of values]
    for each layer: type, bytes of a cell's keys; keys [cell][head][element]
    for each layer: type, bytes of a cell's values; values [cell][head][element]
     or, transposed: type, bytes of an element, elements of a cell; values [head][element][cell]

Of latents there is one for a cell, where the keys are, and nothing of values.

A context that does not share its cells among sequences has a stream for each sequence; the cells are in one of
them, and the others are empty. If layers have a sliding window, all from the number of streams on is there
twice: for the other layers, and then for those with a window, with their last tokens only.

Recurrent layers follow, or are alone. Their one cell has no sequence, and is the state after its position:

    number of cells (1), position, 0
    0, number of the model's layers, with and without a state
    for each layer that has a state: type, bytes of r; r
    for each layer that has a state: type, bytes of s; s

Source: llama.cpp's src/llama-kv-cache.cpp and src/llama-memory-recurrent.cpp, states of the versions 2 to 4;
only those of version 4 have rotations.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import InvalidError, UnsupportedError
from kvferry.model import Dtype, Part, TpRule

MAGIC = 0xAF143CD8
HEAD_BYTES = 8  # before the number of streams
CELL_BYTES = 12
STATE_CELL_BYTES = 8  # of recurrent layers
SIDE_BYTES = 12  # what stands before the keys or the values of each layer

State = bytes | bytearray | memoryview | NDArray[np.uint8]


class CacheType(enum.Enum):
    """A type of a cache's elements: ggml's number, and elements and bytes of its blocks.

    Of types with blocks of several elements kvferry moves the bytes as they are.
    """

    F32 = 0, 1, 4
    F16 = 1, 1, 2
    BF16 = 30, 1, 2
    Q4_0 = 2, 32, 18
    Q4_1 = 3, 32, 20
    Q5_0 = 6, 32, 22
    Q5_1 = 7, 32, 24
    Q8_0 = 8, 32, 34
    IQ4_NL = 20, 32, 18

    def __init__(self, number: int, block: int, block_bytes: int) -> None:
        self.number, self.block, self.block_bytes = number, block, block_bytes

    @property
    def quantized(self) -> bool:
        """Whether a block has several elements."""
        return self.block > 1

    @property
    def unit(self) -> Dtype:
        """What kvferry counts in: elements, or bytes of a quantized type."""
        return Dtype.U8 if self.quantized else Dtype.by_name(self.name.lower())

    def units(self, elements: int) -> int:
        """How many units so many elements have, in whole blocks."""
        return elements // self.block * self.block_bytes if self.quantized else elements

    def elements(self, size: int) -> int:
        """The number of elements in whole blocks of this many bytes together."""
        return size // self.block_bytes * self.block


_TYPES = {kind.number: kind for kind in CacheType}


class Side(NamedTuple):
    """One of the things that a layer keeps of a token's head.

    Attributes:
        name: as other engines call it
        what: in sentences
        size: elements; 0: the layer has none
    """

    name: str
    what: str
    kind: CacheType
    size: int


@dataclass(frozen=True)
class Section:
    """Layers that are alike, and whose cells are together in a state.

    Attributes:
        layers: their numbers in the cache
        written: what a state says of their number
        heads: of each layer
        sides: keys and values, latents, or r and s
        kept: how many of the last tokens the next one looks at; None: all
        streams: see SequenceCache; 0: they are recurrent layers, which have none
        rotations, interleaved, transposed: see SequenceCache
    """

    layers: tuple[int, ...]
    written: int
    heads: int
    sides: tuple[Side, ...]
    kept: int | None = None
    streams: int = 0
    rotations: tuple[int, int] | None = None
    interleaved: bool = False
    transposed: bool = False

    @property
    def recurrent(self) -> bool:
        """Whether a layer has one cell, which stands for all tokens."""
        return self.streams == 0

    def first(self, tokens: int) -> int:
        """The first of so many tokens that the next one looks at."""
        return 0 if self.kept is None else max(0, tokens - self.kept)

    @property
    def parts(self) -> tuple[Part, ...]:
        """What each layer keeps, in kvferry's words."""
        split = len(self.sides) > 1 and not self.recurrent
        return tuple(
            Part(
                side.name,
                side.kind.unit,
                self.heads,
                side.kind.units(side.size),
                tp_rule=TpRule.SPLIT if split else TpRule.REPLICATE,
            )
            for side in self.sides
            if side.size
        )


@dataclass(frozen=True)
class Frame:
    """A state, and where cells of equal layers are.

    Attributes:
        at: where the number of streams is; of recurrent layers, that of cells
        recurrent: whether these layers are
        stream: the number of the one that has cells
        count: of cells
        layers: what the state says of their number
    """

    state: NDArray[np.uint8]
    at: int
    recurrent: bool
    stream: int
    count: int
    layers: int

    @classmethod
    def of(cls, state: NDArray[np.uint8], at: int, recurrent: bool = False) -> Frame:
        """Finds the cells behind a place. Raises InvalidError: there are none."""
        frame = cls(state, at, recurrent, 0, 0, 0)
        if recurrent:
            (count,) = frame.numbers(at, "u4", 1)
            if count != 1:
                raise InvalidError(f"a state has {count} cells of recurrent layers; allowed: 1")
            return frame._with(0, count)
        for stream in range(frame.numbers(at, "u4", 1)[0]):
            (count,) = frame.numbers(at + 4 + 4 * stream, "u4", 1)
            if count:
                return frame._with(stream, count)
        raise InvalidError("a state has no cells; allowed: one token or more")

    def _with(self, stream: int, count: int) -> Frame:
        """The same with so many cells."""
        found = replace(self, stream=stream, count=count)
        return replace(found, layers=found.numbers(found.begin + 4, "u4", 1)[0])

    @property
    def begin(self) -> int:
        """Where what follows the cells begins."""
        return self.begin_of_cells + self.count * self._cell_bytes

    @property
    def cells(self) -> NDArray[np.int32]:
        """For each cell: position, number of sequences[, sequence]."""
        size = self._cell_bytes
        return self.array(self.begin_of_cells, "i4", (self.count, size // 4), (size, 4))

    @property
    def begin_of_cells(self) -> int:
        """Where the first cell is, behind their number."""
        return self.at + (4 if self.recurrent else 8 + 4 * self.stream)

    @property
    def _cell_bytes(self) -> int:
        return STATE_CELL_BYTES if self.recurrent else CELL_BYTES

    def array(self, at: int, kind: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> NDArray[Any]:
        """Elements of the state, not copied."""
        found: NDArray[Any] = np.ndarray(shape, f"<{kind}", self.state.data, at, strides)
        return found

    def numbers(self, at: int, kind: str, count: int) -> list[int]:
        """Numbers that follow each other. Raises InvalidError: the state is shorter."""
        size = np.dtype(kind).itemsize
        if at + count * size > len(self.state):
            raise InvalidError(f"a state ends after {len(self.state)} bytes, in the middle of its fields")
        return [int(number) for number in self.array(at, kind, (count,), (size,))]


def _side_bytes(section: Section, cells: int) -> tuple[int, int]:
    """Bytes of the keys and of the values of a layer, or r and s, with what stands before them."""
    found = [
        SIDE_BYTES + cells * section.heads * side.kind.units(side.size) * side.kind.unit.bits // 8
        for side in section.sides
    ]
    return found[0], sum(found[1:])


def _places(section: Section, frame: Frame) -> tuple[int, int, int]:
    """Where the keys of the first layer are, the values of the first layer, and what follows them."""
    keys = frame.begin + (8 if section.rotations is None else 16)
    of_keys, of_values = _side_bytes(section, frame.count)
    values = keys + len(section.layers) * of_keys
    return keys, values, values + len(section.layers) * of_values


def end_of(section: Section, frame: Frame) -> int:
    """Where all of it ends."""
    return _places(section, frame)[2] + 4 * _streams_behind(section, frame)


def _streams_behind(section: Section, frame: Frame) -> int:
    """How many streams without cells follow."""
    return 0 if section.recurrent else section.streams - 1 - frame.stream


def fields(section: Section, frame: Frame) -> Iterator[tuple[str, NDArray[Any], Any]]:
    """All but positions, sequences and what sides have: name, place and value of each field."""
    keys, values, after = _places(section, frame)
    of_keys, of_values = _side_bytes(section, frame.count)

    def one(at: int) -> NDArray[Any]:
        return frame.array(at, "u4", (1,), (4,))

    def each(at: int, kind: str, stride: int) -> NDArray[Any]:
        return frame.array(at, kind, (len(section.layers),), (stride,))

    if not section.recurrent:
        others = _streams_behind(section, frame)
        yield "the number of streams", one(frame.at), section.streams
        yield "the number of cells in other streams", frame.array(frame.at + 4, "u4", (frame.stream,), (4,)), 0
        yield "the number of cells in other streams", frame.array(after, "u4", (others,), (4,)), 0
    yield "the number of cells", one(frame.begin_of_cells - 4), frame.count
    yield "the number of a cell's sequences", frame.cells[:, 1], 0 if section.recurrent else 1
    yield "whether values are transposed", one(frame.begin), section.transposed
    yield "the number of layers", one(frame.begin + 4), section.written
    if section.rotations is not None:
        yield "the rotation of keys", one(frame.begin + 8), section.rotations[0]
        yield "the rotation of values", one(frame.begin + 12), section.rotations[1]
    side = section.sides[0]
    size = _side_bytes(section, 1)[0] - SIDE_BYTES
    yield f"the type of {side.what}", each(keys, "i4", of_keys), side.kind.number
    yield f"the bytes of a cell's {side.what}", each(keys + 4, "u8", of_keys), size
    if len(section.sides) == 1:
        return
    side = section.sides[1]
    size = _side_bytes(section, 1)[1] - SIDE_BYTES
    yield f"the type of {side.what}", each(values, "i4", of_values), side.kind.number
    if section.transposed:
        yield "the bytes of a value's element", each(values + 4, "u4", of_values), side.kind.block_bytes
        yield (
            "the elements of a cell's values",
            each(values + 8, "u4", of_values),
            section.heads * side.size,
        )
    else:
        yield f"the bytes of a cell's {side.what}", each(values + 4, "u8", of_values), size


def difference(section: Section, frame: Frame) -> str:
    """The first field that has another value, and both values; "": none."""
    for name, place, value in fields(section, frame):
        others = place[place != value]
        if others.size:
            return f"{name} is {others[0]}; allowed: {int(value)}"
    return ""


def rows(section: Section, frame: Frame) -> tuple[NDArray[Any], NDArray[Any]]:
    """Keys and values of a state: [layer][cell][head][unit], not copied."""
    keys, values, _ = _places(section, frame)
    of_keys, of_values = _side_bytes(section, frame.count)
    count, heads = frame.count, section.heads

    def of_side(at: int, of_layer: int, side: Side, transposed: bool) -> NDArray[Any]:
        item, size = side.kind.unit.bits // 8, side.kind.units(side.size)
        within = (
            (item, size * count * item, count * item)
            if transposed
            else (heads * size * item, size * item, item)
        )
        shape = (len(section.layers), count, heads, size)
        return frame.array(at + SIDE_BYTES, f"u{item}", shape, (of_layer, *within))

    first, *others = section.sides
    if not others:  # there are no values, and behind the last keys may be nothing
        others, values = [first._replace(size=0)], keys
    return of_side(keys, of_keys, first, False), of_side(values, of_values, others[0], section.transposed)


def walk(sections: Sequence[Section], state: NDArray[np.uint8]) -> tuple[list[Frame], int]:
    """Where the cells of each section are, and where what follows the last begins. Raises UnsupportedError."""
    frames: list[Frame] = []
    end = HEAD_BYTES
    for section in sections:
        frame = Frame.of(state, end, section.recurrent)
        frames.append(frame)
        if frame.stream >= max(section.streams, 1):
            raise UnsupportedError(f"cells are in stream {frame.stream}; allowed: less than {section.streams}")
        if frame.layers != section.written:
            raise UnsupportedError(f"the number of layers is {frame.layers}; allowed: {section.written}")
        end = end_of(section, frame)
        if len(state) < end:
            raise UnsupportedError(
                f"a state of {frames[0].count} cells has {len(state)} bytes; allowed: {end}"
                f"{'' if section is sections[-1] else ' and more'}"
            )
        wrong = difference(section, frame)
        if wrong:
            raise UnsupportedError(wrong)
    return frames, end


def check_magic(state: NDArray[np.uint8]) -> None:
    """Raises InvalidError: what is given does not begin as a state does."""
    (magic,) = Frame(state, 0, False, 0, 0, 0).numbers(0, "u4", 1)
    if magic != MAGIC:
        raise InvalidError(
            f"a state begins with {magic:#x}; allowed: {MAGIC:#x}, as llama_state_seq_get_data() writes"
        )


def type_of(what: str, number: int) -> CacheType:
    """The type of ggml's number. Raises UnsupportedError, with the name of what has it."""
    if number not in _TYPES:
        allowed = ", ".join(f"{kind.number} ({kind.name.lower()})" for kind in CacheType)
        raise UnsupportedError(f"{what} are of ggml's type {number}; allowed: {allowed}")
    return _TYPES[number]


def bytes_of(state: State) -> NDArray[np.uint8]:
    """The bytes of a state, not copied."""
    return np.frombuffer(state, np.uint8)
