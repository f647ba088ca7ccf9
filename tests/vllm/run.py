"""Prefill in one server, decode in another: the tokens must be those that the decode server computes alone.

Each case starts two servers of one model in different shapes. Every prompt goes

    to the decode server alone, and to the prefill server alone: do they agree without any transfer?
    through both: the answer that is judged
    to the decode server with other tokens before the same last one: this must give another answer
    through both with one corrupted block: for one of the prompts at least this must give another answer

and vLLM's own counters must say that the cache was loaded rather than computed. Ends with `N passed, N failed`.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from faults import Faults
from servers import Server, Side

PLAIN = ("KvferryConnector", "kvferry.vllm")
NEW_TOKENS = 12
LENGTHS = (5, 64, 100, 193, 300)
TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass(frozen=True)
class Case:
    """Two servers of one model."""

    model: str
    prefill: Side
    decode: Side
    dtype: str = "float32"
    has_state: bool = False  # the last prompt token is left to the decode server
    #: Where the two servers alone round differently tokens prove nothing: then the log-probability of the first
    #: token is compared, to within this.
    tolerance: float | None = None
    #: Where vLLM's step for one token disagrees with its own prefill, nothing that is generated proves
    #: anything: then the bytes of both sides are compared, token by token.
    compares_bytes: bool = False
    faults: bool = False  # what goes wrong, instead of prompts of all lengths


CASES = {
    "llama-64-64": Case("llama", Side(64), Side(64)),
    "llama-128-64": Case("llama", Side(128), Side(64)),
    "llama-64-128": Case("llama", Side(64), Side(128)),
    "llama-32-96": Case("llama", Side(32), Side(96)),
    "llama-tp2-tp1": Case("llama", Side(64, tp=2), Side(128)),
    "llama-tp1-tp2": Case("llama", Side(64), Side(32, tp=2)),
    "gemma3-64-32": Case("gemma3", Side(64), Side(32)),
    "gptoss-64-32": Case("gptoss", Side(64), Side(32), dtype="bfloat16"),
    "deepseek": Case("deepseek", Side(), Side(), compares_bytes=True),
    "granite": Case("granite", Side(), Side(), has_state=True),
    "granite-tp2-tp1": Case("granite", Side(tp=2), Side(), has_state=True),
    "granite-tp1-tp2": Case("granite", Side(), Side(tp=2), has_state=True),
    "gemma3-tp2-tp1": Case("gemma3", Side(32, tp=2), Side(64)),
    "qwen3next": Case("qwen3next", Side(), Side(), dtype="bfloat16", has_state=True, tolerance=0.1),
    "faults": Case("llama", Side(64), Side(32), faults=True),
}


class Runner:
    """Runs cases and counts."""

    def __init__(self, folder: pathlib.Path, port: int) -> None:
        self._folder = folder
        self._port = port
        self.passed = 0
        self.failed = 0

    def judge(self, case: str, what: str, good: bool, detail: str = "") -> None:
        """Notes one judgement."""
        self.passed += good
        self.failed += not good
        print(f"{'ok    ' if good else 'FAILED'} {case}: {what}", "" if good else detail, flush=True)

    def run(self, name: str, case: Case) -> None:
        """Runs one case."""
        mark = self._folder / f"{name}.corrupt"
        mark.unlink(missing_ok=True)
        dump = self._folder / f"{name}.dump"
        dump.mkdir(exist_ok=True)
        common: dict[str, Any] = {"model": self._folder / case.model, "dtype": case.dtype}
        prefill = Server(
            **common,
            side=case.prefill,
            role="kv_producer",
            port=self._port,
            log=self._folder / f"{name}.prefill.log",
            environment={"KVFERRY_DUMP": str(dump)},
            connector=("DumpingConnector", "probing") if case.compares_bytes else PLAIN,
        )
        decode = Server(
            **common,
            side=case.decode,
            role="kv_consumer",
            port=self._port + 1,
            log=self._folder / f"{name}.decode.log",
            environment={"KVFERRY_CORRUPT": str(mark), "KVFERRY_DUMP": str(dump)},
            connector=("DumpingConnector" if case.compares_bytes else "CorruptingConnector", "probing"),
        )
        begun = time.monotonic()
        try:
            prefill.start()
            decode.start()
            prefill.ready()
            decode.ready()
            if case.faults:
                Faults(name, self.judge, prefill, decode).run()
            elif case.compares_bytes:
                self._compare_bytes(name, prefill, decode, dump)
            else:
                self._ask(name, case, prefill, decode, mark)
        except Exception as error:  # one case must not end the others
            self.judge(name, "ran to its end", False, f"{type(error).__name__}: {error}")
        finally:
            decode.stop()
            prefill.stop()
            mark.unlink(missing_ok=True)
            print(f"       {name}: {time.monotonic() - begun:.0f} s", flush=True)

    def _ask(self, name: str, case: Case, prefill: Server, decode: Server, mark: pathlib.Path) -> None:
        chance = random.Random(3)
        corrupted_differs = False
        for length in LENGTHS:
            prompt = [chance.randrange(3, 500) for _ in range(length)]
            other = [chance.randrange(3, 500) for _ in range(length - 1)] + prompt[-1:]
            alone = _answer(decode.ask(prompt, NEW_TOKENS))
            there = _answer(prefill.ask(prompt, NEW_TOKENS))
            before = decode.loaded_tokens()
            through = self._through(prefill, decode, prompt)
            loaded = decode.loaded_tokens() - before
            what = f"{length} tokens"
            if alone[0] != there[0]:
                print(f"       {name}: {what}: the two servers alone disagree", flush=True)
            if case.tolerance is None:
                self.judge(name, f"{what}: same tokens", through[0] == alone[0], f"{through[0]} not {alone[0]}")
            else:
                off = abs(through[1] - alone[1])
                good = through[0][0] == alone[0][0] and off <= case.tolerance
                self.judge(name, f"{what}: same first token to within {case.tolerance}", good, f"off by {off}")
            wanted = length - case.has_state
            self.judge(name, f"{what}: all were loaded", loaded == wanted, f"{loaded} of {wanted}")
            if length > 2:
                differs = _answer(decode.ask(other, NEW_TOKENS))[0] != alone[0]
                self.judge(name, f"{what}: another prompt differs", differs)
            mark.touch()
            corrupted_differs |= self._through(prefill, decode, prompt)[0] != through[0]
            mark.unlink()
        self.judge(name, "a corrupted block changes an answer", corrupted_differs)
        loads, wanted = decode.counter("vllm:kvferry_loads_total"), 2 * len(LENGTHS) * case.decode.tp
        self.judge(name, "the metrics count every load of every rank", loads == wanted, f"{loads} of {wanted}")

    def _compare_bytes(self, name: str, prefill: Server, decode: Server, dump: pathlib.Path) -> None:
        chance = random.Random(3)
        for length in LENGTHS:
            prompt = [chance.randrange(3, 500) for _ in range(length)]
            self._through(prefill, decode, prompt)
            there = torch.load(dump / "kv_producer.pt")
            here = torch.load(dump / "kv_consumer.pt")
            layers = [name for name in there if len(there[name]) == length and there[name].any()]
            self.judge(
                name, f"{length} tokens: the prefill server's cache has something in it", len(layers) > 1
            )
            same = there.keys() == here.keys() and all(torch.equal(there[key], here[key]) for key in there)
            self.judge(name, f"{length} tokens: same bytes in {len(layers)} layers", same)

    @staticmethod
    def _through(prefill: Server, decode: Server, prompt: list[int]) -> tuple[list[int], float]:
        params = prefill.ask(prompt, 1, dict(TO_PREFILL))["kv_transfer_params"]
        return _answer(decode.ask(prompt, NEW_TOKENS, params))


def _answer(found: dict[str, Any]) -> tuple[list[int], float]:
    """Tokens, and the log-probability of the first."""
    choice = found["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"][0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="where the models are, and logs go")
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; by default all")
    parser.add_argument("--port", type=int, default=8300, help="the first of two ports")
    given = parser.parse_args()
    if unknown := set(given.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    runner = Runner(given.folder.resolve(), given.port)
    for name in given.cases or CASES:
        runner.run(name, CASES[name])
    print(f"{runner.passed} passed, {runner.failed} failed")
    return runner.failed != 0


if __name__ == "__main__":
    sys.exit(main())
