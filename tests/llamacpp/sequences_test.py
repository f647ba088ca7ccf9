"""Sequences are lent and loaded between agents whose states have other forms."""

from __future__ import annotations

import gc
import json
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cells
import numpy as np
import pytest
from cells import Form, Place, Side

from kvferry import Agent, Contact, Engine, Event, EventKind, GroupSpec, GroupSteps, make_keys
from kvferry.errors import (
    CancelledError,
    ClosedError,
    DeadlineError,
    InvalidError,
    KvferryError,
    LimitError,
    MismatchError,
    NotFoundError,
    OutOfRangeError,
    PeerLostError,
    UnsupportedError,
)
from kvferry.llamacpp import Arrival, CacheType, SequenceAgent, SequenceCache

ROOM = 256  # tokens
PLAIN = Form()
#: A prefill server, in a process of its own: says where its sequence is, and waits.
LENDER = """
import json, sys
import cells
from kvferry.llamacpp import SequenceAgent, SequenceCache
state = cells.write(cells.Form(), range(40))
with SequenceAgent(SequenceCache.of_state(state, cells.Form().heads, False), 64) as agent:
    print(json.dumps(agent.lend(state)), flush=True)
    sys.stdin.read()
"""


def cache_of(form: Form) -> SequenceCache:
    return SequenceCache.of_state(
        cells.write(form, [0]), form.heads, form.interleaved, form.windowed, form.window
    )


def agent_of(form: Form, **options: Any) -> SequenceAgent:
    return SequenceAgent(cache_of(form), options.pop("tokens", ROOM), **options)


def free_tokens(agent: SequenceAgent) -> int:
    """For how many tokens there are pages."""
    for tokens in range(ROOM, -1, -1):
        try:
            firsts = [max(0, tokens - 1) if section.recurrent else 0 for section in agent._sections]
            pages = agent._take(firsts, tokens)
        except LimitError:
            continue
        agent._give(pages)
        return tokens
    raise AssertionError("not even for none")


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not happened"
        time.sleep(0.01)


def state_and_cells(form: Form, count: int) -> tuple[bytes, cells.Cells]:
    return cells.write(form, range(count)), cells.expected(form, range(count))


@pytest.mark.parametrize(
    "there", (PLAIN, Form(transposed=True, interleaved=True, streams=3, stream=1)), ids=str
)
@pytest.mark.parametrize("here", (PLAIN, Form(transposed=True), Form(interleaved=True, streams=2)), ids=str)
@pytest.mark.parametrize(("count", "pages"), ((1, (64, 64)), (37, (16, 5)), (150, (64, 48)), (200, (1, 256))))
def test_a_sequence_arrives_in_the_form_that_the_context_wants(
    there: Form, here: Form, count: int, pages: tuple[int, int]
) -> None:
    state, whole = state_and_cells(there, count)
    with (
        agent_of(there, tokens_per_page=pages[0]) as lender,
        agent_of(here, tokens_per_page=pages[1]) as loader,
    ):
        found = loader.load(lender.lend(state)).wait(20)
        assert cells.read(cells.first_stream(here), found.tobytes()) == whole
        until(lambda: free_tokens(lender) == ROOM)
        assert free_tokens(loader) == ROOM


@pytest.mark.parametrize("types", (("f32", "f16"), ("f16", "f32"), ("f32", "bf16"), ("bf16", "f16")))
def test_types_are_converted(types: tuple[str, str]) -> None:
    there, here = (replace(PLAIN, key_type=kind, value_type=kind) for kind in types)

    def value(side: Side, place: Place) -> int:
        """A number that all types can hold."""
        small = np.float32(cells.raw(side, place) % 200 - 100)
        if types[0] == "f16":
            return int(np.float16(small).view(np.uint16))
        return int(small.view(np.uint32)) >> (16 if types[0] == "bf16" else 0)

    state = cells.write(there, range(70), value)
    with agent_of(there) as lender, agent_of(here) as loader:
        found = cells.read(here, loader.load(lender.lend(state)).wait(20).tobytes())
    for (side, place), bits in found.items():
        assert cells.number(types[1], bits) == cells.number(types[0], value(side, place))


@pytest.mark.parametrize("types", (("q8_0", "q8_0"), ("q4_0", "f16"), ("f16", "q5_1")))
def test_quantized_cells_are_moved_as_they_are(types: tuple[str, str]) -> None:
    there = Form(key_size=64, value_size=32, key_type=types[0], value_type=types[1], interleaved=True)
    here = replace(there, streams=2, interleaved=True)
    state, whole = state_and_cells(there, 90)
    with agent_of(there) as lender, agent_of(here) as loader:
        assert cells.read(here, loader.load(lender.lend(state)).wait(20).tobytes()) == whole


