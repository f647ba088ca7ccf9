"""ZMTP 3.0 without keys, over a socket of our own: what ZeroMQ never sends, frames of an endless message."""

from __future__ import annotations

import errno
import itertools
import select
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import zmq

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
COMMAND, LONG, MORE = 4, 2, 1
HANDSHAKE_S = 5.0


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


def frame(flags: int, data: bytes) -> bytes:
    if len(data) < 256:
        return bytes([flags, len(data)]) + data
    return bytes([flags | LONG]) + len(data).to_bytes(8, "big") + data


READY = frame(COMMAND, b"\x05READY" + _property(b"Socket-Type", b"DEALER") + _property(b"Identity", b""))
# Frames that say that others follow: as many as can be, and as large as can be with little to send.
SMALL, LARGE = frame(MORE, b"") * (1 << 18), frame(MORE, bytes(1 << 19))


class RawDealer:
    """As far as attackers need it, what pyzmq has under the same names; and what it has not."""

    def __init__(self) -> None:
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.unread, self.unsent = b"", b""

    def setsockopt(self, *_: Any) -> None:
        """All of them are for ZeroMQ."""

    def connect(self, endpoint: str) -> None:
        host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
        self.socket.settimeout(HANDSHAKE_S)
        self.socket.connect((host, int(port)))
        self.socket.sendall(GREETING + READY)
        self._need(len(GREETING))
        self.unread = self.unread[len(GREETING) :]
        self._take()  # the other end's READY: before it, ZeroMQ refuses messages
        self.socket.setblocking(False)

    def close(self, *_: Any) -> None:
        self.socket.close()

    def push(self, data: bytes = b"") -> int:
        """Sends what it can of what has been given; how much. A connection that has ended raises OSError."""
        self.unsent += data
        try:
            sent = self.socket.send(self.unsent)
        except BlockingIOError:
            return 0
        self.unsent = self.unsent[sent:]
        return sent

    def push_endless(self, frames: bytes) -> int:
        """Goes on with a message that does not end."""
        return self.push(b"" if self.unsent else frames)

    def send(self, data: bytes, _: int = 0) -> None:
        self.push(frame(0, data))
        if self.unsent:
            raise zmq.Again(errno.EAGAIN)

    def poll(self, milliseconds: int) -> bool:
        return bool(select.select([self.socket], [], [], milliseconds / 1000)[0])

    def recv(self, _: int = 0) -> bytes:
        """The next message that came, of one frame."""
        while True:
            flags, data = self._take()
            if flags & COMMAND == 0:
                return data

    def _take(self) -> tuple[int, bytes]:
        self._need(2)
        flags = self.unread[0]
        head = 9 if flags & LONG else 2
        self._need(head)
        size = int.from_bytes(self.unread[1:head], "big")
        self._need(head + size)
        data, self.unread = self.unread[head : head + size], self.unread[head + size :]
        return flags, data

    def _need(self, count: int) -> None:
        while len(self.unread) < count:
            try:
                came = self.socket.recv(1 << 16)
            except BlockingIOError:
                if not self.unread or not self.poll(1000):  # of what has begun the rest comes soon
                    raise zmq.Again(errno.EAGAIN) from None
                continue
            if not came:
                raise ConnectionResetError
            self.unread += came


def send_endlessly(connect: Callable[[], RawDealer | None], most: int) -> Iterator[bool]:
    """Sends messages without an end, of small frames and large ones, over `most` connections; whether anything
    was sent. A connection that has ended is made again. `connect` gives None if it cannot connect now."""
    raws: list[RawDealer | None] = [None] * most
    for n in itertools.count():
        raw = raws[n % most] = raws[n % most] or connect()
        try:
            sent = raw.push_endless(LARGE if n % 2 else SMALL) if raw else 0
        except OSError:
            assert raw
            raw.close()
            raws[n % most], sent = None, 0
        if sent == 0:
            time.sleep(0.0002)
        yield sent > 0
