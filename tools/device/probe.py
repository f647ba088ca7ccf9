#!/usr/bin/env python3
"""What a CUDA driver does where kvferry, and the stand-in of its tests, only assume it.

    probe.py            asks everything, each question in a process of its own, which is ended after 25 s
    probe.py QUESTION   asks one

Needs libcuda.so.1 and a device, and nothing else. Prints answers, of which none is right or wrong; what kvferry
assumes is in brackets. Numbers are the driver's results: 0 is success, 600 "not ready".
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

LIMIT_S = 25
NOT_READY = 600
RELAXED = 2
MIB = 1 << 20

driver: Any = None
context = c_void_p()
plain = ctypes.create_string_buffer(2 << 16)  # memory of which the driver does not know


class Card(ctypes.Structure):
    """Of memory, for other processes: a CUipcMemHandle."""

    _fields_ = [("bytes", ctypes.c_char * 64)]


def call(name: str, *arguments: Any) -> Any:
    function = getattr(driver, name, None)
    return "absent" if function is None else function(*arguments)


def must(name: str, *arguments: Any) -> None:
    if (result := call(name, *arguments)) != 0:
        raise SystemExit(f"  {name}: {result}")


def new(name: str, *arguments: Any, kind: Any = c_void_p) -> Any:
    """Makes an object by a function whose first argument says where to put it."""
    made = kind()
    must(name, byref(made), *arguments)
    return made


def stream(priority: int = 0) -> Any:
    return new("cuStreamCreateWithPriority", 1, priority)  # not blocking


def event(on: c_void_p) -> Any:
    made = new("cuEventCreate", 2)
    must("cuEventRecord", made, on)
    return made


def memory(size: int) -> Any:
    return new("cuMemAlloc_v2", c_size_t(size), kind=c_uint64)


def pinned(size: int) -> Any:
    return new("cuMemHostAlloc", c_size_t(size), 3)


def hold_up(held: c_void_p) -> Callable[[], None]:
    """Holds a stream up; returns what lets it go."""
    place = pinned(4096)
    word = ctypes.cast(place, ctypes.POINTER(c_uint32))
    word[0] = 0
    must("cuStreamWaitValue32_v2", held, c_uint64(place.value), c_uint32(1), 0)
    return lambda: word.__setitem__(0, 1)


def on_thread(ask: Callable[[], Any], seconds: float = 10, mode: int = 0) -> list[Any]:
    """What is answered on a thread of its own with this capture mode; nothing: no answer by then."""
    answers: list[Any] = []

    def run() -> None:
        must("cuCtxPushCurrent_v2", context)
        must("cuThreadExchangeStreamCaptureMode", byref(c_int(mode)))
        answers.append(ask())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers.copy()


def say(what: str, answer: object) -> None:
    print(f"  {what}: {answer}", flush=True)


def pools() -> None:
    """Whether memory of a pool can be shared [it cannot; virtual devices may have no pools: 801]."""
    of, mine, taken = c_void_p(), stream(), c_uint64()
    result = call("cuMemPoolCreate", byref(of), (c_int * 22)(1, 0, 1))  # a CUmemPoolProps
    if result != 0:
        return say("cuMemPoolCreate", result)
    must("cuMemAllocFromPoolAsync", byref(taken), c_size_t(4096), of, mine)
    say("cuIpcGetMemHandle of its memory [an error]", call("cuIpcGetMemHandle", byref(Card()), taken))
    retained = call("cuMemRetainAllocationHandle", byref(c_uint64()), c_void_p(taken.value))
    say("cuMemRetainAllocationHandle of it [an error]", retained)


def copies() -> None:
    """Copies of 24 streams, of which some may be in the queue of a copy behind a stream that waits."""
    there, here, size = memory(4 * MIB).value, pinned(4 * MIB).value, c_size_t(65536)

    def put(on: c_void_p, to: str, at: int) -> None:
        device, host = c_uint64(there + at), c_void_p(here + at)
        ends = (device, host) if to == "device" else (host, device)
        must("cuMemcpyHtoDAsync_v2" if to == "device" else "cuMemcpyDtoHAsync_v2", *ends, size, on)

    for to, priority in (("device", 0), ("device", -1), ("host", 0), ("host", -1)):
        engine, over = stream(priority), []
        let_go = hold_up(engine)
        put(engine, to, 0)
        for number in range(24):
            ours = stream()
            put(ours, to, (number + 1) * 65536)
            over.append(event(ours))
        time.sleep(0.2)
        stuck = sum(call("cuEventQuery", each) == NOT_READY for each in over)
        let_go()
        must("cuCtxSynchronize")
        say(f"to the {to}, behind a stream of priority {priority}", f"{stuck} are stuck")


def functions() -> list[tuple[str, Callable[[], Any]]]:
    """Calls that may wait, or spoil a capture; some free what others have made."""
    mine, over = stream(), event(stream())
    freed, unpinned, size = memory(4 * MIB), pinned(MIB), c_size_t(2 * MIB)
    page = c_void_p(ctypes.addressof(plain) + -ctypes.addressof(plain) % 65536)
    place = new("cuMemAddressReserve", size, c_size_t(0), c_uint64(0), c_uint64(0), kind=c_uint64)
    segment = new("cuMemCreate", size, (c_int * 8)(1, 1, 1), c_uint64(0), kind=c_uint64)
    must("cuMemMap", place, size, c_size_t(0), segment, c_uint64(0))
    must("cuCtxSynchronize")
    return [
        ("cuEventQuery", lambda: call("cuEventQuery", over)),
        ("cuEventCreate", lambda: call("cuEventCreate", byref(c_void_p()), 2)),
        ("cuStreamCreateWithPriority", lambda: call("cuStreamCreateWithPriority", byref(c_void_p()), 1, 0)),
        ("cuStreamSynchronize of another", lambda: call("cuStreamSynchronize", mine)),
        ("cuMemAlloc", lambda: call("cuMemAlloc_v2", byref(c_uint64()), c_size_t(4 * MIB))),
        ("cuMemHostAlloc", lambda: call("cuMemHostAlloc", byref(c_void_p()), c_size_t(MIB), 1)),
        ("cuMemHostRegister", lambda: call("cuMemHostRegister_v2", page, c_size_t(65536), 3)),
        ("cuMemHostUnregister", lambda: call("cuMemHostUnregister", page)),
        ("cuMemsetD8Async", lambda: call("cuMemsetD8Async", freed, 0, c_size_t(4096), mine)),
        ("cuMemSetAccess", lambda: call("cuMemSetAccess", place, size, (c_int * 3)(1, 0, 3), c_size_t(1))),
        ("cuMemUnmap", lambda: call("cuMemUnmap", place, size)),
        ("cuMemFreeHost", lambda: call("cuMemFreeHost", unpinned)),
        ("cuMemFree", lambda: call("cuMemFree_v2", freed)),
    ]


def waits() -> None:
    """Which calls wait while a stream waits, and whether others can call the driver meanwhile."""
    idle = event(stream())
    for name, ask in functions():
        engine = stream(-1)
        let_go = hold_up(engine)
        answers = on_thread(ask, 0.5)
        others = answers or on_thread(lambda: call("cuEventQuery", idle), 0.5)
        let_go()
        must("cuStreamSynchronize", engine)
        say(name, f"returns {answers[0]}" if answers else f"waits; others {'go on' if others else 'wait, too'}")


def captures() -> None:
    """Which calls of a relaxed thread spoil the capture of another [only the last]."""
    for name, ask in [*functions(), ("cuCtxSynchronize", lambda: call("cuCtxSynchronize"))]:
        captured = stream()
        must("cuStreamBeginCapture_v2", captured, 0)
        answers = on_thread(ask, mode=RELAXED)
        end = call("cuStreamEndCapture", captured, byref(c_void_p()))
        say(name, f"{answers}; the capture ends with {end}")


def handles() -> None:
    """What another process opens by handles of 700000 and of 4096 bytes, and again by the first."""
    cards = [new("cuIpcGetMemHandle", memory(size), kind=Card) for size in (700000, 4096)]
    subprocess.run([sys.executable, __file__, "opened", *(bytes(card).hex() for card in cards)], check=False)


def opened(cards: list[str]) -> None:
    address, base, size = c_uint64(), c_uint64(), c_size_t()
    for card in (*cards, cards[0]):
        result = call("cuIpcOpenMemHandle_v2", byref(address), Card.from_buffer_copy(bytes.fromhex(card)), 1)
        call("cuMemGetAddressRange_v2", byref(base), byref(size), address)
        say(f"{address.value:#x} ({result})", f"{address.value - base.value} behind the begin of {size.value}")
    say("a handle of opened memory [an error]", call("cuIpcGetMemHandle", byref(Card()), address))


QUESTIONS = {each.__name__: each for each in (pools, copies, waits, captures, handles)}


def ask_all() -> None:
    for name, queues in (*((name, "") for name in QUESTIONS), ("copies", "32")):
        print(f"{name}: {QUESTIONS[name].__doc__}{' With 32 queues.' if queues else ''}", flush=True)
        more = {"CUDA_DEVICE_MAX_CONNECTIONS": queues} if queues else {}
        try:
            subprocess.run([sys.executable, __file__, name], env=os.environ | more, timeout=LIMIT_S, check=True)
        except subprocess.SubprocessError as error:
            say("ended", error)


def main(arguments: list[str]) -> None:
    global driver
    driver = ctypes.CDLL("libcuda.so.1")
    if not arguments:
        return ask_all()
    must("cuInit", 0)
    must("cuDevicePrimaryCtxRetain", byref(context), 0)
    must("cuCtxPushCurrent_v2", context)
    opened(arguments[1:]) if arguments[0] == "opened" else QUESTIONS[arguments[0]]()
    os._exit(0)  # threads may wait for ever


if __name__ == "__main__":
    main(sys.argv[1:])