def test_cells_that_are_quantized_otherwise_are_refused() -> None:
    form = Form(key_size=64, value_size=64, key_type="q4_0", value_type="q4_0", rotations=(64, 64))
    state, _ = state_and_cells(form, 5)
    with agent_of(form) as lender:
        params = lender.lend(state)
        other = cache_of(form)
        for cache in (
            replace(other, rotations=(0, 64)),
            replace(other, key_type=CacheType.IQ4_NL),  # of the same size
            replace(other, rotations=None),
        ):
            with SequenceAgent(cache, ROOM) as loader, pytest.raises(KvferryError, match="quantized"):
                loader.load(params, deadline=5).wait(20)


@pytest.mark.parametrize("count", (1, 5, 37, 64, 150))
@pytest.mark.parametrize("less", (0, 1))
def test_layers_with_a_window_keep_the_last_tokens(count: int, less: int) -> None:
    if count == less:
        return
    there = Form(layers=5, windowed=(0, 1, 3, 4), window=37)
    here = replace(there, transposed=True, interleaved=True)
    state, _ = state_and_cells(there, count)
    groups = [[0, 3], [1, 4], [2]]
    with (
        agent_of(there, tokens_per_page=16, groups=groups) as lender,
        agent_of(here, tokens_per_page=12, groups=groups) as loader,
    ):
        params = lender.lend(state)
        assert params["kvferry_groups"] == groups
        found = loader.load(params, count - less).wait(20)
        assert cells.read(here, found.tobytes()) == cells.arrived(here, count - less)
        until(lambda: free_tokens(lender) == ROOM)


def test_a_window_takes_the_pages_of_its_tokens_only() -> None:
    form = Form(layers=2, windowed=(0,), window=37)
    state, _ = state_and_cells(form, 200)
    with agent_of(form, tokens_per_page=16) as lender:
        lender.lend(state)
        free = [len(pages._free) for pages in lender._pages]
        assert free == [16 - 3, 16 - 13]  # 163 to 199, and 0 to 199
        with pytest.raises(LimitError, match="200 tokens need 13 pages of 16 tokens; allowed: 3"):
            lender.lend(state)
        assert [len(pages._free) for pages in lender._pages] == free


def test_other_groups_and_windows_are_refused() -> None:
    form = Form(layers=4, windowed=(0, 2), window=8)
    state, _ = state_and_cells(form, 20)
    with agent_of(form) as lender:
        params = lender.lend(state)
        assert params["kvferry_groups"] == [[0, 2], [1, 3]]
        for other, groups in (
            (form, [[0], [2], [1, 3]]),
            (replace(form, window=9), None),
            (replace(form, windowed=(1, 3)), None),
        ):
            with agent_of(other, groups=groups) as loader, pytest.raises(MismatchError):
                loader.load(params, deadline=5).wait(20)


@pytest.mark.parametrize(
    ("there", "here"),
    (
        (Form(layers=0, recurrent=3), Form(layers=0, recurrent=3)),
        (Form(recurrent=2), Form(transposed=True, recurrent=2, streams=3)),
        (Form(recurrent=2, s_size=0, streams=3, stream=1), Form(recurrent=2, s_size=0)),
        (
            Form(layers=3, windowed=(0, 2), window=37, recurrent=1),
            Form(layers=3, windowed=(0, 2), window=37, recurrent=1, transposed=True),
        ),
    ),
    ids=str,
)
@pytest.mark.parametrize("count", (1, 37, 150))
def test_states_go_with_the_tokens_that_they_have(there: Form, here: Form, count: int) -> None:
    with (
        agent_of(there, tokens_per_page=16, sequences=2) as lender,
        agent_of(here, tokens_per_page=12, sequences=1) as loader,
    ):
        for _ in range(4):  # places are used again
            state, _ = state_and_cells(there, count)
            found = loader.load(lender.lend(state), count).wait(20)
            assert cells.read(cells.first_stream(here), found.tobytes()) == cells.arrived(here, count)
        until(lambda: free_tokens(lender) == ROOM)


