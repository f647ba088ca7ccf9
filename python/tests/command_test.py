"""Commands to running engines, and a request that moves from one to another by them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

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
from kvferry import (
    Agent,
    CancelledError,
    Command,
    Contact,
    DeadlineError,
    Engine,
    Event,
    EventKind,
    GroupSteps,
    InvalidError,
    KeptRequest,
    KeyGrant,
    KeyPair,
    NotFoundError,
    OutOfRangeError,
    Record,
    Reply,
    RequestKind,
    Status,
    ask,
    make_keys,
)
from kvferry.commands import DRAIN, HAND_OVER, KEPT, LIST, RESUME, TAKE_OVER, kept_record

HELD = [GroupSteps(PREFILL_TABLE, 0, TOKENS)]
WANTED = [GroupSteps(DECODE_TABLE, 0, TOKENS)]
PATIENCE = 60.0

Heed = Callable[[Agent, Command], None]


@contextmanager
def heeding(
    agent: Agent, heed: Heed, note: Callable[[Agent, Event], None] = lambda agent, event: None
) -> Iterator[list[Command]]:
    """Lets a thread give the agent's commands to `heed`, and its other events to `note`."""
    seen: list[Command] = []
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            event = agent.wait_event(0.05)
            if event is not None and event.kind is EventKind.COMMAND:
                assert event.command is not None
                seen.append(event.command)
                heed(agent, event.command)
            elif event is not None:
                note(agent, event)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


@contextmanager
def opened(engine: Engine, **options: Any) -> Iterator[tuple[Agent, list[NDArray[np.uint8]]]]:
    """An agent whose memory is registered, and that memory."""
    with Agent(engine, **options) as agent:
        regions = agent.allocate_regions()
        agent.register(regions)
        yield agent, regions


def prefill() -> Engine:
    return prefill_engine(small_model(), tp_size=1)


def only(replies: list[Reply]) -> Reply:
    assert len(replies) == 1
    return replies[0]


def test_a_request_moves_by_two_commands() -> None:
    source, target = prefill(), decode_engine(small_model())
    with (
        opened(source, local_commands=True) as (producer, theirs),
        opened(target, local_commands=True) as (consumer, ours),
    ):
        fill(source.shard(0), theirs, PREFILL_TABLE)

        def hand_over(agent: Agent, command: Command) -> None:
            agent.hold(command.request, HELD)
            agent.reply(command, records=[Record("tokens", b"here", 0, TOKENS)])

        def take_over(agent: Agent, command: Command) -> None:
            assert command.peer is not None and command.records[0].data == b"here"
            ticket = agent.pull(command.request, command.peer, WANTED)
            event = agent.wait_event(PATIENCE)
            assert event is not None and event.ticket == ticket
            agent.reply(command, event.status, event.detail)

        with heeding(producer, hand_over) as first, heeding(consumer, take_over) as second:
            reply = only(ask(producer.contact, HAND_OVER, "prompt", peer=consumer.contact, timeout=PATIENCE))
            assert reply.error is None and [record.name for record in reply.records] == ["tokens"]
            assert wrong_cells(target.shard(0), ours, DECODE_TABLE)  # nothing has moved yet
            taken = ask(
                consumer.contact,
                TAKE_OVER,
                "prompt",
                peer=producer.contact,
                records=reply.records,
                timeout=PATIENCE,
            )
            assert only(taken) == Reply(Status.OK, "", ())
        assert wrong_cells(target.shard(0), ours, DECODE_TABLE) == []
        assert [command.verb for command in first + second] == [HAND_OVER, TAKE_OVER]
        assert first[0].request == b"prompt" and first[0].peer == consumer.contact
        assert 0 < first[0].deadline <= 60 and first[0].asker == ""


def test_a_drained_engine_is_resumed_by_a_command() -> None:
    waiting: list[Command] = []

    def heed(agent: Agent, command: Command) -> None:
        if command.verb == DRAIN:
            agent.drain(command.deadline)
            waiting.append(command)
        else:
            assert command.verb == RESUME
            agent.resume()
            agent.reply(command)

    def drained(agent: Agent, event: Event) -> None:
        if event.kind is EventKind.DRAINED:
            agent.reply(waiting.pop(), event.status, event.detail)

    with opened(prefill(), local_commands=True) as (agent, _), heeding(agent, heed, drained):
        for _ in range(2):
            assert only(ask(agent.contact, DRAIN, timeout=PATIENCE)).error is None
            with pytest.raises(CancelledError, match="drains"):
                agent.hold("r", HELD)
            assert only(ask(agent.contact, RESUME, timeout=PATIENCE)).error is None
            agent.cancel(agent.hold("r", HELD))


