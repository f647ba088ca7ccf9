"""Attacks an honest pair, with one attack after the other or all at once, and judges how the pair fared.

For each attack, with and without keys: the pair's requests per second during it, compared with those beside
programs that only use the processor, with as many threads as the attack, each for as long, and 2 s after it
with those before it; wrong and failed requests; the producer's peak memory and descriptors, and those after the
attackers have gone; and the longest single call of progress, in CPU time. Ends with `N passed, N failed`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import zmq
from attacks import APART, ATTACKS, Attacker, Target
from judging import LONG, RECOVERY_S, STARVED, STOOD, WINDOW_S, Speeds, judge_fairly, rate

MEBI = 1 << 20
BUDGET = 256 * MEBI
PATIENCE_S = 30.0  # until a pair that does nothing any more is said to stand still
SETTLED_S, SETTLED_SLOWER_S = 13.0, 55.0  # until memory kept for peers is freed: the pair's lease and a margin
CONNECTIONS = 256  # that the pair accepts
WAITING = 1.25  # allows for connections that were accepted, and are closed in the pair's next turn
BACK = 0.10  # how much more than before the attack may be left after it
# May be left on top of that: memory that allocators keep if the pair cannot make them return it (memory that
# the library keeps is in "kept"), the same if it can; one message; and connections that were made again.
SLACK_BYTES, SLACK_TRIMMED, SLACK_KEPT, SLACK_FDS = BUDGET // 4, 4 * MEBI, 64 << 10, 4
APART_S = 3.0  # for each of the attacks that do not run with the others
HALF = 0.5  # of the requests beside programs that use the processor likewise
CALL_MS = 50.0  # of CPU time in one call of progress
UNREADABLE = {
    "garbage",
    "large_messages",
    "endless_messages",  # of these the kernel drops a part in the middle
    "endless_in_sessions",
}  # the others speak as the protocol has it: what they do is understood


def key_pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


@dataclass
class Half:
    """One process of the pair."""

    process: subprocess.Popen[str]
    endpoint: str
    lines: list[dict[str, Any]] = field(default_factory=list)

    def read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append(json.loads(line) | {"time": time.monotonic()})

    @property
    def last(self) -> dict[str, Any]:
        return self.lines[-1]

    def await_line(self) -> None:
        """Waits for the first line: the other half may have begun, and worked, before it came."""
        end = time.monotonic() + PATIENCE_S
        while not self.lines and time.monotonic() < end:
            time.sleep(0.1)

    def since(self, begin: float) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["time"] >= begin]


def start(program: str, role: str, options: list[str]) -> Half:
    # glibc stops returning large blocks once some were freed. Fixed thresholds prevent that, so that resident
    # memory is the pair's own.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    process = subprocess.Popen(
        [program, role, *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        env=environment,
    )
    assert process.stdout
    half = Half(process, process.stdout.readline().strip())
    assert half.endpoint, f"{role} did not start"
    threading.Thread(target=half.read, daemon=True).start()
    return half


@dataclass
class Pair:
    producer: Half
    consumer: Half
    target: Target
    connections: ClassVar[int] = CONNECTIONS  # that it accepts

    def attack(self, names: list[str], seconds: float) -> int:
        return run_attackers(names, self.target, seconds)

    def rate(self, begin: float, end: float) -> float:
        return rate(self.consumer.lines, begin, end)

    def rate_now(self) -> float:
        """The rate of a quiet pair."""
        begin = time.monotonic()
        time.sleep(WINDOW_S)
        return self.rate(begin, time.monotonic())

    def serves_since(self, begin: float) -> bool:
        """Whether requests were done after a time; waits for that, because the machine may be slow just now."""
        end = time.monotonic() + PATIENCE_S
        while True:
            lines = self.consumer.since(begin)
            if lines and lines[-1]["done"] > lines[0]["done"]:
                return True
            if time.monotonic() > end or self.consumer.process.poll() is not None:
                return False
            time.sleep(0.1)

    def gives_back(self, before: dict[str, Any], descriptors: int, kept_bytes: int) -> None:
        """Waits until the producer has no more than that beyond what it had before, or for PATIENCE_S."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end and self.producer.process.poll() is None:
            last = self.producer.last
            if (
                last["descriptors"] - before["descriptors"] <= descriptors
                and last["resident"] - before["resident"] <= kept_bytes
            ):
                return
            time.sleep(0.1)

    def close(self) -> int:
        codes = []
        for half in (self.consumer, self.producer):
            assert half.process.stdin
            half.process.stdin.close()
            try:
                codes.append(half.process.wait(60))
            except subprocess.TimeoutExpired:
                half.process.kill()
                codes.append(-1)
        return max(abs(code) for code in codes)


