"""Files of slots, and llama.cpp's server, which goes on with what another engine has computed."""

from __future__ import annotations

import json
import pathlib
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import cells
import gguf_models as models
import llama
import pytest
from gguf_models import PROMPT
from llama import Llama

from kvferry.errors import InputOutputError, InvalidError, KvferryError, UnsupportedError
from kvferry.llamacpp import Context, SequenceAgent, SequenceCache, Slot, SlotServer, read_slot, write_slot

MAGIC = 0x67677371
STATE = cells.write(cells.Form(), range(4))


def test_a_file_is_read_and_written(tmp_path: pathlib.Path) -> None:
    for version in (2, 3, 4):
        write_slot(tmp_path / "slot", [5, 6, 7, 8], STATE, version)
        found = read_slot(tmp_path / "slot")
        assert (found.tokens.tolist(), found.version) == ([5, 6, 7, 8], version)
        assert found.state[8:].tobytes() == STATE[8:]
        content = (tmp_path / "slot").read_bytes()
        assert content == struct.pack("<III4i", MAGIC, version, 4, 5, 6, 7, 8) + STATE[8:]
    assert [file.name for file in tmp_path.iterdir()] == ["slot"]


def test_packed_tokens(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "slot"
    file.write_bytes(struct.pack("<III6i", MAGIC, 4, 6, -1, 1, 2, 50, 60, 0) + STATE[8:])
    assert read_slot(file).tokens.tolist() == [50, 60]
    file.write_bytes(struct.pack("<III6i", MAGIC, 4, 6, -1, 1, 2, 50, 60, 3) + STATE[8:])
    with pytest.raises(UnsupportedError, match="the prompt has 3 images or sounds; allowed: none"):
        read_slot(file)
    for packed in ((-1, 2, 1, 5, 0), (-1, 1, 2, 5, 0), (-1, 1, -1, 5, 0), (-1, 1, 2**31 - 1, 5, 0)):
        file.write_bytes(struct.pack("<III5i", MAGIC, 4, 5, *packed) + STATE[8:])
        with pytest.raises(InvalidError, match="the tokens begin with"):
            read_slot(file)


def test_checkpoints_of_a_server_are_left_out(tmp_path: pathlib.Path) -> None:
    """They are found by where they end, for a state may have the same bytes as their beginning."""
    begin = struct.pack("<III4i", MAGIC, 4, 4, 5, 6, 7, 8)
    one = struct.pack("<QiiQ", 4, 3, 3, 9) + bytes(9) + struct.pack("<QQ", 0, 2) + bytes(2)
    file = tmp_path / "slot"
    for state in (STATE[8:], STATE[8:] + b"SCKP" + struct.pack("<II", 1, 1) + STATE[8:]):
        for count in (1, 3):
            file.write_bytes(begin + state + b"SCKP" + struct.pack("<II", 1, count) + one * count)
            assert read_slot(file).state[8:].tobytes() == state
        for behind in (
            b"",
            b"SCKP",
            b"SCKP" + struct.pack("<II", 1, 2) + one,
            b"SCKP" + struct.pack("<II", 2, 1) + one,
        ):
            file.write_bytes(begin + state + behind)
            assert read_slot(file).state[8:].tobytes() == state + behind


@pytest.mark.parametrize(
    "content",
    (
        b"",
        b"abc",
        struct.pack("<II", MAGIC, 4),
        struct.pack("<III", MAGIC, 5, 0),
        struct.pack("<III", MAGIC + 1, 4, 0),
        struct.pack("<III", MAGIC, 4, 1),
        struct.pack("<IIIi", MAGIC, 4, 2**32 - 1, 7),
    ),
)
def test_what_is_no_file_of_a_slot_is_named(tmp_path: pathlib.Path, content: bytes) -> None:
    (tmp_path / "slot").write_bytes(content)
    with pytest.raises(InvalidError, match=r"begins with \[.*\]; allowed: 1734833009, a version of 2 to 4"):
        read_slot(tmp_path / "slot")


def test_other_versions_are_not_written(tmp_path: pathlib.Path) -> None:
    with pytest.raises(InvalidError, match="version is 5; allowed: 2 to 4"):
        write_slot(tmp_path / "slot", [1], STATE, 5)
    with pytest.raises(FileNotFoundError):
        write_slot(tmp_path / "nowhere" / "slot", [1], STATE)
    with pytest.raises(InvalidError, match="begins with"):
        write_slot(tmp_path / "slot", [1], STATE[8:])
    assert not list(tmp_path.iterdir())
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_slot(tmp_path / "folder", [1], STATE)
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]


