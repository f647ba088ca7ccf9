"""Engines on separate hosts, over links that are slow, long, lossy, cut, or gone: run.py BUILD [--short]
[NAME...]

Every byte that moves is verified: by `kvferry fetch`, by coordinates, and by the program host of this folder.
Prints a line for each case, and at the end `N passed, N failed`. Cases that the machine cannot run are listed
as skipped, under the name "network".
"""

from __future__ import annotations

import argparse
import collections
import json
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hosts import Host, Lacking, Network, Process, missing, without_netem
from wires import choose


@dataclass(frozen=True)
class Fabric:
    """The transport of an agent. `environment` keeps it to the network, because namespaces can share memory."""

    kind: str
    way: str = "auto"
    keys: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    only_eth0: tuple[str, ...] = ()  # options that keep it to one interface if it would use several
    late: str = ""  # settings with which it moves runs over TCP, and bytes may be late
    short: bool = False  # also part of the short form


LATE_MS = 20000  # for how long TCP keeps what is not acknowledged
FABRICS = {
    "messages": Fabric("messages", short=True),
    "messages, packed": Fabric("messages", way="packed"),
    "messages, encrypted": Fabric("messages", keys=True),
    "ucx": Fabric(
        "ucx",
        environment={"UCX_TLS": "tcp"},
        late=f"ucx.emulated=on,ucx.late_ms={LATE_MS}",
        only_eth0=("--ucx-devices", "eth0"),
        short=True,
    ),
    "libfabric": Fabric(
        "libfabric", late=f"libfabric.late_ms={LATE_MS}", only_eth0=("--libfabric-domain", "eth0")
    ),
}

SAID_LINES = 150  # of the engines of a case that failed, the last of which are shown
STRANGER = Path(__file__).with_name("stranger.py")
TCP_RTO_MAX_MS = 44
# Until the next request must be done, once the link is back; and where the machine may stand still for
# seconds, as in the short form, which runs with other tests and is about whether it is done at all.
RECOVERY_S, RECOVERY_SHORT_S = 2.0, 30.0
LONG = ("--prefill", "tp=1,block=16,order=hnd"), ("--decode", "tp=1,block=16,order=hnd")
SHORT_RUNS = ("--prefill", "tp=2,block=16,order=nhd"), ("--decode", "tp=1,block=24,order=hnd")


class Programs:
    def __init__(self, build: Path) -> None:
        self.kvferry = str(build / "kvferry")
        self.wire = str(build / "tests/network/wire")
        self.host = str(build / "tests/network/host")
        made = subprocess.run([self.kvferry, "keys"], capture_output=True, text=True, check=True, timeout=20)
        self.keys: dict[str, str] = json.loads(made.stdout)
        # Kept until the program ends.
        self.key_file = tempfile.NamedTemporaryFile("w", prefix="kvferry-keys-")  # noqa: SIM115
        self.key_file.write(made.stdout)
        self.key_file.flush()


