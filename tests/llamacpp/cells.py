"""Writes and reads states of sequences number by number, without any of kvferry, whose results are compared.

Elements of keys are named by their place in the checkpoint's order.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

Side = str  # "k" or "v"; "r" or "s" of recurrent layers
#: Layer, position, head, element. Recurrent layers are behind the others, and have the last position.
Place = tuple[int, int, int, int]
Cells = dict[tuple[Side, Place], int]

TYPES = {"f32": (0, "I"), "f16": (1, "H"), "bf16": (30, "H")}
#: Types of which cells are bytes: ggml's number, and the bytes of a block of 32 elements.
QUANTIZED = {"q4_0": (2, 18), "q5_1": (7, 24), "q8_0": (8, 34)}


def counted(kind: str, size: int) -> tuple[int, str, int]:
    """ggml's number of a type, the code of what is counted of it, and how many of these a head has."""
    if kind in QUANTIZED:
        number, block_bytes = QUANTIZED[kind]
        return number, "B", size // 32 * block_bytes
    return *TYPES[kind], size


@dataclass(frozen=True)
class Form:
    """How a state is written. See the fields of kvferry.llamacpp.SequenceCache. Latents: values of size 0.

    Attributes:
        recurrent: layers with r and s, which are float32, behind the others
        model_layers: what a state says of the model's layers
    """

    layers: int = 2
    heads: int = 3
    key_size: int = 8
    value_size: int = 6
    key_type: str = "f16"
    value_type: str = "f16"
    interleaved: bool = False
    transposed: bool = False
    streams: int = 1
    stream: int = 0
    rotations: tuple[int, int] | None = (0, 0)
    windowed: tuple[int, ...] = ()
    window: int = 0
    recurrent: int = 0
    r_size: int = 5
    s_size: int = 12
    model_layers: int = 9

    @property
    def full(self) -> list[int]:
        """The layers without a window."""
        return [layer for layer in range(self.layers) if layer not in self.windowed]

    def place(self, element: int) -> int:
        """Where an element of a key is in a state."""
        if not self.interleaved or self.key_type in QUANTIZED:
            return element
        half = self.key_size // 2
        return 2 * element if element < half else 2 * (element - half) + 1


def raw(side: Side, place: Place) -> int:
    """A number of 16 bits for each place, unlike its neighbours'; of bytes the lower ones count."""
    layer, position, head, element = place
    return (31 * layer + 7919 * position + 613 * head + 17 * element + 29 * "kvrs".index(side)) % 65521


def write(form: Form, positions: Sequence[int], value: Callable[[Side, Place], int] = raw) -> bytes:
    """A state of cells with these positions; of layers with a window the last ones, as llama.cpp does."""
    out = struct.pack("<Ii", 0xAF143CD8, 5)
    if form.layers:
        out += _write_section(form, form.full, positions, value)
    if form.windowed:
        out += _write_section(form, form.windowed, kept(form, positions, form.window), value)
    if form.recurrent:
        out += _write_recurrent(form, max(positions), value)
    return out


def _write_recurrent(form: Form, position: int, value: Callable[[Side, Place], int]) -> bytes:
    """What a state has of recurrent layers."""
    out = [struct.pack("<IiIII", 1, position, 0, 0, form.model_layers)]
    for side, size in (("r", form.r_size), ("s", form.s_size)):
        for layer in range(form.layers, form.layers + form.recurrent):
            out.append(struct.pack("<iQ", 0, 4 * size))
            out += [struct.pack("<I", value(side, (layer, position, 0, element))) for element in range(size)]
    return b"".join(out)


def kept(form: Form, positions: Sequence[int], count: int) -> list[int]:
    """The positions among the last `count`."""
    return [position for position in positions if position > max(positions) - count]


def _write_section(
    form: Form, layers: Sequence[int], positions: Sequence[int], value: Callable[[Side, Place], int]
) -> bytes:
    """What a state has of layers that are alike."""
    out = [struct.pack("<I", form.streams)]
    out += [struct.pack("<I", 0)] * form.stream
    out.append(struct.pack("<I", len(positions)))
    out += [struct.pack("<iIi", position, 1, 5) for position in positions]
    out.append(struct.pack("<II", form.transposed, len(layers)))
    if form.rotations is not None:
        out.append(struct.pack("<II", *form.rotations))
    number, code, size = counted(form.key_type, form.key_size)
    width = struct.calcsize(code)
    last = 2 ** (8 * width) - 1
    for layer in layers:
        out.append(struct.pack("<iQ", number, form.heads * size * width))
        for position in positions:
            for head in range(form.heads):
                row = [0] * size
                for element in range(size):
                    row[form.place(element)] = value("k", (layer, position, head, element)) & last
                out.append(struct.pack(f"<{size}{code}", *row))
    number, code, size = counted(form.value_type, form.value_size)
    width = struct.calcsize(code)
    last = 2 ** (8 * width) - 1
    for layer in layers if size else ():
        if form.transposed:
            out.append(struct.pack("<iII", number, width, form.heads * size))
            for head in range(form.heads):
                for element in range(size):
                    for position in positions:
                        bits = value("v", (layer, position, head, element)) & last
                        out.append(struct.pack(f"<{code}", bits))
        else:
            out.append(struct.pack("<iQ", number, form.heads * size * width))
            for position in positions:
                for head in range(form.heads):
                    for element in range(size):
                        bits = value("v", (layer, position, head, element)) & last
                        out.append(struct.pack(f"<{code}", bits))
    out += [struct.pack("<I", 0)] * (form.streams - 1 - form.stream)
    return b"".join(out)


