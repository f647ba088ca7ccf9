"""The two processes of agents.c in Python, with torch, their own model and their own event loop.

    pip install torch
    python examples/agents.py

The prefill process computes the caches of two requests. The decode process pulls one of them; the prefill
process pushes the other, layer by layer as it computes it. The prefill process keeps blocks of 16 tokens, token
before head; the decode process blocks of 24, head before token. Every element is compared.
"""

import select
import subprocess
import sys

import torch

from kvferry import Agent, Contact, Engine, EventKind, Group, GroupSpec, GroupSteps, Model, Part

LAYERS, HEADS, SIZE, TOKENS = 4, 4, 32, 40
PULLED = {"prefill": [7, 3, 9], "decode": [5, 1]}  # where the two requests lie, in the blocks of either side
PUSHED = {"prefill": [2, 8, 4], "decode": [0, 6]}


def toy_model() -> Model:
    parts = (Part("k", "f32", HEADS, SIZE), Part("v", "f32", HEADS, SIZE))
    return Model([Group("full", tuple(range(LAYERS)), parts)], name="toy")


def compute(layer: int, request: dict[str, list[int]]) -> torch.Tensor:
    """What the model "computes", [K or V, token, head, element]: different in each request and layer."""
    count = 2 * TOKENS * HEADS * SIZE
    values = torch.arange(layer * count, (layer + 1) * count, dtype=torch.float32)
    return values.reshape(2, TOKENS, HEADS, SIZE) + (0.5 if request is PUSHED else 0.0)


def steps(blocks: list[int]) -> list[GroupSteps]:
    return [GroupSteps(blocks, 0, TOKENS)]


def run_until_done(agent: Agent, requests: int) -> None:
    """An engine's loop, which would also wait here for its own work."""
    while requests > 0:
        select.select([agent], [], [], 1)
        agent.progress()
        for event in agent.events():
            if event.kind is EventKind.FAILED:
                raise SystemExit(f"agents: {event.detail}")
            requests -= event.kind is EventKind.DONE


def prefill() -> None:
    pages = [torch.zeros(12, 2, 16, HEADS, SIZE) for _ in range(LAYERS)]

    def write(layer: int, request: dict[str, list[int]]) -> None:
        values = compute(layer, request)
        for token in range(TOKENS):
            pages[layer][request["prefill"][token // 16], :, token % 16] = values[:, token]

    with Agent(Engine(toy_model(), GroupSpec(12, 16, "L|BPNH"), name="prefill"), own_thread=False) as agent:
        agent.register(pages)
        print(agent.contact.engine, agent.contact.endpoint, flush=True)
        for layer in range(LAYERS):
            write(layer, PULLED)
        agent.hold("pulled", steps(PULLED["prefill"]))
        ticket = agent.push("pushed", steps(PUSHED["prefill"]))
        for layer in range(LAYERS):
            write(layer, PUSHED)
            agent.push_ready(ticket, (0, TOKENS), layer + 1)
            agent.progress()  # between two layers, as an engine would
        run_until_done(agent, 2)  # then both requests' blocks are free


def wrong_elements(pages: list[torch.Tensor], request: dict[str, list[int]]) -> int:
    wrong = 0
    for layer, page in enumerate(pages):
        values = compute(layer, request)
        for token in range(TOKENS):
            found = page[request["decode"][token // 24], :, :, token % 24]
            wrong += int((found != values[:, token]).sum())
    return wrong


def decode(contact: Contact) -> None:
    pages = [torch.full((12, 2, HEADS, 24, SIZE), -1.0) for _ in range(LAYERS)]
    with Agent(Engine(toy_model(), GroupSpec(12, 24, "L|BPHN"), name="decode"), own_thread=False) as agent:
        agent.register(pages)
        agent.pull("pulled", contact, steps(PULLED["decode"]))
        agent.expect("pushed", contact, steps(PUSHED["decode"]))
        run_until_done(agent, 2)
    wrong = wrong_elements(pages, PULLED) + wrong_elements(pages, PUSHED)
    count = LAYERS * 2 * TOKENS * HEADS * SIZE
    print(f"{count} elements pulled and as many pushed, {wrong} of them wrong")
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    if sys.argv[1:] == ["prefill"]:
        prefill()
    else:
        command = [sys.executable, __file__, "prefill"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout
            decode(Contact(*other.stdout.readline().split()))
        raise SystemExit(other.returncode)
