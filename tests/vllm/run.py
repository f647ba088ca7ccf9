"""Prefill in one vLLM server, decode in another, of one model in different shapes.

Each case starts two servers; what it does with them is in the file that RUNS names. Ends with `N passed, N
failed`.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import vllm
from beside import Beside
from cases import CASES, SHORT, Case, What
from copying import Copying
from elsewhere import Elsewhere
from ending import Ending
from faults import Faults
from mismatch import Mismatch
from pair import BESIDE, INTERRUPTING, PLAIN, PROBING, WATCHING, Pair
from prefixes import Prefixes
from prompts import LENGTHS, SHORT_LENGTHS, HandOver
from proxying import Proxying
from refusing import Refusing
from replicas import Replicas
from retries import Retries
from roles import Roles
from turns import ProxyTurns, Turns

#: What a case runs, and with which connector.
RUNS: dict[What, tuple[Callable[..., Any], tuple[str, str | None]]] = {
    What.HAND_OVER: (HandOver, PROBING),
    What.FAULTS: (Faults, WATCHING),
    What.RETRIES: (Retries, WATCHING),
    What.COPYING: (Copying, INTERRUPTING),
    What.MISMATCH: (Mismatch, WATCHING),
    What.PREFIXES: (Prefixes, PROBING),
    What.PROXY: (Proxying, WATCHING),
    What.ENDING: (Ending, PLAIN),
    What.REFUSED: (Refusing, PLAIN),
    What.ROLES: (Roles, PLAIN),
    What.REPLICAS: (Replicas, PLAIN),
    What.TURNS: (Turns, PROBING),
    What.PROXY_TURNS: (ProxyTurns, PROBING),
    What.BESIDE: (Beside, BESIDE),
    What.ELSEWHERE: (Elsewhere, WATCHING),
}


class Runner:
    """Runs cases and counts."""

    def __init__(self, folder: pathlib.Path, port: int, short: bool, minutes: float) -> None:
        self._folder, self._port = folder, port
        self._more: dict[What, dict[str, Any]] = {
            What.HAND_OVER: {"lengths": SHORT_LENGTHS if short else LENGTHS},
            What.FAULTS: {"minutes": minutes},
        }
        self.passed = 0
        self.failed = 0

    def judge(self, case: str, what: str, good: bool, detail: str = "") -> None:
        """Records one judgement."""
        self.passed += good
        self.failed += not good
        print(f"{'ok    ' if good else 'FAILED'} {case}: {what}", "" if good else detail, flush=True)

    def run(self, name: str, case: Case) -> None:
        """Runs one case."""
        begun = time.monotonic()
        try:
            runs, connector = RUNS[case.what]
            with Pair(self._folder, name, case, self._port, connector) as pair:
                more = {"lengths": case.lengths} if case.lengths else self._more.get(case.what, {})
                runs(self.judge, pair, **more).run()
        except Exception as error:  # one case must not end the others
            self.judge(name, "ran to its end", False, f"{type(error).__name__}: {error}")
        print(f"       {name}: {time.monotonic() - begun:.0f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="where the models are, and logs go")
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; by default all")
    parser.add_argument("--short", action="store_true", help=f"fewer prompts; by default {' and '.join(SHORT)}")
    parser.add_argument(
        "--minutes", type=float, default=0, help="for which the cases faults* repeat their faults"
    )
    parser.add_argument("--port", type=int, default=8300, help="the first of eight ports")
    given = parser.parse_intermixed_args()  # options may come between the folder and the cases
    if unknown := set(given.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    # The servers import what this process imports.
    print(f"vLLM {vllm.__version__} from {pathlib.Path(vllm.__file__).parent}")
    runner = Runner(given.folder.resolve(), given.port, given.short, given.minutes)
    for name in given.cases or (SHORT if given.short else CASES):
        runner.run(name, CASES[name])
    print(f"{runner.passed} passed, {runner.failed} failed")
    return runner.failed != 0


if __name__ == "__main__":
    sys.exit(main())