@pytest.mark.parametrize("form", (Form(layers=0, recurrent=2), Form(recurrent=2)), ids=str)
def test_a_state_is_never_taken_for_fewer_tokens(form: Form) -> None:
    state, whole = state_and_cells(form, 40)
    with agent_of(form) as lender, agent_of(form) as loader:
        params = lender.lend(state)
        for tokens in (39, 1):
            with pytest.raises(
                InvalidError,
                match=f"tokens is {tokens}; allowed: remote_num_tokens, which is 40, as the states",
            ):
                loader.load(params, tokens)
        with pytest.raises(InvalidError, match="tokens is 40; allowed: remote_num_tokens, which is not given"):
            loader.load({**params, "remote_num_tokens": None}, 40)
        if form.layers:  # the lender knows how many tokens there are beside its states
            with pytest.raises(OutOfRangeError):
                loader.load({**params, "remote_num_tokens": 39}, 39).wait(20)
        assert free_tokens(loader) == ROOM
        assert cells.read(form, loader.load(params).wait(20).tobytes()) == whole


def test_there_are_states_for_so_many_sequences() -> None:
    form = Form(recurrent=2)
    state, whole = state_and_cells(form, 5)
    with agent_of(form, sequences=2, tokens_per_page=16) as lender, agent_of(form) as loader:
        params = [lender.lend(state) for _ in range(2)]
        with pytest.raises(LimitError, match="layers need 1 state; allowed: 0, as the others of 2 are in use"):
            lender.lend(state)
        loader.decline(params[0])
        until(lambda: free_tokens(lender) == ROOM - 16)
        params.append(lender.lend(state))
        for lent in params[1:]:
            assert cells.read(form, loader.load(lent).wait(20).tobytes()) == whole
    with pytest.raises(OutOfRangeError, match="sequences is 0; allowed: 1 and more"):
        agent_of(form, sequences=0)


def test_other_states_are_refused() -> None:
    form = Form(recurrent=2)
    state, _ = state_and_cells(form, 5)
    with agent_of(form) as lender:
        params = lender.lend(state)
        for other in (
            replace(form, recurrent=0),
            replace(form, recurrent=3),
            replace(form, r_size=6),
            replace(form, s_size=0),
            replace(form, layers=0),
        ):
            with agent_of(other) as loader, pytest.raises(MismatchError):
                loader.load(params, 5, deadline=5).wait(20)
        engine = Engine(lender.cache.model(), groups=[GroupSpec(9, 16), GroupSpec(9, 1)], name="other")
        with Agent(engine) as agent:
            agent.register(agent.allocate_regions())
            there = Contact(params["remote_engine_id"], lender.agent.endpoint)
            agent.pull(bytes.fromhex(params["kvferry_transfer_id"]), there, [GroupSteps(), GroupSteps()])
            event = agent.wait_event(20)
            assert event is not None and isinstance(event.error, MismatchError)
            assert "states" in str(event.error)


def test_the_first_tokens_are_enough() -> None:
    """A decode server computes the last token of a prompt itself."""
    state, _ = state_and_cells(PLAIN, 100)
    with agent_of(PLAIN) as lender, agent_of(PLAIN) as loader:
        arrival = loader.load(lender.lend(state), 99)
        assert arrival.tokens == 99
        assert cells.read(PLAIN, arrival.wait(20).tobytes()) == cells.expected(PLAIN, range(99))
        until(lambda: free_tokens(lender) == ROOM)


def test_a_lent_sequence_is_a_copy() -> None:
    state, whole = state_and_cells(PLAIN, 50)
    mine = bytearray(state)
    with agent_of(PLAIN) as lender, agent_of(PLAIN) as loader:
        params = lender.lend(mine)
        mine[:] = bytes(len(mine))
        assert cells.read(PLAIN, loader.load(params).wait(20).tobytes()) == whole


def test_several_may_load_it() -> None:
    state, whole = state_and_cells(PLAIN, 50)
    with agent_of(PLAIN) as lender, agent_of(PLAIN) as one, agent_of(PLAIN) as two:
        params = lender.lend(state, uses=2)
        assert cells.read(PLAIN, one.load(params).wait(20).tobytes()) == whole
        assert free_tokens(lender) < ROOM
        assert cells.read(PLAIN, two.load(params).wait(20).tobytes()) == whole
        until(lambda: free_tokens(lender) == ROOM)


