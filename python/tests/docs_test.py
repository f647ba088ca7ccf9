"""What documents say in Python runs; docs/python.md prints what the text says. The examples run, too."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinates import decode_engine, prefill_engine, small_model
from kvferry import Agent

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


# The program that runs a command of a document, by document and first word; or why none does. The targets of
# `make` are looked up in the Makefile.
RUN = {
    ("docs/README.md", "kvferry"): "tests/integration/hand.sh",
    ("docs/README.md", "cc"): "tests/install/consume.sh",
    ("docs/choosing-shapes.md", "kvferry"): "tests/integration/documents.sh",
    ("docs/simulation.md", "kvferry"): "tests/integration/documents.sh",
    ("docs/operating.md", "kvferry"): "tests/integration/documents.sh",
    ("docs/operating.md", "python"): "python/tests/docs_test.py",
    ("docs/operating.md", "podman"): "scripts/check-container",
    ("docs/sglang.md", "python"): "tests/sglang/documents_test.py",
    ("docs/vllm.md", "vllm"): "tests/vllm/documents_test.py",
    ("docs/vllm.md", "python"): "tests/vllm/documents_test.py",
    ("docs/vllm.md", "curl"): "tests/vllm/documents_test.py",
    ("docs/vllm.md", "(umask"): "python/tests/docs_test.py",
}
NOT_READ = {
    ("docs/README.md", "ldconfig"): "tests/install/consume.sh installs into a folder of its own, and names it",
    ("docs/operating.md", "apt-get"): "scripts/check-deb installs the same packages into a fresh Debian",
    ("docs/python.md", "pip"): "scripts/check-python installs the checkout, wheel_test.py the wheel",
    ("docs/sglang.md", "pip"): "scripts/sglang-environment installs the checkout",
    ("docs/vllm.md", "pip"): "scripts/vllm-environment installs the checkout",
}
#: Documents whose Python is run: by this file, or by tests/llamacpp/document_test.py.
PYTHON = ("docs/python.md", "docs/operating.md", "docs/embedding.md", "docs/llamacpp.md")
EXCERPTS = (
    "README.md",
    "docs/embedding.md",
)  # their C is compared with the examples by tests/integration/documents.sh


def blocks() -> Iterator[tuple[str, str, str]]:
    """Document, language and text of each block of the documents."""
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "SECURITY.md",
        *(ROOT / "docs").glob("*.md"),
    ):
        for language, text in BLOCK.findall(path.read_text()):
            yield str(path.relative_to(ROOT)), language, text


def commands_of(text: str) -> Iterator[list[str]]:
    """The commands of a block, without variables before them. A word in quotes may go over several lines."""
    line = ""
    for part in text.splitlines():
        line = f"{line}\n{part}" if line else part
        try:
            words = shlex.split(line.replace("\\\n", " "), comments=True)
        except ValueError:  # a quote or a line that goes on
            continue
        if line.endswith("\\"):
            continue
        line = ""
        words = list(itertools.dropwhile(lambda word: re.match(r"[A-Z_]+=", word), words))
        if words:
            yield words
    assert not line


def test_every_command_of_the_documents_is_run_or_it_is_said_why_not() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    found = set()
    for document, language, text in blocks():
        assert language in ("c", "python", "sh", "text"), f"{document}: a block of what is not said"
        if language == "c":
            assert document in EXCERPTS
        if language == "python":
            assert document in PYTHON
        for words in commands_of(text) if language == "sh" else ():
            if words[0] == "make":
                assert words[1] in targets, f"{document}: make {words[1]}"
                continue
            found.add((document, words[0]))
    assert found == RUN.keys() | NOT_READ.keys()
    for (document, _), reader in RUN.items():
        assert Path(document).stem in (ROOT / reader).read_text(), f"{reader} does not read {document}"


def test_the_loop_of_embedding_is_that_of_the_example() -> None:
    (loop,) = (
        text for document, language, text in blocks() if (document, language) == ("docs/embedding.md", "python")
    )
    assert loop in (ROOT / "examples" / "agents.py").read_text()


def test_operating_says_what_to_do_about_every_status_and_embedding_about_every_event() -> None:
    table = (ROOT / "docs" / "operating.md").read_text().split("\n## What a status means\n")[1]
    declared = re.findall(
        r"^    (KVF_(?:E_|IN_)\w+) = ", (ROOT / "include/kvferry/status.h").read_text(), re.MULTILINE
    )
    named = re.findall(r"KVF_\w+", "".join(re.findall(r"^\| (KVF[^|]*)\|", table, re.MULTILINE)))
    assert sorted(named) == sorted(declared)
    table = (ROOT / "docs" / "embedding.md").read_text().split("\n## What to do with each event\n")[1]
    events = re.findall(
        r"^    KVF_EVENT_(\w+) = ", (ROOT / "include/kvferry/agent.h").read_text(), re.MULTILINE
    )
    rows = "".join(re.findall(r"^\| ([A-Z][^|]*)\|", table, re.MULTILINE))
    assert len(events) > 5
    assert set(re.findall(r"[A-Z]\w+(?=[ ,])", rows)) == set(events)


def test_pictures_and_messages_are_no_commands() -> None:
    known = {word for _, word in RUN.keys() | NOT_READ.keys()} | {"make"}
    for document, language, text in blocks():
        for line in text.splitlines() if language == "text" else ():
            assert line.split(" ")[0] not in known, f"{document}: {line}"


def test_what_the_documents_name_of_make_is_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        (path.name, target)
        for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))
        for target in re.findall(r"`make\s+([a-z-]+)", path.read_text())
    }
    assert len(named) > 20
    assert [(document, target) for document, target in sorted(named) if target not in targets] == []


def test_the_settings_of_sglang_are_those_of_its_document() -> None:
    read = set(re.findall(r'"(KVFERRY_\w+)"', (ROOT / "python/kvferry/sglang/settings.py").read_text()))
    table = (ROOT / "docs" / "sglang.md").read_text().split("\n## Settings\n")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(KVFERRY_\w+)` \|", table, re.MULTILINE)) == read


def test_the_settings_of_the_connector_are_those_of_the_table() -> None:
    """Every setting that the connector reads is a row of docs/vllm.md, with its variable, and no other."""
    source = (ROOT / "python" / "kvferry" / "vllm" / "settings.py").read_text()
    read = set(re.findall(r'extra\.\w+\(\s*"(\w+)"', source))
    table = (ROOT / "docs" / "vllm.md").read_text().split("\n## Settings\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (?:`(\w+)`)? ?\|", table, re.MULTILINE)
    assert {name for name, _ in rows} == read
    assert {variable for _, variable in rows} - {""} == set(re.findall(r'os\.environ\.get\("(\w+)"', source))
    assert len(rows) > 15


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
