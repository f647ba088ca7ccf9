"""A stranger that sends a message of a mebibyte, in segments as long as they may be, to the first of some ports
that speaks ZMTP: stranger.py HOST SECONDS PORT...

Prints "begun", and after so many seconds how many bytes of the message the other end's kernel has received.
"""

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
        return made
    made.close()
    return None


def main() -> int:
    host, seconds, *ports = sys.argv[1:]
    met = (shake_hands(host, int(port)) for port in ports)
    made = next(filter(None, met), None)
    if made is None:
        print("no port speaks ZMTP without keys", flush=True)
        return 1
    print("begun", flush=True)
    made.setblocking(False)
    sent, end = 0, time.monotonic() + float(seconds)
    while time.monotonic() < end:
        try:
            sent += made.send(FRAME[sent:])
        except BlockingIOError:
            time.sleep(0.01)
    print(sent - int.from_bytes(fcntl.ioctl(made, termios.TIOCOUTQ, bytes(4)), sys.byteorder), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
