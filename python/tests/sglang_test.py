"""The parts of the SGLang backend that need no SGLang: settings, geometry, and the blocks of a request."""

from __future__ import annotations

import json
import pathlib
from dataclasses import replace

import numpy as np
import pytest

import kvferry
from kvferry import Dtype, InvalidError, MismatchError, UnsupportedError
from kvferry.sglang.blocks import Chunks, Extent, block_ids, steps_of
from kvferry.sglang.geometry import Blocks, Buffers, Component, StateTensors, build_engine, of_states, of_tokens
from kvferry.sglang.settings import read_settings


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    plain = read_settings()
    assert (plain.transport, plain.keys, plain.allowed_keys, plain.insecure) == ("auto", None, (), False)
    keys = kvferry.make_keys()
    file = tmp_path / "keys.json"
    file.write_text(json.dumps(keys._asdict()))
    monkeypatch.setenv("KVFERRY_KEY_FILE", str(file))
    monkeypatch.setenv("KVFERRY_ALLOWED_KEYS", f"{keys.public_key},")
    monkeypatch.setenv("KVFERRY_VERIFY", "True")
    monkeypatch.setenv("KVFERRY_TRANSPORT", "shm")
    found = read_settings()
    assert (found.keys, found.allowed_keys, found.verify, found.transport) == (
        keys,
        (keys.public_key,),
        True,
        "shm",
    )


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("KVFERRY_INSECURE", "perhaps", "KVFERRY_INSECURE is 'perhaps'; allowed: 0, 1, false, true"),
        ("KVFERRY_KEY_FILE", "no such file", "KVFERRY_KEY_FILE no such file cannot be used"),
        ("KVFERRY_ALLOWED_KEYS", "x", "KVFERRY_ALLOWED_KEYS is given without KVFERRY_KEY_FILE"),
    ],
)
def test_a_wrong_setting_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, why: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidError, match=why):
        read_settings()


def buffers(count: int, item: int, blocks: int = 8) -> Buffers:
    """Buffers of equal shape, which nobody reads."""
    return Buffers(tuple(4096 * (i + 1) for i in range(count)), (item * blocks,) * count, (item,) * count)


def tokens(name: str = "kv", blocks: Blocks = Blocks.ALL, heads: int = 4, tp_size: int = 2) -> Component:
    """A component of two layers, pages of 4 tokens, heads of 16 bytes. With a window it has own blocks."""
    item = 4 * max(1, heads // tp_size) * 16
    count = 4 if heads else 2
    made = of_tokens(name, blocks, range(2), 2, buffers(count, item), 4, Dtype.BF16, heads, tp_size)
    return replace(made, source=int(blocks is Blocks.LAST))


def test_heads_are_shared_and_latents_are_everywhere() -> None:
    engine = build_engine([tokens(), tokens("dsa", heads=0)], "engine", 2, [2])
    shares = [[part.units for part in group.parts] for group in engine.shard(1).groups]
    assert shares == [[range(2, 4), range(2, 4)], [range(1)]]
    assert len(engine.shard(1).region_bytes) == 6


def test_buffers_that_contradict_the_model_are_refused_by_name() -> None:
    with pytest.raises(
        UnsupportedError, match="kv has 3 buffers for 2 layers; allowed: 4, k and v of each layer"
    ):
        of_tokens("kv", Blocks.ALL, range(2), 2, buffers(3, 64), 4, Dtype.BF16, 4, 2)
    with pytest.raises(
        UnsupportedError, match="a page of kv k has 100 bytes; allowed: 4 tokens of 2 equal heads"
    ):
        of_tokens("kv", Blocks.ALL, range(2), 2, buffers(4, 100), 4, Dtype.BF16, 4, 2)
    two = Buffers((1, 2, 3, 4), (64, 64, 64, 128), (64, 64, 64, 64))
    with pytest.raises(UnsupportedError, match=r"the buffers of kv have \[1, 2\] blocks"):
        build_engine([of_tokens("kv", Blocks.ALL, range(2), 2, two, 4, Dtype.BF16, 2, 1)], "engine", 1, [2])
    uneven = StateTensors((0, 1), (6, 6), (1, 1), ((5, 7), (5, 7)))
    with pytest.raises(UnsupportedError, match=r"parts of \(5, 7\) units; allowed: equal units"):
        of_states("mamba", uneven, buffers(2, 60), 2)


def test_a_window_waits_for_the_last_chunk_and_the_rest_does_not() -> None:
    parts = [tokens(), tokens("swa", Blocks.LAST)]
    extent = Extent(4, 28, 4, (2,))
    assert [(step.begin, step.end) for step in steps_of(parts, extent)] == [(4, 28), (20, 28)]
    chunks = Chunks(parts, extent)
    said = chunks.add([11, 12, 13], 12, None)
    assert said is not None and said[0] == (4, 16)
    said = chunks.add([14, 15], 8, None)  # a page of it lies in the window
    assert said is not None and said[0] == (16, 20)
    assert chunks.add([], 0, None) is None
    said = chunks.add([16], 3, [[3, 4]])
    assert said is not None and said[0] == (20, 28)
    assert [(list(table.ids), table.first_block) for table in said[1]] == [([15, 16], 5), ([3, 4], 5)]


def test_pages_of_the_decode_engine_may_end_later() -> None:
    """21 tokens, of which the decode engine has 8: it has pages of 8, the prefill engine pages of 4."""
    chunks = Chunks([tokens()], Extent.read(Extent(8, 24, 8, ()).numbers))
    said = chunks.add([5, 6, 7, 9], 13, [])
    assert said is not None and said[0] == (8, 24)
    assert [(list(table.ids), table.first_block) for table in said[1]] == [([5, 6, 7, 9], 2)]
    chunks = Chunks([tokens()], Extent(6, 24, 6, ()))
    assert (chunks.begin, chunks.steps[0].begin) == (4, 4)  # the page in which the prefix ends goes again
    said = chunks.add([4, 5, 6, 7], 15, [])
    assert said is not None and said[0] == (4, 24)
    assert list(said[1][0].ids) == [4, 5, 6, 7, 7]


def test_prompts_of_other_lengths_are_refused_by_name() -> None:
    for count, others in ((8, []), (13, []), (13, None)):
        with pytest.raises(
            MismatchError, match=f"{count} tokens in the prefill server, and 9 to 12 in the decode"
        ):
            Chunks([tokens()], Extent(0, 12, 4, ())).add([1] * 4, count, others)


def test_a_decode_engine_with_other_blocks_is_refused_by_name() -> None:
    several = [tokens(), tokens("swa", Blocks.LAST)]
    for parts, extent, why in (
        (several, Extent(0, 32, 16, (2,)), "page size is 4 in the prefill server, and 16 in the decode server"),
        (several, Extent(0, 32, 4, ()), "2 kinds of blocks in the prefill server, and 1 in the decode server"),
        ([tokens()], Extent(0, 32, 4, (1,)), "1 kinds of blocks in the prefill server, and 2 in the decode"),
    ):
        with pytest.raises(MismatchError, match=why):
            Chunks(parts, extent)


def test_block_ids_are_taken_as_sglang_gives_them() -> None:
    for given in (np.array(5), [np.array(5)], [np.array([5], np.int64)], [5]):
        assert block_ids(given).tolist() == [5]
