"""Caches that are torch tensors on a CUDA device, moved from process to process: see torch_process.py.

Both processes use the machine's own driver, whatever KVF_CUDA_LIBRARY names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinates import HEAD_SIZE, HEADS, LAYERS, TOKENS
from kvferry import Transport, transport_kinds

pytest.importorskip("torch")

CELLS = LAYERS * 2 * TOKENS * HEADS


@pytest.fixture(scope="module", autouse=True)
def device() -> None:
    # Asked in a process of its own: this one may have loaded a stand-in for the driver.
    ask = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)"
    asked = subprocess.run([sys.executable, "-c", ask], check=False)
    if asked.returncode == 3:
        pytest.skip("torch finds no CUDA device")
    assert asked.returncode == 0


class Process:
    """A running torch_process.py."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def hear(self) -> Any:
        """What it prints next."""
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, "the process has ended"
        return json.loads(line)

    def go_on(self) -> None:
        assert self._process.stdin
        print(file=self._process.stdin, flush=True)


@contextmanager
def started(allocator: str, *arguments: str) -> Iterator[Process]:
    """Runs a process whose tensors are allocated in this way; it must end well."""
    command = [sys.executable, str(Path(__file__).with_name("torch_process.py")), *arguments]
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": allocator}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield Process(process)
            assert process.wait(60) == 0
        finally:
            process.kill()


def pull_from_another_process(allocator: str, withheld: str, transport: str, fabric: str) -> None:
    """`fabric`: which must serve the peer if the tensors are shown."""
    with started(allocator, "produce", withheld, transport) as prefill:
        endpoint = prefill.hear()
        if isinstance(endpoint, dict):
            pytest.skip(f"{transport} takes no memory of devices here: {endpoint['unsupported']}")
        with started(allocator, "consume", withheld, transport, endpoint) as decode:
            assert decode.hear() == CELLS
            for wrong in (0, CELLS // 2):  # a changed layer proves that wrong bytes are found
                prefill.go_on()
                assert prefill.hear() == "holds"
                decode.go_on()
                got = decode.hear()
                assert (got["event"], got["detail"], got["wrong"]) == ("DONE", "", wrong)
                assert got["bytes"] == CELLS * HEAD_SIZE * 4
                assert got["packed"] == (got["bytes"] if withheld == "withheld" else 0)
                ((used, *why),) = got["peers"]
                assert transport != "auto" or (used == fabric) == (withheld == "shown"), why
                assert transport == "auto" or used == fabric, why
                assert prefill.hear() == "DONE"
            prefill.go_on()


@pytest.mark.parametrize("withheld", ["shown", "withheld"])
@pytest.mark.parametrize("allocator", ["expandable_segments:False", "expandable_segments:True"])
def test_tensors_of_another_process_are_pulled(allocator: str, withheld: str) -> None:
    pull_from_another_process(allocator, withheld, "auto", "cuda")


# Not in expandable segments, which UCX may not reach.
@pytest.mark.skipif("ucx" not in transport_kinds(), reason="this build has no UCX")
@pytest.mark.parametrize("withheld", ["shown", "withheld"])
def test_tensors_of_another_process_are_pulled_by_ucx(withheld: str) -> None:
    with Transport() as transport:
        ucx = next(found for found in transport.findings if found.kind == "ucx")
    if not ucx.works:
        pytest.skip(f"UCX does not work here: {ucx.why_not}")
    pull_from_another_process("expandable_segments:False", withheld, "ucx", "ucx")
