"""Traces of two agents, between which one request was pulled and one was pushed, every byte verified."""

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
from kvferry.trace import read

HELD = [GroupSteps(PREFILL_TABLE, 0, TOKENS)]
WANTED = [GroupSteps(DECODE_TABLE, 0, TOKENS)]


def _end(agent, ticket):
    while (event := agent.wait_event(60)) is None or event.ticket != ticket:
        if event is None:
            raise RuntimeError("a request does not end")
    if event.kind is not EventKind.DONE:
        raise RuntimeError(f"a request failed: {event}")


def _move(producer, consumer, request, pulls):
    if pulls:
        giving = producer.hold(request, HELD)
        taking = consumer.pull(request, producer.contact, WANTED)
    else:
        taking = consumer.expect(request, producer.contact, WANTED)
        giving = producer.push(request, HELD)
        producer.push_ready(giving)
    _end(consumer, taking)
    _end(producer, giving)


def make_sides():
    """The traces of both, as Agent.trace() gives them."""
    model = small_model()
    prefill, decode = prefill_engine(model, tp_size=1), decode_engine(model)
    with Agent(prefill, trace_requests=8) as producer, Agent(decode, trace_requests=8) as consumer:
        theirs, ours = producer.allocate_regions(), consumer.allocate_regions()
        producer.register(theirs)
        consumer.register(ours)
        for request, pulls in (("pulled", True), ("pushed", False)):
            fill(prefill.shard(0), theirs, PREFILL_TABLE)
            ours[0][:] = 0
            _move(producer, consumer, request, pulls)
            if wrong_cells(decode.shard(0), ours, DECODE_TABLE):
                raise RuntimeError(f"what was {request} is wrong")
        return [read(agent.trace()) for agent in (producer, consumer)]
