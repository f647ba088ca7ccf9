"""States of sequences are read and written as llama.cpp does it."""

from __future__ import annotations

import itertools
import struct
from dataclasses import replace

import cells
import pytest
from cells import Form, Place, Side

from kvferry.errors import InvalidError, KvferryError, UnsupportedError
from kvferry.llamacpp import CacheType, LayerCells, SequenceCache, States

#: With recurrent layers, beside others or alone.
RECURRENT = [
    replace(form, recurrent=count, r_size=r_size, s_size=s_size)
    for form, (count, r_size, s_size) in itertools.product(
        (
            Form(layers=0),
            Form(),
            Form(interleaved=True, transposed=True, streams=3, stream=1, rotations=None),
            Form(key_size=64, value_size=32, key_type="q8_0", value_type="q4_0", rotations=(64, 0)),
            Form(3, 1, 64, 0, "bf16", "bf16", streams=4, stream=2),
            Form(layers=4, windowed=(0, 2), window=4),
        ),
        # Of the second, two layers with as many bytes of r and of s would be as long.
        ((1, 5, 12), (3, 6, 0), (4, 3, 300)),
    )
]
FORMS = (
    [
        Form(
            interleaved=interleaved, transposed=transposed, streams=streams, stream=stream, rotations=rotations
        )
        for interleaved, transposed, (streams, stream), rotations in itertools.product(
            (False, True), (False, True), ((1, 0), (4, 0), (4, 2), (4, 3)), (None, (0, 0))
        )
    ]
    + [
        Form(key_type=key, value_type=value, transposed=transposed)
        for key, value, transposed in itertools.product(cells.TYPES, cells.TYPES, (False, True))
    ]
    + [
        Form(key_size=64, value_size=32, key_type=key, value_type=value, interleaved=True, rotations=rotations)
        for key, value, rotations in (
            ("q8_0", "q8_0", (64, 0)),
            ("q4_0", "q5_1", (64, 32)),
            ("q5_1", "f16", (0, 0)),
            ("f16", "q4_0", None),
        )
    ]
    + [
        Form(3, 1, 64, 0, kind, kind, False, transposed, *streams, rotations=rotations)
        for kind, transposed, streams, rotations in itertools.product(
            ("f32", "bf16", "q8_0"), (False, True), ((1, 0), (4, 0), (4, 2)), (None, (0, 0))
        )
    ]
    + RECURRENT
    + [
        replace(form, layers=5, windowed=windowed, window=window)
        for form, windowed, window in itertools.product(
            (Form(), Form(interleaved=True, transposed=True, streams=3, stream=1, rotations=None)),
            ((0, 2, 3), (4,), (0, 1, 2, 3)),
            (2, 4, 5, 64),
        )
    ]
)


def cache_of(form: Form) -> SequenceCache:
    """The same in kvferry's words."""
    if form.recurrent:
        states = States(form.recurrent, form.model_layers, form.r_size, form.s_size)
        if not form.layers:
            return SequenceCache(0, 1, 0, 0, states=states)
        rest = cache_of(replace(form, recurrent=0))
        return replace(
            rest,
            kv_heads=1,
            key_size=form.heads * form.key_size,
            value_size=form.heads * form.value_size,
            interleaved=False,
            states=states,
        )
    return SequenceCache(
        form.layers,
        form.heads,
        form.key_size,
        form.value_size,
        CacheType[form.key_type.upper()],
        CacheType[form.value_type.upper()],
        form.interleaved and form.key_type not in cells.QUANTIZED,
        form.transposed,
        form.streams,
        form.rotations,
        form.windowed,
        form.window,
    )


