"""Prefill in one SGLang server, decode in another: run.py FOLDER [case...]

Each case starts two servers; what it does with them is in the file that RUNS names. Ends with `N passed, N
failed`.
"""

from __future__ import annotations

import pathlib
import sys
import time

from cases import CASES, Case, What
from faults import Faults
from handing import Drafts, HandOver, Prefixes
from pair import Pair
from refusing import Mismatch, Stages, WrongKey

RUNS = {
    What.HAND_OVER: HandOver,
    What.DRAFTS: Drafts,
    What.PREFIXES: Prefixes,
    What.FAULTS: Faults,
    What.MISMATCH: Mismatch,
    What.STAGES: Stages,
    What.WRONG_KEY: WrongKey,
}


class Runner:
    """Runs cases and counts."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
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
            with Pair(self._folder, name, case) as pair:
                RUNS[case.what](self.judge, pair).run()
        except Exception as error:  # one case must not end the others
            self.judge(name, "ran to its end", False, f"{type(error).__name__}: {error}")
        print(f"       {name}: {time.monotonic() - begun:.0f} s", flush=True)


def main() -> int:
    """Runs the named cases, or all; returns the exit status."""
    folder = pathlib.Path(sys.argv[1]).resolve()
    runner = Runner(folder)
    for name in sys.argv[2:] or CASES:
        runner.run(name, CASES[name])
    print(f"{runner.passed} passed, {runner.failed} failed")
    return 1 if runner.failed or not runner.passed else 0


if __name__ == "__main__":
    sys.exit(main())
