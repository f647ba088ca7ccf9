"""The bookkeeping of an engine's scheduler."""

from __future__ import annotations

import numpy as np
import pytest

from coordinates import small_model
from kvferry import (
    BlockTable,
    ClosedError,
    ExistsError,
    InvalidError,
    LimitError,
    NotFoundError,
    OutOfRangeError,
)
from kvferry.aggregator import (
    Aggregate,
    Aggregator,
    CountRule,
    GroupBlock,
    RequestKey,
    Rider,
    StepRequest,
    WorkerOutput,
    step_requests,
)
from kvferry.rules import (
    ClockProbe,
    TransferSamples,
    base_request_id,
    clock_offset,
    lease_expired,
    prefill_token_count,
    summarise_transfers,
)
from kvferry.scheduler import InstructionKind, LoadOutcome, Schedule, TransferParams

SECOND = 10**9


def producer() -> Schedule:
    return Schedule(small_model(), [16], engine="prefill", endpoint="tcp://127.0.0.1:1")


def consumer(**options: object) -> Schedule:
    return Schedule(small_model(), [24], **options)  # type: ignore[arg-type]


def loading(schedule: Schedule) -> RequestKey:
    """Adds a request whose load the workers know."""
    source = TransferParams("prefill", b"x", "tcp://127.0.0.1:1", tokens=40)
    key = schedule.add("r", 40, now_ns=SECOND, source=source)
    assert schedule.match(key, 0, now_ns=SECOND) == 40
    assert schedule.allocated(key, [[5, 1]], computed_tokens=0, load_tokens=40, now_ns=SECOND)
    assert [item.kind for item in schedule.take()] == [InstructionKind.PULL]
    return key


def test_a_request_passes_from_one_scheduler_to_another() -> None:
    prefill, decode = producer(), consumer()
    served = prefill.add("r", 40, now_ns=SECOND, serves=True)
    end = prefill.finished(served, [[7, 3, 9]], 40, now_ns=2 * SECOND)
    assert end.keep and end.params and end.params.tokens == 40
    (hold,) = prefill.take()
    assert hold.kind is InstructionKind.HOLD
    (group,) = hold.groups
    assert isinstance(group.table, BlockTable) and isinstance(group.table.ids, np.ndarray)
    assert (list(group.table.ids), group.begin, group.end) == ([7, 3, 9], 0, 40)

    wanted = decode.add("r", 40, now_ns=SECOND, source=end.params)
    tokens = decode.match(wanted, 0, now_ns=SECOND)
    assert decode.allocated(wanted, [[5, 1]], computed_tokens=0, load_tokens=tokens, now_ns=SECOND)
    (pull,) = decode.take()
    assert (pull.kind, pull.transfer_id, pull.engine) == (InstructionKind.PULL, hold.transfer_id, "prefill")
    assert decode.counts.loading == 1

    workers = Aggregator(2)
    assert workers.step([WorkerOutput(received=[wanted]), WorkerOutput()]).received == ()
    assert workers.pending == 1
    step = workers.step([WorkerOutput(), WorkerOutput(received=[wanted], riders=Rider.STATS)])
    assert (step.received, step.with_stats, step.output) == ((wanted,), (1,), 0)
    (loaded,) = decode.update(step).loaded
    assert (loaded.request, loaded.outcome, loaded.tokens) == (wanted, LoadOutcome.LOADED, 40)

    (freed,) = prefill.update(Aggregate(0, 1, sent=(served,))).freed
    assert freed.request == served and not freed.of_load
    with pytest.raises(NotFoundError):
        prefill.abort(served)


def test_a_load_that_failed_in_part_names_its_blocks() -> None:
    schedule = consumer()
    key = loading(schedule)
    aggregate = Aggregate(0, 1, received=(key,), invalid=(GroupBlock(0, 1),))
    (loaded,) = schedule.update(aggregate).loaded
    assert (loaded.outcome, loaded.tokens, loaded.invalid) == (LoadOutcome.IN_PART, 24, (GroupBlock(0, 1),))


def test_an_aborted_load_keeps_its_blocks_until_the_workers_have_stopped() -> None:
    schedule = consumer()
    key = loading(schedule)
    assert schedule.abort(key) is False
    (cancel,) = schedule.take()
    assert (cancel.kind, cancel.cancels) == (InstructionKind.CANCEL, InstructionKind.PULL)
    (freed,) = schedule.update(Aggregate(0, 1, received=(key,))).freed
    assert freed.of_load