def test_an_engine_lists_what_it_keeps() -> None:
    def heed(agent: Agent, command: Command) -> None:
        assert command.verb == LIST
        named = ((kept.id.decode(), kept) for kept in agent.kept() if kept.id.startswith(command.request))
        agent.reply(command, records=[kept_record(named)])

    with opened(prefill(), local_commands=True) as (agent, _), heeding(agent, heed):
        for name in ("prompt-1", "prompt-2", "turn"):
            agent.hold(name, HELD, lease=300)
        for beginning, wanted in (("prompt", ["prompt-1", "prompt-2"]), ("", ["prompt-1", "prompt-2", "turn"])):
            (record,) = only(ask(agent.contact, LIST, beginning, timeout=PATIENCE)).records
            found = json.loads(record.data)
            assert record.name == KEPT and found["count"] == len(wanted)
            assert [one["request"] for one in found["kept"]] == wanted
            assert all(one["tokens"] == TOKENS and 270 < one["left_s"] <= 300 for one in found["kept"])


def test_a_list_has_as_many_requests_as_fit() -> None:
    def named(count: int, length: int) -> dict[str, Any]:
        kept = KeptRequest(1, RequestKind.HOLD, b"", False, 1, 0, 100, 1.0, None)
        record = kept_record(("x" * length, kept) for _ in range(count))
        assert len(record.data) < 66_000
        found: dict[str, Any] = json.loads(record.data)
        return found

    assert len(named(300, 40)["kept"]) == 300
    many = named(10_000, 40)
    assert (many["count"], len(many["kept"])) == (10_000, 500)  # of 131 bytes each
    assert len(named(100, 1024)["kept"]) < 60
    assert "left_s" not in many["kept"][0]  # it has no limit
    assert named(0, 1) == {"count": 0, "kept": []}


def test_commands_are_refused_by_agents_that_do_not_allow_them() -> None:
    with opened(prefill()) as (agent, _):
        reply = only(ask(agent.contact, DRAIN, timeout=PATIENCE))
        assert reply.status is Status.PERMISSION and "local_commands" in reply.detail
        assert reply.error is not None


def test_a_key_needs_the_right_to_give_commands() -> None:
    engine, operator, other = make_keys(), make_keys(), make_keys()
    grants = [KeyGrant(operator.public_key, commands=True), KeyGrant(other.public_key), engine.public_key]

    def refuse(agent: Agent, command: Command) -> None:
        agent.reply(command, Status.UNSUPPORTED, f"{command.asker} asks for what this engine does not do")

    with opened(prefill(), keys=engine, allowed_keys=grants) as (agent, _):

        def try_as(keys: KeyPair) -> Reply:
            return only(ask(agent.contact, "dance", keys=keys, timeout=PATIENCE))

        with heeding(agent, refuse) as seen:
            assert try_as(other).status is Status.PERMISSION
            assert seen == []
            reply = try_as(operator)
        assert reply.status is Status.UNSUPPORTED and reply.detail.startswith(operator.public_key)
    with pytest.raises(InvalidError, match="a grant of commands names no engine"):
        Agent(prefill(), keys=engine, allowed_keys=[KeyGrant(other.public_key, "decode", commands=True)])


def test_a_command_is_replied_to_once() -> None:
    def reply_twice(agent: Agent, command: Command) -> None:
        with pytest.raises(InvalidError):
            agent.reply(command, Status.AGAIN)
        with pytest.raises(OutOfRangeError):
            agent.reply(command, records=[Record("", b"")])
        agent.reply(command, detail="once")
        with pytest.raises(NotFoundError):
            agent.reply(command, detail="twice")

    with opened(prefill(), local_commands=True) as (agent, _):
        with heeding(agent, reply_twice) as seen:
            assert only(ask(agent.contact, DRAIN, timeout=PATIENCE)).detail == "once"
        assert len(seen) == 1


def test_who_is_not_there_is_not_asked() -> None:
    nobody = Contact("prefill", "tcp://127.0.0.1:1")
    with pytest.raises(DeadlineError, match=r"127\.0\.0\.1:1"):
        ask(nobody, DRAIN, timeout=0.05)
    with pytest.raises(OutOfRangeError, match="verb"):
        ask(nobody, "")
