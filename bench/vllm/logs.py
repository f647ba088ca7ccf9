"""Finds the cause of an error in a server's log."""

from __future__ import annotations

import pathlib
import re

_ERROR = re.compile(r"\b(?:\w+\.)*(\w*(?:Error|Exception|Refusal|Timeout|Again)\b: .*)")
# Messages of vLLM that only follow from an earlier error in the log.
_CONSEQUENCES = ("EngineDeadError", "Engine core initialization failed", "EngineGenerateError", "cancelled")


def cause(log: pathlib.Path, begin: int = 0, longest: int = 160) -> str:
    """The last error in the log, from a byte on, that is not a consequence of another; "" if there is none."""
    with log.open("rb") as file:
        file.seek(begin)
        lines = file.read().decode(errors="replace").splitlines()
    found = ""
    for line in lines:
        match = _ERROR.search(line)
        if match and not any(word in line for word in _CONSEQUENCES):
            found = match.group(1).strip()
    return shortened(found, longest)


def shortened(text: str, longest: int = 160) -> str:
    """The text in one line, cut at `longest` characters."""
    flat = " ".join(text.split())
    return flat if len(flat) <= longest else flat[: longest - 3] + "..."