class _Taking:
    """Takes one number after the other."""

    def __init__(self, state: bytes) -> None:
        self.state, self.at = state, 0

    def take(self, code: str) -> int:
        (found,) = struct.unpack_from(f"<{code}", self.state, self.at)
        self.at += struct.calcsize(f"<{code}")
        return int(found)

    def must(self, what: str, code: str, value: int) -> None:
        found = self.take(code)
        assert found == value, f"{what} is {found}, not {value}"


def read(form: Form, state: bytes) -> Cells:
    """All keys and values of a state, which must have this form to its last byte."""
    taking = _Taking(state)
    taking.must("magic", "I", 0xAF143CD8)
    taking.take("i")
    found = _read_section(form, form.full, taking) if form.layers else {}
    if form.windowed:
        found |= _read_section(form, form.windowed, taking)
    if form.recurrent:
        found |= _read_recurrent(form, taking)
    assert taking.at == len(state), f"the state has {len(state) - taking.at} bytes too many"
    return found


def _read_recurrent(form: Form, taking: _Taking) -> Cells:
    """What a state has of recurrent layers."""
    taking.must("cells", "I", 1)
    position = taking.take("i")
    taking.must("sequences of a cell", "I", 0)
    taking.must("transposed", "I", 0)
    taking.must("layers", "I", form.model_layers)
    cells: Cells = {}
    for side, size in (("r", form.r_size), ("s", form.s_size)):
        for layer in range(form.layers, form.layers + form.recurrent):
            taking.must(f"type of {side}", "i", 0)
            taking.must(f"bytes of {side}", "Q", 4 * size)
            for element in range(size):
                cells[side, (layer, position, 0, element)] = taking.take("I")
    return cells


def _read_section(form: Form, layers: Sequence[int], taking: _Taking) -> Cells:
    """What a state has of layers that are alike."""
    take, must = taking.take, taking.must
    must("streams", "I", form.streams)
    for _ in range(form.stream):
        must("cells of another stream", "I", 0)
    positions = []
    for _ in range(take("I")):
        positions.append(take("i"))
        must("sequences of a cell", "I", 1)
        take("i")
    must("transposed", "I", form.transposed)
    must("layers", "I", len(layers))
    for rotated in form.rotations or ():
        must("rotation", "I", rotated)
    cells: Cells = {}
    number, code, size = counted(form.key_type, form.key_size)
    for layer in layers:
        must("type of keys", "i", number)
        must("bytes of a cell's keys", "Q", form.heads * size * struct.calcsize(code))
        for position in positions:
            for head in range(form.heads):
                row = [take(code) for _ in range(size)]
                for element in range(size):
                    cells["k", (layer, position, head, element)] = row[form.place(element)]
    number, code, size = counted(form.value_type, form.value_size)
    for layer in layers if size else ():
        must("type of values", "i", number)
        if form.transposed:
            must("bytes of an element", "I", struct.calcsize(code))
            must("elements of a cell's values", "I", form.heads * size)
            for head in range(form.heads):
                for element in range(size):
                    for position in positions:
                        cells["v", (layer, position, head, element)] = take(code)
        else:
            must("bytes of a cell's values", "Q", form.heads * size * struct.calcsize(code))
            for position in positions:
                for head in range(form.heads):
                    for element in range(size):
                        cells["v", (layer, position, head, element)] = take(code)
    for _ in range(form.streams - 1 - form.stream):
        must("cells of another stream", "I", 0)
    return cells


def expected(form: Form, positions: Sequence[int], count: int | None = None) -> Cells:
    """What read() must find in a state of these positions.

    Args:
        count: how many of the last ones layers with a window have; None: as many as llama.cpp writes
    """
    windowed = kept(form, positions, form.window if count is None else count)
    found = {}
    for side, kind, elements in (("k", form.key_type, form.key_size), ("v", form.value_type, form.value_size)):
        _, code, size = counted(kind, elements)
        for layer in range(form.layers):
            here = windowed if layer in form.windowed else positions
            for position, head, element in itertools.product(here, range(form.heads), range(size)):
                place = layer, position, head, element
                found[side, place] = raw(side, place) & (2 ** (8 * struct.calcsize(code)) - 1)
    for side, size in (("r", form.r_size), ("s", form.s_size)):
        for layer in range(form.layers, form.layers + form.recurrent):
            for element in range(size):
                place = layer, max(positions), 0, element
                found[side, place] = raw(side, place)
    return found


def arrived(form: Form, count: int) -> Cells:
    """What read() must find in a state of the first tokens that kvferry has made.

    A later token looks at one token less than the window has, beside itself.
    """
    return expected(form, range(count), form.window - 1)


def number(kind: str, bits: int) -> float:
    """The number that bits of a type stand for."""
    if kind == "f16":
        (found,) = struct.unpack("<e", struct.pack("<H", bits))
    else:
        (found,) = struct.unpack("<f", struct.pack("<I", bits if kind == "f32" else bits << 16))
    return float(found)


def first_stream(form: Form) -> Form:
    """The same with the cells in the first stream, as kvferry writes states."""
    return replace(form, stream=0)
