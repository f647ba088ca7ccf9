"""Joins the traces of several agents: one request's times on both sides, on one clock.

    python -m kvferry.trace prefill.json decode.json -o both.json
    python -m kvferry.trace prefill.json decode.json --otlp -o spans.json

Each file is the text of kvf_agent_trace() or Agent.trace(). All times are converted to the clock of the first;
Perfetto (ui.perfetto.dev) and chrome://tracing open the result. `--otlp` writes OpenTelemetry spans as JSON for
collectors, and send_spans() hands them to the OpenTelemetry that the process has set up.

Clocks are joined by the offsets that agents have measured, each by the shortest round trip of their messages,
and moved as little as is needed for no message to be received before it was sent. If no file has an offset to
another one's clock, not even over a third, the wall clocks of both agents are used, and a note says so.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Joined", "Side", "join", "otlp", "read", "send_spans"]

# Moments that one side sends and the other receives: (name, kind of the sender, kind of the receiver).
ARROWS = (
    ("granted", "hold", "pull"),
    ("released", "pull", "hold"),
    ("expected", "expect", "push"),
    ("written", "push", "expect"),
)

Name = tuple[str, int]  # an engine and a rank
TraceEvent = dict[str, Any]


@dataclass(frozen=True)
class Side:
    """The trace of one agent.

    Attributes:
        name: its engine and rank
        origin: nanoseconds of its clock at time 0 of the trace
        unix: the same moment since 1970, by its wall clock
        events: as in the file
        clocks: for each peer rank its clock minus ours, and how far off this may be, in nanoseconds
    """

    name: Name
    origin: int
    unix: int
    events: list[TraceEvent]
    clocks: dict[Name, tuple[int, int]]


@dataclass(frozen=True)
class Joined:
    """Several traces on the clock of the first.

    Attributes:
        events: of all of them, in Chrome's format; a process stands for a trace, by its place in the list
        unix: nanoseconds since 1970 at time 0
        sides: their names
        notes: reasons why times are less certain
    """

    events: list[TraceEvent]
    unix: int
    sides: list[Name]
    notes: list[str]

    def chrome(self) -> str:
        """The text of a file that Perfetto opens."""
        data = {"origin_unix_ns": self.unix, "notes": self.notes}
        return json.dumps({"traceEvents": self.events, "otherData": data, "displayTimeUnit": "ns"}) + "\n"


def _nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1000)


def read(text: str) -> Side:
    """Reads what Agent.trace() gave. ValueError: it is no such trace, and why."""
    try:
        trace = json.loads(text)
        data, events = trace["otherData"], trace["traceEvents"]
        clocks: dict[Name, tuple[int, int]] = {}
        for event in events:
            known = event["args"]
            if event.get("cat") == "peer" and "clock_error_ns" in known:
                peer = (str(known["engine"]), int(known["rank"]))
                found = (int(known["clock_offset_ns"]), int(known["clock_error_ns"]))
                clocks[peer] = min(found, clocks.get(peer, found), key=lambda clock: clock[1])
        return Side(
            (str(data["engine"]), int(data["rank"])),
            int(data["origin_ns"]),
            int(data["origin_unix_ns"]),
            events,
            clocks,
        )
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"not a trace of an agent: {type(error).__name__} {error}") from error


# ---- messages


@dataclass(frozen=True)
class _Message:
    """What both sides have recorded of a message: its moments, each by the clock of the side of that number."""

    name: str
    request: str
    sender: int
    sent: TraceEvent
    receiver: int
    received: TraceEvent


def _messages(sides: Sequence[Side]) -> list[_Message]:
    places = {side.name: i for i, side in enumerate(sides)}
    said: dict[tuple[str, str, int, int, str], list[TraceEvent]] = {}
    for i, side in enumerate(sides):
        kinds = {event["tid"]: event["name"] for event in side.events if event.get("cat") == "request"}
        for event in side.events:
            if event.get("cat") != "peer":
                continue
            args = event["args"]
            peer = places.get((args["engine"], args["rank"]))
            if peer is not None:
                key = event["name"], args["request"], i, peer, kinds[event["tid"]]
                said.setdefault(key, []).append(event)
    return [
        _Message(name, request, one, sent, other, received)
        for name, sends, receives in ARROWS
        for (moment, request, one, other, kind), begins in said.items()
        if moment == name and kind == sends
        for sent, received in zip(begins, said.get((name, request, other, one, receives), []), strict=False)
    ]


# ---- clocks


def _offset(one: Side, other: Side) -> tuple[int, int] | None:
    """What is added to the other's clock for ours, and how far off that may be; None: neither knows."""
    found = []
    if other.name in one.clocks:
        offset, error = one.clocks[other.name]
        found.append((-offset, error))
    if one.name in other.clocks:
        found.append(other.clocks[one.name])
    return min(found, key=lambda clock: clock[1], default=None)


