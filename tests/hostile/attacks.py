"""Attacks by the protocol. Each is a generator that runs until its time is over.

`Target` is what an attacker knows: where the producer and the consumer listen, and their keys. Each attack
yields how much it has done, in its own unit.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgpack
import zmq
from protocol import (
    ACQUIRE,
    ANSWER,
    CHECKSUM,
    EXPECTATION,
    FOR_EVER,
    HIGHEST,
    OK,
    WITHDRAW,
    WRITTEN,
    Speaker,
    envelope,
    incarnation_of,
    numbers,
)
from zmtp import RawDealer, send_endlessly

HEAVY_TOKENS = 1 << 14  # of a block: a shard then has nearly as many pieces as an agent accepts


KNOWN = 3  # connections that bring messages without an end: an agent keeps up to 34 MiB of each that is met


@dataclass
class Target:
    producer: str
    consumer: str
    producer_key: str = ""
    consumer_key: str = ""
    keys: tuple[str, str] | None = None  # the attacker's own, which the pair allows


class Attacker:
    """Connections to both processes of the pair; attacks are its methods."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.context = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, 20000)
        self.open: list[Speaker] = []

    def close(self) -> None:
        for speaker in self.open:
            speaker.close()
        self.context.destroy(0)

    def speak(self, to_consumer: bool = False, name: str = "") -> Speaker:
        t = self.target
        speaker = Speaker(
            self.context,
            t.consumer if to_consumer else t.producer,
            t.consumer_key if to_consumer else t.producer_key,
            t.keys,
            name,
        )
        self.open.append(speaker)
        return speaker

    def speak_raw(self, met: bool) -> Speaker | None:
        """Over a socket of our own: one that is met, or a stranger. None: not now."""
        raw = RawDealer()
        try:
            speaker = Speaker(self.context, self.target.producer, made=raw)
            if met and speaker.visit(1.0):
                speaker.greet()
        except (OSError, zmq.ZMQError):
            raw.close()
            time.sleep(0.01)
            return None
        return speaker

    def endless_over(self, met: bool, most: int) -> Iterator[bool]:
        """With keys the connections are refused at once: these are of a peer that has none."""

        def connect() -> RawDealer | None:
            speaker = self.speak_raw(met and self.target.keys is None)
            return speaker.socket if speaker else None

        return send_endlessly(connect, most)

    def greeted(self, to_consumer: bool = False, name: str = "") -> Speaker:
        speaker = self.speak(to_consumer, name)
        if speaker.visit():
            speaker.greet()
        return speaker

    def consumer_says(self) -> dict[str, Any]:
        """The introduction of the consumer, which is public."""
        found = self.speak(True).visit()
        assert found, "the consumer does not answer"
        return found[1]

    # ---- posing as another

    def impersonate(self) -> Iterator[int]:
        """Greets as the consumer, with everything that its introduction says; joins and releases."""
        speaker = self.speak()
        says = self.consumer_says()
        speaker.visit()
        speaker.name = says["engine"]
        others = [{"incarnation": says["incarnation"]}, {}]
        for n in range(1 << 40):
            answer = speaker.greet(**others[n % 2])
            assert answer is None or not answer[2].get("card"), "a stranger got a session as the consumer"
            speaker.send(speaker.join(says, b"card", n + 1))
            for i in range(20):
                speaker.send(speaker.release(b"request %d" % (n + i)))
            yield 1

    def release_by_count(self) -> Iterator[int]:
        """Releases, in a session of its own, requests that others are about to acquire, with leases counted
        up."""
        speaker = self.greeted()
        for n in range(1 << 40):
            for i in range(50):
                speaker.send(speaker.release(b"request %d" % (n % 100000), generation=n * 50 + i + 1))
            speaker.drain()
            yield 50

    def speak_for_the_producer(self) -> Iterator[int]:
        """Tells the consumer that everything is written, in guessed sessions, and answers calls it has not
        made."""
        speaker = self.greeted(True, "prefill-of-others")
        for n in range(1 << 40):
            session = speaker.session if n % 2 else os.urandom(16)
            number = n % 5000 + 1
            speaker.send(
                speaker.call(
                    WRITTEN,
                    session=session,
                    request=b"request %d" % n,
                    generation=EXPECTATION | n % 50000,
                    status=OK,
                    detail="",
                    bytes=4096,
                )
            )
            answer = {"session": session, "number": number, "kind": WITHDRAW, "status": OK, "detail": ""}
            speaker.send(envelope(ANSWER, answer))
            speaker.drain()
            yield 2

    def jump_numbers(self) -> Iterator[int]:
        """Sends BEATs with the highest number, in sessions of its own and of others."""
        speaker = self.greeted()
        for n in range(1 << 40):
            session = None if n % 2 else os.urandom(16)
            speaker.send(speaker.beat(session=session, number=HIGHEST))
            speaker.drain()
            if n % 100 == 0:
                speaker.greet()
            yield 1

    # ---- filling

    def expect_for_ever(self) -> Iterator[int]:
        """Sends small EXPECTs of large tables, for ever."""
        speaker = self.greeted()
        for n in range(1 << 40):
            speaker.send(speaker.expect(b"e%d" % n, 190_000))
            if n % 10 == 9:
                speaker.drain()
                time.sleep(0.02)
            yield 1

    def wait_for_ever(self) -> Iterator[int]:
        """Acquires requests that never come; hangs up now and then, and comes back under another name."""
        speaker = self.greeted()
        for n in range(1 << 40):
            for i in range(100):
                speaker.send(speaker.acquire(b"never %d" % (n * 100 + i)))
            speaker.drain()
            if n % 200 == 199:
                speaker.close()
                self.open.remove(speaker)
                speaker = self.greeted()
            time.sleep(0.005)
            yield 100

    def take_sessions(self) -> Iterator[int]:
        """Opens as many sessions over one connection as it can get."""
        speaker = self.greeted()
        for n in range(1 << 40):
            one = Speaker.__new__(Speaker)
            one.__dict__ |= speaker.__dict__ | {"name": f"s{n}", "secret": n.to_bytes(16, "little")}
            one.incarnation = incarnation_of(one.secret)
            speaker.send(one.hello(True))
            if n % 50 == 49:
                speaker.drain()
                time.sleep(0.002)
            yield 1

    def connect_often(self) -> Iterator[int]:
        """Opens connections and keeps them."""
        for _ in range(1 << 40):
            if len(self.open) < 300:
                self.speak()
                yield 1
            else:
                time.sleep(0.05)
                yield 0

    def connect_and_be_silent(self) -> Iterator[int]:
        """Keeps as many silent TCP connections as it can get, and replaces those that end."""
        host, port = self.target.producer.removeprefix("tcp://").rsplit(":", 1)
        sockets: list[socket.socket] = []
        for n in range(1 << 40):
            if len(sockets) < 1500:
                try:
                    sockets.append(socket.create_connection((host, int(port)), 1.0))
                except OSError:  # the queue of connections to be accepted is full
                    time.sleep(0.02)
                    yield 0
                    continue
            else:
                sockets.pop(n % len(sockets)).close()
            if n % 50 == 49:
                time.sleep(0.02)
            yield 1

    def endless_messages(self) -> Iterator[int]:
        """Messages without an end by strangers."""
        return self.endless_over(False, 101)

    def endless_in_sessions(self) -> Iterator[int]:
        """Messages without an end by peers that are met."""
        return self.endless_over(True, KNOWN)

    def half_tables(self) -> Iterator[int]:
        """Sends EXPECTs that announce more parts which never come, and beats that keep them alive."""
        speaker = self.greeted()
        for n in range(1 << 40):
            speaker.send(speaker.expect(b"half %d" % n, 190_000, more=True))
            if n % 10 == 9:
                speaker.drain()
                pairs = [number for g in range(max(0, n - 50), n) for number in (EXPECTATION | g + 1, FOR_EVER)]
                speaker.send(speaker.beat(expectations=numbers(*pairs)))
                time.sleep(0.02)
            yield 1

    def ask_for_checksums(self) -> Iterator[int]:
        """Asks for many CHECKSUMs of a whole request, under leases of its own."""
        speaker = self.greeted()
        lease = 0
        for n in range(1 << 40):
            answer = (
                speaker.ask(speaker.acquire(b"request %d" % (n % 100000), 0), 0.05) if n % 50 == 0 else None
            )
            lease = answer[2].get("generation", 0) if answer else lease
            speaker.send(
                speaker.call(
                    CHECKSUM,
                    generation=lease,
                    group=0,
                    part=0,
                    layers=[0, 1],
                    units=[0, 1],
                    begin=0,
                    end=64,
                )
            )
            if n % 100 == 99:
                speaker.drain()
                time.sleep(0.005)
            yield 1

    def release_as_the_last_rank(self) -> Iterator[int]:
        """Releases leases of others, as the highest-numbered ranks of many engines."""
        for n in range(1 << 40):
            speaker = self.speak(name=f"many-{n}")
            if speaker.visit():
                speaker.greet(rank=65535 - n % 8, rank_count=65536)
            for i in range(200):
                speaker.send(speaker.release(b"request %d" % (n % 500 * 200 + i), rank_count=65536))
            speaker.drain()
            speaker.close()
            self.open.remove(speaker)
            yield 200

    def large_messages(self) -> Iterator[int]:
        """Sends messages of the largest size allowed, and larger ones."""
        speakers = [self.greeted() for _ in range(4)]
        small, large = os.urandom(900_000), os.urandom(4 << 20)
        for n in range(1 << 40):
            speaker = speakers[n % 4]
            speaker.send(speaker.call(ACQUIRE, request=small, time_ns=1, rank_count=1, first_id=0))
            if n % 50 == 0:
                speaker.send(large)
            time.sleep(0.01)
            yield 1

    def heavy_introduction(self, speaker: Speaker, tokens: int) -> dict[str, Any]:
        """An introduction of a shard with blocks of `tokens` tokens; each cell lies between cells of other
        layers."""
        says = self.consumer_says()
        shard = msgpack.unpackb(says["shard"])
        says |= {"engine": speaker.name, "incarnation": speaker.incarnation, "digest": speaker.digest}
        group = shard["groups"][0]
        group |= {"tokens_per_block": tokens, "block_count": 1, "kernel_blocks_per_block": 1}
        for part in group["parts"]:
            for run in part["placements"]:
                # region, offset, strides of a block, a row and a unit; layers are 192 bytes apart
                run[1:6] = [0, 0, 1 << 40, 1024, 192]
                run[8:10] = [0, 192]
        shard["regions"] = [[1, 1 << 50]]
        says["shard"] = msgpack.packb(shard)
        return says

    def heavy_shards(self) -> Iterator[int]:
        """Joins with shards whose layers interleave in far too many pieces."""
        speaker = self.greeted()
        says = self.heavy_introduction(speaker, 1 << 23)
        for n in range(1 << 40):
            speaker.ask(speaker.join(says, b"card %d" % n, n + 1), 0.5)
            yield 1

    def heavy_shards_at_once(self) -> Iterator[int]:
        """Joins with shards of as many pieces as an agent accepts, one after the other, over four
        connections."""
        speakers = [self.greeted() for _ in range(4)]
        says = [self.heavy_introduction(speaker, HEAVY_TOKENS) for speaker in speakers]
        for n in range(1 << 40):
            speaker = speakers[n % 4]
            speaker.send(speaker.join(says[n % 4], b"card %d" % n, n + 1))
            if n % 40 == 39:
                speaker.drain()
                time.sleep(0.001)
            yield 1

    def garbage(self) -> Iterator[int]:
        """Sends random bytes, and messages with one bit flipped."""
        speaker = self.greeted()
        good = [speaker.beat(), speaker.acquire(b"a"), speaker.expect(b"b", 5), speaker.hello(True)]
        for n in range(1 << 40):
            one = bytearray(good[n % 4])
            one[int.from_bytes(os.urandom(2), "little") % len(one)] ^= 1 << n % 8
            speaker.send(bytes(one) if n % 3 else os.urandom(100))
            if n % 100 == 99:
                speaker.drain()
                time.sleep(0.001)
            yield 1


ATTACKS: dict[str, Callable[[Attacker], Iterator[int]]] = {
    name: getattr(Attacker, name)
    for name in (
        "impersonate",
        "release_by_count",
        "speak_for_the_producer",
        "jump_numbers",
        "expect_for_ever",
        "wait_for_ever",
        "take_sessions",
        "connect_often",
        "connect_and_be_silent",
        "endless_messages",
        "endless_in_sessions",
        "half_tables",
        "ask_for_checksums",
        "release_as_the_last_rank",
        "large_messages",
        "heavy_shards",
        "heavy_shards_at_once",
        "garbage",
    )
}


# Each takes as much memory as there may be: together with all the others they are above every budget. Without
# keys only.
APART = ("endless_messages", "endless_in_sessions")
