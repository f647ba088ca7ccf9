"""What wires are told: words for tc, worked out by hand, which tc must understand; and which kind is chosen."""

from __future__ import annotations

import os
import subprocess
import unittest

from wires import Counts, End, NetemWire, OwnWire, Settings, choose, netem_words, rate_words

NO_NETEM = "Error: Specified qdisc kind is unknown."


class TheChoice(unittest.TestCase):
    def test_netem_is_used_where_it_is_there(self) -> None:
        self.assertEqual(choose("auto", None), (True, "links with delay and loss: by the kernel's netem"))
        self.assertTrue(choose("netem", None)[0])

    def test_elsewhere_links_are_the_tests_own_and_the_reason_is_said(self) -> None:
        netem, said = choose("auto", NO_NETEM)
        self.assertFalse(netem)
        self.assertEqual(
            said, f"links with delay and loss: the tests' own, in user space; no netem here: {NO_NETEM}"
        )

    def test_the_tests_own_can_be_asked_for(self) -> None:
        self.assertEqual(
            choose("wire", None),
            (False, "links with delay and loss: the tests' own, in user space, as was asked for"),
        )

    def test_netem_is_not_replaced_if_it_was_asked_for(self) -> None:
        with self.assertRaisesRegex(
            ValueError, "netem was asked for, but cannot be used here: Error: Specified"
        ):
            choose("netem", NO_NETEM)


class Words(unittest.TestCase):
    def netem(self, cut: bool = False, **settings: float) -> str:
        return " ".join(netem_words(Settings(**settings), cut))

    def rate(self, mbits: float, mtu: int = 1500) -> str:
        return " ".join(rate_words(Settings(rate=mbits), mtu))

    def test_a_link_without_settings_only_holds_many_packets(self) -> None:
        self.assertEqual(self.netem(), "limit 100000")

    def test_a_delay_is_in_microseconds(self) -> None:
        self.assertEqual(self.netem(delay=0.1), "limit 100000 delay 100us")
        self.assertEqual(self.netem(delay=50), "limit 100000 delay 50000us")

    def test_jitter_only_makes_the_delay_longer(self) -> None:
        """5 ms and up to 5 more are 7.5 ms, 2.5 more or less."""
        self.assertEqual(self.netem(delay=5, jitter=5), "limit 100000 delay 7500us 2500us")
        self.assertEqual(self.netem(jitter=4), "limit 100000 delay 2000us 2000us")

    def test_loss_and_order_are_in_percent(self) -> None:
        self.assertEqual(self.netem(loss=0.1), "limit 100000 loss random 0.1%")
        self.assertEqual(self.netem(delay=2, reorder=5), "limit 100000 delay 2000us reorder 5%")

    def test_without_a_delay_nothing_can_be_skipped(self) -> None:
        self.assertEqual(self.netem(reorder=5), "limit 100000")

    def test_a_link_that_is_cut_loses_everything(self) -> None:
        self.assertEqual(self.netem(cut=True, loss=1, delay=10), "limit 100000 delay 10000us loss random 100%")

    def test_what_leaves_at_once_is_a_millisecond_and_two_packets_at_least(self) -> None:
        self.assertEqual(self.rate(1000), "rate 1000000kbit burst 125000 latency 40ms")
        self.assertEqual(self.rate(1), "rate 1000kbit burst 3000 latency 40ms")
        self.assertEqual(self.rate(1, mtu=9000), "rate 1000kbit burst 18000 latency 40ms")
        self.assertEqual(self.rate(0), "rate 100000000kbit burst 12500000 latency 40ms")


