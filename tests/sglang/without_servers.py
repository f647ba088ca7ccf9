"""Runs the tests of this folder that need no servers, `*_test.py`.

Ends with what failed, and with `N passed, N failed`.
"""

from __future__ import annotations

import os
import pathlib
import sys
import unittest

HERE = pathlib.Path(__file__).resolve().parent
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
sys.path.insert(0, str(HERE / "stand_ins"))


def main() -> int:
    """Returns the exit status."""
    tests = unittest.defaultTestLoader.discover(str(HERE), "*_test.py", str(HERE))
    result = unittest.TextTestRunner(verbosity=2).run(tests)
    for test, trace in result.failures + result.errors:
        print(f"FAILED {test.id()}: {trace.rstrip().splitlines()[-1]}")
    bad = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses)
    good = result.testsRun - bad - len(result.skipped)
    print(f"{good} passed, {bad} failed")
    return bad != 0 or good == 0


if __name__ == "__main__":
    sys.exit(main())
