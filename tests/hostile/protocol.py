"""The protocol, from docs/protocol.md alone: messages as bytes, and a speaker that sends them over ZeroMQ."""

from __future__ import annotations

import hashlib
import os
import time
from typing import Any

import msgpack
import zmq

VERSION = 2
HELLO, WELCOME, REFUSED, CALL, ANSWER = range(1, 6)
JOIN, ACQUIRE, RELEASE, BEAT, EXPECT, WRITTEN, WITHDRAW, CHECKSUM, PROBE = range(1, 10)
OK, PERMISSION, PEER_LOST, AGAIN = 0, 14, 16, 18
EXPECTATION = 1 << 63
FOR_EVER = (1 << 64) - 1
HIGHEST = (1 << 64) - 1


def envelope(kind: int, body: dict[str, Any], digest: bytes = b"") -> bytes:
    return bytes(msgpack.packb(["kvf", VERSION, kind, digest, msgpack.packb(body)]))


def open_envelope(data: bytes) -> tuple[int, bytes, dict[str, Any]]:
    magic, version, kind, digest, body = msgpack.unpackb(data)
    assert magic == "kvf" and version == VERSION, (magic, version)
    return kind, digest, msgpack.unpackb(body)


def incarnation_of(secret: bytes) -> int:
    return int.from_bytes(hashlib.sha256(secret).digest()[:8], "little")


def runs(*pairs: tuple[int, int]) -> bytes:
    return b"".join(first.to_bytes(4, "little") + count.to_bytes(4, "little") for first, count in pairs)


def numbers(*values: int) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in values)


class Speaker:
    """One connection, and the messages of its session."""

    def __init__(
        self,
        context: Any,
        endpoint: str,
        server_key: str = "",
        keys: tuple[str, str] | None = None,
        name: str = "",
        made: Any = None,
    ) -> None:
        self.name = name or "stranger-" + os.urandom(4).hex()
        self.secret = os.urandom(16)
        self.incarnation = incarnation_of(self.secret)
        self.session = bytes(16)
        self.digest = bytes(32)
        self.number = 0
        self.card = b""
        self.socket = made or context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 1000)
        if keys:
            self.socket.curve_publickey, self.socket.curve_secretkey = (key.encode() for key in keys)
            self.socket.curve_serverkey = server_key.encode()
        self.socket.connect(endpoint)

    def close(self) -> None:
        self.socket.close(0)

    def send(self, data: bytes) -> bool:
        """False: the other side takes no message now."""
        try:
            self.socket.send(data, zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def receive(self, seconds: float = 1.0) -> tuple[int, bytes, dict[str, Any]] | None:
        if not self.socket.poll(int(seconds * 1000)):
            return None
        return open_envelope(self.socket.recv())

    def drain(self) -> int:
        count = 0
        try:
            while count < 10000:
                self.socket.recv(zmq.DONTWAIT)
                count += 1
        except zmq.Again:
            pass
        return count

    def hello(self, wants_card: bool, **other: Any) -> bytes:
        body = {
            "engine": self.name,
            "incarnation": self.incarnation,
            "rank": 0,
            "rank_count": 1,
            "wants_ranks": not wants_card,
            "first_rank": 0,
            "wants_card": wants_card,
            "secret": self.secret if wants_card else bytes(16),
            "clock_ns": time.monotonic_ns(),
        }
        return envelope(HELLO, body | other, self.digest)

    def ask(self, data: bytes, seconds: float = 1.0) -> tuple[int, bytes, dict[str, Any]] | None:
        self.drain()
        self.send(data)
        return self.receive(seconds)

    def visit(self, seconds: float = 5.0) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Asks who is there. Returns the WELCOME and the first introduction, and keeps the digest of its
        facts."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            answer = self.ask(self.hello(False), 0.5)
            if answer and answer[0] == WELCOME and answer[2]["introductions"]:
                self.digest = answer[1]
                return answer[2], msgpack.unpackb(answer[2]["introductions"][0])
            time.sleep(0.05)
        return None

    def greet(self, **other: Any) -> tuple[int, bytes, dict[str, Any]] | None:
        """Asks for a session and a card."""
        answer = self.ask(self.hello(True, **other))
        if answer and answer[0] == WELCOME and answer[2]["card"]:
            self.session, self.card = answer[2]["session"], answer[2]["card"]
        return answer

    def call(self, kind: int, session: bytes | None = None, number: int | None = None, **body: Any) -> bytes:
        self.number = self.number + 1 if number is None else number
        head = {"session": self.session if session is None else session, "number": self.number, "kind": kind}
        return envelope(CALL, head | body)

    def join(self, introduction: dict[str, Any], card: bytes, generation: int) -> bytes:
        says = msgpack.packb(introduction)
        return self.call(JOIN, introduction=says, card=card, generation=generation, stage=0)

    def acquire(self, request: bytes, seconds: float = 3600) -> bytes:
        return self.call(ACQUIRE, request=request, time_ns=int(seconds * 1e9), rank_count=1, first_id=0)

    def release(self, request: bytes, generation: int = 0, rank_count: int = 1) -> bytes:
        return self.call(
            RELEASE, request=request, generation=generation, earlier=0, rank_count=rank_count, status=OK
        )

    def expect(self, request: bytes, ids: int, more: bool = False) -> bytes:
        table = {"first_block": 0, "begin": 0, "end": 16 * ids, "runs": runs((0, ids))}
        return self.call(
            EXPECT,
            request=request,
            generation=EXPECTATION | self.number + 1,
            time_ns=FOR_EVER,
            rank_count=1,
            groups=[table],
            first_id=0,
            more=more,
            packed=0,
        )

    def beat(self, *leases: int, **other: Any) -> bytes:
        fields = {"leases": numbers(*leases), "expectations": b"", "clock_ns": time.monotonic_ns()}
        return self.call(BEAT, **(fields | other))