class Running:
    """A server of llama.cpp with two slots."""

    def __init__(self, model: pathlib.Path, folder: pathlib.Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, str(pathlib.Path(__file__).with_name("server.py")), str(model), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout
        self.url = self.process.stdout.readline().strip()
        self.slots = SlotServer(self.url, folder)

    def complete(self, prompt: list[int], slot: int, count: int = 16) -> tuple[list[int], int]:
        """Tokens after a prompt, and how many tokens of the prompt were computed for that."""
        body = {"prompt": prompt, "n_predict": count, "temperature": 0, "top_k": 1, "ignore_eos": True}
        body |= {"return_tokens": True, "cache_prompt": True, "id_slot": slot}
        request = urllib.request.Request(
            f"{self.url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            said: dict[str, Any] = json.load(answer)
        return said["tokens"], said["timings"]["prompt_n"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("slots")
    running = Running(models.make("llama", tmp_path_factory.mktemp("models")), folder)
    yield running
    running.process.communicate(timeout=60)


def test_a_server_goes_on_with_what_another_slot_has_computed(server: Running) -> None:
    alone, computed = server.complete(PROMPT, 0)
    assert computed == len(PROMPT)
    saved = server.slots.save(0)
    assert isinstance(saved, Slot)
    assert saved.tokens.tolist() == [*PROMPT, *alone[:-1]]
    cache = SequenceCache.of_state(saved.state, models.KV_HEADS, True)
    with SequenceAgent(cache, 256) as lender, SequenceAgent(cache, 256) as loader:
        state = loader.load(lender.lend(saved.state), len(PROMPT) - 1).wait(20)
        server.slots.restore(1, PROMPT[:-1], state, saved.version)
        assert server.complete(PROMPT, 1) == (alone, 1)

        # A control: with the values of two tokens exchanged in one layer, other tokens come out.
        values = cache.read(state)[1].values
        values[[5, 6]] = values[[6, 5]]
        server.slots.restore(1, PROMPT[:-1], state, saved.version)
        wrong, computed = server.complete(PROMPT, 1)
        assert computed == 1 and wrong != alone
    assert not list(server.folder.iterdir())


def test_a_server_that_refuses_says_why(server: Running) -> None:
    server.complete(PROMPT[:3], 0, 1)
    saved = server.slots.save(0)
    with pytest.raises(InputOutputError, match=r"does not restore slot 1: .*Unable to restore slot"):
        server.slots.restore(1, PROMPT[:3], saved.state[:-5])
    assert server.complete(PROMPT[:3], 1)[1] == 3
    assert not list(server.folder.iterdir())
    with pytest.raises(InputOutputError, match="does not answer"):
        SlotServer("http://127.0.0.1:1", server.folder).save(0)


def test_a_state_is_not_taken_for_that_of_another_model(server: Running) -> None:
    server.complete(PROMPT[:3], 0, 1)
    saved = server.slots.save(0)
    with pytest.raises(KvferryError):
        SequenceCache.of_state(saved.state, models.KV_HEADS - 1, True)


def test_a_slot_with_checkpoints_goes_on_elsewhere(tmp_path: pathlib.Path) -> None:
    """The server keeps them of layers with a window."""
    folder, file = tmp_path / "slots", models.make("gemma3", tmp_path)
    folder.mkdir()
    server = Running(file, folder)
    engine = Llama(llama.load_library(), file, models.VOCABULARY)
    try:
        alone, _ = server.complete(PROMPT, 0)
        server.complete(PROMPT, 1, 1)
        saved = server.slots.save(1)
        windowed = models.MODELS["gemma3"].windowed
        cache = SequenceCache.of_state(saved.state, models.KV_HEADS, False, windowed, models.WINDOW)
        context = Context(llama.load_library(), engine.context)
        engine.compute(PROMPT[:2], 0)
        with (
            SequenceAgent(cache, 256) as lender,
            SequenceAgent(context.cache(context.save(0)), 256) as loader,
        ):
            state = loader.load(lender.lend(saved.state), len(PROMPT) - 1).wait(20)
        context.restore(1, state)
        assert engine.go_on(PROMPT[-1], len(PROMPT) - 1, len(alone), 1) == alone

        # A control: with the values of other tokens, other tokens come out.
        for layer in loader.cache.read(state):
            layer.values[...] = layer.values[::-1].copy()
        context.restore(2, state)
        assert engine.go_on(PROMPT[-1], len(PROMPT) - 1, len(alone), 2) != alone
    finally:
        engine.close()
        server.process.communicate(timeout=60)
