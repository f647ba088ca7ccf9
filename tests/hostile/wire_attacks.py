"""Attacks on the port of the transport "messages", from docs/protocol.md alone: by strangers that know only the
port, and by holders of the card. Each is called again and again until its time is over, and yields how much it
has done, in its own unit.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import zmq
from zmtp import RawDealer, frame, send_endlessly

HELLO, READ, WRITE, NOTICE = 1, 2, 3, 4
MEBI = 1 << 20
# Connections that bring messages without an end: an owner keeps up to 34 MiB of each who has the card.
KNOWN = 3
LARGE = 8  # connections that bring large messages: an owner keeps up to 9 MiB of each who has the card
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00"  # of ZMTP: signature and version; the rest is missing


@dataclass
class Port:
    """What an attacker is told; see stage_honest.c."""

    port: int
    secret: bytes
    generation: int
    regions: int
    key: str = ""

    @classmethod
    def of(cls, line: str) -> Port:
        _, port, secret, generation, regions, key = line.split(",")
        return cls(int(port), bytes.fromhex(secret), int(generation), int(regions), key)


class Wire:
    """Connections to the port; attacks are its methods."""

    def __init__(self, port: Port) -> None:
        self.port = port
        self.context = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, 4000)
        self.open: list[Any] = []

    def close(self) -> None:
        for one in self.open:
            one.close()
        self.context.destroy(0)

    def socket(self) -> Any:
        """A new socket. Retries, because closed ones count until ZeroMQ's thread has ended them."""
        while True:
            try:
                return self.context.socket(zmq.DEALER)
            except zmq.ZMQError as error:
                if error.errno != errno.EMFILE:
                    raise
                time.sleep(0.01)

    def dealer(self, most_unread: int = 1000) -> Any:
        made = self.socket()
        made.linger, made.sndhwm, made.rcvhwm = 0, 64, most_unread
        if self.port.key:
            made.curve_publickey, made.curve_secretkey = zmq.curve_keypair()
            made.curve_serverkey = self.port.key.encode()
        made.connect(f"tcp://127.0.0.1:{self.port.port}")
        return made

    def raw(self) -> socket.socket | None:
        try:
            made = socket.create_connection(("127.0.0.1", self.port.port), 1.0)
        except OSError:
            time.sleep(0.01)
            return None
        made.setblocking(False)
        return made

    def raw_dealer(self) -> RawDealer | None:
        made = RawDealer()
        try:
            made.connect(f"tcp://127.0.0.1:{self.port.port}")
        except OSError:
            made.close()
            time.sleep(0.01)
            return None
        return made

    def hello(self, secret: bytes | None = None) -> bytes:
        name = f"wire-{os.urandom(4).hex()}".encode()
        return (
            struct.pack("<B4sH", HELLO, b"KVFM", 2)
            + (self.port.secret if secret is None else secret)
            + os.urandom(16)
            + struct.pack("<QIB", self.port.generation, self.port.regions, len(name))
            + name
        )

    def keep(self, one: Any, most: int) -> None:
        """Keeps a connection open, and at most `most` in all."""
        self.open.append(one)
        if len(self.open) > most:
            self.open.pop(0).close()


def send(dealer: Any, data: bytes) -> bool:
    try:
        dealer.send(data, zmq.DONTWAIT)
    except zmq.Again:
        time.sleep(0.001)
        return False
    return True


def request(kind: int, number: int, entries: bytes, size: int, data: bytes = b"") -> bytes:
    return struct.pack("<IIII", kind, number, len(entries), size) + entries + data


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out) + bytes([value])


def series(region: int, size: int, begins: int, count: int, distance: int) -> bytes:
    """One entry; `begins` and `distance` are not negative."""
    return b"\x07" + b"".join(map(varint, (region, size, 2 * begins, count, 2 * distance)))


# ---- strangers ---------------------------------------------------------------------------------


def idle(wire: Wire) -> Iterator[int]:
    """Keeps as many silent connections as it can get."""
    while True:
        made = wire.raw()
        if made:
            wire.keep(made, 4000)
        yield made is not None


def half_handshake(wire: Wire) -> Iterator[int]:
    """Sends greetings that stop in the middle, on connections that stay open or are closed again."""
    for i in itertools.count():
        made = wire.raw()
        if made:
            try:
                made.send(GREETING[: 1 + i % len(GREETING)])
            except OSError:
                pass
            wire.keep(made, 300)
        yield made is not None


def noise(wire: Wire) -> Iterator[int]:
    """Sends bytes that are not ZMTP."""
    while True:
        made = wire.raw()
        sent = 0
        if made:
            try:
                sent = made.send(os.urandom(65536))
            except OSError:
                pass
            made.close()
        yield sent > 0