def _in_order(
    sides: Sequence[Side], messages: Sequence[_Message], known: Mapping[int, int], new: int, offset: int
) -> int:
    """The nearest offset of the new side with which its messages are received after they were sent.

    Only messages between it and a side whose offset is known count.
    """

    def on_its_clock(side: int, event: TraceEvent) -> int:
        return sides[side].origin + _nanoseconds(event["ts"])

    for message in messages:
        sent, received = (
            on_its_clock(message.sender, message.sent),
            on_its_clock(message.receiver, message.received),
        )
        if message.receiver == new and message.sender in known:
            offset = max(offset, sent + known[message.sender] - received)
        elif message.sender == new and message.receiver in known:
            offset = min(offset, received + known[message.receiver] - sent)
    return offset


def _offsets(sides: Sequence[Side], messages: Sequence[_Message]) -> tuple[list[int], list[str]]:
    """The offset of each clock to the first, and notes on clocks that could not be joined."""
    known, errors = {0: 0}, {0: 0}
    while True:  # from the known clocks to the next, by the most certain offset
        steps = [
            (errors[a] + step[1], b, known[a] + step[0])
            for a in known
            for b in range(len(sides))
            if b not in known and (step := _offset(sides[a], sides[b])) is not None
        ]
        if not steps:
            break
        error, b, offset = min(steps)
        known[b], errors[b] = _in_order(sides, messages, known, b, offset), error
    offsets, notes = [], []
    for i, side in enumerate(sides):
        wall = (side.unix - side.origin) - (sides[0].unix - sides[0].origin)
        if i not in known:
            notes.append(
                f"{side.name[0]} rank {side.name[1]}: joined by wall clocks, because no agent has met it"
            )
        elif i > 0:
            notes.append(f"{side.name[0]} rank {side.name[1]}: its clock to within {errors[i]} ns")
        offsets.append(known.get(i, wall))
    return offsets, notes


# ---- joining


def _on_one_clock(side: Side, place: int, ahead: int) -> list[TraceEvent]:
    """Its events, `ahead` nanoseconds later, in the process that stands for it."""
    moved = []
    for event in side.events:
        moved.append({**event, "pid": place + 1})
        if "ts" in event:
            moved[-1]["ts"] = (_nanoseconds(event["ts"]) + ahead) / 1000
    return moved


def _arrows(messages: Sequence[_Message], ahead: Sequence[int]) -> Iterator[TraceEvent]:
    for number, message in enumerate(messages, 1):
        common = {"cat": "peer", "name": message.name, "id": number, "args": {"request": message.request}}
        for phase, side, event in (
            ("s", message.sender, message.sent),
            ("f", message.receiver, message.received),
        ):
            ts = (_nanoseconds(event["ts"]) + ahead[side]) / 1000
            arrow = {"ph": phase, **common, "pid": side + 1, "tid": event["tid"], "ts": ts}
            yield {**arrow, "bp": "e"} if phase == "f" else arrow


def join(sides: Sequence[Side]) -> Joined:
    """Converts traces to the clock of the first, with arrows between the two sides of a request."""
    if not sides:
        raise ValueError("no trace is given")
    messages = _messages(sides)
    offsets, notes = _offsets(sides, messages)
    starts = [side.origin + offset for side, offset in zip(sides, offsets, strict=True)]
    origin = min(starts)
    ahead = [start - origin for start in starts]
    events = [event for i, side in enumerate(sides) for event in _on_one_clock(side, i, ahead[i])]
    events += _arrows(messages, ahead)
    unix = sides[0].unix - sides[0].origin + origin
    return Joined(events, unix, [side.name for side in sides], notes)


# ---- OpenTelemetry


@dataclass
class _Span:
    name: str
    side: Name
    begin: int  # nanoseconds since 1970
    end: int
    attributes: dict[str, str | int]
    moments: list[tuple[int, str, dict[str, str | int]]]
    phases: list[_Span]


def _spans(joined: Joined) -> list[_Span]:
    """The requests, each with its phases."""
    requests: dict[tuple[int, int], _Span] = {}
    rest: list[TraceEvent] = []
    for event in joined.events:
        if event.get("cat") == "request":
            requests[event["pid"], event["tid"]] = _span(joined, event)
        elif event.get("cat") in ("phase", "peer", "blocks") and event["ph"] in "Xi":
            rest.append(event)
    for event in rest:
        request = requests[event["pid"], event["tid"]]
        if event["cat"] == "phase":
            request.phases.append(_span(joined, event))
        else:
            at = joined.unix + _nanoseconds(event["ts"])
            request.moments.append((at, event["name"], _attributes(event)))
    return list(requests.values())


def _attributes(event: TraceEvent) -> dict[str, str | int]:
    return {f"kvferry.{name}": value for name, value in event["args"].items()}


