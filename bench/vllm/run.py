"""Hand-over between two vLLM servers, with kvferry's connector and with vLLM's NixlConnector, shape after
shape.

For each shape and connector it starts a prefill server and a decode server. In each round, one token of every
prompt goes to the decode server alone, then the whole prompt goes to the decode server alone, then through both
servers. A time is from sending the request to the decode server until its first token arrives. Tokens of a
prompt through both must equal those that the decode server computes alone (greedy, prefix cache off).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import statistics
import sys
from collections.abc import Iterable

import layerwise
import load
from connectors import CONNECTORS
from handover import Handover, Result, Shape, make_prompts
from servers import Side

SHAPES = {
    "llama-64-64": Shape("llama", Side(64), Side(64)),
    "llama-64-32": Shape("llama", Side(64), Side(32)),
    "llama-32-64": Shape("llama", Side(32), Side(64)),
    "llama-128-64": Shape("llama", Side(128), Side(64)),
    "llama-tp2-tp1": Shape("llama", Side(64, tp=2), Side(64)),
    "llama-tp1-tp2": Shape("llama", Side(64), Side(64, tp=2)),
    "granite": Shape("granite", Side(), Side(), has_state=True),
    "granite-tp2-tp1": Shape("granite", Side(tp=2), Side(), has_state=True),
    "gemma3-64-32": Shape("gemma3", Side(64), Side(32)),
}

MESSAGES = 3  # printed for a shape and connector; the JSON has all

COLUMNS = (
    f"{'shape':<16} {'connector':<9} {'result':<14} {'equal':>6} {'first':>8} {'median':>8} {'worst':>8} "
    f"{'alone':>8} {'1 token':>8} {'added':>8} {'kB':>7}"
)
LEGEND = """\
Times in ms, from the request to the decode server until its first token is here. first: the first request, when
the servers meet; alone: the same prompts without a transfer; 1 token: a prompt of one token without a transfer;
added: what a hand-over takes beyond that. Medians but for first and worst. kB: read for a request."""


def milliseconds(seconds: Iterable[float]) -> str:
    """The median of some times, for a column."""
    values = list(seconds)
    return f"{statistics.median(values) * 1e3:.1f}" if values else "-"


def row(shape: str, connector: str, result: Result) -> str:
    """A line of the table; times in ms."""
    answered = result.answered
    kilobytes = f"{result.bytes_read / len(answered) / 1e3:.0f}" if answered and result.bytes_read else "-"
    worst = [max(answered)] if answered else []
    columns = (answered[:1], answered, worst, result.alone, result.least, result.added)
    line = f"{shape:<16} {connector:<9} {result.outcome:<14} {result.equal:>3}/{result.asked:<2} "
    line += " ".join(f"{milliseconds(times):>8}" for times in columns) + f" {kilobytes:>7}"
    for message in result.messages[:MESSAGES]:
        line += f"\n{'':<26} {message}"
    if result.started and result.servers_agree < result.prompts:
        line += f"\n{'':<26} alone, the servers agree in {result.servers_agree} of {result.prompts} prompts"
    if result.started and result.distinct < result.prompts:
        line += f"\n{'':<26} {result.distinct} of {result.prompts} prompts have an answer of their own"
    return line


def machine() -> dict[str, object]:
    """The properties of the machine that the figures depend on."""
    return {
        "processors": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "UCX_TLS": os.environ.get("UCX_TLS"),
    }


def save(file: pathlib.Path | None, found: dict[str, object]) -> int:
    """Writes every figure, if a file is named."""
    if file is not None:
        file.write_text(json.dumps({"machine": machine(), **found}, indent=1) + "\n")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="where the models are, and logs go")
    parser.add_argument("shapes", nargs="*", help=f"of {', '.join(SHAPES)}; by default all")
    parser.add_argument("--connectors", nargs="+", choices=CONNECTORS, default=list(CONNECTORS))
    parser.add_argument("--prompts", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=180, help="for a shape and connector, or a level")
    parser.add_argument("--layers", action="store_true", help="writing layer by layer against reading instead")
    parser.add_argument("--load", action="store_true", help="many requests at once through the proxy instead")
    parser.add_argument("--setups", nargs="+", choices=load.SETUPS, default=load.SETUPS, help="of --load")
    parser.add_argument(
        "--levels", type=int, nargs="+", default=load.LEVELS, help="requests at once, of --load"
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=layerwise.LENGTHS, help="lengths of prompts, of --layers"
    )
    parser.add_argument("--json", type=pathlib.Path, help="where to write every figure")
    parser.add_argument(
        "--port", type=int, default=8400, help="the first of three ports, and two more 50 above"
    )
    given = parser.parse_intermixed_args()
    if unknown := set(given.shapes) - set(SHAPES):
        parser.error(f"no such shape: {', '.join(sorted(unknown))}")
    if given.layers:
        found = layerwise.run(given.folder.resolve(), given.port, given.tokens, given.rounds, given.seconds)
        return save(given.json, {"layers": found})
    if given.load:
        found = load.run(given.folder.resolve(), given.port, given.setups, given.levels, given.seconds)
        return save(given.json, {"load": found})
    prompts = make_prompts(given.prompts, 300, 900)
    print(LEGEND)
    print(COLUMNS, flush=True)
    cases: list[dict[str, object]] = []
    for name in given.shapes or SHAPES:
        for connector in given.connectors:
            case = Handover(
                SHAPES[name], CONNECTORS[connector], given.folder.resolve(), f"{name}-{connector}", given.port
            )
            result = case.run(prompts, given.rounds, given.seconds)
            print(row(name, connector, result), flush=True)
            cases.append(
                {
                    "shape": name,
                    "connector": connector,
                    "outcome": result.outcome,
                    **dataclasses.asdict(result),
                }
            )
            save(given.json, {"rounds": given.rounds, "cases": cases})
    return 0


if __name__ == "__main__":
    sys.exit(main())
