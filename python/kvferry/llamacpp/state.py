"""The saved state of a sequence of llama.cpp, whose cells kvferry moves. sections.py knows where they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import InvalidError, KvferryError, UnsupportedError
from kvferry.llamacpp.sections import (
    HEAD_BYTES,
    MAGIC,
    SIDE_BYTES,
    CacheType,
    Frame,
    Section,
    Side,
    State,
    bytes_of,
    check_magic,
    difference,
    end_of,
    fields,
    rows,
    type_of,
    walk,
)
from kvferry.model import Group, GroupKind, Model
from kvferry.transfer_params import own_group_name


class LayerCells(NamedTuple):
    """What a state has of a layer; the arrays are parts of the state.

    A unit is an element, or a byte of a quantized type.

    Attributes:
        first: the position of the first token; of a recurrent layer that of the last, whose row stands for all
        keys, values: [token][head][unit]; latents are keys of one head, and values have no units; recurrent
            layers have r and s here, of one head
    """

    first: int
    keys: NDArray[Any]
    values: NDArray[Any]


@dataclass(frozen=True)
class States:
    """What recurrent layers keep: of a sequence one state, in which all of its tokens are.

    Attributes:
        layers: how many have a state
        model_layers: how many the model has, as llama.cpp counts
        r_size, s_size: elements of what llama.cpp calls r, mostly the last inputs of a convolution, and s, the
            recurrent state; 0: there is none
    """

    layers: int
    model_layers: int
    r_size: int
    s_size: int
    r_type: CacheType = CacheType.F32
    s_type: CacheType = CacheType.F32

    def section(self, first: int) -> Section:
        """These layers, numbered from a first one on."""
        sides = Side("r", "r", self.r_type, self.r_size), Side("s", "s", self.s_type, self.s_size)
        return Section(tuple(range(first, first + self.layers)), self.model_layers, 1, sides, kept=1)


@dataclass(frozen=True)
class SequenceCache:
    """How a context of llama.cpp keeps the cache of a sequence.

    All layers that keep keys and values are alike, but for windows, and so are all that are recurrent. The
    former are numbered from 0 on, the latter behind them: in a state their place in the model is not said.

    Attributes:
        layers: that keep keys and values, or latents
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
        states: of recurrent layers. Then the cache goes to another llama.cpp only, and the cells of the other
            layers go as they lie: of_state() takes them for one head that is not interleaved
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
    states: States | None = None

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

        Args:
            kv_heads, interleaved, windowed, window: see SequenceCache. Of one with recurrent layers 1 and False
                will do: see `states`

        Raises InvalidError (this is no state, or one without cells; layers that there are not),
        UnsupportedError (a cache of another kind: with other windows, with an indexer ...).
        """
        if kv_heads < 1:
            raise InvalidError(f"kv_heads is {kv_heads}; allowed: 1 and more")
        if windowed and window < 2:
            raise InvalidError(f"window is {window}; allowed: 2 and more")
        return _read_cache(bytes_of(state), kv_heads, interleaved, tuple(windowed), window)

    @property
    def latent(self) -> bool:
        """Whether layers keep latents."""
        return self.value_size == 0

    @property
    def sides(self) -> tuple[Side, ...]:
        """What each layer keeps of a token's head, of those that are not recurrent."""
        if self.latent:
            return (Side("latent", "keys", self.key_type, self.key_size),)
        return (
            Side("k", "keys", self.key_type, self.key_size),
            Side("v", "values", self.value_type, self.value_size),
        )

    @property
    def full(self) -> tuple[int, ...]:
        """The layers that keep all tokens."""
        return tuple(layer for layer in range(self.layers) if layer not in self.windowed)

    @property
    def recurrent(self) -> tuple[int, ...]:
        """The layers with a state."""
        return self.states.section(self.layers).layers if self.states else ()

    @property
    def sections(self) -> tuple[Section, ...]:
        """The layers whose cells are together in a state, in its order."""
        found = []
        if self.layers:
            plain = Section(
                self.full,
                len(self.full),
                self.kv_heads,
                self.sides,
                None,
                self.streams,
                self.rotations,
                self.interleaved,
                self.transposed,
            )
            found.append(plain)
            if self.windowed:
                found.append(
                    replace(plain, layers=self.windowed, written=len(self.windowed), kept=self.window - 1)
                )
        if self.states:
            found.append(self.states.section(self.layers))
        return tuple(found)

    def section(self, layer: int) -> Section:
        """That of a layer."""
        return next(section for section in self.sections if layer in section.layers)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each kind, the kind of the first layer first, as vLLM has them if both are as many."""
        kinds = (self.full, self.windowed) if 0 in self.full else (self.windowed, self.full)
        return tuple(kind for kind in (*kinds, self.recurrent) if kind)

    def model(self, groups: Sequence[Sequence[int]] | None = None) -> Model:
        """What kvferry moves of it, as other engines with the same model describe it.

        Args:
            groups: the layers of each of the other engine's groups; None: see `groups`

        Raises InvalidError: these are not all layers, each once, those of other kinds apart.
        """
        groups = self.groups if groups is None else groups
        count = self.layers + len(self.recurrent)
        if sorted(layer for group in groups for layer in group) != list(range(count)) or any(
            len({self.section(layer) for layer in group}) != 1 for group in groups
        ):
            raise InvalidError(
                f"groups are {groups}; allowed: each of {count} layers once, in groups of one "
                f"kind; the kinds are {self.groups}"
            )
        found = []
        for number, group in enumerate(groups):
            section = self.section(group[0])
            found.append(
                Group(
                    own_group_name(number, 0),
                    tuple(group),
                    section.parts,
                    kind=GroupKind.STATE if section.recurrent else GroupKind.TOKENS,
                    window_tokens=self.window if group[0] in self.windowed else 0,
                )
            )
        return Model(found, count)

    @property
    def facts(self) -> dict[str, str]:
        """What must be equal on both sides beyond the model: how cells are quantized, whose states they are."""
        sides = zip(self.sides, self.rotations or (0, 0), strict=False)
        said = [
            f"{side.name} {side.kind.name} rotated by {size}" for side, size in sides if side.kind.quantized
        ]
        return {
            **({"quantized": ", ".join(said)} if said else {}),
            **({"states": "in the order of llama.cpp"} if self.states else {}),
        }

    def make(self, tokens: int) -> tuple[NDArray[np.uint8], list[LayerCells]]:
        """A state of this many tokens, at least one, to be filled: its bytes, and what it has of each layer.

        Layers with a window have the tokens that the next one looks at.
        """
        frames: list[Frame] = []
        length = HEAD_BYTES
        firsts = [section.first(tokens) for section in self.sections]
        for section, first in zip(self.sections, firsts, strict=True):
            frames.append(
                Frame(np.empty(0, np.uint8), length, section.recurrent, 0, tokens - first, len(section.layers))
            )
            length = end_of(section, frames[-1])
        state = np.empty(length, np.uint8)
        head = state[:HEAD_BYTES].view("<u4")
        head[0], head[1] = MAGIC, 0
        frames = [replace(frame, state=state) for frame in frames]
        for section, frame, first in zip(self.sections, frames, firsts, strict=True):
            for _, place, value in fields(section, frame):
                place[...] = value
            frame.cells[:, 0], frame.cells[:, 2:] = np.arange(first, tokens), 0
        return state, self._layers(frames, firsts)

    def read(self, state: State) -> list[LayerCells]:
        """What a state has of each layer; not copied if tokens lie in their order.

        Raises InvalidError (this is no state, or one without cells, or its tokens are not those from 0 on; of
        layers with a window, the last ones; or recurrent layers do not stand at the last one), UnsupportedError
        (it is of another cache).
        """
        frames = _check(self, bytes_of(state))
        orders, firsts = [], []
        end = frames[0].count if self.layers else int(frames[0].cells[0, 0]) + 1
        for frame, section in zip(frames, self.sections, strict=True):
            positions, latest = frame.cells[:, 0], section.first(end)
            order = np.argsort(positions, kind="stable")
            first = end - frame.count
            if not 0 <= first <= latest or not np.array_equal(positions[order], np.arange(first, end)):
                raise InvalidError(
                    f"the recurrent layers stand at position {positions[0]}; allowed: {max(0, end - 1)}, that "
                    "of the last token"
                    if section.recurrent
                    else f"the state has {frame.count} tokens of positions {positions.min()} to "
                    f"{positions.max()}; allowed: each from {latest} to {end - 1} once"
                )
            firsts.append(first)
            orders.append(order)
        found = self._layers(frames, firsts)
        for section, order in zip(self.sections, orders, strict=True):
            if not np.array_equal(order, np.arange(len(order))):
                for layer in section.layers:
                    first, keys, values = found[layer]
                    found[layer] = LayerCells(first, keys[order], values[order])
        return found

    def _layers(self, frames: Sequence[Frame], firsts: Sequence[int]) -> list[LayerCells]:
        """What sections have of each layer."""
        found = {}
        for section, frame, first in zip(self.sections, frames, firsts, strict=True):
            keys, values = rows(section, frame)
            for i, layer in enumerate(section.layers):
                found[layer] = LayerCells(first, keys[i], values[i])
        return [found[layer] for layer in sorted(found)]


def _check(cache: SequenceCache, state: NDArray[np.uint8]) -> list[Frame]:
    """Where the cells are. Raises UnsupportedError: the state is of another cache."""
    check_magic(state)
    frames, end = walk(cache.sections, state)
    if len(state) > end:
        raise UnsupportedError(f"a state of {frames[0].count} cells has {len(state)} bytes; allowed: {end}")
    return frames


def _read_cache(
    state: NDArray[np.uint8], kv_heads: int, interleaved: bool, windowed: tuple[int, ...], window: int
) -> SequenceCache:
    """The cache whose states have this form. Raises UnsupportedError."""
    check_magic(state)
    if _is_recurrent(state):
        if windowed:
            raise InvalidError(f"windowed is {windowed}; allowed: none, as all layers are recurrent")
        cache = SequenceCache(0, 1, 0, 0, states=_read_states(state, HEAD_BYTES))
        _check(cache, state)
        return cache
    frame = Frame.of(state, HEAD_BYTES)
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
            cache = _with_states(cache, state)
            _check(cache, state)
            return cache
        except (UnsupportedError, InvalidError) as error:
            reasons.append(str(error))
    raise UnsupportedError(
        f"this is not a state of {frame.layers} equal layers with keys and values of {kv_heads} heads"
        f"{f', and {len(windowed)} with a window' if windowed else ''}: {reasons[0]}; read as an older one: "
        f"{reasons[1]}; as one of latents: {reasons[2]}; as an older one of latents: {reasons[3]}"
    )


def _is_recurrent(state: NDArray[np.uint8]) -> bool:
    """Whether all layers are: a state begins with one cell of no sequence, which is followed by a 0.

    Else it begins with a number of streams, and if there is one, its first cell has one sequence. One without
    cells, in its recurrent layers neither, begins as if these alone had one token, but they have no r and s.
    """
    begin = state[HEAD_BYTES : HEAD_BYTES + 16].tobytes()
    if begin[:4] != b"\1\0\0\0" or begin[8:] != bytes(8):
        return False
    rest = state[HEAD_BYTES + 20 :].tobytes() if begin[4:8] == bytes(4) else b""
    layers, half = len(rest) // (2 * SIDE_BYTES), len(rest) // 2
    return not rest or rest != (rest[:SIDE_BYTES] * layers + rest[half : half + SIDE_BYTES] * layers)


def _with_states(cache: SequenceCache, state: NDArray[np.uint8]) -> SequenceCache:
    """The cache with what follows its sections in a state, if anything does. Raises UnsupportedError."""
    frames, end = walk(cache.sections, state)
    if end == len(state):
        return cache
    try:
        states = _read_states(state, end)
    except KvferryError as error:
        raise UnsupportedError(
            f"a state of {frames[0].count} cells has {len(state)} bytes; allowed: {end}, or recurrent layers "
            f"behind: {error}"
        ) from None
    return replace(
        cache,
        kv_heads=1,
        key_size=cache.kv_heads * cache.key_size,
        value_size=cache.kv_heads * cache.value_size,
        interleaved=False,
        states=states,
    )


def _read_states(state: NDArray[np.uint8], at: int) -> States:
    """What recurrent layers keep, which have a state from a place to its end. Raises UnsupportedError."""
    frame = Frame.of(state, at, True)
    begin = frame.begin + 8
    whole = len(state) - begin
    r_type = type_of("r", frame.numbers(begin, "i4", 1)[0])
    (r_bytes,) = frame.numbers(begin + 4, "u8", 1)
    wrong = (
        f"{whole} bytes of recurrent layers begin with {r_bytes} bytes of r; allowed: equal ones of 1 to "
        f"{frame.layers} layers, and as many equal ones of s"
    )
    # The state does not say how many layers are recurrent: as many as there are with equal r, and with equal s.
    for layers in range(1, min(frame.layers, whole // (2 * SIDE_BYTES + r_bytes)) + 1):
        middle = begin + layers * (SIDE_BYTES + r_bytes)
        (s_bytes,) = frame.numbers(middle + 4, "u8", 1)
        if r_bytes + s_bytes and layers * (2 * SIDE_BYTES + r_bytes + s_bytes) == whole:
            s_type = type_of("s", frame.numbers(middle, "i4", 1)[0])
            sizes = r_type.elements(r_bytes), s_type.elements(s_bytes)
            states = States(layers, frame.layers, *sizes, r_type, s_type)
            wrong = difference(states.section(0), frame)
            if not wrong:
                return states
    raise UnsupportedError(wrong)


def _read_sides(frame: Frame, kv_heads: int, transposed: bool, rotated: bool, latent: bool) -> SequenceCache:
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
        value_type = type_of("values", kind)
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


def _side(frame: Frame, what: str, at: int, kv_heads: int) -> tuple[CacheType, int]:
    """The type of a layer's keys or values, and how many elements a head has, which are whole blocks."""
    kind = type_of(what, frame.numbers(at, "i4", 1)[0])
    size = frame.numbers(at + 4, "u8", 1)[0]
    return kind, kind.elements(_share(f"bytes of a cell's {what}", size, kv_heads * kind.block_bytes, kv_heads))


def _share(what: str, whole: int, step: int, count: int) -> int:
    """What each of `count` has of a number, which is a multiple of a step."""
    if whole % step or not whole:
        raise UnsupportedError(f"there are {whole} {what}; allowed: a multiple of {step}")
    return whole // count
