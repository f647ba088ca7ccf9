"""The judging of a pair's speed, over lines as the pair prints them."""

from __future__ import annotations

import unittest
from typing import Any

from judging import NOT_BACK, RECOVERY_S, ROUNDS, STOOD, WINDOW_S, Speeds, judge_fairly, rate

BEGIN, END, LATER = 10.0, 20.0, 30.0  # of the attack, and when the pair was measured once more
USUAL = 1000.0  # requests per second


def lines_of(pieces: list[tuple[float, float]]) -> list[dict[str, Any]]:
    """A line five times a second. Each piece is a time and the requests per second until then."""
    lines, done, now = [], 0.0, 0.0
    for until, per_second in pieces:
        while now < until:
            lines.append({"time": now, "done": int(done)})
            now += 0.2
            done += per_second * 0.2
    return lines


def speeds_of(pieces: list[tuple[float, float]]) -> Speeds:
    lines, after = lines_of(pieces), END + RECOVERY_S
    return Speeds(
        rate(lines, BEGIN - WINDOW_S, BEGIN),
        rate(lines, after, after + WINDOW_S),
        rate(lines, LATER - WINDOW_S, LATER),
    )


class SpeedsTest(unittest.TestCase):
    def test_a_pair_that_is_back_within_two_seconds_is_good(self) -> None:
        speeds = speeds_of([(BEGIN, USUAL), (END + 1.8, 0.1 * USUAL), (LATER, USUAL)])
        self.assertEqual(speeds.faults(), [])
        self.assertAlmostEqual(speeds.back(), 1.0, 2)

    def test_a_pair_that_is_back_later_is_not(self) -> None:
        for slow in (0.0, 0.1, 0.6):
            speeds = speeds_of([(BEGIN, USUAL), (END + 5, slow * USUAL), (LATER, USUAL)])
            self.assertEqual(len(speeds.faults()), 1)
            self.assertIn(f"{NOT_BACK} 2 s after", speeds.faults()[0])

    def test_a_pair_that_is_never_back_is_not(self) -> None:
        for slow in (0.0, 0.1, 0.4):
            speeds = speeds_of([(BEGIN, USUAL), (LATER, slow * USUAL)])
            self.assertEqual(len(speeds.faults()), 1)
            self.assertIn(f"{NOT_BACK} at all", speeds.faults()[0])

    def test_a_machine_that_has_got_slower_is_no_fault_of_the_pair(self) -> None:
        speeds = speeds_of([(BEGIN, USUAL), (END, 0.2 * USUAL), (LATER, 0.6 * USUAL)])
        self.assertEqual(speeds.faults(), [])

    def test_a_machine_that_has_got_faster_is_none_either(self) -> None:
        speeds = speeds_of([(BEGIN, 0.5 * USUAL), (END + 6, 0.4 * USUAL), (LATER, USUAL)])
        self.assertEqual(speeds.faults(), [])

    def test_a_pair_that_did_nothing_before_says_nothing(self) -> None:
        self.assertIn(STOOD, speeds_of([(BEGIN, 0.0), (LATER, USUAL)]).faults()[0])

    def test_too_few_lines_are_no_rate(self) -> None:
        self.assertEqual(rate([{"time": 1.0, "done": 5}], 0.0, 2.0), 0.0)


class FairnessTest(unittest.TestCase):
    def judge(self, rounds: list[list[str]], seconds: float = 2.0) -> tuple[list[str], int]:
        """The faults that are told, and how often the pair was attacked."""
        left = list(rounds)
        _, faults = judge_fairly(lambda: ({}, left.pop(0)), seconds)
        return faults, len(rounds) - len(left)

    def test_a_slow_round_is_made_again(self) -> None:
        self.assertEqual(self.judge([[NOT_BACK], []]), ([], 2))

    def test_a_pair_that_is_slow_every_time_is_at_fault(self) -> None:
        self.assertEqual(self.judge([[NOT_BACK]] * ROUNDS), ([NOT_BACK], ROUNDS))

    def test_other_faults_count_at_once(self) -> None:
        self.assertEqual(self.judge([[NOT_BACK, "3 requests are wrong"], []])[1], 1)
        self.assertEqual(self.judge([[NOT_BACK], ["3 requests are wrong"], []]), (["3 requests are wrong"], 2))

    def test_an_attack_of_an_hour_is_not_made_again(self) -> None:
        self.assertEqual(self.judge([[NOT_BACK], []], 3600.0), ([NOT_BACK], 1))


if __name__ == "__main__":
    unittest.main()
