"""The times of requests on both sides, joined: real pulls and pushes between two agents."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
from kvferry import Agent, EventKind, GroupSteps, InvalidError, LogForm, LogLevel, LogLine
from kvferry.trace import Joined, join, main, otlp, read, send_spans

HELD = [GroupSteps(PREFILL_TABLE, 0, TOKENS)]
WANTED = [GroupSteps(DECODE_TABLE, 0, TOKENS)]
SECOND = 1_000_000_000


def ended(agent: Agent, ticket: int) -> None:
    while True:
        event = agent.wait_event(30)
        assert event is not None
        if event.ticket == ticket:
            assert event.kind is EventKind.DONE, event
            return


@pytest.fixture(scope="module")
def traces() -> tuple[str, str]:
    """The traces of a producer and a consumer after a pull of "pulled" and a push of "pushed"."""
    model = small_model()
    prefill, decode = prefill_engine(model, tp_size=1), decode_engine(model)
    with Agent(prefill, trace_requests=8) as producer, Agent(decode, trace_requests=8) as consumer:
        theirs, ours = producer.allocate_regions(), consumer.allocate_regions()
        producer.register(theirs)
        consumer.register(ours)
        for request in ("pulled", "pushed"):
            fill(prefill.shard(0), theirs, PREFILL_TABLE)
            ours[0][:] = 0
            if request == "pulled":
                giving = producer.hold(request, HELD)
                taking = consumer.pull(request, producer.contact, WANTED)
            else:
                taking = consumer.expect(request, producer.contact, WANTED)
                giving = producer.push(request, HELD)
                producer.push_ready(giving)
            ended(consumer, taking)
            ended(producer, giving)
            assert wrong_cells(decode.shard(0), ours, DECODE_TABLE) == []
        return producer.trace(), consumer.trace()


def moments(joined: Joined, request: str) -> dict[tuple[str, str], float]:
    """By engine and name, the times of the events of a request that both sides have recorded."""
    found = {}
    for event in joined.events:
        if event["ph"] == "i" and event["args"].get("request") == request:
            found[joined.sides[event["pid"] - 1][0], event["name"]] = event["ts"]
    return found


def order(joined: Joined) -> list[bool]:
    """Whether each message was sent before it was received; times are rounded to the nanosecond."""
    pulled, pushed = moments(joined, "pulled"), moments(joined, "pushed")
    off = 0.001
    return [
        pulled["prefill", "granted"] <= pulled["decode", "granted"] + off,
        pulled["decode", "granted"] <= pulled["decode", "released"],
        pulled["decode", "released"] <= pulled["prefill", "released"] + off,
        pushed["decode", "expected"] <= pushed["prefill", "expected"] + off,
        pushed["prefill", "expected"] <= pushed["prefill", "posted"],
        pushed["prefill", "posted"] <= pushed["prefill", "written"],
        pushed["prefill", "written"] <= pushed["decode", "written"] + off,
    ]


def without_clocks(text: str) -> str:
    trace = json.loads(text)
    for event in trace["traceEvents"]:
        event["args"].pop("clock_error_ns", None)
    return json.dumps(trace)


def on_another_clock(text: str, ahead: int, wall: int, seen: int) -> str:
    """The trace with its clock, its wall clock, and the offsets of its peers' clocks moved."""
    trace = json.loads(text)
    trace["otherData"]["origin_ns"] += ahead
    trace["otherData"]["origin_unix_ns"] += wall
    for event in trace["traceEvents"]:
        if "clock_offset_ns" in event["args"]:
            event["args"]["clock_offset_ns"] += seen
    return json.dumps(trace)


def test_both_sides_of_a_pull_and_a_push_are_in_order(traces: tuple[str, str]) -> None:
    joined = join([read(trace) for trace in traces])
    assert joined.sides == [("prefill", 0), ("decode", 0)]
    assert all(order(joined)), order(joined)