def test_a_waiting_request_sends_signs_of_life() -> None:
    schedule = consumer(heartbeats=True, lease=6.0)
    source = TransferParams("prefill", b"x", "tcp://127.0.0.1:1", tokens=40, expiry_ns=60 * SECOND)
    schedule.add("r", 40, now_ns=SECOND, source=source)
    (beat,) = schedule.heartbeats(4 * SECOND)
    assert (beat.engine, beat.transfer_id) == ("prefill", b"x")
    assert schedule.heartbeats(4 * SECOND) == []


def test_bad_calls_are_refused() -> None:
    schedule = consumer(max_requests=1)
    schedule.add("r", 40, now_ns=SECOND)
    with pytest.raises(ExistsError):
        schedule.add("r", 40, now_ns=SECOND)
    with pytest.raises(LimitError):
        schedule.add("s", 40, now_ns=SECOND)
    with pytest.raises(NotFoundError):
        schedule.match("nobody", 0, now_ns=SECOND)
    with pytest.raises(InvalidError, match="1 groups"):
        Schedule(small_model(), [16, 16])
    with pytest.raises(OutOfRangeError):
        Aggregator(0)
    with pytest.raises(InvalidError):
        Aggregator(2).step([WorkerOutput()])
    with pytest.raises(OutOfRangeError):
        Aggregator(1).step([WorkerOutput(sent=[b"x" * 2000])])
    schedule.close()
    with pytest.raises(ClosedError):
        schedule.take()


def test_reports_may_be_counted_as_the_public_aggregator_does() -> None:
    workers = Aggregator(2, rule=CountRule.REPORTS)
    twice = WorkerOutput(sent=["a"], failed=[], invalid=[GroupBlock(0, 3), GroupBlock(0, 1)])
    assert workers.step([twice, WorkerOutput()]).invalid == (GroupBlock(0, 1), GroupBlock(0, 3))
    with pytest.raises(InvalidError, match="worker 1 has no output"):
        workers.step([twice, None])
    assert workers.step([twice, WorkerOutput()]).sent == (RequestKey(b"a"),)
    workers.step([twice, WorkerOutput()])
    workers.forget("a")
    assert workers.pending == 0


def test_a_step_lists_its_requests_in_order() -> None:
    listed = step_requests([StepRequest(b"a", ([1],))], [StepRequest(b"b", ([2],)), StepRequest(b"c")], [b"b"])
    assert [(request.id, request.resumed) for request in listed] == [(b"a", False), (b"b", True), (b"c", False)]
    assert step_requests([], []) == []


def test_a_step_takes_ids_as_text_and_requests_without_groups() -> None:
    cached = [StepRequest("b", None), StepRequest(b"\xc3\xa9", None), StepRequest("d", ())]
    listed = step_requests([StepRequest("a", ([1], [2]))], cached, ["b", "\u00e9"])
    assert [(request.id, request.groups) for request in listed] == [
        ("a", ([1], [2])),
        ("b", None),
        (b"\xc3\xa9", None),
        ("d", ()),
    ]
    assert [request.resumed for request in listed] == [False, True, True, False]


def test_rules_that_both_sides_share() -> None:
    assert base_request_id("abc-01234567") == b"abc"
    assert base_request_id(b"abc-0123456x") == b"abc-0123456x"
    assert prefill_token_count(40) == 40
    assert prefill_token_count(40, has_state=True) == 39
    assert lease_expired(10, 5) and not lease_expired(10, 0)
    offset = clock_offset([ClockProbe(0, 100, 0), ClockProbe(0, 10, 105)])
    assert (offset.offset_ns, offset.error_ns) == (100, 5)
    with pytest.raises(InvalidError):
        clock_offset([])


def test_transfers_are_summed_up_in_one_line() -> None:
    summary = summarise_transfers(TransferSamples([0.1, 0.2], [0.01, 0.02], [2**20, 2**21], [10, 20]))
    assert (summary.transfers, summary.average_transfer_ms, summary.average_mb) == (2, 150.0, 1.5)
    assert str(summary).startswith("transfers=2 ")
    with pytest.raises(InvalidError, match="equally long"):
        summarise_transfers(TransferSamples([0.1]))


def test_every_kind_of_failure_counts_as_a_failed_transfer() -> None:
    samples = TransferSamples(failed_transfers=1, failed_handshakes=20, failed_notifications=300)
    summary = summarise_transfers(samples)
    assert (summary.failed, summary.empty) == (321, False)
    assert " failed=321 " in str(summary)