def test_many_at_once_from_several_threads() -> None:
    lengths = [1 + 7 * i % 60 for i in range(24)]
    wrong: list[int] = []

    def hand_over(lender: SequenceAgent, loader: SequenceAgent, mine: list[int]) -> None:
        for count in mine:
            state, whole = state_and_cells(PLAIN, count)
            if cells.read(PLAIN, loader.load(lender.lend(state)).wait(60).tobytes()) != whole:
                wrong.append(count)

    with agent_of(PLAIN, tokens_per_page=8) as lender, agent_of(PLAIN, tokens_per_page=12) as loader:
        threads = [threading.Thread(target=hand_over, args=(lender, loader, lengths[i::4])) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        until(lambda: free_tokens(lender) == ROOM)
        assert free_tokens(loader) == ROOM
    assert not wrong


def test_what_is_too_long_is_refused_and_takes_nothing() -> None:
    state, _ = state_and_cells(PLAIN, 200)
    with agent_of(PLAIN) as lender, agent_of(PLAIN, tokens=128) as loader:
        params = lender.lend(state)
        with pytest.raises(LimitError, match="200 tokens need 4 pages of 64 tokens; allowed: 0"):
            lender.lend(state)
        with pytest.raises(
            LimitError, match="200 tokens need 4 pages of 64 tokens; allowed: 2, as the others of 2"
        ):
            loader.load(params)
        loader.load(params, 128).wait(20)
        until(lambda: free_tokens(lender) == ROOM)


def test_what_nobody_loads_is_free_after_its_lease() -> None:
    state, _ = state_and_cells(PLAIN, 50)
    with agent_of(PLAIN) as lender, agent_of(PLAIN) as loader:
        params = lender.lend(state, lease=0.3)
        until(lambda: free_tokens(lender) == ROOM)
        with pytest.raises(KvferryError):
            loader.load(params, deadline=1).wait(20)
        until(lambda: free_tokens(loader) == ROOM)


def test_what_is_declined_is_free() -> None:
    state, _ = state_and_cells(PLAIN, 50)
    with agent_of(PLAIN) as lender, agent_of(PLAIN) as loader:
        loader.decline(lender.lend(state))
        loader.close()  # it knows
        until(lambda: free_tokens(lender) == ROOM)
        with pytest.raises(ClosedError):
            loader.decline(lender.lend(state))


def test_a_load_that_fails_says_why_and_frees_its_pages() -> None:
    state, _ = state_and_cells(PLAIN, 50)
    with agent_of(PLAIN) as lender, agent_of(PLAIN) as loader:
        params = {**lender.lend(state), "kvferry_transfer_id": b"another".hex()}
        arrival = loader.load(params, deadline=0.5)
        with pytest.raises(DeadlineError, match="50 tokens have not arrived within 0 s"):
            arrival.wait(0)
        with pytest.raises(
            DeadlineError, match=r"no lease on the request was granted|did not hold this request in time"
        ):
            arrival.wait(20)
        with pytest.raises(NotFoundError):
            arrival.wait(20)
        assert free_tokens(loader) == ROOM


def test_a_load_can_be_cancelled() -> None:
    state, _ = state_and_cells(PLAIN, 50)
    with agent_of(PLAIN) as lender, agent_of(PLAIN) as loader:
        params = lender.lend(state)
        waiting = loader.load({**params, "kvferry_transfer_id": b"another".hex()})
        waiting.cancel()
        with pytest.raises(NotFoundError, match="given, or its load cancelled"):
            waiting.wait(20)
        arrived = loader.load(params)
        until(lambda: loader._loads[arrived._ticket] is not None)
        arrived.cancel()
        until(lambda: free_tokens(loader) == ROOM)


def test_a_load_that_is_dropped_is_cancelled() -> None:
    state, _ = state_and_cells(PLAIN, 50)
    with agent_of(PLAIN) as lender, agent_of(PLAIN, tokens=64) as loader:
        params = lender.lend(state)
        waiting = loader.load({**params, "kvferry_transfer_id": b"another".hex()})
        with pytest.raises(DeadlineError):
            waiting.wait(0)
        del waiting
        gc.collect()  # the error's frames hold it, too
        until(lambda: free_tokens(loader) == 64)
        arrived = loader.load(params)
        until(lambda: all(loader._loads.values()))
        del arrived
        assert len(loader.load(lender.lend(state)).wait(20)) > 0
        assert not loader._loads and not loader._used


def test_a_cancelled_load_wakes_who_waits() -> None:
    state, _ = state_and_cells(PLAIN, 50)
    said: list[KvferryError] = []

    def wait(arrival: Arrival) -> None:
        try:
            arrival.wait()
        except KvferryError as error:
            said.append(error)

    with agent_of(PLAIN) as lender, agent_of(PLAIN) as loader:
        params = {**lender.lend(state), "kvferry_transfer_id": b"another".hex()}
        for close in (False, True):
            arrival = loader.load(params)
            thread = threading.Thread(target=wait, args=(arrival,))
            thread.start()
            time.sleep(0.1)
            loader.close() if close else arrival.cancel()
            thread.join(20)
            assert not thread.is_alive()
    assert [type(error) for error in said] == [NotFoundError, ClosedError]


def test_other_weights_and_models_are_refused() -> None:
    state, _ = state_and_cells(PLAIN, 5)
    with agent_of(PLAIN, weights="a") as lender:
        params = lender.lend(state)
        with agent_of(PLAIN, weights="b") as loader:
            with pytest.raises(MismatchError, match="kvferry_weights is 'a'; this engine's weights are 'b'"):
                loader.load(params)
            # The agents refuse an engine that has passed on other parameters.
            with pytest.raises(KvferryError, match="weights"):
                loader.load({**params, "kvferry_weights": "b"}, deadline=5).wait(20)
    with agent_of(PLAIN) as lender:
        params = lender.lend(state)
        quantized = replace(PLAIN, key_type="q8_0", value_type="q8_0", key_size=32, value_size=32)
        for other in (
            quantized,
            replace(PLAIN, layers=3),
            replace(PLAIN, heads=4),
            replace(PLAIN, value_size=8),
        ):
            with agent_of(other) as loader, pytest.raises(MismatchError):
                loader.load(params, deadline=5).wait(20)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    (
        ({"transfer_mode": "push"}, UnsupportedError, "transfer_mode is push; allowed: pull"),
        ({"transfer_mode": "post"}, InvalidError, "transfer_mode is 'post'"),
        ({"remote_host": None}, InvalidError, "no remote_host"),
        ({"remote_port": 0}, InvalidError, "remote_port is 0; allowed: 1 to 65535"),
        ({"kvferry_versions": [7, 9]}, MismatchError, "kvferry_versions is 7 to 9"),
        ({"kvferry_transfer_id": "xyz"}, InvalidError, "kvferry_transfer_id is 'xyz'"),
        ({"remote_num_tokens": 4}, InvalidError, "tokens is 5; allowed: 1 to remote_num_tokens, which is 4"),
    ),
)
def test_parameters_that_cannot_be_used_are_named(
    changed: dict[str, Any], error: type[KvferryError], message: str
) -> None:
    state, _ = state_and_cells(PLAIN, 5)
    with agent_of(PLAIN) as lender, agent_of(PLAIN) as loader:
        with pytest.raises(error, match=message):
            loader.load({**lender.lend(state), **changed}, 5)
        assert free_tokens(loader) == ROOM


