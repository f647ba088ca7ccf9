"""One side of a pull between caches that are torch tensors on a CUDA device, for tests.

    torch_process.py produce WITHHELD TRANSPORT
    torch_process.py consume WITHHELD TRANSPORT ENDPOINT

WITHHELD is "withheld" or "shown". Prints one JSON value a line: first what the other side or the test must
know, then results after each line of the standard input. The first request is right; before the second one
the producer changes every byte of its first layer. If the transport takes no memory of devices, the only value
is {"unsupported": WHY}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

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
from kvferry import Agent, Contact, GroupSteps, LogLine, Shard, UnsupportedError

REQUESTS = ("right", "changed")

# Torch's expandable segments have 20 MiB, and a block of each table lies in two of them.
LEAD = (20 << 20) - 31744
SMALL_LEAD = 512


class Cache:
    """The first layer behind much other memory of one tensor, the second behind little of a small one."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.bytes = [
            torch.zeros(lead + size, dtype=torch.uint8, device="cuda")[lead:]
            for lead, size in zip((LEAD, SMALL_LEAD), shard.region_bytes, strict=True)
        ]
        self.tensors = [
            memory.view(torch.float32).view([axis.length for axis in view.axes])
            for memory, (view,) in zip(self.bytes, shard.regions(), strict=True)
        ]
        torch.cuda.synchronize()

    def fill(self, table: Sequence[int]) -> None:
        regions = [np.zeros(size, np.uint8) for size in self.shard.region_bytes]
        fill(self.shard, regions, table)
        for memory, region in zip(self.bytes, regions, strict=True):
            memory.copy_(torch.from_numpy(region))
        torch.cuda.synchronize()

    def change(self) -> None:
        self.bytes[0].bitwise_xor_(0x55)
        torch.cuda.synchronize()

    def wrong(self, table: Sequence[int]) -> int:
        return len(wrong_cells(self.shard, [memory.cpu().numpy() for memory in self.bytes], table))


def say(value: Any) -> None:
    print(json.dumps(value), flush=True)


def log(line: LogLine) -> None:
    """Shown with a test that fails."""
    print(line.text, file=sys.stderr)


def registered(agent: Agent, cache: Cache, withheld: bool) -> bool:
    try:
        agent.register(cache.tensors, withheld=withheld)
    except UnsupportedError as error:
        say({"unsupported": str(error)})
        return False
    return True


def produce(withheld: bool, transport: str) -> None:
    engine = prefill_engine(small_model(), tp_size=1)
    cache = Cache(engine.shard(0))
    cache.fill(PREFILL_TABLE)
    with Agent(engine, transport=transport, own_thread=True, log=log) as agent:
        if not registered(agent, cache, withheld):
            return
        say(agent.endpoint)
        for name in REQUESTS:
            sys.stdin.readline()
            if name == "changed":
                cache.change()
            agent.hold(name, [GroupSteps(PREFILL_TABLE, 0, TOKENS)])
            say("holds")
            event = agent.wait_event(60)
            say(event.kind.name if event else "nothing")
        sys.stdin.readline()  # until the other side has looked at its peers


def consume(withheld: bool, transport: str, endpoint: str) -> None:
    engine = decode_engine(small_model())
    cache = Cache(engine.shard(0))
    with Agent(engine, transport=transport, own_thread=True, log=log) as agent:
        if not registered(agent, cache, withheld):
            return
        say(cache.wrong(DECODE_TABLE))
        for name in REQUESTS:
            sys.stdin.readline()
            agent.pull(name, Contact("prefill", endpoint), [GroupSteps(DECODE_TABLE, 0, TOKENS)], deadline=60)
            event = agent.wait_event(90)
            assert event is not None
            say(
                {
                    "event": event.kind.name,
                    "detail": event.detail,
                    "bytes": event.bytes,
                    "packed": event.bytes_packed,
                    "wrong": cache.wrong(DECODE_TABLE),
                    "peers": [(peer.fabric, peer.passed_over, peer.failure) for peer in agent.peers()],
                }
            )


def main() -> None:
    role, withheld, transport, *rest = sys.argv[1:]
    if role == "produce":
        produce(withheld == "withheld", transport)
    else:
        consume(withheld == "withheld", transport, *rest)


if __name__ == "__main__":
    main()
