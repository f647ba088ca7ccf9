"""One rank of a prefill engine, for tests: prefill_process.py RANK TP_SIZE.

Prints its contact, learns of the other ranks, holds one request, and prints how the request ended.
"""

from __future__ import annotations

import sys

from coordinates import PREFILL_TABLE, TOKENS, fill, prefill_engine, small_model
from kvferry import Agent, GroupSteps


def main() -> None:
    rank, tp_size = (int(argument) for argument in sys.argv[1:3])
    engine = prefill_engine(small_model(), tp_size)
    with Agent(engine, rank) as agent:
        regions = agent.allocate_regions()
        fill(engine.shard(rank), regions, PREFILL_TABLE)
        agent.register(regions)
        print(agent.endpoint, agent.introduction.hex(), flush=True)
        for introduction in sys.stdin.readline().split():
            agent.introduce(bytes.fromhex(introduction))
        agent.hold("request", [GroupSteps(PREFILL_TABLE, 0, TOKENS)])
        print("holding", flush=True)
        event = agent.wait_event(60)
        print(event.kind.name if event else "nothing", flush=True)


if __name__ == "__main__":
    main()
