"""A stranger that sends a message of a mebibyte, in segments as long as they may be, to each of some ports that
speaks ZMTP: stranger.py HOST SECONDS PORT...

Prints "begun", and after so many seconds how many bytes of each message the other end's kernel has received.
"""

import contextlib
import fcntl
import os
import socket
import sys
import termios
import time

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x29\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"
# Of zeros a checksum would not show that some are missing.
FRAME = b"\x02" + (1 << 20).to_bytes(8, "big") + os.urandom(1 << 20)


def shake_hands(host: str, port: int) -> socket.socket | None:
    """None: the port speaks something else."""
    made = socket.create_connection((host, port), 5)
    try:
        made.sendall(GREETING + READY)
        theirs = b""
        while len(theirs) < len(GREETING + READY) and (came := made.recv(4096)):
            theirs += came
    except OSError:
        theirs = b""
    if theirs[:1] == GREETING[:1] and theirs[12:16] == b"NULL":
        made.setblocking(False)
        return made
    made.close()
    return None


def unread(made: socket.socket) -> int:
    """What was sent, but not received."""
    return int.from_bytes(fcntl.ioctl(made, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def main() -> int:
    host, seconds, *ports = sys.argv[1:]
    met = [made for port in ports if (made := shake_hands(host, int(port)))]
    if not met:
        print("no port speaks ZMTP without keys", flush=True)
        return 1
    print("begun", flush=True)
    sent, end = dict.fromkeys(met, 0), time.monotonic() + float(seconds)
    while time.monotonic() < end:
        for made in met:
            with contextlib.suppress(BlockingIOError, ConnectionError):  # who is refused is hung up on
                sent[made] += made.send(FRAME[sent[made] :])
        time.sleep(0.01)
    print(*(sent[made] - unread(made) for made in met), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