class Case:
    """The programs, the fabric and the network of a case."""

    def __init__(self, programs: Programs, fabric: Fabric, network: Network, short: bool) -> None:
        self.programs = programs
        self.recovery_s = RECOVERY_SHORT_S if short else RECOVERY_S
        self.fabric = fabric
        self.network = network
        self.notes: list[str] = []
        self.engines: list[Engine] = []
        self.often = tries_often()
        self.environment = dict(fabric.environment)
        self.way = fabric.way  # of the program host
        self.settings = ""  # of the transport of the program host: KEY=VALUE,KEY=VALUE
        self.how = ["--transport", fabric.kind, "--move", fabric.way]
        if fabric.keys:
            self.how += ["--key-file", programs.key_file.name]

    # ---- kvferry serve and fetch

    def met(self, host: Host) -> list[str]:
        """The options by which an engine listens on a host."""
        return ["--listen", f"tcp://{host.address}:*", *([] if self.fabric.keys else ["--insecure"])]

    def serve(self, host: Host, shape: tuple[str, str], *more: str, tokens: int = 64, requests: int = 2) -> str:
        process = host.start(
            self.programs.kvferry, "serve", *shape, *self.how, *self.met(host), "--tokens", str(tokens),
            "--requests", str(requests), *more, **self.environment,
        )  # fmt: skip
        return process.line_with("met at", 30).split()[-1]

    def fetch(
        self, host: Host, endpoint: str, shape: tuple[str, str], *more: str, seconds: float = 120
    ) -> dict[str, Any]:
        done = host.run(
            self.programs.kvferry, "fetch", endpoint, *shape, *self.how, *self.met(host), "--json", *more,
            seconds=seconds, **self.environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr.strip()
        figures: dict[str, Any] = json.loads(done.stdout)
        assert figures["transport"] == self.fabric.kind, figures["transport"]
        assert figures["encrypted"] == self.fabric.keys, "sessions are encrypted where there are keys"
        assert figures["verified_bytes"] == figures["bytes"] * len(figures["rounds"])
        return figures

    def move(self, producer: Host, consumer: Host, shapes: Any = LONG, tokens: int = 64, requests: int = 2,
             rounds: int = 3) -> dict[str, Any]:  # fmt: skip
        endpoint = self.serve(producer, shapes[0], tokens=tokens, requests=requests)
        figures = self.fetch(consumer, endpoint, shapes[1], "--rounds", str(rounds))
        self.notes.append(
            f"{figures['gb_per_s']:.3f} GB/s, plain stream {figures['stream_gb_per_s']:.3f}, "
            f"round trip {figures['round_trip_ns'] / 1e6:.2f} ms"
        )
        return figures

    # ---- the program host

    @staticmethod
    def move_at_once(consumer: Engine, producer: Engine, numbers: range) -> None:
        for number in numbers:
            consumer.process.say(f"expect {number} 30000")
        for number in numbers:
            producer.process.say(f"push {number} 30000")
        for number in numbers:
            _, words = consumer.wait("expect", number, 30)
            assert words[0] == "done" and words[4] == "0", " ".join(words)

    def pair(self, a: Host, b: Host, lease_ms: int) -> Pair:
        return Pair(self, a, b, lease_ms)


class Engine:
    """A running program host, and the results of its requests."""

    def __init__(
        self, case: Case, host: Host, name: str, port: int, lease_ms: int, producer: Engine | None = None
    ) -> None:
        peer = (producer.name, producer.endpoint) if producer else ()
        keys = {f"KVF_{name.upper()}": key for name, key in case.programs.keys.items() if case.fabric.keys}
        self.process: Process = host.start(
            case.programs.host, name, f"tcp://{host.address}:{port}", case.fabric.kind, case.way,
            str(lease_ms), *peer, **case.environment, **keys, KVF_SETTINGS=case.settings,
        )  # fmt: skip
        self.endpoint = self.process.line_with("endpoint tcp://", 20).split()[1]
        self.ended: dict[tuple[str, int], tuple[float, list[str]]] = {}
        self.said: collections.deque[tuple[float, str]] = collections.deque(maxlen=SAID_LINES)
        self.changed = threading.Condition()
        self.name = name
        case.engines.append(self)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            when, line = self.process.lines.get()
            self.said.append((when, f"{self.name}: {line}"))
            words = line.split(" ", 5)
            if words[0] not in ("done", "failed"):
                continue
            with self.changed:
                self.ended[words[1], int(words[2])] = (when, words)
                self.changed.notify_all()

    def wait(self, kind: str, number: int, seconds: float) -> tuple[float, list[str]]:
        with self.changed:
            there = self.changed.wait_for(lambda: (kind, number) in self.ended, seconds)
        assert there, f"{kind} {number} hangs: no end within {seconds:.1f} s"
        return self.ended[kind, number]


class Pair:
    """A producer on host a and a consumer on host b, whose requests are numbered from 1."""

    def __init__(self, case: Case, a: Host, b: Host, lease_ms: int) -> None:
        self.case, self.a, self.b, self.lease_ms = case, a, b, lease_ms
        self.last = 0
        self.producer = Engine(case, a, "prefill", 5555, lease_ms)
        self.consumer = Engine(case, b, "decode", 5556, lease_ms, self.producer)

    def begin(self, writes: bool, deadline_ms: int = 30000) -> int:
        self.last += 1
        self.producer.process.say(f"{'push' if writes else 'hold'} {self.last} {deadline_ms}")
        self.consumer.process.say(f"{'expect' if writes else 'pull'} {self.last} {deadline_ms}")
        return self.last

    def move(
        self, writes: bool = False, seconds: float = 20, deadline_ms: int = 30000
    ) -> tuple[float, list[str]]:
        """Moves one request, which must arrive without a wrong cell. Returns when it was done, and the words of
        its line."""
        number = self.begin(writes, deadline_ms)
        when, words = self.consumer.wait("expect" if writes else "pull", number, seconds)
        assert words[0] == "done", " ".join(words)
        assert words[4] == "0", f"{words[4]} cells of request {number} are wrong"
        return when, words


class Traffic(threading.Thread):
    """Requests of a pair, reads and writes in turn, until finish(): none may fail or be wrong."""

    def __init__(self, pair: Pair) -> None:
        super().__init__(daemon=True)
        self.pair = pair
        self.stopping = False
        self.ends: list[float] = []
        self.failure = ""

    def run(self) -> None:
        try:
            while not self.stopping:
                when, _ = self.pair.move(writes=self.pair.last % 2 == 1, seconds=60, deadline_ms=60000)
                self.ends.append(when)
        except AssertionError as failed:
            self.failure = str(failed)

    def finish(self) -> None:
        self.stopping = True
        self.join(70)
        assert not self.failure, self.failure
        assert not self.is_alive(), "a request hangs"


CASES: list[tuple[str, bool, str, Callable[[Case], None]]] = []


def case(
    name: str, short: bool = False, only: str = ""
) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
    """`only`: the kind of fabric that it is about."""

    def note(function: Callable[[Case], None]) -> Callable[[Case], None]:
        CASES.append((name, short, only, function))
        return function

    return note


# ---- links that work -----------------------------------------------------------------------------


def rate(mbits: int, tokens: int) -> Callable[[Case], None]:
    def check(self: Case) -> None:
        a, b = self.network.switch("ab", mbits=mbits)
        figures = self.move(a, b, tokens=tokens, requests=4)
        assert figures["gb_per_s"] <= mbits / 8000 * 1.1, "faster than the link: it went another way"

    return check


case("a link of 1 Gbit/s")(rate(1000, 64))
case("a link of 10 Gbit/s", short=True)(rate(10000, 100))
case("a link of 25 Gbit/s")(rate(25000, 200))


@case("short runs at 10 Gbit/s")
def short_runs(self: Case) -> None:
    a, b = self.network.switch("ab", mbits=10000)
    self.move(a, b, shapes=SHORT_RUNS)


@case("frames of 9000 bytes at 10 Gbit/s")
def large_frames(self: Case) -> None:
    a, b = self.network.switch("ab", mbits=10000, mtu=9000)
    self.move(a, b, tokens=100, requests=4)


@case("a pair with IPv6 only", short=True)
def ipv6_only(self: Case) -> None:
    a, b = self.network.switch("ab", ipv6=True)
    self.move(a, b)


@case("two interfaces", short=True)
def two_interfaces(self: Case) -> None:
    a, b = self.network.switch("ab")
    self.network.switch("ab", device="eth1")
    self.move(a, b)


@case("a second interface that leads nowhere", short=True)
def useless_interface(self: Case) -> None:
    """As on hosts with containers: a bridge has the same address on both. The fabric may choose it; then the
    error must say what helps."""
    a, b = self.network.switch("ab")
    for host in (a, b):
        host.ip("link", "add", "docker0", "type", "bridge")
        host.ip("addr", "add", "172.17.0.1/16", "dev", "docker0")
        host.ip("link", "set", "docker0", "up")
        host.ip("link", "add", "inside", "type", "veth", "peer", "name", "outside")
        host.ip("link", "set", "outside", "master", "docker0", "up")
        host.ip("link", "set", "inside", "up")
    only = self.fabric.only_eth0
    self.fetch(b, self.serve(a, LONG[0], *only), LONG[1], *only)
    try:
        self.fetch(b, self.serve(a, LONG[0]), LONG[1], "--timeout", "10")
    except AssertionError as failed:
        assert only and only[0].lstrip("-").replace("-", ".") in str(failed), failed
        self.notes.append("without being told which to use: the sentence says how")


@case("three hosts, two of which fetch at once")
def three_hosts(self: Case) -> None:
    a, b, c = self.network.switch("abc", mbits=10000)
    endpoint = self.serve(a, LONG[0], tokens=100, requests=4)
    failures: list[str] = []

    def fetch(host: Host) -> None:
        try:
            self.fetch(host, endpoint, LONG[1], "--rounds", "4")
        except AssertionError as failed:
            failures.append(f"{host.name}: {failed}")

    threads = [threading.Thread(target=fetch, args=(host,)) for host in (b, c)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, "; ".join(failures)


@case("a wrong byte is noticed", short=True)
def wrong_byte(self: Case) -> None:
    a, b = self.network.switch("ab")
    endpoint = self.serve(a, LONG[0], "--corrupt", "1,5,v,17,3,40")
    done = b.run(
        self.programs.kvferry,
        "fetch",
        endpoint,
        *LONG[1],
        *self.how,
        *self.met(b),
        seconds=60,
        **self.environment,
    )
    assert done.returncode == 1, "the fetch says that all is well"
    assert "request 1, layer 5, part v, token 17, head 3, element 40: expected" in done.stderr, done.stderr
    pair = self.pair(a, b, 10000)
    pair.move()
    pair.producer.process.say("spoil")
    number = pair.begin(writes=False)
    _, words = pair.consumer.wait("pull", number, 20)
    assert words[0] == "done" and int(words[4]) > 0, " ".join(words)


# ---- long and lossy links ---------------------------------------------------------------------


def shaped(delay: float = 0, loss: float = 0, tokens: int = 64, **more: float | str) -> Callable[[Case], None]:
    def check(self: Case) -> None:
        a, b, wire = self.network.wire(self.programs.wire)
        wire.tell(delay=delay, loss=loss, **more)
        figures = self.move(a, b, tokens=tokens)
        counts = wire.count()
        self.notes.append(str(counts))
        least_ns = 0 if "reorder" in more else 2e6 * delay  # a packet may skip the delay
        assert figures["round_trip_ns"] >= least_ns, "a round trip is shorter than the delay of the link"
        assert counts.lost >= counts.carried * loss / 200, "the link lost less than half of what it should"
        if "jitter" in more or "reorder" in more:
            assert a.came_out_of_order() + b.came_out_of_order() > 0, "no packet has overtaken another"

    return check


case("a delay of 0.1 ms")(shaped(rate=10000, delay=0.1))
case("a delay of 1 ms")(shaped(rate=10000, delay=1))
case("a delay of 10 ms", short=True)(shaped(rate=1000, delay=10))
case("a delay of 50 ms")(shaped(rate=1000, delay=50))
case("a loss of 0.1 %")(shaped(rate=1000, segments="off", loss=0.1))
case("a loss of 1 %", short=True)(shaped(rate=1000, segments="off", loss=1))
case("a loss of 5 %")(shaped(rate=1000, segments="off", loss=5))
# Where TCP's congestion control is CUBIC, one connection has 0.9 MB/s here.
case("a loss of 1 % at 10 ms")(shaped(rate=1000, segments="off", loss=1, delay=10, tokens=8))


@case("a loss of 0.1 % at 10 Gbit/s")
def loss_at_speed(self: Case) -> None:
    a, b = self.network.switch("ab", mbits=10000)
    for host in (a, b):
        host.lose(0.1)
    self.move(a, b, tokens=100, requests=4)


case("jitter of 5 ms")(shaped(rate=1000, segments="off", delay=5, jitter=5))
case("reordering of 5 %")(shaped(rate=1000, segments="off", delay=2, reorder=5))


@case("a link without checksum offload, and a stranger", short=True, only="messages")
def without_offload(self: Case) -> None:
    """Of long segments of strangers the kernel keeps the beginning, and checks the sum afterwards: so it drops
    them whole. Who is let in has sent only short ones until then, and is not delayed."""
    a, b = self.network.switch("ab", mbits=1000)
    self.network.without_offload()
    endpoint = self.serve(a, LONG[0])
    stranger = None
    before = a.bad_checksums()
    if not self.fabric.keys:  # else it could not shake hands
        ports = a.listens() - {int(endpoint.rpartition(":")[2])}
        stranger = b.start(sys.executable, str(STRANGER), a.address, "5", *map(str, sorted(ports)))
        assert stranger.line(20) == "begun"
    figures = self.fetch(b, endpoint, LONG[1], "--rounds", "3")
    self.notes.append(f"{figures['gb_per_s']:.3f} GB/s")
    if stranger:
        received, dropped = stranger.line(20), a.bad_checksums() - before
        self.notes[-1] += f"; of the stranger's messages {received} bytes came, {dropped} segments were dropped"
        # Agents' ports receive segments whole; the transport's does not.
        assert dropped > 0 and min(map(int, received.split())) < 1024, self.notes[-1]


# ---- links that are cut --------------------------------------------------------------------------


def short_outage(seconds: float, lease_ms: int, direction: str = "both") -> Callable[[Case], None]:
    """Shorter than the lease: nothing fails. Requests under way are done when TCP retransmits: after a silence
    it waits about as long as the silence lasted."""

    def check(self: Case) -> None:
        a, b, wire = self.network.wire(self.programs.wire)
        wire.tell(rate=1000, delay=0.2)
        traffic = Traffic(self.pair(a, b, lease_ms))
        traffic.start()
        begun = time.monotonic()
        while not traffic.ends and time.monotonic() - begun < 10:
            time.sleep(0.05)
        assert traffic.ends, "nothing moves over a link that is up"
        if time.monotonic() - begun > 1:
            self.notes.append(f"the first request took {traffic.ends[0] - begun:.2f} s")
        time.sleep(0.5)
        wire.cut(direction)
        time.sleep(seconds)
        wire.heal()
        healed = time.monotonic()
        while not (after := [end for end in traffic.ends if end > healed]) and traffic.is_alive():
            if time.monotonic() - healed > seconds + self.recovery_s:
                break
            time.sleep(0.05)
        traffic.finish()
        assert after, "nothing was done after the link was back"
        self.notes.append(f"the next request was done {after[0] - healed:.2f} s after the link was back")
        assert after[0] - healed <= seconds + self.recovery_s, self.notes[-1]

    return check


case("a link that is down for 1 s")(short_outage(1, 10000))
case("a link that is down for 3 s of a lease of 10 s", short=True)(short_outage(3, 10000))
case("a link that is down for 10 s of a lease of 30 s")(short_outage(10, 30000))
case("a link that is down for 20 s of a lease of 30 s")(short_outage(20, 30000))
case("one direction, to the consumer, is down for 5 s of a lease of 30 s")(short_outage(5, 30000, "ab"))
case("one direction, to the producer, is down for 5 s of a lease of 30 s")(short_outage(5, 30000, "ba"))


def tries_often() -> bool:
    """Whether this kernel lets a program limit the time between TCP's retransmissions."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, 1000)
        except OSError:
            return False
    return True


def bytes_under_way(seconds: float, lease_ms: int, direction: str = "both") -> Callable[[Case], None]:
    """Many requests share a slow link, and are under way when it goes down. Shorter than the lease: all are
    done when TCP retransmits. Longer: those under way fail, and the next works soon after the link is back."""

    def check(self: Case) -> None:
        a, b, wire = self.network.wire(self.programs.wire)
        a.remember_no_rate()
        b.remember_no_rate()
        pair = self.pair(a, b, lease_ms)
        pair.move()
        pair.move(writes=True)
        wire.tell(rate=1, delay=0.2)
        for writes in (False, True):
            kind = "expect" if writes else "pull"
            numbers = [pair.begin(writes, deadline_ms=60000) for _ in range(12)]
            time.sleep(1)  # they take at least four seconds at this rate
            wire.cut(direction)
            time.sleep(0.2)  # packets on their way arrive
            cut = [number for number in numbers if (kind, number) not in pair.consumer.ended]
            assert cut, "all of them were done before the link was cut"
            time.sleep(seconds)
            wire.tell(rate=1000)
            wire.heal()
            healed = time.monotonic()
            if seconds > lease_ms / 1000:
                for number in cut:
                    when, words = pair.consumer.wait(kind, number, 1)
                    assert words[0] == "failed" and when < healed, " ".join(words)
                cut = [pair.begin(writes)]
            last = healed
            for number in cut:
                when, words = pair.consumer.wait(kind, number, 60)
                assert words[0] == "done" and words[4] == "0", " ".join(words)
                last = max(last, when)
            self.notes.append(f"{len(cut)} by {kind} were done {last - healed:.2f} s after the link was back")
            # TCP sends again once in a second, or after about as long again as the link was down. Without bytes
            # that wait in a fabric's only connection, agents make a second one.
            waits = 1.0 if self.often else seconds
            if seconds > lease_ms / 1000 and self.fabric.kind == "messages":
                waits = 0.0
            assert last - healed <= waits + self.recovery_s, self.notes[-1]
            wire.tell(rate=1)

    return check


case("bytes are under way when a link goes down for 25 s of a lease of 50 s")(bytes_under_way(25, 50000))
case("bytes are under way when one direction, to the consumer, goes down for 25 s of a lease of 50 s")(
    bytes_under_way(25, 50000, "ab")
)
case("bytes are under way when a link goes down for 14 s of a lease of 6 s")(bytes_under_way(14, 6000))


@case("a request that waits while the link is down for 25 s of a lease of 30 s")
def waiting(self: Case) -> None:
    """Nothing moves: the fabric's connection is idle, and the agents must not give it up."""
    a, b, wire = self.network.wire(self.programs.wire)
    pair = self.pair(a, b, 30000)
    pair.move()
    pair.move(writes=True)
    pair.last += 1
    pair.consumer.process.say(f"pull {pair.last} 60000")
    time.sleep(1)
    wire.cut()
    time.sleep(25)
    wire.heal()
    healed = time.monotonic()
    pair.producer.process.say(f"hold {pair.last}")
    when, words = pair.consumer.wait("pull", pair.last, 30)
    assert words[0] == "done" and words[4] == "0", " ".join(words)
    self.notes.append(f"done {when - healed:.2f} s after the link was back")
    assert when - healed <= self.recovery_s, self.notes[-1]


def long_outage(seconds: float, lease_ms: int, direction: str = "both") -> Callable[[Case], None]:
    """Longer than the lease: requests under way fail in time, and the next request works soon after."""

    def check(self: Case) -> None:
        a, b, wire = self.network.wire(self.programs.wire)
        wire.tell(rate=1000, delay=0.2)
        pair = self.pair(a, b, lease_ms)
        pair.move()
        pair.move(writes=True)
        wire.cut(direction)
        time.sleep(0.1)
        deadline_ms = 4000
        caught = [(pair.begin(writes, deadline_ms), "expect" if writes else "pull") for writes in (False, True)]
        down = time.monotonic()
        for number, kind in caught:
            _, words = pair.consumer.wait(kind, number, deadline_ms / 1000 + self.recovery_s / 2)
            assert words[0] == "failed", " ".join(words)
        patient = pair.begin(False, deadline_ms=int(seconds * 1000) + 20000)
        time.sleep(max(0.0, seconds - (time.monotonic() - down)))
        wire.heal()
        healed = time.monotonic()
        for writes in (False, True):
            when, _ = pair.move(writes, seconds=40)
            self.notes.append(f"a {'write' if writes else 'read'} was done {when - healed:.2f} s after")
            assert when - healed <= self.recovery_s, self.notes[-1]
        pair.consumer.wait("pull", patient, 30)  # it may succeed or fail, but must end

    return check


case("a link that is down for 8 s of a lease of 3 s", short=True)(long_outage(8, 3000))
case("a link that is down for 60 s of a lease of 10 s")(long_outage(60, 10000))
case("one direction, to the consumer, is down for 8 s of a lease of 3 s")(long_outage(8, 3000, "ab"))
case("one direction, to the producer, is down for 8 s of a lease of 3 s")(long_outage(8, 3000, "ba"))


@case("bytes are under way when a link goes down, and arrive when others have the blocks")
def late_bytes(self: Case) -> None:
    """What a writer had sent arrives long after its lease. The blocks must be nobody's by then."""
    a, b, wire = self.network.wire(self.programs.wire)
    if self.fabric.late:
        self.way, self.settings = "direct", self.fabric.late
    pair = self.pair(a, b, 3000)
    pair.move()
    pair.move(writes=True)
    wire.tell(rate=1, delay=0.2)
    numbers = [pair.begin(writes=True, deadline_ms=60000) for _ in range(12)]
    time.sleep(1)  # they take at least four seconds at this rate
    wire.cut()
    down = time.monotonic()
    for number in numbers:
        pair.consumer.wait("expect", number, 10)
    assert any(pair.consumer.ended["expect", number][1][0] == "failed" for number in numbers)
    time.sleep(4)  # more than the rest of a lease

    other = Engine(self, b, "other", 5557, 3000)
    pair.consumer.process.say(f"meet other {other.endpoint}")
    self.move_at_once(pair.consumer, other, range(100, 120))
    wire.tell(rate=100)
    wire.heal()
    back = time.monotonic()
    time.sleep(back - down + 2)  # TCP waits about as long again, with kernels that cannot be told otherwise
    pair.consumer.process.say("look 1")
    _, words = pair.consumer.wait("look", 1, 5)
    assert words[4] == "0", f"{words[4]} cells of requests that were done have changed"
    self.notes.append(f"the link was down for {back - down:.1f} s")
    time.sleep(max(0.0, down + LATE_MS / 1000 + 10 - time.monotonic()))
    self.move_at_once(pair.consumer, other, range(200, 230))  # nearly all blocks


@case("a link that is down for 5 s in the middle of a long fetch")
def down_while_fetching(self: Case) -> None:
    a, b, wire = self.network.wire(self.programs.wire)
    wire.tell(rate=200, delay=0.2)
    endpoint = self.serve(a, LONG[0], tokens=400)
    timer = threading.Timer(4, wire.cut)
    healer = threading.Timer(9, wire.heal)
    timer.start()
    healer.start()
    figures = self.fetch(b, endpoint, LONG[1], "--rounds", "1")
    self.notes.append(
        f"{figures['rounds'][0]['seconds']:.1f} s for {figures['bytes'] / 1e6:.0f} MB at 200 Mbit/s"
    )
    assert figures["rounds"][0]["seconds"] > 5, "the outage did not fall into it"


@case("a host that vanishes", short=True)
def vanishes(self: Case) -> None:
    """The producer's host loses power; later another process runs at the same address."""
    a, b, wire = self.network.wire(self.programs.wire)
    pair = self.pair(a, b, 3000)
    pair.move()
    pair.move(writes=True)
    wire.cut()
    pair.producer.process.kill()
    caught = [(pair.last + 1, "pull"), (pair.last + 2, "expect")]
    for number, kind in caught:
        pair.consumer.process.say(f"{kind} {number} 5000")
    for number, kind in caught:
        when, words = pair.consumer.wait(kind, number, 5 + self.recovery_s)
        assert words[0] == "failed", " ".join(words)
    pair.last += 2
    wire.heal()
    pair.producer = Engine(self, a, "prefill", 5555, 3000)
    back = time.monotonic()
    when, _ = pair.move()
    self.notes.append(f"the next request was done {when - back:.2f} s after it was back")
    assert when - back <= self.recovery_s, self.notes[-1]


@case("a consumer's host that vanishes")
def consumer_vanishes(self: Case) -> None:
    """Blocks that were lent to it are free again when its lease is over."""
    a, b, wire = self.network.wire(self.programs.wire)
    pair = self.pair(a, b, 3000)
    pair.move()
    number = pair.last + 1
    pair.producer.process.say(f"hold {number} 2000")
    pair.consumer.process.say(f"expect {number + 1} 20000")
    pair.producer.process.say(f"push {number + 1} 20000")
    wire.cut()
    pair.consumer.process.kill()
    pair.producer.wait("hold", number, 12)
    pair.producer.wait("push", number + 1, 30)
    wire.heal()
    pair.last += 2
    pair.consumer = Engine(self, b, "decode", 5556, 3000, pair.producer)
    back = time.monotonic()
    when, _ = pair.move()
    assert when - back <= self.recovery_s + 3, f"{when - back:.2f} s"


# ---- all of them ---------------------------------------------------------------------------------


def run_case(
    programs: Programs, fabric: str, name: str, check: Callable[[Case], None], short: bool, netem: bool
) -> bool | None:
    """Whether the case passed; None: this machine cannot run it."""
    begun = time.monotonic()
    title = f"{name}, over {fabric}"
    self = None
    try:
        with Network(netem) as network:
            self = Case(programs, FABRICS[fabric], network, short)
            check(self)
    except Lacking as lacking:
        print(f"[  SKIPPED ] network: {title}: {lacking}")
        return None
    except Exception as failed:  # a failing case must not stop the others
        print(f"[  FAILED  ] {title}: {failed}")
        said = sorted(line for engine in self.engines for line in engine.said) if self else []
        for when, line in said[-SAID_LINES:]:
            print(f"             {when - begun:.3f} s {line}")
        if not isinstance(failed, AssertionError):
            traceback.print_exc(file=sys.stdout)
        return False
    print(f"[       OK ] {title} ({time.monotonic() - begun:.1f} s)")
    for note in self.notes:
        print(f"             {note}")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", type=Path)
    parser.add_argument("--short", action="store_true", help="two fabrics, and less than two minutes")
    parser.add_argument("--fabric", choices=FABRICS, action="append")
    parser.add_argument(
        "--links",
        choices=("auto", "netem", "wire"),
        default="auto",
        help="what shapes links: the kernel's netem, or wire.c; auto: netem if the kernel has it",
    )
    parser.add_argument("names", nargs="*", help="parts of the names of cases")
    asked = parser.parse_intermixed_args()
    lacking = missing()
    if lacking:
        print(f"[  SKIPPED ] 1 test(s), listed below:\n[  SKIPPED ] network: {lacking}")
        return 0
    try:
        netem, said = choose(asked.links, without_netem())
    except ValueError as refused:
        parser.error(str(refused))
    print(said, flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that namespaces and programs are removed
    programs = Programs(asked.build)
    passed = failed = 0
    for fabric in asked.fabric or [name for name, fabric in FABRICS.items() if fabric.short or not asked.short]:
        for name, short, only, check in CASES:
            if (asked.short and not short) or (asked.names and not any(part in name for part in asked.names)):
                continue
            if only and only != FABRICS[fabric].kind:
                continue
            good = run_case(programs, fabric, name, check, asked.short, netem)
            passed, failed = passed + (good is True), failed + (good is False)
            sys.stdout.flush()
    print(f"{passed} passed, {failed} failed")
    return failed > 0 or passed == 0


if __name__ == "__main__":
    sys.exit(main())
