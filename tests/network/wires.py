"""A link between the hosts a and b that is slow, long or lossy, and changes while it runs.

Where the kernel has netem, a veth pair is shaped by it; elsewhere wire.c is the link, in user space between two
TUN devices. Either way each host has a device "wire", and both directions have these settings:

    rate      Mbit/s; 0: unlimited
    delay     ms
    jitter    ms: the delay is longer by 0 to this, evenly, and packets may overtake each other by that
    loss      percent of the packets
    reorder   percent of the packets: they skip the delay, and so overtake others
    segments  "on": a sender may hand over more than the MTU at once, as with network cards, and one loss takes
              all of it; "off": it hands over single packets
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

DEVICE = "wire"
QUEUE_MS = 40  # a packet that would wait longer to leave is dropped, as by wire.c
PACKETS_MAX = 100000  # on their way by netem: 50 ms at 10 Gbit/s are 42,000
UNLIMITED_MBITS = 100000


class Counts(NamedTuple):
    """Packets of both directions. A full queue loses packets, too."""

    carried: int
    lost: int

    def __str__(self) -> str:
        return f"{self.carried} packets carried, {self.lost} lost"


class Wire(ABC):
    @abstractmethod
    def tell(self, **settings: float | str) -> None:
        """Changes these settings of both directions; the others stay."""

    @abstractmethod
    def cut(self, direction: str = "both") -> None:
        """Loses what is sent in this direction from now on, silently: "ab", "ba" or "both"."""

    @abstractmethod
    def heal(self) -> None:
        """Ends every cut."""

    @abstractmethod
    def count(self) -> Counts: ...


# ---- which of the two --------------------------------------------------------------------------


def choose(asked: str, lacking: str | None) -> tuple[bool, str]:
    """Whether netem shapes the links, and a line that says so.

    Args:
        asked: "netem" or "wire"; "auto": netem if the kernel has it
        lacking: why netem cannot be used here; None: it can

    Raises:
        ValueError: netem was asked for, and is not there
    """
    if asked == "netem" and lacking:
        raise ValueError(f"netem was asked for, but cannot be used here: {lacking}")
    if asked == "wire":
        return False, "links with delay and loss: the tests' own, in user space, as was asked for"
    if lacking:
        return False, f"links with delay and loss: the tests' own, in user space; no netem here: {lacking}"
    return True, "links with delay and loss: by the kernel's netem"


# ---- by netem ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    rate: float = 0
    delay: float = 0
    jitter: float = 0
    loss: float = 0
    reorder: float = 0
    segments: str = "on"


def netem_words(of: Settings, is_cut: bool) -> list[str]:
    """The arguments of tc for netem. Its delay varies by as much to both sides of what it is given."""
    words = ["limit", str(PACKETS_MAX)]
    if of.delay or of.jitter:
        words += ["delay", f"{round((of.delay + of.jitter / 2) * 1000)}us"]
    if of.jitter:
        words += [f"{round(of.jitter / 2 * 1000)}us"]
    if is_cut or of.loss:
        words += ["loss", "random", f"{100 if is_cut else of.loss:g}%"]
    if of.reorder and (of.delay or of.jitter):
        words += ["reorder", f"{of.reorder:g}%"]
    return words


def rate_words(of: Settings, mtu: int) -> list[str]:
    """The arguments of tc for tbf, behind netem: netem's own rate would put packets back into their order. What
    may leave at once is what leaves in a millisecond, and never less than two packets."""
    mbits = of.rate or UNLIMITED_MBITS
    burst = max(2 * mtu, round(mbits * 125))
    return ["rate", f"{round(mbits * 1000)}kbit", "burst", str(burst), "latency", f"{QUEUE_MS}ms"]


class End(NamedTuple):
    """Runs the programs tc and ip in a host."""

    tc: Callable[..., str]  # returns what it prints
    ip: Callable[..., Any]


class NetemWire(Wire):
    """A veth pair, which exists already.

    Args:
        ends: host a's and host b's
    """

    def __init__(self, ends: tuple[End, End], mtu: int) -> None:
        self._ends = ends
        self._mtu = mtu
        self._settings = Settings()
        self._cut = (False, False)
        self._shape()

    def tell(self, **settings: float | str) -> None:
        self._settings = replace(self._settings, **settings)  # type: ignore[arg-type]
        self._shape()

    def cut(self, direction: str = "both") -> None:
        self._cut = {"ab": (True, False), "ba": (False, True), "both": (True, True)}[direction]
        self._shape()

    def heal(self) -> None:
        self._cut = (False, False)
        self._shape()

    def count(self) -> Counts:
        found = []
        for end in self._ends:
            queues = json.loads(end.tc("-s", "-j", "qdisc", "show", "dev", DEVICE))
            found += [one for one in queues if one["kind"] == "netem"]
        return Counts(sum(one["packets"] for one in found), sum(one["drops"] for one in found))

    def _shape(self) -> None:
        at_once = "1" if self._settings.segments == "off" else "65535"
        for end, is_cut in zip(self._ends, self._cut, strict=True):
            end.ip("link", "set", "dev", DEVICE, "gso_max_segs", at_once)
            end.tc("qdisc", "replace", "dev", DEVICE, "root", "handle", "1:", "netem",
                   *netem_words(self._settings, is_cut))  # fmt: skip
            end.tc("qdisc", "replace", "dev", DEVICE, "parent", "1:1", "handle", "10:", "tbf",
                   *rate_words(self._settings, self._mtu))  # fmt: skip


# ---- in user space -----------------------------------------------------------------------------


class OwnWire(Wire):
    """A running wire.

    Args:
        ask: gives wire.c, which lists its commands, one of them, and returns the answer
    """

    def __init__(self, ask: Callable[[str], str]) -> None:
        self._ask = ask

    def tell(self, **settings: float | str) -> None:
        for name, value in settings.items():
            answer = self._ask(f"{name} {value}")
            assert answer == "ok", answer

    def cut(self, direction: str = "both") -> None:
        self.tell(cut=direction)

    def heal(self) -> None:
        self.tell(heal="")

    def count(self) -> Counts:
        numbers = [int(one) for one in re.findall(r"\d+", self._ask("count"))]
        return Counts(numbers[0] + numbers[3], sum(numbers[1:3] + numbers[4:6]))
