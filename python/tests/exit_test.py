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
    def work(first, *others):
        with first:
            if others:
                return work(*others)
            inside.set()
            over.wait()
    working = threading.Thread(target=work, args=locks, daemon=True)
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


MAKE = """
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
"""


def test_a_forked_process_may_use_what_no_thread_of_its_parent_used() -> None:
    run(
        OPEN
        + MAKE
        + """
import signal
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


EVERYWHERE = """
def everywhere(do, then):
    # `do` has been called before, so that what is made at the first call is there.
    # Interrupts it wherever a signal handler may raise: when Python code is called, when C code has returned.
    at, ended = 0, False
    while not ended:
        at, left = at + 1, at + 1
        def interrupt(_frame, event, _):
            nonlocal left
            left -= event in ("call", "c_return")
            if left == 0:
                raise KeyboardInterrupt
        try:
            sys.setprofile(interrupt)
            do()
            sys.setprofile(None)
        except KeyboardInterrupt:
            then()
        else:  # the exception was not raised yet, or it was in a __del__, which Python only prints
            ended = left > 0
            if not ended:
                then()
    assert at > 5
def elsewhere(do):  # in another thread, which must not wait for this one
    done = []
    thread = threading.Thread(target=lambda: done.append(do()), daemon=True)
    thread.start()
    thread.join(10)
    assert done
"""


def test_an_agent_whose_call_was_interrupted_is_used_and_closed_by_other_threads() -> None:
    run(
        OPEN
        + EVERYWHERE
        + """
consumer.next_event()
everywhere(consumer.next_event, lambda: elsewhere(consumer.next_event))
elsewhere(consumer.close)
"""
    )


def test_what_was_being_made_when_the_interrupt_came_is_not_taken_from_others() -> None:
    run(
        OPEN
        + """
import signal
import kvferry._native
from kvferry import Plan, Request
model = small_model()
engine = decode_engine(model)
plan = Plan(engine.shard(0), engine)
end = hold(kvferry._native._LOCK)
def interrupt(*_):
    end()
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
signal.setitimer(signal.ITIMER_REAL, 0.2)
try:
    Request(plan)  # waits for the lock when the plan is to be kept
except KeyboardInterrupt:
    pass
else:
    sys.exit(1)
freed, release = [], plan._resource._release
plan._resource._release = lambda pointer: [freed.append(pointer), release(pointer)]
request = Request(plan)
plan.close()
assert not freed
request.close()
assert len(freed) == 1
"""
    )


def test_shards_that_were_being_given_to_an_engine_when_the_interrupt_came_are_freed_once() -> None:
    run(
        OPEN
        + EVERYWHERE
        + """
from kvferry import Engine, Shard
import kvferry.shard
lib = kvferry.shard.lib
freed = []
class Counting:
    def __getattr__(self, name):
        return getattr(lib, name)
    def kvf_shard_free(self, pointer):
        freed.append(pointer)
        lib.kvf_shard_free(pointer)
    def kvf_engine_free(self, pointer):
        freed.extend(lib.kvf_engine_shard(pointer, i) for i in range(2))
        lib.kvf_engine_free(pointer)
kvferry.shard.lib = Counting()
model = small_model()
engine = prefill_engine(model, tp_size=2)
def renew():
    global given
    freed.clear()
    given = [
        Shard(
            model, rank=one.rank, layers=one.layers, region_bytes=one.region_bytes, groups=one.groups,
            tp_size=2, tp_rank=one.tp_rank,
        )
        for one in engine.shards
    ]
def look():
    for one in given:
        with contextlib.suppress(ClosedError):
            assert one.placement(0, 0, 0).region == 0
    given.clear()
    assert len(set(freed)) == len(freed)
    renew()
sys.unraisablehook = lambda _: None
renew()
Engine.from_shards(model, given)
renew()
everywhere(lambda: Engine.from_shards(model, given), look)
"""
    )


def test_a_transport_whose_call_was_interrupted_is_used_by_other_threads_and_closed() -> None:
    run(
        OPEN
        + EVERYWHERE
        + """
def use_and_close():
    elsewhere(one.progress)
    one.close()
    renew()
def renew():
    global one, peer
    one = Transport("inproc")
    peer = one.connect(transport.card)
uses = (lambda: one.progress(), lambda: one.wait(0), lambda: peer.info, lambda: peer.close())
transport = Transport("inproc")
for use in uses:
    renew()
    use()
    renew()
    everywhere(use, use_and_close)
"""
    )


def test_what_one_thread_uses_at_a_time_is_used_by_another_after_an_interrupted_call() -> None:
    run(
        OPEN
        + EVERYWHERE
        + MAKE
        + """
for use in make()[1]:
    use()
    everywhere(use, lambda: elsewhere(use))
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


INTERRUPT = """
import gc, weakref
import numpy as np
import kvferry._native
check = kvferry._native.check
def interrupt(status):  # Python raises it when the call of the library returns
    kvferry._native.check = check
    raise KeyboardInterrupt
def interrupted(function, *arguments, **options):
    kvferry._native.check = interrupt
    try:
        function(*arguments, **options)
    except KeyboardInterrupt:
        return
    sys.exit(1)
"""


def test_an_interrupted_registration_keeps_the_memory_until_the_end() -> None:
    run(
        OPEN
        + INTERRUPT
        + """
def memory(engine):
    found = [np.zeros(size, np.uint8) for size in engine.shard(0).region_bytes]
    return found, [weakref.ref(array) for array in found]
engine = decode_engine(small_model())
agent, endpoint = Agent(engine), Transport("inproc")
for opened in (agent, endpoint):
    given, kept = memory(engine)
    interrupted(opened.register, given)
    del given
    gc.collect()
    assert all(one() is not None for one in kept)
    opened.unregister_region(0)
    given, kept_again = memory(engine)
    interrupted(opened.register_region, 0, given[0])
    del given
    gc.collect()
    assert kept_again[0]() is not None
    opened.close()
    gc.collect()
    assert all(one() is None for one in kept + kept_again)
"""
    )


def test_what_was_being_opened_when_the_interrupt_came_is_closed() -> None:
    run(
        OPEN
        + INTERRUPT
        + """
from pathlib import Path
from kvferry import Stage
def threads():
    return sorted(Path("/proc/self/task").iterdir())
engine = decode_engine(small_model())
before = threads()
interrupted(Agent, engine)
assert threads() == before
stub = Transport("inproc")
stub.register([stub.allocate(size) for size in engine.shard(0).region_bytes])
before = threads()
interrupted(Stage, stub, engine.shard(0), workers=2)
assert threads() == before
Stage(stub, engine.shard(0))
"""
    )


# Two transports of one process: one has what the other wants.
PAIR = """
from coordinates import PREFILL_TABLE
model = small_model()
there, here = prefill_engine(model, tp_size=1), decode_engine(model)
giver, taker = Transport("inproc"), Transport("inproc")
for one, engine in ((giver, there), (taker, here)):
    one.register([one.allocate(size) for size in engine.shard(0).region_bytes])
"""


def test_a_transfer_whose_start_was_interrupted_is_ended() -> None:
    run(
        OPEN
        + INTERRUPT
        + PAIR
        + """
from kvferry import Direction, GroupRequest, Plan, Request
peer = taker.connect(giver.card)
request = Request(Plan(here.shard(0), there), [GroupRequest(DECODE_TABLE, PREFILL_TABLE, 0, TOKENS)])
for start in (taker.pull, taker.put):
    interrupted(start, request, [peer])
runs, done = request.runs(0), []
interrupted(peer.submit, Direction.READ, runs, done.append)
del request, runs  # nothing reads it any more
gc.collect()
while not done:
    taker.progress()
    giver.progress()
assert [operation.status.name for operation in done] == ["OK"]
assert peer.info.bytes_read == 20480
"""
    )


def test_a_transfer_that_an_interrupt_left_to_nobody_lets_its_request_go() -> None:
    run(
        OPEN
        + EVERYWHERE
        + PAIR
        + """
from kvferry import GroupRequest, Plan, Request, Stage
stages = Stage(giver, there.shard(0)), Stage(taker, here.shard(0))
peer, back = taker.connect(giver.card), giver.connect(taker.card)
stages[1].join(peer)
stages[0].join(back)
wanted = [GroupRequest(DECODE_TABLE, PREFILL_TABLE, 0, TOKENS)]
request = Request(Plan(here.shard(0), there), wanted)
sys.unraisablehook = lambda _: None
ways = (
    lambda: taker.pull(request, [peer]),
    lambda: giver.push(request, 0, back),
    lambda: stages[1].pull(request, [peer]),
    lambda: stages[0].push(request, 0, back),
)
for way in ways:
    way().close()
    everywhere(lambda: (request.set(wanted), way().close()), lambda: None)
    giver.progress()
    taker.progress()
    assert not any(one._endpoint.moves for one in (giver, taker)) and not any(one._moves for one in stages)
"""
    )


@pytest.mark.parametrize("do", ["copy.copy", "copy.deepcopy", "pickle.dumps"])
def test_what_stands_for_an_object_of_the_library_is_neither_copied_nor_pickled(do: str) -> None:
    run(
        OPEN
        + f"""
import copy, pickle
from kvferry import InvalidError, Operation, Plan, Request, Stage
from kvferry.transfer import Transfer
model = small_model()
engine = decode_engine(model)
plan = Plan(engine.shard(0), engine)
request = Request(plan)
peer = transport.connect(transport.card)
move = transport.pull(request, [peer])
for one in (model, engine, engine.shard(0), plan, request, transport, peer, move, producer):
    try:
        {do}(one)
    except InvalidError as error:
        assert str(error).startswith(f"a {{type(one).__name__}} can be neither copied nor pickled")
    else:
        sys.exit(type(one).__name__)
"""
    )


def test_what_was_being_closed_when_the_interrupt_came_is_not_closed_twice() -> None:
    run(
        OPEN
        + """
import kvferry.stage, kvferry.transfer, kvferry.transport
from kvferry import GroupRequest, Plan, Request, Stage
from coordinates import PREFILL_TABLE
lib = kvferry.transport.lib
class Interrupting:  # Python raises the exception when the call of the library returns
    def __init__(self, name):
        self.name = name
    def __getattr__(self, name):
        function = getattr(lib, name)
        def interrupted(*arguments):
            function(*arguments)
            raise KeyboardInterrupt
        return interrupted if name == self.name else function
def interrupt(module, name, close):
    module.lib = Interrupting(name)
    try:
        close()
    except KeyboardInterrupt:
        module.lib = lib
        close()
    else:
        sys.exit(name)
model = small_model()
there, here = prefill_engine(model, tp_size=1), decode_engine(model)
def pair():
    endpoints = Transport("inproc"), Transport("inproc")
    for one, engine in zip(endpoints, (there, here)):
        one.register([one.allocate(size) for size in engine.shard(0).region_bytes])
    return endpoints
wanted = [GroupRequest(DECODE_TABLE, PREFILL_TABLE, 0, TOKENS)]
request = Request(Plan(here.shard(0), there), wanted)
giver, taker = pair()
stages = Stage(giver, there.shard(0)), Stage(taker, here.shard(0))
peer = taker.connect(giver.card)
stages[1].join(peer)
stages[0].join(giver.connect(taker.card))
interrupt(kvferry.transfer, "kvf_transfer_free", taker.pull(request, [peer]).close)
request.set(wanted)
interrupt(kvferry.stage, "kvf_move_free", stages[1].pull(request, [peer]).close)
request.set(wanted)
interrupt(kvferry.stage, "kvf_stage_close", stages[1].close)
before = len(os.listdir("/proc/self/task"))
stage = Stage(taker, here.shard(0), workers=2)
stage.join(peer)
move = stage.pull(request, [peer])
interrupt(kvferry.stage, "kvf_move_free", stage.close)  # of what still moves
assert stage.closed and len(os.listdir("/proc/self/task")) == before
interrupt(kvferry.transport, "kvf_peer_close", peer.close)
other = taker.connect(giver.card)
interrupt(kvferry.transport, "kvf_transport_close", taker.close)
assert other.closed
other.close()
"""
    )
