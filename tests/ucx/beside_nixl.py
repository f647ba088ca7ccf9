"""NIXL's agents and kvferry's in one process, each over a UCX of its own: beside_nixl.py LIBRARY nixl|kvferry

LIBRARY is the libucp that kvferry loads; NIXL has its own. The second argument says whose agents are opened,
and move bytes, first. Then both move bytes in turns, in either order. Every byte is compared, and the process
must end well.

NIXL 1.5.1 alone crashes when its process ends, where its module for EFA finds the system's libefa (Debian 12):
its libraries then call into the system's copies of the same libraries. If libefa was opened before, they
do not.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import time

import numpy as np

from coordinates import (
    DECODE_TABLE,
    PREFILL_TABLE,
    TOKENS,
    decode_engine,
    fill,
    prefill_engine,
    small_model,
    wrong_cells,
)
from kvferry import Agent, EventKind, GroupSteps

BYTES = 3 << 20
TURNS = 10
PATIENCE_S = 30


class Nixl:
    """Two agents with the backend UCX; one reads from the other, and writes to it."""

    def __init__(self) -> None:
        from nixl_cu13 import nixl_agent, nixl_agent_config

        self.memory = [np.zeros(BYTES, np.uint8) for _ in range(2)]
        self.places = [(memory.ctypes.data, BYTES, 0) for memory in self.memory]
        self.agents = [nixl_agent(f"nixl-{i}", nixl_agent_config(backends=["UCX"])) for i in range(2)]
        for agent, place in zip(self.agents, self.places, strict=True):
            agent.register_memory([(*place, "")], "DRAM")
        self.other = self.agents[0].add_remote_agent(self.agents[1].get_agent_metadata())

    def move(self, turn: int) -> None:
        agent, reads = self.agents[0], turn % 2 == 0
        target, source = self.memory if reads else reversed(self.memory)
        source[:] = np.random.default_rng(turn).integers(256, size=BYTES, dtype=np.uint8)
        target[:] = 0
        places = [agent.get_xfer_descs([place], "DRAM") for place in self.places]
        handle = agent.initialize_xfer("READ" if reads else "WRITE", *places, self.other)
        state, end = agent.transfer(handle), time.monotonic() + PATIENCE_S
        while state == "PROC" and time.monotonic() < end:
            state = agent.check_xfer_state(handle)
        assert state == "DONE", f"NIXL's transfer {turn}: {state}"
        agent.release_xfer_handle(handle)
        assert np.array_equal(source, target), f"NIXL's transfer {turn} has wrong bytes"


class Kvferry:
    """Two agents; one holds and pushes, the other pulls and expects."""

    def __init__(self, library: str) -> None:
        model = small_model()
        self.shards = prefill_engine(model, tp_size=1), decode_engine(model)
        settings = {"ucx.library": library}
        self.agents = [Agent(engine, transport="ucx", settings=settings) for engine in self.shards]
        self.memory = [agent.allocate_regions() for agent in self.agents]
        for agent, memory in zip(self.agents, self.memory, strict=True):
            agent.register(memory)
        fill(self.shards[0].shard(0), self.memory[0], PREFILL_TABLE)

    def move(self, turn: int) -> None:
        (producer, consumer), name = self.agents, f"request {turn}"
        held, wanted = [GroupSteps(PREFILL_TABLE, 0, TOKENS)], [GroupSteps(DECODE_TABLE, 0, TOKENS)]
        for region in self.memory[1]:
            region[:] = 0
        if turn % 2 == 0:
            producer.hold(name, held)
            consumer.pull(name, producer.contact, wanted)
        else:
            producer.push_ready(producer.push(name, held))
            consumer.expect(name, producer.contact, wanted)
        for agent in self.agents:
            event = agent.wait_event(PATIENCE_S)
            assert event and event.kind is EventKind.DONE, f"{name}: {event}"
        wrong = wrong_cells(self.shards[1].shard(0), self.memory[1], DECODE_TABLE)
        assert not wrong, f"{name}: {len(wrong)} wrong cells"


def main() -> None:
    library, first = sys.argv[1:]
    with contextlib.suppress(OSError):
        ctypes.CDLL("libefa.so.1")
    makers = {"nixl": Nixl, "kvferry": lambda: Kvferry(library)}
    second = next(name for name in makers if name != first)
    movers = {first: makers[first]()}
    movers[first].move(0)
    movers[second] = makers[second]()
    for turn in range(1, TURNS):
        for name in (first, second) if turn % 2 else (second, first):
            movers[name].move(turn)
    print(f"{first} first, kvferry over {library}: {TURNS} transfers of each, right")


if __name__ == "__main__":
    main()
