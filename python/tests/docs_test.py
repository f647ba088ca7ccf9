"""The code of docs/python.md and the examples run, and print what the text says."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