def test_a_joined_trace_has_what_perfetto_needs(traces: tuple[str, str], tmp_path: Path) -> None:
    files = [tmp_path / "prefill.json", tmp_path / "decode.json"]
    for file, trace in zip(files, traces, strict=True):
        file.write_text(trace)
    command = [sys.executable, "-m", "kvferry.trace", *map(str, files), "-o", str(tmp_path / "both.json")]
    subprocess.run(command, check=True, timeout=60, cwd=tmp_path)
    trace = json.loads((tmp_path / "both.json").read_text())
    arrows: dict[str, list[Any]] = {"s": [], "f": []}
    for event in trace["traceEvents"]:
        assert (
            isinstance(event["name"], str) and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        )
        if event["ph"] == "M":
            assert isinstance(event["args"]["name"], str)
            continue
        assert event["ts"] >= 0
        assert event["ph"] != "X" or event["dur"] >= 0
        assert event["ph"] in "Xisf"
        arrows.get(event["ph"], []).append(event)
    assert {event["pid"] for event in trace["traceEvents"]} == {1, 2}
    assert [event["name"] for event in arrows["s"]] == ["granted", "released", "expected", "written"]
    for begin, end in zip(arrows["s"], arrows["f"], strict=True):
        assert begin["id"] == end["id"] and begin["pid"] != end["pid"]
        assert begin["ts"] <= end["ts"] + 0.001


def test_a_joined_trace_keeps_the_rules_of_its_form(traces: tuple[str, str]) -> None:
    """The rules of Chrome's trace event format: spans of a thread nest, and ends of arrows lie in spans."""
    joined = join([read(trace) for trace in traces])
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in joined.events:
        if event["ph"] == "X":
            spans = threads.setdefault((event["pid"], event["tid"]), [])
            spans.append((event["ts"], event["ts"] + event["dur"]))
    assert len(threads) == 4
    off = 0.002  # the error of two numbers that were rounded to the nanosecond
    for spans in threads.values():
        for one in spans:
            for other in spans:
                apart = one[1] <= other[0] + off or other[1] <= one[0] + off
                inside = one[0] + off >= other[0] and one[1] <= other[1] + off
                assert apart or inside or (other[0] + off >= one[0] and other[1] <= one[1] + off)
    for event in joined.events:
        if event["ph"] in "sf":
            spans = threads[event["pid"], event["tid"]]
            assert any(begin - off <= event["ts"] <= end + off for begin, end in spans), event
            assert event["ph"] == "s" or event["bp"] == "e"
        assert event["ph"] != "i" or event["s"] == "t"


def test_clocks_that_differ_are_joined_by_what_agents_say_of_them(traces: tuple[str, str]) -> None:
    prefill, decode = traces
    ahead = 3600 * SECOND
    skewed = on_another_clock(decode, ahead, 0, -ahead), on_another_clock(prefill, 0, 0, ahead)
    there, here = join([read(skewed[1]), read(skewed[0])]), join([read(prefill), read(decode)])
    assert moments(there, "pulled") == pytest.approx(moments(here, "pulled"), abs=0.01)
    assert all(order(there))
    # Agents that have not measured each other's clock are joined by their wall clocks, which may be wrong.
    wrong = on_another_clock(without_clocks(decode), ahead, -ahead, 0)
    blind = join([read(without_clocks(prefill)), read(wrong)])
    assert "wall clocks" in blind.notes[0]
    assert not all(order(blind))


@pytest.mark.parametrize("wrong", [SECOND, -SECOND])
def test_a_clock_that_was_measured_badly_is_moved_until_messages_are_in_order(
    traces: tuple[str, str], wrong: int
) -> None:
    prefill, decode = traces
    joined = join([read(on_another_clock(prefill, 0, 0, wrong)), read(on_another_clock(decode, 0, 0, -wrong))])
    assert all(order(joined)), order(joined)


def test_spans_are_those_of_otlp(traces: tuple[str, str]) -> None:
    joined = join([read(trace) for trace in traces])
    spans = [
        span
        for resource in json.loads(otlp(joined))["resourceSpans"]
        for span in resource["scopeSpans"][0]["spans"]
    ]
    assert len({span["spanId"] for span in spans}) == len(spans)
    by_id = {span["spanId"]: span for span in spans}
    tops = [span for span in spans if "parentSpanId" not in span]
    assert sorted(span["name"] for span in tops) == ["expect", "hold", "pull", "push"]
    traced = {span["name"]: span["traceId"] for span in tops}
    assert traced["hold"] == traced["pull"] != traced["push"] == traced["expect"]
    for span in spans:
        assert len(span["traceId"]) == 32 and len(span["spanId"]) == 16
        assert int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"])
        if "parentSpanId" in span:
            parent = by_id[span["parentSpanId"]]
            assert parent["traceId"] == span["traceId"]
            assert int(parent["startTimeUnixNano"]) <= int(span["startTimeUnixNano"])
            assert int(span["endTimeUnixNano"]) <= int(parent["endTimeUnixNano"])


