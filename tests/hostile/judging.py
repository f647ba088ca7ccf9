"""How fast a pair is: before an attack, once it has ended, and later.

A pair must be back within RECOVERY_S of the end of an attack. The machine may have other work, more at one
time than at another. So the pair is back if it is nearly as fast as before the attack, or as it is a while
later. And later it must not be much slower than before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

RECOVERY_S = 2.0  # until throughput has recovered
WINDOW_S = 2.0  # over which it is measured
BACK = 0.75  # of the lower of the two other rates
RETURNED = 0.5  # of the rate before, at the latest in the end
ROUNDS = 3  # at most, if the only faults are about speed
LONGEST_REPEATED_S = 60.0  # an attack that lasted longer is not made again

# The beginnings of faults that another load on the machine may cause
NOT_BACK = "throughput is not back"
STARVED = "the reader starved"
STOOD = "the pair stood still"
LONG = "a call took long"


def rate(lines: list[dict[str, Any]], begin: float, end: float) -> float:
    """Requests per second between two times."""
    during = [line for line in lines if begin <= line["time"] <= end]
    if len(during) < 2:
        return 0.0
    return float(during[-1]["done"] - during[0]["done"]) / float(during[-1]["time"] - during[0]["time"])


@dataclass
class Speeds:
    """Requests per second of a quiet pair."""

    before: float
    after: float  # RECOVERY_S after the end of the attack, for WINDOW_S
    later: float

    def back(self) -> float:
        usual = min(self.before, self.later)
        return self.after / usual if usual > 0 else 0.0

    def faults(self) -> list[str]:
        if self.before <= 0:
            return [f"{STOOD} before the attack"]
        if self.later < RETURNED * self.before:
            return [f"{NOT_BACK} at all: {self.later:.0f} a second, {self.before:.0f} before the attack"]
        if self.back() < BACK:
            return [
                f"{NOT_BACK} {RECOVERY_S:.0f} s after the attack: {self.after:.0f} a second, "
                f"{self.before:.0f} before it and {self.later:.0f} later"
            ]
        return []


def is_about_speed(fault: str) -> bool:
    return any(words in fault for words in (NOT_BACK, STARVED, STOOD, LONG))


Judged = tuple[dict[str, Any], list[str]]


def judge_fairly(judge_once: Callable[[], Judged], seconds: float) -> Judged:
    """Measures again if the only faults are about speed, since others use the machine too: the pair must be
    fast enough once in ROUNDS."""
    judged = judge_once()
    for _ in range(ROUNDS - 1):
        if seconds > LONGEST_REPEATED_S or not judged[1] or not all(map(is_about_speed, judged[1])):
            break
        judged = judge_once()
    return judged