def bits(form: Form, found: list[LayerCells], side: Side, place: Place) -> int:
    """What a layer has at a place; its row has the heads one after the other."""
    layer, position, head, element = place
    there = found[layer]
    row = (there.keys if side in "kr" else there.values)[position - there.first].reshape(-1)
    if layer >= form.layers:
        return int(row[element])
    return int(row[head * (len(row) // form.heads) + (form.place(element) if side == "k" else element)])


def copy(source: list[LayerCells], target: list[LayerCells]) -> None:
    """Copies the tokens that both have."""
    for there, here in zip(source, target, strict=True):
        skipped = here.first - there.first
        here.keys[...], here.values[...] = there.keys[skipped:], there.values[skipped:]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("count", (1, 2, 7))
def test_a_state_is_read_and_written(form: Form, count: int) -> None:
    state = cells.write(form, range(count))
    cache = SequenceCache.of_state(state, form.heads, form.interleaved, form.windowed, form.window)
    assert cache == cache_of(form)

    found = cache.read(state)
    whole = cells.expected(form, range(count))
    assert sum(layer.keys.size + layer.values.size for layer in found) == len(whole)
    for (side, place), number in whole.items():
        assert bits(form, found, side, place) == number

    made, places = cache.make(count)
    copy(found, places)
    first = cells.first_stream(form)
    assert cells.read(first, made.tobytes()) == cells.arrived(form, count)


@pytest.mark.parametrize("form", (Form(transposed=True), Form(transposed=True, recurrent=2)), ids=str)
def test_cells_may_lie_in_any_order(form: Form) -> None:
    found = cache_of(form).read(cells.write(form, [3, 0, 4, 2, 1]))
    made, places = cache_of(form).make(5)
    copy(found, places)
    assert cells.read(form, made.tobytes()) == cells.expected(form, range(5))


@pytest.mark.parametrize("positions", ([1, 2, 3], [0, 1, 3], [0, 1, 1], [-1, 0, 1]), ids=str)
def test_tokens_that_are_not_the_first_ones_are_refused(positions: list[int]) -> None:
    form = Form()
    with pytest.raises(InvalidError, match=r"3 tokens of positions -?\d to \d; allowed: each from 0 to 2 once"):
        cache_of(form).read(cells.write(form, positions))


def test_recurrent_layers_that_stand_elsewhere_are_refused() -> None:
    form = Form(recurrent=2)
    others, behind = cells.write(replace(form, recurrent=0), range(5)), replace(form, layers=0)
    cache_of(form).read(others + cells.write(behind, range(5))[8:])
    for count in (4, 6):
        with pytest.raises(
            InvalidError, match=f"recurrent layers stand at position {count - 1}; allowed: 4, that of the last"
        ):
            cache_of(form).read(others + cells.write(behind, range(count))[8:])
    with pytest.raises(InvalidError, match="recurrent layers stand at position -1; allowed: 0"):
        cache_of(behind).read(cells.write(behind, [-1]))


@pytest.mark.parametrize("streams", (1, 3))
def test_a_sequence_without_tokens_has_no_cells(streams: int) -> None:
    """Its state begins as that of one token in recurrent layers alone."""
    heads = struct.pack("<iQ", 0, 20) * 2 + struct.pack("<iQ", 0, 48) * 2
    empty = struct.pack(f"<IiI{streams}I", 0xAF143CD8, 5, streams, *[0] * streams)
    with pytest.raises(InvalidError, match="a state has no cells; allowed: one token or more"):
        SequenceCache.of_state(empty + struct.pack("<III", 0, 0, 4) + heads, 1, False)
    alone = cells.write(Form(layers=0, recurrent=2), [0])
    assert alone[: len(empty)] == empty or streams > 1
    assert SequenceCache.of_state(alone, 1, False) == cache_of(Form(layers=0, recurrent=2))


def test_other_recurrent_layers_are_refused_by_name() -> None:
    form = Form(recurrent=2)
    others = cells.write(replace(form, recurrent=0), range(5))
    behind = cells.write(replace(form, layers=0), range(5))[8:]

    def read(behind: bytes) -> None:
        with pytest.raises(UnsupportedError) as alone:
            SequenceCache.of_state(others + behind, form.heads, False)
        with pytest.raises(KvferryError) as beside:
            cache_of(form).read(others + behind)
        said.append((str(alone.value), str(beside.value)))

    said: list[tuple[str, str]] = []
    for what, at, code, value in (
        ("a state has 2 cells of recurrent layers; allowed: 1", 0, "I", 2),
        ("the number of a cell's sequences is 1; allowed: 0", 8, "I", 1),
        ("whether values are transposed is 1; allowed: 0", 12, "I", 1),
        ("r are of ggml's type 12; allowed: 0 (f32), 1", 20, "i", 12),
        ("begin with 24 bytes of r; allowed: equal ones of 1 to 9 layers", 24, "Q", 24),
    ):
        changed = bytearray(behind)
        struct.pack_into(f"<{code}", changed, at, value)
        read(bytes(changed))
        assert what in said[-1][0], said[-1]
    read(behind + b"\0")
    read(behind[:52] + struct.pack("<Q", 8) + bytes(8) + behind[52:])  # with a second row beside the first r
    assert "bytes; allowed: " in said[-1][0] and "or recurrent layers behind" in said[-1][0]
    with pytest.raises(UnsupportedError, match="the number of layers is 9; allowed: 8"):
        cache_of(replace(form, model_layers=8)).read(others + behind)
    with pytest.raises(InvalidError, match=r"windowed is .*; allowed: none, as all layers are recurrent"):
        SequenceCache.of_state(cells.write(replace(form, layers=0), [0]), 1, False, (0,), 4)
    with pytest.raises(InvalidError, match="kv_heads is 0; allowed: 1 and more"):
        SequenceCache.of_state(others, 0, False)
    with pytest.raises(InvalidError, match=r"groups are .*; the kinds are \(\(0, 1\), \(2, 3\)\)"):
        cache_of(form).model([[0, 2], [1, 3]])


LATENTS = [form for form in FORMS if not form.value_size and not form.recurrent]


@pytest.mark.parametrize("form", [*FORMS[:32:3], *LATENTS[::5], *RECURRENT[:8]], ids=str)
def test_every_field_counts(form: Form) -> None:
    """A byte that is changed anywhere but in keys, values, r, s and sequence numbers is noticed.

    Where all layers are recurrent, nothing but their position says how many tokens there were.
    """
    count = 3
    state = cells.write(form, range(count))
    cache = cache_of(form)
    whole = cells.expected(form, range(count))
    sequences = [4, *(16 + 4 * form.stream + 12 * cell + 8 for cell in range(count if form.layers else 0))]
    for at in range(len(state)):
        if not form.layers and 12 <= at < 16:
            continue
        other = bytearray(state)
        other[at] ^= 0x41
        try:
            layers = cache.read(bytes(other))
        except KvferryError:
            continue
        # Nothing but one cell, or the number of a sequence, has changed.
        made, places = cache.make(count)
        copy(layers, places)
        found = cells.read(cells.first_stream(form), made.tobytes())
        changed = [place for place in whole if whole[place] != found[place]]
        assert len(changed) == 1 or any(first <= at < first + 4 for first in sequences), at


@pytest.mark.parametrize("form", [*FORMS[:32:5], *LATENTS[::5], *RECURRENT[::2], *FORMS[-24::5]], ids=str)
def test_a_state_that_is_cut_off_is_refused(form: Form) -> None:
    state = cells.write(form, range(2))
    for length in range(len(state)):
        try:
            found = SequenceCache.of_state(
                state[:length], form.heads, form.interleaved, form.windowed, form.window
            )
        except KvferryError:
            pass
        else:  # a state does not say how many layers are recurrent, so that it is one of fewer
            assert found.states is None or found.states.layers < form.recurrent
        with pytest.raises(KvferryError):
            cache_of(form).read(state[:length])
    with pytest.raises(UnsupportedError, match="bytes; allowed"):
        cache_of(form).read(state + b"\0")


@pytest.mark.parametrize(
    ("content", "message"),
    (
        (b"", "ends after 0 bytes"),
        (b"GGUF" + bytes(60), "begins with 0x46554747; allowed: 0xaf143cd8"),
        (struct.pack("<IiII", 0xAF143CD8, 0, 1, 0), "no cells"),
        (struct.pack("<IiII", 0xAF143CD8, 0, 1, 2**32 - 1), "ends after 16 bytes"),
    ),
)
def test_what_is_no_state_is_named(content: bytes, message: str) -> None:
    with pytest.raises(InvalidError, match=message):
        SequenceCache.of_state(content, 1, False)


def test_other_caches_are_refused_by_name() -> None:
    form = Form()
    state = cells.write(form, range(2))
    keys = 16 + 2 * 12 + 16  # where the first layer's keys begin

    quantized = bytearray(state)
    quantized[keys : keys + 4] = struct.pack("<i", 12)
    with pytest.raises(
        UnsupportedError, match=r"keys are of ggml's type 12; allowed: 0 \(f32\), 1 \(f16\), 30"
    ):
        SequenceCache.of_state(quantized, form.heads, False)

    rotated = bytearray(state)
    rotated[keys - 8 : keys - 4] = struct.pack("<I", 64)
    with pytest.raises(UnsupportedError, match="elements of the type F16 are rotated by 64; allowed: 0"):
        SequenceCache.of_state(rotated, form.heads, False)

    with_window = state + cells.write(form, range(2))[8:]  # the cache of other layers follows
    with pytest.raises(UnsupportedError, match=r"a state of 2 cells has \d+ bytes; allowed: \d+"):
        SequenceCache.of_state(with_window, form.heads, False)

    latents = cells.write(replace(form, value_size=0), range(2))
    with pytest.raises(UnsupportedError, match="as one of latents: there are 3 KV heads; allowed: 1"):
        SequenceCache.of_state(latents, form.heads, False)
    latents = cells.write(replace(form, heads=1, value_size=0), range(2))
    with pytest.raises(UnsupportedError, match="interleaved is True; allowed: False, of latents"):
        SequenceCache.of_state(latents, 1, True)
    with pytest.raises(UnsupportedError):
        SequenceCache.of_state(latents + latents[8:], 1, False)  # as of an indexer

    of_images = bytearray(state[:16])
    for cell in range(2):  # with three more numbers each
        of_images += state[16 + 12 * cell : 24 + 12 * cell] + bytes(12) + state[24 + 12 * cell : 28 + 12 * cell]
    with pytest.raises(UnsupportedError):
        SequenceCache.of_state(of_images + state[40:], form.heads, False)

    uneven = bytearray(state)
    second = keys + 12 + 2 * form.heads * form.key_size * 2
    uneven[second + 4 : second + 12] = struct.pack("<Q", form.heads * form.key_size)
    with pytest.raises(UnsupportedError, match=r"the bytes of a cell's keys is 24; allowed: 48"):
        SequenceCache.of_state(uneven, form.heads, False)

    with pytest.raises(UnsupportedError, match="48 bytes of a cell's keys; allowed: a multiple of 10"):
        SequenceCache.of_state(state, 5, False)
    windowed = replace(form, layers=3, windowed=(1,), window=4)
    with_window = cells.write(windowed, range(9))
    for layers in ([0, 1], []):
        with pytest.raises(UnsupportedError):
            SequenceCache.of_state(with_window, form.heads, False, layers, 4)
    for layers in ([3], [-1], [1, 1]):
        with pytest.raises(KvferryError, match=r"allowed: ascending numbers from 0 to \d"):
            SequenceCache.of_state(with_window, form.heads, False, layers, 4)
    with pytest.raises(InvalidError, match="window is 1; allowed: 2 and more"):
        SequenceCache.of_state(with_window, form.heads, False, (1,), 1)
    too_few = replace(windowed, window=2)  # tokens than the window of the cache has
    with pytest.raises(InvalidError, match="2 tokens of positions 7 to 8; allowed: each from 6 to 8 once"):
        cache_of(windowed).read(cells.write(too_few, range(9)))
    with pytest.raises(InvalidError, match="groups are"):
        cache_of(windowed).model([[0, 1], [2]])
    with pytest.raises(UnsupportedError, match="cells are in stream 2; allowed: less than 2"):
        cache_of(replace(form, streams=2)).read(cells.write(replace(form, streams=3, stream=2), range(2)))
    with pytest.raises(UnsupportedError, match="the type of keys is 1; allowed: 0"):
        cache_of(replace(form, key_type="f32", key_size=4)).read(state)