def test_a_load_that_does_not_begin_takes_no_pages() -> None:
    state, _ = state_and_cells(PLAIN, 5)
    with agent_of(PLAIN) as lender, agent_of(PLAIN) as loader:
        params = {**lender.lend(state), "remote_host": "no host"}
        with pytest.raises(InvalidError):
            loader.load(params)
        assert free_tokens(loader) == ROOM
        lender.agent.drain()
        with pytest.raises(CancelledError):
            lender.lend(state)
        assert free_tokens(lender) == ROOM - 64  # what was lent before


def test_pages_that_a_peer_may_still_write_are_not_given_away() -> None:
    """A load may fail while an operation is under way; another event says when its blocks are free."""
    state, _ = state_and_cells(PLAIN, 5)
    with agent_of(PLAIN) as lender, agent_of(PLAIN) as loader:
        arrival = loader.load({**lender.lend(state), "kvferry_transfer_id": b"another".hex()}, deadline=0.2)
        events: list[Event] = []
        note = loader._note
        loader._note = events.append  # type: ignore[method-assign, assignment]
        until(lambda: bool(events))
        (event,) = events
        assert event.blocks_free
        note(replace(event, blocks_free=False))
        with pytest.raises(DeadlineError):
            arrival.wait(20)
        assert free_tokens(loader) == ROOM - 64
        note(replace(event, kind=EventKind.BLOCKS_FREE))
        assert free_tokens(loader) == ROOM


