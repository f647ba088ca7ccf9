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

Source: llama.cpp's src/llama-kv-cache.cpp, states of the versions 2 to 4; only those of version 4 have
rotations.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import InvalidError, UnsupportedError
from kvferry.model import Dtype, Group, Model, Part, TpRule
from kvferry.transfer_params import own_group_name

MAGIC = 0xAF143CD8
HEAD_BYTES = 8  # before the number of streams
CELL_BYTES = 12
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
_NOTHING = np.empty(0, np.uint8)


class LayerCells(NamedTuple):
    """What a state has of a layer; the arrays are parts of the state.

    A unit is an element, or a byte of a quantized type.

    Attributes:
        first: the position of the first token
        keys, values: [token][head][unit]; latents are keys of one head, and values have no units
    """

    first: int
    keys: NDArray[Any]
    values: NDArray[Any]


@dataclass(frozen=True)
class SequenceCache:
    """How a context of llama.cpp keeps the cache of a sequence. All layers are alike, but for windows.

    Attributes:
        kv_heads: of each layer; 1 of latents
        key_size, value_size: elements of a head; of latents, with what is rotated, and 0
        interleaved: the two halves that a key has in the checkpoint are interleaved: element i of the first is
            at 2 i, that of the second at 2 i + 1. See interleaves(). Of quantized keys it does not count: they
            go to another llama.cpp only
        transposed: values lie channel by channel: the context does not use flash attention
        streams: 1, or one for each sequence of the context
        rotations: sizes of the matrices by which keys and values are rotated before they are quantized; 0: not
            at all. None: states do not say it, those of older llama.cpp
        windowed: layers with a sliding window, which do not keep all tokens; see windowed_layers()
        window: how many tokens these layers look at, with the one that looks
    """

    layers: int
    kv_heads: int
    key_size: int
    value_size: int
    key_type: CacheType = CacheType.F16
    value_type: CacheType = CacheType.F16
    interleaved: bool = False
    transposed: bool = False
    streams: int = 1
    rotations: tuple[int, int] | None = (0, 0)
    windowed: tuple[int, ...] = ()
    window: int = 0

    @classmethod
    def of_state(
        cls,
        state: State,
        kv_heads: int,
        interleaved: bool,
        windowed: Sequence[int] = (),
        window: int = 0,
    ) -> SequenceCache:
        """The cache of which this is a state, of one token or more.

        Raises InvalidError (this is no state, or one without cells; layers that there are not),
        UnsupportedError (a cache of another kind: with states, with other windows ...).
        """
        if windowed and window < 2:
            raise InvalidError(f"window is {window}; allowed: 2 and more")
        return _read_cache(bytes_of(state), kv_heads, interleaved, tuple(windowed), window)

    @property
    def latent(self) -> bool:
        """Whether layers keep latents."""
        return self.value_size == 0

    @property
    def sides(self) -> tuple[tuple[str, CacheType, int], ...]:
        """What each layer keeps of a token's head: name, as other engines call it, type, and elements."""
        if self.latent:
            return (("latent", self.key_type, self.key_size),)
        return (("k", self.key_type, self.key_size), ("v", self.value_type, self.value_size))

    @property
    def full(self) -> tuple[int, ...]:
        """The layers that keep all tokens."""
        return tuple(layer for layer in range(self.layers) if layer not in self.windowed)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each kind, the kind of the first layer first, as vLLM has them if both are as many."""
        kinds = (self.full, self.windowed) if 0 in self.full else (self.windowed, self.full)
        return tuple(kind for kind in kinds if kind)

    def model(self, groups: Sequence[Sequence[int]] | None = None) -> Model:
        """What kvferry moves of it, as other engines with the same model describe it.

        Args:
            groups: the layers of each of the other engine's groups; None: see `groups`

        Raises InvalidError: these are not all layers, each once, those with and without a window apart.
        """
        groups = self.groups if groups is None else groups
        kinds = [{layer in self.windowed for layer in group} for group in groups]
        if sorted(layer for group in groups for layer in group) != list(range(self.layers)) or any(
            len(kind) != 1 for kind in kinds
        ):
            raise InvalidError(
                f"groups are {groups}; allowed: groups of the layers with a window, {self.windowed}, and "
                f"groups of the others of {self.layers}"
            )
        rule = TpRule.REPLICATE if self.latent else TpRule.SPLIT
        parts = tuple(
            Part(name, kind.unit, self.kv_heads, kind.units(size), tp_rule=rule)
            for name, kind, size in self.sides
        )
        return Model(
            [
                Group(
                    own_group_name(number, 0),
                    tuple(group),
                    parts,
                    window_tokens=self.window if group[0] in self.windowed else 0,
                )
                for number, group in enumerate(groups)
            ],
            self.layers,
        )

    @property
    def facts(self) -> dict[str, str]:
        """What must be equal on both sides beyond the model: how cells are quantized, if they are."""
        sides = zip(self.sides, self.rotations or (0, 0), strict=False)
        said = [f"{name} {kind.name} rotated by {size}" for (name, kind, _), size in sides if kind.quantized]
        return {"quantized": ", ".join(said)} if said else {}

    def first(self, layer: int, tokens: int) -> int:
        """The first of so many tokens that a layer needs for the next one."""
        return max(0, tokens - self.window + 1) if layer in self.windowed else 0

    def make(self, tokens: int) -> tuple[NDArray[np.uint8], list[LayerCells]]:
        """A state of this many tokens, at least one, to be filled: its bytes, and what it has of each layer.

        Layers with a window have the tokens that the next one looks at.
        """
        frames: list[_Frame] = []
        length = HEAD_BYTES
        firsts = [self.first(layers[0], tokens) for layers in self._sections]
        for layers, first in zip(self._sections, firsts, strict=True):
            frames.append(_Frame(_NOTHING, length, 0, tokens - first, len(layers)))
            length = _end(self, frames[-1])
        state = np.empty(length, np.uint8)
        head = state[:HEAD_BYTES].view("<u4")
        head[0], head[1] = MAGIC, 0
        frames = [replace(frame, state=state) for frame in frames]
        for frame, first in zip(frames, firsts, strict=True):
            for _, place, value in _fields(self, frame):
                place[...] = value
            frame.cells[:, 0], frame.cells[:, 2] = np.arange(first, tokens), 0
        return state, self._layers(frames, firsts)

    def read(self, state: State) -> list[LayerCells]:
        """What a state has of each layer; not copied if tokens lie in their order.

        Raises InvalidError (this is no state, or one without cells, or its tokens are not those from 0 on; of
        layers with a window, the last ones), UnsupportedError (it is of another cache).
        """
        frames = _check(self, bytes_of(state))
        orders, firsts = [], []
        end = frames[0].count
        for frame, latest in zip(
            frames, (self.first(layers[0], end) for layers in self._sections), strict=True
        ):
            positions = frame.cells[:, 0]
            order = np.argsort(positions, kind="stable")
            first = end - frame.count
            if not 0 <= first <= latest or not np.array_equal(positions[order], np.arange(first, end)):
                raise InvalidError(
                    f"the state has {frame.count} tokens of positions {positions.min()} to {positions.max()}; "
                    f"allowed: each from {latest} to {end - 1} once"
                )
            firsts.append(first)
            orders.append(order)
        found = self._layers(frames, firsts)
        for layers, order in zip(self._sections, orders, strict=True):
            if not np.array_equal(order, np.arange(len(order))):
                for layer in layers:
                    first, keys, values = found[layer]
                    found[layer] = LayerCells(first, keys[order], values[order])
        return found

    @property
    def _sections(self) -> tuple[tuple[int, ...], ...]:
        """The layers whose cells are together in a state."""
        return (self.full, self.windowed) if self.windowed else (self.full,)

    def _layers(self, frames: Sequence[_Frame], firsts: Sequence[int]) -> list[LayerCells]:
        """What sections have of each layer."""
        found = {}
        for layers, frame, first in zip(self._sections, frames, firsts, strict=True):
            keys, values = _rows(self, frame)
            for i, layer in enumerate(layers):
                found[layer] = LayerCells(first, keys[i], values[i])
        return [found[layer] for layer in range(self.layers)]


@dataclass(frozen=True)
class _Frame:
    """A state, and where cells of equal layers are.

    Attributes:
        at: where the number of streams is
        stream: the number of the one that has cells
        count: of cells
        layers: how many
    """

    state: NDArray[np.uint8]
    at: int
    stream: int
    count: int
    layers: int

    @classmethod
    def of(cls, state: NDArray[np.uint8], at: int) -> _Frame:
        """Finds the cells behind a place. Raises InvalidError: there are none."""
        frame = cls(state, at, 0, 0, 0)
        for stream in range(frame.numbers(at, "u4", 1)[0]):
            (count,) = frame.numbers(at + 4 + 4 * stream, "u4", 1)
            if count:
                found = cls(state, at, stream, count, 0)
                return replace(found, layers=found.numbers(found.begin + 4, "u4", 1)[0])
        raise InvalidError("a state has no cells; allowed: one token or more")

    @property
    def begin(self) -> int:
        """Where what follows the cells begins."""
        return self.at + 8 + 4 * self.stream + self.count * CELL_BYTES

    @property
    def cells(self) -> NDArray[np.int32]:
        """For each cell: position, number of sequences, sequence."""
        return self.array(self.begin - self.count * CELL_BYTES, "i4", (self.count, 3), (CELL_BYTES, 4))

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


def _side_bytes(cache: SequenceCache, cells: int) -> tuple[int, int]:
    """Bytes of the keys and of the values of a layer, with what stands before them."""
    found = [
        SIDE_BYTES + cells * cache.kv_heads * kind.units(size) * kind.unit.bits // 8
        for _, kind, size in cache.sides
    ]
    return found[0], sum(found[1:])


def _places(cache: SequenceCache, frame: _Frame) -> tuple[int, int, int]:
    """Where the keys of the first layer are, the values of the first layer, and what follows them."""
    keys = frame.begin + (8 if cache.rotations is None else 16)
    of_keys, of_values = _side_bytes(cache, frame.count)
    values = keys + frame.layers * of_keys
    return keys, values, values + frame.layers * of_values


def _end(cache: SequenceCache, frame: _Frame) -> int:
    """Where all of it ends."""
    return _places(cache, frame)[2] + 4 * (cache.streams - 1 - frame.stream)


def _fields(cache: SequenceCache, frame: _Frame) -> Iterator[tuple[str, NDArray[Any], Any]]:
    """All but positions, sequences, keys and values: name, place and value of each field."""
    keys, values, after = _places(cache, frame)
    of_keys, of_values = _side_bytes(cache, frame.count)
    others = cache.streams - 1 - frame.stream

    def one(at: int) -> NDArray[Any]:
        return frame.array(at, "u4", (1,), (4,))

    def each(at: int, kind: str, stride: int) -> NDArray[Any]:
        return frame.array(at, kind, (frame.layers,), (stride,))

    yield "the number of streams", one(frame.at), cache.streams
    yield "the number of cells in other streams", frame.array(frame.at + 4, "u4", (frame.stream,), (4,)), 0
    yield "the number of cells in other streams", frame.array(after, "u4", (others,), (4,)), 0
    yield "the number of cells", one(frame.at + 4 + 4 * frame.stream), frame.count
    yield "the number of a cell's sequences", frame.cells[:, 1], 1
    yield "whether values are transposed", one(frame.begin), cache.transposed
    yield "the number of layers", one(frame.begin + 4), frame.layers
    if cache.rotations is not None:
        yield "the rotation of keys", one(frame.begin + 8), cache.rotations[0]
        yield "the rotation of values", one(frame.begin + 12), cache.rotations[1]
    yield "the type of keys", each(keys, "i4", of_keys), cache.key_type.number
    yield "the bytes of a cell's keys", each(keys + 4, "u8", of_keys), _side_bytes(cache, 1)[0] - SIDE_BYTES
    if cache.latent:
        return
    yield "the type of values", each(values, "i4", of_values), cache.value_type.number
    if cache.transposed:
        yield "the bytes of a value's element", each(values + 4, "u4", of_values), cache.value_type.block_bytes
        yield (
            "the elements of a cell's values",
            each(values + 8, "u4", of_values),
            (cache.kv_heads * cache.value_size),
        )
    else:
        size = _side_bytes(cache, 1)[1] - SIDE_BYTES
        yield "the bytes of a cell's values", each(values + 4, "u8", of_values), size


def _rows(cache: SequenceCache, frame: _Frame) -> tuple[NDArray[Any], NDArray[Any]]:
    """Keys and values of a state: [layer][cell][head][unit], not copied."""
    keys, values, _ = _places(cache, frame)
    of_keys, of_values = _side_bytes(cache, frame.count)
    count, heads = frame.count, cache.kv_heads
    if cache.latent:
        values = keys  # there are none, and behind the last keys may be nothing

    def rows(at: int, of_layer: int, kind: CacheType, size: int, transposed: bool) -> NDArray[Any]:
        item, size = kind.unit.bits // 8, kind.units(size)
        within = (
            (item, size * count * item, count * item)
            if transposed
            else (heads * size * item, size * item, item)
        )
        shape = (frame.layers, count, heads, size)
        return frame.array(at + SIDE_BYTES, f"u{item}", shape, (of_layer, *within))

    return (
        rows(keys, of_keys, cache.key_type, cache.key_size, False),
        rows(values, of_values, cache.value_type, cache.value_size, cache.transposed),
    )


def _check(cache: SequenceCache, state: NDArray[np.uint8]) -> list[_Frame]:
    """Where the cells are. Raises UnsupportedError: the state is of another cache."""
    _check_magic(state)
    frames: list[_Frame] = []
    end = HEAD_BYTES
    for layers in cache._sections:
        frame = _Frame.of(state, end)
        frames.append(frame)
        if frame.stream >= cache.streams:
            raise UnsupportedError(f"cells are in stream {frame.stream}; allowed: less than {cache.streams}")
        if frame.layers != len(layers):
            raise UnsupportedError(f"the number of layers is {frame.layers}; allowed: {len(layers)}")
        end = _end(cache, frame)
        is_last = len(frames) == len(cache._sections)
        if len(state) < end or (is_last and len(state) > end):
            raise UnsupportedError(
                f"a state of {frame.count} cells has {len(state)} bytes; allowed: {end}"
                f"{'' if is_last else ' and more'}"
            )
        for name, place, value in _fields(cache, frame):
            others = place[place != value]
            if others.size:
                raise UnsupportedError(f"{name} is {others[0]}; allowed: {int(value)}")
    return frames


def _check_magic(state: NDArray[np.uint8]) -> None:
    (magic,) = _Frame(state, 0, 0, 0, 0).numbers(0, "u4", 1)
    if magic != MAGIC:
        raise InvalidError(
            f"a state begins with {magic:#x}; allowed: {MAGIC:#x}, as llama_state_seq_get_data() writes"
        )


def _read_cache(
    state: NDArray[np.uint8], kv_heads: int, interleaved: bool, windowed: tuple[int, ...], window: int
) -> SequenceCache:
    """The cache whose states have this form. Raises UnsupportedError."""
    _check_magic(state)
    frame = _Frame.of(state, HEAD_BYTES)
    (transposed,) = frame.numbers(frame.begin, "u4", 1)
    if transposed > 1 or not 1 <= frame.layers <= len(state) // SIDE_BYTES:
        raise UnsupportedError(
            f"a state of {frame.count} cells has {frame.layers} layers, and says {transposed} of whether "
            "values are transposed; allowed: layers, and 0 or 1, directly behind cells of 12 bytes"
        )
    layers = frame.layers + len(windowed)
    if windowed != tuple(sorted(set(windowed))) or any(not 0 <= layer < layers for layer in windowed):
        raise InvalidError(f"windowed is {windowed}; allowed: ascending numbers from 0 to {layers - 1}")
    reasons = []
    for rotated, latent in ((True, False), (False, False), (True, True), (False, True)):
        try:
            cache = _read_sides(frame, kv_heads, bool(transposed), rotated, latent)
            cache = replace(
                cache,
                layers=layers,
                interleaved=interleaved and not cache.key_type.quantized,
                windowed=windowed,
                window=window if windowed else 0,
            )
            if cache.latent and interleaved:
                raise InvalidError("interleaved is True; allowed: False, of latents")
            _check(cache, state)
            return cache
        except (UnsupportedError, InvalidError) as error:
            reasons.append(str(error))
    raise UnsupportedError(
        f"this is not a state of {frame.layers} equal layers with keys and values of {kv_heads} heads"
        f"{f', and {len(windowed)} with a window' if windowed else ''}: {reasons[0]}; read as an older one: "
        f"{reasons[1]}; as one of latents: {reasons[2]}; as an older one of latents: {reasons[3]}"
    )


def _read_sides(frame: _Frame, kv_heads: int, transposed: bool, rotated: bool, latent: bool) -> SequenceCache:
    """The cache of these layers, as the first one's keys and values say."""
    at = frame.begin + 8
    rotations = None
    if rotated:
        keys, values = frame.numbers(at, "u4", 2)
        rotations = keys, values
        at += 8
    key_type, key_size = _side(frame, "keys", at, kv_heads)
    at += frame.layers * (SIDE_BYTES + frame.count * frame.numbers(at + 4, "u8", 1)[0])
    if latent:
        if kv_heads != 1:
            raise UnsupportedError(f"there are {kv_heads} KV heads; allowed: 1, of latents")
        value_type, value_size = key_type, 0
    elif transposed:
        kind, _, elements = frame.numbers(at, "u4", 3)
        value_type = _type("values", kind)
        value_size = _share("elements of a cell's values", elements, kv_heads, kv_heads)
        if value_type.quantized:
            raise UnsupportedError(f"values are of the type {value_type.name.lower()}, channel by channel")
    else:
        value_type, value_size = _side(frame, "values", at, kv_heads)
    for of_side, size in zip((key_type, value_type), rotations or (0, 0), strict=True):
        if size and not of_side.quantized:
            raise UnsupportedError(f"elements of the type {of_side.name} are rotated by {size}; allowed: 0")
    return SequenceCache(
        frame.layers,
        kv_heads,
        key_size,
        value_size,
        key_type,
        value_type,
        False,
        transposed,
        frame.numbers(frame.at, "u4", 1)[0],
        rotations,
    )


def _side(frame: _Frame, what: str, at: int, kv_heads: int) -> tuple[CacheType, int]:
    """The type of a layer's keys or values, and how many elements a head has, which are whole blocks."""
    kind = _type(what, frame.numbers(at, "i4", 1)[0])
    size = frame.numbers(at + 4, "u8", 1)[0]
    return kind, kind.elements(_share(f"bytes of a cell's {what}", size, kv_heads * kind.block_bytes, kv_heads))


def _share(what: str, whole: int, step: int, count: int) -> int:
    """What each of `count` has of a number, which is a multiple of a step."""
    if whole % step or not whole:
        raise UnsupportedError(f"there are {whole} {what}; allowed: a multiple of {step}")
    return whole // count


def _type(what: str, number: int) -> CacheType:
    if number not in _TYPES:
        allowed = ", ".join(f"{kind.number} ({kind.name.lower()})" for kind in CacheType)
        raise UnsupportedError(f"{what} are of ggml's type {number}; allowed: {allowed}")
    return _TYPES[number]


def bytes_of(state: State) -> NDArray[np.uint8]:
    """The bytes of a state, not copied."""
    return np.frombuffer(state, np.uint8)