def frames(wire: Wire) -> Iterator[int]:
    """Sends garbage instead of a HELLO, and HELLOs with another secret."""
    dealer = wire.dealer()
    wire.open.append(dealer)
    while True:
        data = random.choice([b"", b"\x01", wire.hello(bytes(16)), os.urandom(random.randrange(4096))])
        yield send(dealer, data)


def large_frames(wire: Wire) -> Iterator[int]:
    """Sends messages of a mebibyte over connections that have sent no HELLO."""
    data = bytes(MEBI)
    for i in itertools.count():
        if i < LARGE:
            wire.open.append(wire.dealer())
        yield send(wire.open[i % len(wire.open)], data)


def endless_over(wire: Wire, begin: bytes, most: int) -> Iterator[bool]:
    """Each connection sends `begin` first. With keys it is refused at once: it is of a peer that has none."""

    def connect() -> RawDealer | None:
        raw = wire.raw_dealer()
        try:
            if raw and begin:
                raw.push(begin)
        except OSError:
            assert raw
            raw.close()
            return None
        return raw

    return send_endlessly(connect, most)


def endless(wire: Wire) -> Iterator[bool]:
    """Messages without an end over connections that said nothing."""
    return endless_over(wire, b"", 101)


# ---- with the card -----------------------------------------------------------------------------


def many(wire: Wire) -> Iterator[int]:
    """Opens connections that are let in, and then do nothing."""
    while True:
        dealer = wire.dealer()
        sent = send(dealer, wire.hello())
        wire.keep(dealer, 100)
        yield sent


def bad_lists(wire: Wire) -> Iterator[int]:
    """Sends requests for places that do not exist, or that contradict themselves."""
    dealer = wire.dealer()
    wire.keep(dealer, 4)
    send(dealer, wire.hello())
    for number in range(20):
        entries = random.choice(
            [
                series(random.randrange(9), 1 << 40, 0, 1, 0),
                series(0, 64, 1 << 60, 1, 0),
                series(0, 1, 0, 1 << 50, 1 << 50),
                os.urandom(random.randrange(1, 200)),
                b"\xff" * 50,
            ]
        )
        dealer_data = request(random.choice([READ, WRITE]), number, entries, random.randrange(MEBI))
        yield send(dealer, dealer_data)
        try:
            dealer.recv(zmq.DONTWAIT)
        except zmq.Again:
            pass


def unread(wire: Wire) -> Iterator[int]:
    """Reads much, and takes no answers."""
    dealer = wire.dealer(1)
    wire.keep(dealer, 48)
    send(dealer, wire.hello())
    for number in range(32):
        yield send(dealer, request(READ, number, series(0, 4096, 0, 16, 4096), 65536))


def hoard(wire: Wire) -> Iterator[int]:
    """Sends as many large writes as it can, over eight connections, each to a region that does not exist."""
    data = request(WRITE, 1, series(7, MEBI, 0, 1, 0), MEBI, bytes(MEBI))
    for i in itertools.count():
        if i < LARGE:
            wire.open.append(wire.dealer())
            send(wire.open[i], wire.hello())
        yield send(wire.open[i % len(wire.open)], data)


def notices(wire: Wire) -> Iterator[int]:
    """Sends more notifications than an owner may keep unread."""
    dealer = wire.dealer(1)
    wire.keep(dealer, 8)
    send(dealer, wire.hello())
    for _ in range(200):
        yield send(dealer, bytes([NOTICE]) + os.urandom(4096))


def endless_known(wire: Wire) -> Iterator[bool]:
    """Messages without an end, by those who are let in."""
    return endless_over(wire, frame(0, wire.hello()), KNOWN)


STRANGERS: dict[str, Callable[[Wire], Iterator[int]]] = {
    "idle": idle,
    "half_handshake": half_handshake,
    "noise": noise,
    "frames": frames,
    "large_frames": large_frames,
    "endless": endless,
}
HOLDERS: dict[str, Callable[[Wire], Iterator[int]]] = {
    "many": many,
    "bad_lists": bad_lists,
    "unread": unread,
    "hoard": hoard,
    "notices": notices,
    "endless_known": endless_known,
}


# Each takes as much memory as there may be: these are not for all at once. Without keys only.
APART = ("endless", "endless_known")


def attack(name: str, line: str, seconds: float, count: Any) -> None:
    """The body of an attacking process."""
    wire = Wire(Port.of(line))
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            for done in (STRANGERS | HOLDERS)[name](wire):
                count.value += done
                if time.monotonic() >= end:
                    break
    finally:
        wire.close()