def open_pair(program: str, secure: bool) -> Pair:
    if not secure:
        limits = ["--connections", str(CONNECTIONS)]
        producer = start(program, "produce", limits)
        consumer = start(program, "consume", ["--peer", producer.endpoint, *limits])
        return Pair(producer, consumer, Target(producer.endpoint, consumer.endpoint))
    theirs, ours, attackers = key_pair(), key_pair(), key_pair()
    allow = [option for keys in (theirs, ours, attackers) for option in ("--allow", keys[0])]
    allow += ["--connections", str(CONNECTIONS)]
    producer = start(program, "produce", ["--keys", ",".join(theirs), *allow])
    peer = f"{producer.endpoint},{theirs[0]}"
    consumer = start(program, "consume", ["--keys", ",".join(ours), "--peer", peer, *allow])
    return Pair(producer, consumer, Target(producer.endpoint, consumer.endpoint, theirs[0], ours[0], attackers))


def attack(name: str, target: Target, seconds: float, count: Any) -> None:
    """The body of an attacking process."""
    attacker = Attacker(target)
    end = time.monotonic() + seconds
    try:
        for done in ATTACKS[name](attacker):
            count.value += done
            if time.monotonic() >= end:
                break
    finally:
        attacker.close()


def threads_below(pid: int) -> dict[tuple[int, int], float]:
    """CPU seconds that each thread of a process's descendants has used."""
    found: dict[tuple[int, int], float] = {}
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                for thread in Path(f"/proc/{child}/task").iterdir():
                    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                        found[child, int(thread.name)] = (
                            int((thread / "schedstat").read_text().split()[0]) / 1e9
                        )
                found |= threads_below(child)
    return found


class Meter:
    """Watches what an attack's threads use of the processor, apart from the pair's."""

    def __init__(self, pair: Pair) -> None:
        self.own = {half.process.pid for half in (pair.producer, pair.consumer)}
        self.used: dict[tuple[int, int], float] = {}
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def watch(self) -> None:
        while not self.ended.wait(0.1):
            self.used |= {one: s for one, s in threads_below(os.getpid()).items() if one[0] not in self.own}

    def shares(self, seconds: float) -> list[float]:
        """Of a core, of each thread that counts."""
        self.ended.set()
        self.thread.join()
        return [used / seconds for used in self.used.values() if used / seconds > 0.01]


def burn_share(share: float, seconds: float) -> None:
    """The body of a process that uses a share of a core."""
    begin, spent = time.monotonic(), time.thread_time()
    while (passed := time.monotonic() - begin) < seconds:
        if time.thread_time() - spent > share * passed:
            time.sleep(0.0005)
        else:
            sum(range(1000))


