"""Attacks an honest pair on one host through its shared memory: as any process of the same user could, and as a
process with the card could.

Reports what run.py does, with moves of the pair instead of requests, for each attack alone or all at once. An
attack alone must leave the pair half of its speed beside a program that only uses the processor; all at once,
the pair must only not stand still. In any case it must be as fast as before within 2 s. Ends with a line
`N passed, N failed`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attacks import Target
from judging import LONG, STARVED, judge_fairly
from run import MEBI, Half, Pair, judge, start

LEAST = 0.5  # of the moves beside programs that use the processor likewise
CALL_MS = 50.0  # CPU time of one call of progress
MORE_BYTES = 96 * MEBI  # all shared buffers, and the memory for their clients
LEFT_DESCRIPTORS = 16
LEFT_BYTES = 26 * MEBI

# The programs of each attack, which run at once; attacks without a card first.
PLANS: dict[str, list[str]] = {
    "garbage": ["garbage"],
    "descriptors": ["descriptors"],
    "flood": ["flood"],
    "unread": ["unread"],
    "greedy": ["greedy", "greedy"],
    "crumbs": ["crumbs"],
    "stopped": ["stopped"],
    "scribble": ["scribble"],
    "crowd": ["crowd"],
    "mapped": ["mapped"],
    "gatekeeper": ["gatekeeper"],
}
STRANGERS = {"garbage", "descriptors", "flood"}


@dataclass
class ShmPair(Pair):
    """A pair on one host; `folder` holds the attacking programs."""

    connections = 1024
    folder: Path = Path()
    harm: list[str] = field(default_factory=list)
    name: str = field(init=False)

    def __post_init__(self) -> None:
        # Looked up before any attack: later descriptors come and go, and the producer may run out of them
        self.name = socket_name(self.producer.process.pid)

    def attack(self, names: list[str], seconds: float) -> int:
        processes = [
            subprocess.Popen(
                [str(self.folder / f"shm_{name}"), self.card(name), str(seconds)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for name in names
        ]
        done = 0
        for process in processes:
            try:
                said, _ = process.communicate(timeout=seconds + 60)
            except subprocess.TimeoutExpired:
                process.kill()
                said, _ = process.communicate()
            if process.returncode:
                self.harm.append(f"{Path(str(process.args[0])).name} ended with {process.returncode}")
                continue
            answer = json.loads(said)
            done += answer["done"]
            if answer["harm"]:
                self.harm.append(answer["harm"])
        return done

    def card(self, name: str) -> str:
        """What an attacker is told: the card, or for a stranger only the name that everybody can see."""
        if name not in STRANGERS:
            return f"card:{self.producer.endpoint}"
        return f"name:{self.name}"


def socket_name(pid: int) -> str:
    """The name of the process's listening socket, as /proc/net/unix shows it."""
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            links.append(link.readlink().name)
    sockets = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        # fields: 6 is the inode, 3 the flags (listening), 7 the name
        if fields[6] in sockets and len(fields) > 7 and fields[3] == "00010000":
            return fields[7].removeprefix("@kvferry-")
    raise RuntimeError("the owner's socket has no name")


def open_pair(program: Path, *options: str) -> ShmPair:
    owner = start(str(program), "own", list(options))
    reader = start(str(program), "read", [owner.endpoint])
    return ShmPair(owner, reader, Target("", ""), program.parent)


def wait_for(half: Half, what: str, least: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not half.lines or half.last[what] < least:
        if time.monotonic() > end or half.process.poll() is not None:
            return False
        time.sleep(0.1)
    return True


def a_wrong_byte_is_noticed(program: Path) -> bool:
    """The control: the reader must notice a wrong byte of the owner."""
    pair = open_pair(program, "--wrong")
    noticed = wait_for(pair.consumer, "wrong", 1, 20)
    pair.close()
    return noticed


def find_faults(pair: ShmPair, figures: dict[str, Any], faults: list[str], judged_by_speed: bool) -> list[str]:
    """What judge() found, and the further limits of this transport."""
    faults = faults + pair.harm
    pair.harm = []
    if judged_by_speed and figures["of burning"] < LEAST:
        faults.append(f"{STARVED}: {figures['of burning']} of the moves")
    if judged_by_speed and figures["ms of a call"] > CALL_MS:
        faults.append(f"{LONG}: {figures['ms of a call']} ms of the processor")
    if figures["MiB more"] * MEBI > MORE_BYTES:
        faults.append(f"{figures['MiB more']} MiB more than before are above the budget of buffers")
    if figures["fds left"] > LEFT_DESCRIPTORS or figures["MiB left"] * MEBI > LEFT_BYTES:
        faults.append(f"{figures['fds left']} descriptors and {figures['MiB left']} MiB were left")
    return faults


def judge_one(
    program: Path, names: list[str], seconds: float, by_speed: bool
) -> tuple[dict[str, Any], list[str]]:
    """Runs attacks at once on a new pair."""
    pair = open_pair(program)
    wait_for(pair.consumer, "done", 20, 30)
    attackers = [one for name in names for one in PLANS[name]]
    figures, faults = judge(pair, attackers, seconds, False, (LEFT_DESCRIPTORS, LEFT_BYTES))
    figures["attack"] = names[0] if len(names) == 1 else f"all {len(names)}"
    faults = find_faults(pair, figures, faults, by_speed)
    if pair.close():
        faults.append("the pair did not end as it should")
    figures["moves/s"] = figures.pop("requests/s")
    figures.pop("told")
    return figures, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="the honest one: build/release/tests/hostile/shm_honest")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="each attack alone, for so long [2]; 0: none"
    )
    parser.add_argument("--together", type=float, default=0.0, help="then all at once for so many seconds [0]")
    parser.add_argument(
        "--any-speed", action="store_true", help="not judged by times, for programs with sanitizers"
    )
    parser.add_argument("--only", action="append", choices=sorted(PLANS), help="this attack; may be repeated")
    parser.add_argument("--json", help="write the figures there too")
    options = parser.parse_args()
    program = Path(options.program)
    names = options.only or list(PLANS)
    counts = {"ok": 0, "FAILED": 0}
    rows = []

    def say(word: str, *text: str) -> None:
        counts[word] += 1
        print(word.ljust(6), *text, flush=True)

    say(*("ok", "a wrong byte is noticed") if a_wrong_byte_is_noticed(program) else ("FAILED", "it is not"))
    by_speed = not options.any_speed
    alone = [([name], options.seconds, by_speed) for name in names if options.seconds]
    at_once = [(names, options.together, False)] if options.together else []
    for plan in alone + at_once:
        figures, faults = judge_fairly(functools.partial(judge_one, program, *plan), plan[1])
        rows.append(figures)
        say("FAILED" if faults else "ok", json.dumps(figures), *faults)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))
    print(f"{counts['ok']} passed, {counts['FAILED']} failed")
    return 1 if counts["FAILED"] or not counts["ok"] else 0


if __name__ == "__main__":
    sys.exit(main())