def _span(joined: Joined, event: TraceEvent) -> _Span:
    begin = joined.unix + _nanoseconds(event["ts"])
    end = begin + _nanoseconds(event["dur"])
    side = joined.sides[event["pid"] - 1]
    return _Span(event["name"], side, begin, end, _attributes(event), [], [])


def _digest(length: int, *words: object) -> str:
    text = "\0".join(str(word) for word in words)
    return hashlib.blake2b(text.encode(), digest_size=length).hexdigest()


def _otlp_attributes(attributes: Mapping[str, str | int]) -> list[dict[str, Any]]:
    return [
        {
            "key": key,
            "value": {"stringValue": value} if isinstance(value, str) else {"intValue": str(value)},
        }
        for key, value in attributes.items()
    ]


def _otlp_span(span: _Span, request: str, parent: str | None, number: object) -> dict[str, Any]:
    failed = str(span.attributes.get("kvferry.status", "KVF_OK")) not in ("KVF_OK", "KVF_IN_PROGRESS")
    written = {
        "traceId": _digest(16, request),
        "spanId": _digest(8, request, *span.side, number),
        "name": span.name,
        "kind": 1,  # internal
        "startTimeUnixNano": str(span.begin),
        "endTimeUnixNano": str(span.end),
        "attributes": _otlp_attributes(span.attributes),
        "events": [
            {"timeUnixNano": str(at), "name": name, "attributes": _otlp_attributes(attributes)}
            for at, name, attributes in span.moments
        ],
        "status": {"code": 2, "message": span.attributes.get("kvferry.detail", "")} if failed else {},
    }
    return {**written, "parentSpanId": parent} if parent else written


def otlp(joined: Joined) -> str:
    """The spans as OTLP's JSON (an ExportTraceServiceRequest): a trace is a request, on all sides.

    The trace id follows from the request's id alone, so traces that each side sends by itself are joined, too.
    """
    resources: dict[Name, list[dict[str, Any]]] = {side: [] for side in joined.sides}
    for span in _spans(joined):
        request = str(span.attributes["kvferry.request"])
        top = _otlp_span(span, request, None, span.attributes["kvferry.ticket"])
        resources[span.side].append(top)
        for i, phase in enumerate(span.phases):
            number = f"{span.attributes['kvferry.ticket']} {i}"
            resources[span.side].append(_otlp_span(phase, request, top["spanId"], number))
    written = [
        {
            "resource": {
                "attributes": _otlp_attributes(
                    {"service.name": "kvferry", "kvferry.engine": engine, "kvferry.rank": rank}
                )
            },
            "scopeSpans": [{"scope": {"name": "kvferry"}, "spans": spans}],
        }
        for (engine, rank), spans in resources.items()
    ]
    return json.dumps({"resourceSpans": written}) + "\n"


def send_spans(joined: Joined) -> int:
    """Hands the spans to the OpenTelemetry that this process has set up, by its tracer "kvferry".

    Returns how many there were. OpenTelemetry chooses the ids; the request's id is the attribute
    "kvferry.request".

    Raises ImportError: the package opentelemetry-api is not installed.
    """
    from opentelemetry import trace

    tracer = trace.get_tracer("kvferry")
    count = 0
    for span in _spans(joined):
        attributes = {**span.attributes, "kvferry.engine": span.side[0], "kvferry.rank": span.side[1]}
        top = tracer.start_span(span.name, start_time=span.begin, attributes=attributes)
        for at, name, told in span.moments:
            top.add_event(name, told, timestamp=at)
        if "kvferry.detail" in attributes:
            top.set_status(trace.StatusCode.ERROR, str(attributes["kvferry.detail"]))
        context = trace.set_span_in_context(top)
        for phase in span.phases:
            tracer.start_span(phase.name, context, start_time=phase.begin).end(phase.end)
        top.end(span.end)
        count += 1 + len(span.phases)
    return count


# ---- the command


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kvferry.trace", description="Joins the traces of agents.")
    parser.add_argument("trace", nargs="+", type=Path, help="a file of Agent.trace() or kvf_agent_trace()")
    parser.add_argument("-o", "--output", type=Path, help="where to; otherwise the standard output")
    parser.add_argument("--otlp", action="store_true", help="OpenTelemetry's spans as OTLP JSON")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """The command: 0, or 1 with a sentence on the standard error."""
    arguments = _arguments(given)
    sides = []
    for path in arguments.trace:
        try:
            sides.append(read(path.read_text()))
        except (OSError, ValueError) as error:
            print(f"kvferry.trace: {path}: {error}", file=sys.stderr)
            return 1
    joined = join(sides)
    for note in joined.notes:
        print(f"kvferry.trace: {note}", file=sys.stderr)
    text = otlp(joined) if arguments.otlp else joined.chrome()
    try:
        if arguments.output is None:
            sys.stdout.write(text)
        else:
            arguments.output.write_text(text)
    except OSError as error:
        print(f"kvferry.trace: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