def burn_likewise(shares: list[float], seconds: float) -> None:
    """Uses the processor as an attack did: as many threads, each for as long."""
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=burn_share, args=(share, seconds)) for share in shares]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def run_attackers(names: list[str], target: Target, seconds: float) -> int:
    """Runs attacks at once and returns how much they did together; negative: one of them got what it must not
    get."""
    spawn = multiprocessing.get_context("spawn")
    counts = [spawn.Value("q", 0) for _ in names]
    processes = [
        spawn.Process(target=attack, args=(n, target, seconds, c)) for n, c in zip(names, counts, strict=True)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(seconds + 60)
        if process.is_alive():
            process.terminate()
    if any(process.exitcode for process in processes):
        return -1
    return sum(count.value for count in counts)


def cpu_seconds(pair: Pair) -> float:
    """Processor time that both processes have used."""
    ticks = 0
    for half in (pair.producer, pair.consumer):
        with open(f"/proc/{half.process.pid}/stat") as file:
            ticks += sum(int(field) for field in file.read().rpartition(")")[2].split()[11:13])
    return ticks / os.sysconf("SC_CLK_TCK")


def cpu_of_a_request(pair: Pair, measured: Callable[[], Any]) -> tuple[Any, float]:
    """The result of a call, and the processor time in ms that the pair used meanwhile per request."""
    spent, done = cpu_seconds(pair), pair.consumer.last["done"]
    result = measured()
    return result, (cpu_seconds(pair) - spent) * 1e3 / max(1, pair.consumer.last["done"] - done)


def judge(
    pair: Pair, names: list[str], seconds: float, settle: bool, left: tuple[int, int] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Runs attacks at once on a quiet pair and waits until it is quiet again. Returns figures, and faults.

    `left`: descriptors and bytes that may stay; what is left is measured once it is no more than that, or after
    PATIENCE_S.
    """
    for half in (pair.producer, pair.consumer):
        half.await_line()
    usual = pair.rate_now()
    before = dict(pair.producer.last), dict(pair.consumer.last)
    begin, meter = time.monotonic(), Meter(pair)
    done, dear = cpu_of_a_request(pair, lambda: pair.attack(names, seconds))
    end = time.monotonic()
    shares = meter.shares(seconds)
    time.sleep(RECOVERY_S)
    during_attack, after = pair.rate(begin + 0.7, end), pair.rate_now()
    goes_on = pair.serves_since(end + RECOVERY_S)
    burnt = time.monotonic()
    _, cheap = cpu_of_a_request(pair, lambda: burn_likewise(shares, min(seconds, 10.0) + 0.7))
    beside = pair.rate(burnt + 0.7, time.monotonic())
    speeds = Speeds(usual, after, pair.rate_now())
    if left:
        pair.gives_back(before[0], *left)
    if settle:
        time.sleep(SETTLED_S if pair.producer.last.get("slower", 1) == 1 else SETTLED_SLOWER_S)
    during = pair.producer.since(begin)

    def more(what: str) -> int:  # a pair without sessions does not report their counters
        return int(pair.producer.last.get(what, 0) - before[0].get(what, 0))

    most = max(line["resident"] for line in during) - before[0]["resident"]
    left = pair.producer.last["resident"] - before[0]["resident"]
    malformed = more("malformed") + int(pair.consumer.last.get("malformed", 0) - before[1].get("malformed", 0))
    figures = {
        "attack": "+".join(names) if len(names) < 4 else f"all {len(names)}",
        "done": done,
        "requests/s": round(during_attack),
        "of burning": round(during_attack / beside, 2) if beside else 0,
        "back": round(speeds.back(), 2),
        "ms a request": round(dear, 2),
        "burning": round(cheap, 2),
        "cores": round(sum(shares), 2),
        "wrong": pair.consumer.last["wrong"] - before[1]["wrong"],
        "failed": pair.consumer.last["failed"]
        - before[1]["failed"]
        + pair.producer.last["failed"]
        - before[0]["failed"],
        "MiB more": round(most / MEBI, 1),
        "MiB left": round(left / MEBI, 1),
        "fds more": max(line["descriptors"] for line in during) - before[0]["descriptors"],
        "fds usually": round(statistics.median(line["descriptors"] for line in during))
        - before[0]["descriptors"],
        "fds left": pair.producer.last["descriptors"] - before[0]["descriptors"],
        "ms of a call": max(line["busiest_ms"] for line in during),
        "told": more("refused"),
        "refused": more("over_budget"),
        "closed": more("closed"),
        "malformed": malformed,
        "kept MiB": round(max(line.get("kept", 0) for line in during) / MEBI, 1),
        "kept left": more("kept"),
    }
    faults = speeds.faults()
    if done < 0:
        faults.append("an attacker got what it must not get")
    if malformed and UNREADABLE.isdisjoint(names):
        faults.append(f"{malformed} messages of an attack could not be read: it does not speak the protocol")
    if figures["wrong"] or figures["failed"]:
        faults.append(f"{figures['wrong']} requests are wrong and {figures['failed']} failed")
    if during_attack <= 0 or not goes_on:
        faults.append(STOOD)
    sanitizer = 2 if pair.producer.last.get("slower", 1) > 1 else 1  # red zones, and freed memory in quarantine
    if most > BUDGET * sanitizer or figures["kept MiB"] * MEBI > BUDGET:
        faults.append(f"{figures['MiB more']} MiB more than before are above the budget")
    if figures["fds usually"] > pair.connections * WAITING + SLACK_FDS:
        faults.append(f"{figures['fds usually']} descriptors more than before are above the budget")
    if settle:
        faults += unsettled(pair, before[0], figures)
    return figures, faults


def unsettled(pair: Pair, before: dict[str, Any], figures: dict[str, Any]) -> list[str]:
    """Faults that count only once the pair had time to settle: resources not given back, requests too slow."""
    faults = []
    last = pair.producer.last
    sanitized = 2 if last.get("slower", 1) > 1 else 1  # its allocator keeps red zones, too
    allocators = SLACK_TRIMMED if last.get("trimmed") else SLACK_BYTES * sanitized
    for name, slack in (("resident", allocators), ("kept", SLACK_KEPT), ("descriptors", SLACK_FDS)):
        if last[name] > before[name] * (1 + BACK) + slack:
            faults.append(f"{name} was {before[name]}, and is {last[name]} after it")
    if figures["of burning"] < HALF and last["slower"] == 1:  # a sanitizer makes messages ten times slower
        faults.append(
            f"{STARVED}: {figures['requests/s']} requests a second, less than half of those beside burners"
        )
    if figures["ms of a call"] > CALL_MS * pair.producer.last["slower"]:
        faults.append(f"{LONG}: {figures['ms of a call']} ms of progress")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="the honest one: build/release/tests/hostile/honest")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="each attack alone, for so long [2]; 0: none"
    )
    parser.add_argument(
        "--together", type=float, default=0.0, help="then all but APART at once, for so many seconds [0]"
    )
    parser.add_argument("--settle", action="store_true", help="wait after each until what it left has run out")
    parser.add_argument("--only", action="append", choices=sorted(ATTACKS), help="this attack; may be repeated")
    parser.add_argument("--json", help="write the figures there too")
    options = parser.parse_args()
    names = options.only or list(ATTACKS)
    rows, passed, failed = [], 0, 0
    for secure in (False, True):
        pair = open_pair(options.program, secure)
        end = time.monotonic() + 30
        while (not pair.consumer.lines or pair.consumer.last["done"] < 20) and time.monotonic() < end:
            time.sleep(0.1)
        plans = [([name], options.seconds) for name in names] if options.seconds else []
        if options.together:
            at_once = [name for name in names if name not in APART]
            plans += [(at_once, options.together)] if at_once else []
            plans += [([name], APART_S) for name in names if name in APART and not secure]
        for attackers, seconds in plans:
            judge_once = functools.partial(judge, pair, attackers, seconds, options.settle)
            figures, faults = judge_fairly(judge_once, seconds)
            rows.append({"keys": secure} | figures)
            print(("ok     " if not faults else "FAILED ") + json.dumps(rows[-1]), *faults, flush=True)
            passed, failed = passed + (not faults), failed + bool(faults)
        if pair.close():
            failed += 1
            print("FAILED the pair did not end as it should")
        else:
            passed += 1
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