class Netem(unittest.TestCase):
    """A wire whose commands are noted, not run. Of each end the last one of each device's part counts."""

    def setUp(self) -> None:
        self.said: list[dict[str, str]] = [{}, {}]
        self.wire = NetemWire((self.end(0), self.end(1)), 1500)

    def end(self, i: int) -> End:
        def tc(*words: str) -> str:
            if words[:2] == ("-s", "-j"):
                return f"""[{{"kind": "netem", "packets": {100 + i}, "drops": {10 + i}}},
                            {{"kind": "tbf", "packets": 7, "drops": 7}}]"""
            kind = "netem" if "netem" in words else "tbf"
            self.assertEqual(words[:4], ("qdisc", "replace", "dev", "wire"))
            self.said[i][kind] = " ".join(words[4:])
            return ""

        def ip(*words: str) -> None:
            self.assertEqual(words[:5], ("link", "set", "dev", "wire", "gso_max_segs"))
            self.said[i]["segments"] = words[5]

        return End(tc, ip)

    def all_lost(self) -> list[bool]:
        return ["loss random 100%" in said["netem"] for said in self.said]

    def test_both_directions_are_shaped_and_a_setting_stays_until_it_is_changed(self) -> None:
        self.wire.tell(rate=1000, delay=10)
        self.wire.tell(loss=1, segments="off")
        wanted = {
            "netem": "root handle 1: netem limit 100000 delay 10000us loss random 1%",
            "tbf": "parent 1:1 handle 10: tbf rate 1000000kbit burst 125000 latency 40ms",
            "segments": "1",
        }
        self.assertEqual(self.said, [wanted, wanted])
        self.wire.tell(segments="on")
        self.assertEqual([said["segments"] for said in self.said], ["65535", "65535"])

    def test_a_cut_is_of_one_direction_or_both_until_it_is_healed(self) -> None:
        self.wire.tell(loss=1)
        for direction, lost in (("ab", [True, False]), ("ba", [False, True]), ("both", [True, True])):
            self.wire.cut(direction)
            self.assertEqual(self.all_lost(), lost)
        self.wire.tell(delay=1)
        self.assertEqual(self.all_lost(), [True, True])
        self.wire.heal()
        self.assertEqual([said["netem"][-14:] for said in self.said], ["loss random 1%"] * 2)

    def test_what_is_no_setting_is_refused(self) -> None:
        with self.assertRaises(TypeError):
            self.wire.tell(speed=1)

    def test_packets_of_both_directions_are_counted_once(self) -> None:
        self.assertEqual(self.wire.count(), Counts(201, 21))


class Own(unittest.TestCase):
    def test_each_setting_is_a_command(self) -> None:
        said: list[str] = []

        def ask(command: str) -> str:
            said.append(command)
            return "ok"

        wire = OwnWire(ask)
        wire.tell(rate=1000, segments="off")
        wire.cut("ab")
        wire.heal()
        self.assertEqual(said, ["rate 1000", "segments off", "cut ab", "heal "])

    def test_an_answer_that_is_not_well_fails(self) -> None:
        with self.assertRaisesRegex(AssertionError, "unknown: speed 1"):
            OwnWire(lambda command: f"unknown: {command}").tell(speed=1)

    def test_packets_of_both_directions_are_counted(self) -> None:
        wire = OwnWire(lambda _: "ab carried 100 lost 3 dropped 4, ba carried 50 lost 1 dropped 2")
        self.assertEqual(wire.count(), Counts(150, 10))


class ToTc(unittest.TestCase):
    """tc itself, in a network namespace: the kernel may lack netem, but tc must understand the words."""

    SPACE = ("unshare", "--net") if os.geteuid() == 0 else ("unshare", "--map-root-user", "--net")

    def setUp(self) -> None:
        try:
            made = subprocess.run([*self.SPACE, "tc", "-Version"], capture_output=True, timeout=20)
        except FileNotFoundError as missing:
            self.skipTest(str(missing))
        if made.returncode != 0:
            self.skipTest("no network namespace can be made here, or there is no tc")

    def is_understood(self, *words: str) -> bool:
        done = subprocess.run(
            [*self.SPACE, "tc", "qdisc", "replace", "dev", "lo", "root", "handle", "1:", *words],
            capture_output=True, text=True, timeout=20,
        )  # fmt: skip
        return done.returncode == 0 or "qdisc kind is unknown" in done.stderr

    def test_it_understands_all_of_them(self) -> None:
        for settings in (
            Settings(),
            Settings(rate=1, delay=0.1),
            Settings(rate=10000, delay=50, jitter=5, loss=0.1),
            Settings(rate=2.5, delay=2, reorder=5),
        ):
            for cut in (False, True):
                words = netem_words(settings, cut)
                self.assertTrue(self.is_understood("netem", *words), words)
            self.assertTrue(self.is_understood("tbf", *rate_words(settings, 1500)), settings)

    def test_it_refuses_others(self) -> None:
        self.assertFalse(self.is_understood("netem", "delai", "1ms"))
        self.assertFalse(self.is_understood("tbf", "rate", "1000kbit"))


if __name__ == "__main__":
    unittest.main()
