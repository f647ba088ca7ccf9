"""Processes that end without closing anything, and objects in a child of fork()."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

OPEN = """
import contextlib, os, sys, threading
from coordinates import DECODE_TABLE, TOKENS, decode_engine, prefill_engine, small_model
from kvferry import Agent, ClosedError, GroupSteps, Transport
lines = []
producer = Agent(prefill_engine(small_model(), tp_size=1), log=lines.append)
consumer = Agent(decode_engine(small_model()), log=lines.append)
for agent in (producer, consumer):
    agent.register(agent.allocate_regions())
consumer.pull("nobody holds it", producer.contact, [GroupSteps(DECODE_TABLE, 0, TOKENS)])
transport = Transport("shm", on_notify=lambda *_: None)
transport.register([transport.allocate(64)])
def hold(*locks):  # in another thread, as though calls were under way; what it returns ends them
    inside, over = threading.Event(), threading.Event()
    def work():
        with contextlib.ExitStack() as calls:
            for lock in locks:
                calls.enter_context(lock)
            inside.set()
            over.wait()
    working = threading.Thread(target=work, daemon=True)
    working.start()
    inside.wait()
    def end():
        over.set()
        working.join()
    return end
"""

ENDS = {
    "running out": "",
    "waiting in a daemon thread": """
def wait():
    with contextlib.suppress(ClosedError):
        producer.wait()
threading.Thread(target=wait, daemon=True).start()
""",
    "from within": "raise SystemExit(0)",
    "in a cycle": """
cycle = [producer, consumer, transport]
cycle.append(cycle)
del producer, consumer, transport, cycle
""",
}


def run(code: str) -> None:
    environment = os.environ | {"PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code],
        env=environment,
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
def test_a_process_that_closes_nothing_ends_well(end: str) -> None:
    run(OPEN + end)


def test_a_forked_process_can_neither_use_nor_close_what_it_inherits() -> None:
    run(
        OPEN
        + """
child = os.fork()
if child == 0:
    for use in (producer.next_event, transport.progress):
        try:
            use()
        except ClosedError as error:
            assert "forked" in str(error)
        else:
            sys.exit(1)
    producer.close()
    transport.close()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert producer.next_event() is None and not transport.closed
"""
    )


def test_a_forked_process_waits_for_no_thread_of_its_parent() -> None:
    run(
        OPEN
        + """
import signal
import kvferry._native
peer = transport.connect(transport.card)
end = hold(producer._session.change, transport._endpoint.lock, kvferry._native._LOCK)
child = os.fork()
if child == 0:
    signal.alarm(10)
    for use in (producer.next_event, transport.progress, peer.notify):
        with contextlib.suppress(ClosedError):
            use(*([b"x"] if use == peer.notify else []))
            sys.exit(1)
    small_model()
    for left in (peer, transport, producer):
        left.close()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
end()
"""
    )


def test_a_forked_process_may_use_what_no_thread_of_its_parent_used() -> None:
    run(
        OPEN
        + """
import signal
from kvferry import Plan, Request
from kvferry.aggregator import Aggregator
from kvferry.scheduler import Schedule
from kvferry.topology import EngineTransferInfo, Topology
def make():
    model = small_model()
    plan = Plan(decode_engine(model).shard(0), prefill_engine(model, tp_size=1))
    request, topology = Request(plan), Topology(tp_size=1, tp_rank=0, block_size=16, total_kv_heads=4)
    schedule, aggregator = Schedule(model, [16]), Aggregator(1)
    uses = (
        lambda: request.bytes(0),
        lambda: topology.register("e", EngineTransferInfo(1, 16)),
        lambda: schedule.counts,
        lambda: aggregator.pending,
    )
    return (request, topology, schedule, aggregator), uses
(used, uses_of_used), (unused, uses_of_unused) = make(), make()
end = hold(*(one._lock for one in used))
child = os.fork()
if child == 0:
    signal.alarm(20)
    for use in uses_of_used:
        try:
            use()
        except ClosedError as error:
            assert "forked" in str(error)
        else:
            os._exit(1)
    threads = [threading.Thread(target=use) for use in uses_of_unused for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert unused[1].get("e") == EngineTransferInfo(1, 16)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
end()
for use in uses_of_used:
    use()
"""
    )


def test_a_signal_handler_may_not_close_the_agent_that_it_interrupts() -> None:
    run(
        OPEN
        + """
import signal
from kvferry import InvalidError
signal.signal(signal.SIGALRM, lambda *_: consumer.close())
signal.setitimer(signal.ITIMER_REAL, 0.2)
try:
    consumer.wait(30)
except InvalidError as error:
    assert "signal handler" in str(error)
else:
    sys.exit(1)
assert not consumer.closed
consumer.close()
"""
    )


def test_an_agent_is_closed_after_a_call_that_was_interrupted_at_its_end() -> None:
    run(
        OPEN
        + """
leave = contextlib._GeneratorContextManager.__exit__.__code__
def interrupt(frame, event, _):  # as a signal handler that raises, at the moment when the call is left
    if event == "call" and frame.f_code is leave:
        sys.settrace(None)
        raise KeyboardInterrupt
sys.settrace(interrupt)
try:
    consumer.next_event()
except KeyboardInterrupt:
    consumer.close()
else:
    sys.exit(1)
"""
    )


INTERRUPTIONS = {
    "while it waits for a call of another thread": """
end = hold(consumer._session.using())
interrupted = threading.Event()
def handle(*_):
    if not interrupted.is_set():
        interrupted.set()
        raise KeyboardInterrupt
signal.signal(signal.SIGINT, handle)
def interrupt():
    while not consumer._session.closing:
        time.sleep(0.001)
    while not interrupted.is_set():  # one that comes just before the thread waits does not wake it
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.01)
threading.Thread(target=interrupt).start()
def go_on():
    end()
""",
    "while the library closes it": """
import kvferry._session
lib = kvferry._session.lib
class Interrupted:  # Python raises the exception when the call of the library returns
    def kvf_agent_close(self, pointer):
        lib.kvf_agent_close(pointer)
        raise KeyboardInterrupt
kvferry._session.lib = Interrupted()
def go_on():
    kvferry._session.lib = lib
""",
}


@pytest.mark.parametrize("interruption", INTERRUPTIONS.values(), ids=INTERRUPTIONS.keys())
def test_an_agent_whose_close_was_interrupted_is_closed_by_the_next_call(interruption: str) -> None:
    run(
        OPEN
        + "import signal, time\n"
        + interruption
        + """
try:
    consumer.close()
except KeyboardInterrupt:
    go_on()
else:
    sys.exit(1)
signal.alarm(20)
consumer.close()
assert consumer._session.pointer is None
"""
    )