def test_with_keys() -> None:
    state, whole = state_and_cells(PLAIN, 50)
    ours, theirs, others = make_keys(), make_keys(), make_keys()
    with (
        agent_of(PLAIN, keys=ours, allowed_keys=[theirs.public_key]) as lender,
        agent_of(PLAIN, keys=theirs) as loader,
        agent_of(PLAIN, keys=others) as stranger,
    ):
        params = lender.lend(state)
        assert params["kvferry_public_key"] == ours.public_key
        with pytest.raises(KvferryError):
            stranger.load(params, deadline=1).wait(20)
        assert cells.read(PLAIN, loader.load(params).wait(20).tobytes()) == whole


@pytest.mark.parametrize("tokens", (0, -1, 6))
def test_numbers_of_tokens_are_checked(tokens: int) -> None:
    state, _ = state_and_cells(PLAIN, 5)
    with agent_of(PLAIN) as lender, agent_of(PLAIN) as loader:
        params = lender.lend(state)
        with pytest.raises(
            InvalidError, match=f"tokens is {tokens}; allowed: 1 to remote_num_tokens, which is 5"
        ):
            loader.load(params, tokens)
        with pytest.raises(
            InvalidError, match="tokens is None; allowed: 1 to remote_num_tokens, which is not given"
        ):
            loader.load({**params, "remote_num_tokens": 0})


def test_states_of_another_cache_are_refused() -> None:
    with agent_of(PLAIN) as lender:
        for other in (replace(PLAIN, transposed=True), replace(PLAIN, layers=1)):
            with pytest.raises(UnsupportedError):
                lender.lend(cells.write(other, range(3)))
        assert free_tokens(lender) == ROOM


def test_what_an_agent_cannot_be_made_of() -> None:
    cache = cache_of(Form(key_size=7))
    for tokens, per_page in ((0, 64), (-5, 64), (ROOM, 0)):
        with pytest.raises(OutOfRangeError, match=r"is (0|-5); allowed: 1 and more"):
            SequenceAgent(cache, tokens, tokens_per_page=per_page)
    SequenceAgent(cache, ROOM).close()
    with pytest.raises(UnsupportedError, match="interleaved keys have 7 elements; allowed: an even number"):
        SequenceAgent(replace(cache, interleaved=True), ROOM)


def test_a_lender_in_another_process_which_then_dies() -> None:
    with (
        subprocess.Popen(
            [sys.executable, "-c", LENDER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=str(pathlib.Path(__file__).parent),
        ) as process,
        agent_of(PLAIN, peer_timeout=1) as loader,
    ):
        assert process.stdout
        params = json.loads(process.stdout.readline())
        state = loader.load(params, 40).wait(20)
        assert cells.read(PLAIN, state.tobytes()) == cells.expected(PLAIN, range(40))
        waiting = loader.load({**params, "kvferry_transfer_id": b"another".hex()})
        time.sleep(0.2)
        process.kill()
        with pytest.raises((PeerLostError, DeadlineError, CancelledError)):
            waiting.wait(20)
        until(lambda: free_tokens(loader) == ROOM)


def test_an_engine_of_another_kind() -> None:
    """Two tensor-parallel ranks with heads before tokens lend what a context of llama.cpp loads."""
    form = Form(heads=4)
    model = cache_of(form).model()
    engine = Engine(model, GroupSpec(9, 16, "L|BPHN"), name="other", tp_size=2)
    whole = cells.expected(form, range(100))
    blocks = [5, 1, 8, 0, 3, 7, 2]
    agents = [Agent(engine, rank) for rank in range(2)]
    try:
        for rank, agent in enumerate(agents):
            regions = agent.allocate_regions()
            agent.register(regions)
            for (side, (layer, token, head, element)), bits in whole.items():
                if head // 2 == rank:
                    at = engine.shard(rank).locate(
                        0, layer, "kv".index(side), blocks[token // 16], token % 16, head
                    )
                    place = at.offset + 2 * element
                    regions[at.region][place : place + 2] = np.frombuffer(np.uint16(bits).tobytes(), np.uint8)
            agent.hold("request", [GroupSteps(blocks, 0, 100)])
        agents[0].introduce(agents[1].introduction)
        host, _, port = agents[0].endpoint.removeprefix("tcp://").rpartition(":")
        params = {
            "remote_engine_id": "other",
            "remote_request_id": "request",
            "remote_host": host,
            "remote_port": int(port),
            "remote_num_tokens": 100,
        }
        with agent_of(form) as loader:
            state = loader.load(params).wait(20)
        assert cells.read(form, state.tobytes()) == whole
        for agent in agents:
            event = agent.wait_event(20)
            assert event is not None and event.kind == EventKind.DONE
    finally:
        for agent in agents:
            agent.close()
