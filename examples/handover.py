"""One process computes a cache, another fetches it: with agents, and with asyncio on the fetching side.

The prefill process keeps blocks of 16 tokens, token before head; the decode process blocks of 24, head before
token. Only the contact travels between them, here as a line of text.
"""

import asyncio
import subprocess
import sys

import numpy as np

from kvferry import Agent, Contact, Engine, EventKind, Group, GroupSpec, GroupSteps, Model, Part

HEADS, SIZE, TOKENS = 4, 8, 40
THEIRS, OURS = [7, 3, 9], [5, 1]  # the blocks of the sequence on either side


def small_model() -> Model:
    return Model([Group("full", (0, 1), (Part("k", "f32", HEADS, SIZE), Part("v", "f32", HEADS, SIZE)))])


def token_values() -> np.ndarray:
    """The cache, [K or V, token, head, element]: a number for each element, which both sides know."""
    return np.arange(2 * TOKENS * HEADS * SIZE, dtype=np.float32).reshape(2, TOKENS, HEADS, SIZE)


def prefill() -> None:
    engine = Engine(small_model(), GroupSpec(12, 16, "L|BPNH"), name="prefill")
    with Agent(engine) as agent:
        layers = [agent.allocate((12, 2, 16, HEADS, SIZE), np.float32) for _ in range(2)]
        for layer, cache in enumerate(layers):
            for token in range(TOKENS):
                block, row = divmod(token, 16)
                cache[THEIRS[block], :, row] = token_values()[:, token] + layer
        agent.register(layers)
        agent.hold("request", [GroupSteps(THEIRS, 0, TOKENS)])
        print(agent.contact.engine, agent.contact.endpoint, flush=True)
        agent.wait_event(timeout=60)


async def decode() -> None:
    command = [sys.executable, __file__, "prefill"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        contact = Contact(*other.stdout.readline().split())
        with Agent(Engine(small_model(), GroupSpec(8, 24, "L|BPHN"), name="decode")) as agent:
            layers = [agent.allocate((8, 2, HEADS, 24, SIZE), np.float32) for _ in range(2)]
            agent.register(layers)
            agent.pull("request", contact, [GroupSteps(OURS, 0, TOKENS)])
            event = await asyncio.wait_for(agent.event(), timeout=60)
            if event.kind is not EventKind.DONE:
                raise SystemExit(f"the request failed: {event.detail}")
            for layer, cache in enumerate(layers):
                for token in range(TOKENS):
                    block, row = divmod(token, 24)
                    np.testing.assert_array_equal(
                        cache[OURS[block], :, :, row], token_values()[:, token] + layer
                    )
            print(f"{event.bytes} bytes in {event.runs} runs, all in their places")


if __name__ == "__main__":
    if sys.argv[1:] == ["prefill"]:
        prefill()
    else:
        asyncio.run(decode())
