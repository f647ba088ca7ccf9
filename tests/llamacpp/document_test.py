"""The code of docs/llamacpp.md runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf_models as models
import llama
import pytest
from gguf_models import PROMPT
from llama import Llama
from slots_test import Running

DOCUMENT = Path(__file__).parents[2] / "docs" / "llamacpp.md"


def test_the_code_runs(tmp_path: Path) -> None:
    codes = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    lending, loading, restoring, grouping = (compile(code, str(DOCUMENT), "exec") for code in codes)
    library, file = llama.load_library(), models.make("llama", tmp_path)
    lender, loader = (Llama(library, file, models.VOCABULARY) for _ in range(2))

    first = lender.compute(PROMPT, 0)
    alone = [first, *lender.go_on(first, len(PROMPT), 7, sequence=0)]
    lender.forget(0)
    lender.compute(PROMPT, 0)
    there: dict[str, Any] = {"library": library, "pointer": lender.context}
    exec(lending, there)
    loader.compute(PROMPT[:3], 0)
    here = {"library": library, "pointer": loader.context, "params": there["params"], "prompt": PROMPT}
    exec(loading, here)
    assert loader.go_on(PROMPT[-1], len(PROMPT) - 1, 8, sequence=1) == alone

    slots = tmp_path / "slots"
    slots.mkdir()
    server = Running(file, slots)
    server.complete(PROMPT[:3], 0)
    params = there["agent"].lend(there["state"])
    exec(restoring, {"url": server.url, "folder": slots, "params": params, "prompt": PROMPT})
    assert server.complete(PROMPT, 1, 8) == (alone, 1)

    grouped = {"cache": here["cache"], "params": {"kvferry_groups": None}}
    exec(grouping, grouped)
    grouped["agent"].close()

    server.process.communicate(timeout=60)
    there["agent"].close()
    here["agent"].close()
    lender.close()
    loader.close()


@pytest.mark.parametrize("architecture", ("llama", "mistral3", "granite"))
def test_what_the_document_says_is_interleaved_is(architecture: str) -> None:
    from kvferry.llamacpp import RopeType, interleaves

    assert interleaves(architecture, RopeType.NORM)
