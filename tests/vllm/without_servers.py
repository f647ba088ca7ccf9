"""Runs the tests of this folder that need no servers, `*_test.py`.

Ends with what failed, and with `N passed, N failed`.
"""

from __future__ import annotations

import pathlib
import sys
import unittest

import vllm


def main() -> int:
    print(f"vLLM {vllm.__version__} from {pathlib.Path(vllm.__file__).parent}")
    folder = str(pathlib.Path(__file__).parent)
    tests = unittest.defaultTestLoader.discover(folder, "*_test.py", folder)
    result = unittest.TextTestRunner(verbosity=2).run(tests)
    for test, trace in result.failures + result.errors:
        print(f"FAILED {test.id()}: {trace.rstrip().splitlines()[-1]}")
    bad = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses)
    good = result.testsRun - bad - len(result.skipped)
    print(f"{good} passed, {bad} failed")
    return bad != 0 or good == 0


if __name__ == "__main__":
    sys.exit(main())