def test_the_file_is_read_by_the_definition_of_otlp(traces: tuple[str, str]) -> None:
    definition = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    form = pytest.importorskip("google.protobuf.json_format")
    failed = json.loads(traces[1])
    for event in failed["traceEvents"]:
        if event.get("cat") == "request" and event["args"]["request"] == "pulled":
            event["args"].update(status="KVF_E_TIMEOUT", detail="the deadline has passed")
    text = otlp(join([read(traces[0]), read(json.dumps(failed))]))
    told = form.Parse(text, definition.ExportTraceServiceRequest())
    names = [
        {pair.key: pair.value.string_value or pair.value.int_value for pair in resource.resource.attributes}
        for resource in told.resource_spans
    ]
    assert [name["kvferry.engine"] for name in names] == ["prefill", "decode"]
    for resource, written in zip(told.resource_spans, json.loads(text)["resourceSpans"], strict=True):
        pairs = zip(resource.scope_spans[0].spans, written["scopeSpans"][0]["spans"], strict=True)
        for span, said in pairs:
            # OTLP's JSON has ids in hexadecimal digits, which a protobuf reader takes for base 64.
            assert base64.b64encode(span.trace_id).decode() == said["traceId"] and len(said["traceId"]) == 32
            assert span.kind == span.SPAN_KIND_INTERNAL
            assert span.start_time_unix_nano == int(said["startTimeUnixNano"]) <= span.end_time_unix_nano
            attributes = {pair.key: pair.value for pair in span.attributes}
            if span.name == "pull":
                assert attributes["kvferry.request"].string_value == "pulled"
                assert [event.name for event in span.events if event.name == "granted"]
                assert (span.status.code, span.status.message) == (2, "the deadline has passed")
            else:
                assert span.status.code == 0
    with pytest.raises(form.ParseError, match="parentId"):  # the reader refuses unknown fields
        form.Parse(text.replace("parentSpanId", "parentId"), definition.ExportTraceServiceRequest())


def test_spans_go_to_the_opentelemetry_of_the_process(traces: tuple[str, str]) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip(
        "opentelemetry.sdk.trace.export.in_memory_span_exporter"
    ).InMemorySpanExporter()
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(export))
    trace.set_tracer_provider(provider)
    joined = join([read(text) for text in traces])
    assert send_spans(joined) == len(export.get_finished_spans())
    spans = {span.name: span for span in export.get_finished_spans()}
    pull, moving = spans["pull"], spans["planning"]
    assert moving.parent.span_id == pull.context.span_id
    assert pull.start_time <= moving.start_time <= moving.end_time <= pull.end_time
    assert pull.attributes["kvferry.request"] == "pulled"
    assert [event.name for event in pull.events if event.name != "freed"] == ["granted", "released"]


def test_a_text_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="otherData"):
        read("{}")
    with pytest.raises(ValueError, match="no trace is given"):
        join([])
    (tmp_path / "text").write_text("text")
    ran = subprocess.run(
        [sys.executable, "-m", "kvferry.trace", str(tmp_path / "text")],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert ran.returncode == 1 and "not a trace of an agent" in ran.stderr
    with (
        Agent(prefill_engine(small_model(), tp_size=1)) as agent,
        pytest.raises(InvalidError, match="trace_requests"),
    ):
        agent.trace()


def test_a_file_that_cannot_be_written_is_named_in_a_sentence(
    traces: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, nowhere = tmp_path / "p.json", tmp_path / "missing" / "both.json"
    given.write_text(traces[0])
    assert main([str(given), "-o", str(nowhere)]) == 1
    assert f"kvferry.trace: [Errno 2] No such file or directory: '{nowhere}'" in capsys.readouterr().err


def test_a_line_of_the_log_is_text_or_json() -> None:
    line = LogLine(LogLevel.WARNING, 1795377901.25, '{"failure":"request"}')
    assert line.write() == '2026-11-22T20:05:01.250000Z WARNING {"failure":"request"}'
    assert json.loads(line.write(LogForm.JSON)) == {
        "time": "2026-11-22T20:05:01.250000Z",
        "level": "WARNING",
        "failure": "request",
    }
