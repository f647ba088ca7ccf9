"""Attacks an honest pair of stages over messages: through its port, as any host that reaches it could; and with
its card, by messages of the fabric and of the stage.

Reports what run.py does, without keys and with, for each attack alone or all at once. Ends with a line `N
passed, N failed`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from attacks import Target
from judging import LONG, STARVED, judge_fairly
from run import APART_S, CONNECTIONS, MEBI, Pair, judge, start
from run_shm import wait_for
from wire_attacks import APART, HOLDERS, STRANGERS, attack

LEAST = 0.3  # of the requests beside programs that use the processor likewise: usually it is 0.7 and more
# Of one attack. All at once may take what judge() allows: while the owner does not get the processor, ZeroMQ
# keeps up to 9 MiB for each connection of those who have the card, and three attacks have eight of them.
MORE_BYTES = 192 * MEBI
SOCKETS = 200  # of the pair's own: it connects back to peers that join it
LEFT_DESCRIPTORS, LEFT_BYTES = 40, 64 * MEBI
CALL_MS = 100.0  # CPU time of one turn
LONGEST_S = 4.0  # until slots that departed peers may still touch are free, and their connections are closed

# The programs of each attack, which run at once: two that hold all the slots they can get are worse than one.
BY_STAGE: dict[str, list[str]] = {
    "opens": ["opens"],
    "giants": ["giants"],
    "holds": ["holds", "holds", "holds"],
    "abandons": ["abandons"],
    "invents": ["invents"],
    "garbage": ["garbage"],
    "silent": ["silent", "silent"],
}
NAMES = [*BY_STAGE, *STRANGERS, *HOLDERS]


@dataclass
class StagePair(Pair):
    """`folder` holds stage_attack; `secret` is the attackers' key."""

    connections = CONNECTIONS + SOCKETS
    folder: Path = Path()
    secret: tuple[str, ...] = ()
    harm: list[str] = field(default_factory=list)

    def attack(self, names: list[str], seconds: float) -> int:
        spawn = multiprocessing.get_context("spawn")
        line = self.producer.endpoint
        programs = [
            subprocess.Popen(
                [str(self.folder / "stage_attack"), name, line.split(",")[0], str(seconds), *self.secret],
                stdout=subprocess.PIPE,
                text=True,
            )
            for name in names
            if name in BY_STAGE
        ]
        wires = [name for name in names if name not in BY_STAGE]
        counts = [spawn.Value("q", 0) for _ in wires]
        processes = [
            spawn.Process(target=attack, args=(n, line, seconds, c)) for n, c in zip(wires, counts, strict=True)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(seconds + 60)
            if process.exitcode is None:
                process.terminate()
            if process.exitcode:
                self.harm.append(f"an attacker ended with {process.exitcode}")
        done = sum(count.value for count in counts)
        for program in programs:
            try:
                said, _ = program.communicate(timeout=seconds + 60)
                done += json.loads(said)["done"]
            except (subprocess.TimeoutExpired, ValueError):
                program.kill()
                self.harm.append(f"{program.args} did not end as it should")
        return done


def open_pair(program: Path, secure: bool, role: str = "own") -> StagePair:
    owner_key, reader_key, attacker_key = (
        (zmq.curve_keypair()[1].decode(),) if secure else () for _ in range(3)
    )
    owner = start(str(program), role, [*owner_key])
    reader = start(str(program), "read", [owner.endpoint.split(",")[0], *reader_key])
    return StagePair(owner, reader, Target("", ""), program.parent, attacker_key)


def a_wrong_byte_is_noticed(program: Path) -> bool:
    """The control: the reader must notice a wrong cell of the owner."""
    pair = open_pair(program, False, "own-wrong")
    noticed = wait_for(pair.consumer, "wrong", 1, 30)
    pair.close()
    return noticed


def find_faults(pair: StagePair, figures: dict[str, Any], faults: list[str], by_speed: bool) -> list[str]:
    """What judge() found, and the further limits of this pair."""
    last = pair.producer.last
    faults = faults + pair.harm
    if by_speed and figures["of burning"] < LEAST:
        faults.append(f"{STARVED}: {figures['of burning']} of the requests")
    if by_speed and figures["ms of a call"] > CALL_MS * last["slower"]:
        faults.append(f"{LONG}: {figures['ms of a call']} ms of the processor")
    alone = not figures["attack"].startswith("all")
    if alone and figures["MiB more"] * MEBI > MORE_BYTES * last["slower"]:
        faults.append(f"{figures['MiB more']} MiB more than before are above the budget")
    if figures["fds left"] > LEFT_DESCRIPTORS or figures["MiB left"] * MEBI > LEFT_BYTES * last["slower"]:
        faults.append(f"{figures['fds left']} descriptors and {figures['MiB left']} MiB were left")
    return faults


def judge_one(
    program: Path, secure: bool, names: list[str], seconds: float, by_speed: bool
) -> tuple[dict[str, Any], list[str]]:
    """Runs attacks at once on a new pair."""
    pair = open_pair(program, secure)
    wait_for(pair.consumer, "done", 20, 60)
    attackers = [one for name in names for one in BY_STAGE.get(name, [name])]
    pair.producer.await_line()
    left = LEFT_DESCRIPTORS, LEFT_BYTES * pair.producer.last["slower"]
    figures, faults = judge(pair, attackers, seconds, False, left)
    time.sleep(LONGEST_S)
    figures["attack"] = names[0] if len(names) == 1 else f"all {len(names)}"
    figures["keys"] = secure
    faults = find_faults(pair, figures, faults, by_speed)
    if pair.close():
        faults.append("the pair did not end as it should")
    return figures, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="the honest one: build/release/tests/hostile/stage_honest")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="each attack alone, for so long [2]; 0: none"
    )
    parser.add_argument(
        "--together", type=float, default=0.0, help="then all but APART at once, for so many seconds [0]"
    )
    parser.add_argument(
        "--any-speed", action="store_true", help="not judged by times, for programs with sanitizers"
    )
    parser.add_argument("--only", action="append", choices=sorted(NAMES), help="this attack; may be repeated")
    parser.add_argument("--json", help="write the figures there too")
    options = parser.parse_args()
    program = Path(options.program)
    names = options.only or NAMES
    counts = {"ok": 0, "FAILED": 0}
    rows = []

    def say(word: str, *text: str) -> None:
        counts[word] += 1
        print(word.ljust(6), *text, flush=True)

    say(*("ok", "a wrong byte is noticed") if a_wrong_byte_is_noticed(program) else ("FAILED", "it is not"))
    by_speed = not options.any_speed
    alone = [([name], options.seconds, by_speed) for name in names if options.seconds]
    together = [name for name in names if name not in APART]
    at_once = [(together, options.together, False)] if together else []
    apart = [([name], APART_S, False) for name in names if name in APART]
    short = at_once + apart if options.together else []
    for secure, plan in itertools.product((False, True), alone + short):
        if secure and plan in apart:
            continue
        figures, faults = judge_fairly(functools.partial(judge_one, program, secure, *plan), plan[1])
        rows.append(figures)
        say("FAILED" if faults else "ok", json.dumps(figures), *faults)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))
    print(f"{counts['ok']} passed, {counts['FAILED']} failed")
    return 1 if counts["FAILED"] or not counts["ok"] else 0


if __name__ == "__main__":
    sys.exit(main())
