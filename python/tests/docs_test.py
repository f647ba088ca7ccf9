"""What documents say in Python runs; docs/python.md prints what the text says. The examples run, too."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from coordinates import decode_engine, prefill_engine, small_model
from kvferry import Agent

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_code_of_the_document_prints_what_it_says() -> None:
    blocks = BLOCK.findall((ROOT / "docs" / "python.md").read_text())
    scope: dict[str, object] = {"__name__": "document"}
    compared = 0
    for (language, code), (following, expected) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
        if language != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "docs/python.md", "exec"), scope)
        assert printed.getvalue() == (expected if following == "text" else "")
        compared += following == "text"
    assert compared > 5


def test_every_symbol_among_the_concepts_is_declared_where_it_says() -> None:
    headers = {header.name: header.read_text() for header in (ROOT / "include").rglob("*.h")}
    rows = 0
    for line in (ROOT / "docs" / "concepts.md").read_text().splitlines():
        named = re.findall(r"`(kvf_\w+)", line)
        header = re.search(r"\| (?:connector/)?(\w+\.h) \|$", line)
        declared = headers[header[1]] if header else "".join(headers.values())
        assert [symbol for symbol in named if not re.search(rf"\b{symbol}\b", declared)] == [], line
        rows += bool(header and named)
    assert rows > 40


@pytest.mark.parametrize("name", ["explain.py", "handover.py", "agents.py", "transformers_handover.py"])
def test_the_examples_run(name: str) -> None:
    needed = {"agents.py": "torch", "transformers_handover.py": "transformers"}.get(name)
    if needed and not importlib.util.find_spec(needed):
        pytest.skip(f"{needed} is not installed")
    subprocess.run([sys.executable, str(ROOT / "examples" / name)], check=True, timeout=120)


def blocks_of(document: str, language: str) -> list[str]:
    text = (ROOT / "docs" / document).read_text()
    return [code for found, code in BLOCK.findall(text) if found == language]


def test_what_operating_says_of_traces_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = blocks_of("operating.md", "python")
    model = small_model()
    for side, engine in (("prefill", prefill_engine(model, tp_size=1)), ("decode", decode_engine(model))):
        scope = {"Agent": Agent, "Path": Path, "engine": engine, "rank": 0}
        exec(compile(code.replace("decode", side), "docs/operating.md", "exec"), scope)
    lines = [line for block in blocks_of("operating.md", "sh") for line in block.splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("python ")]
    assert len(commands) == 2
    for command in commands:
        subprocess.run([sys.executable, *command[1:]], check=True, timeout=60)
    assert json.loads(Path("both.json").read_text())["traceEvents"]
    assert "resourceSpans" in json.loads(Path("spans.json").read_text())


def test_what_vllm_says_of_keys_makes_a_file_of_its_owner_alone(tmp_path: Path) -> None:
    (line,) = [line for line in (ROOT / "docs" / "vllm.md").read_text().splitlines() if "make_keys()" in line]
    here = line.replace("python -c", f"{shlex.quote(sys.executable)} -c")
    subprocess.run(["sh", "-c", here], check=True, timeout=60, cwd=tmp_path)
    keys = tmp_path / "keys.json"
    assert keys.stat().st_mode & 0o777 == 0o600
    assert set(json.loads(keys.read_text())) >= {"public_key", "secret_key"}
