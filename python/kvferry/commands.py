"""Commands: what an operator's program asks of running engines. See kvferry/ask.h and kvferry/agent.h."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvferry._binding import ffi, lib
from kvferry._native import Arena, call, id_fields, id_out, nanoseconds, string, take
from kvferry.contact import Contact, KeyPair, contact_fields, key_fields
from kvferry.errors import KvferryError, Status, error_of
from kvferry.records import Record, records_in, records_out

if TYPE_CHECKING:
    from kvferry.kept import KeptRequest

__all__ = [
    "DRAIN",
    "HAND_OVER",
    "KEPT",
    "LIST",
    "RESUME",
    "TAKE_OVER",
    "Command",
    "Reply",
    "ask",
    "kept_record",
    "read_command",
]

# Verbs that have a meaning in kvferry/agent.h; engines may agree on others.
DRAIN = "drain"
RESUME = "resume"
LIST = "list"
HAND_OVER = "hand over"
TAKE_OVER = "take over"

#: The record of a reply to LIST.
KEPT = "kept"
# Most bytes of its JSON.
_MOST_LIST_BYTES = 64 << 10


@dataclass(frozen=True)
class Command:
    """A command as the engine gets it, in an event of the kind COMMAND. Agent.reply() replies to it.

    Attributes:
        verb: what is asked: DRAIN, RESUME, LIST, HAND_OVER, TAKE_OVER, or what engines have agreed on
        request: what it is about: the name of a request, or of what else the engine keeps; b"": nothing
        peer: another engine that it is about; its `engine` is "" if the asker did not say
        deadline: seconds that the engine has, from when the agent got the command
        records: of the asker
        number: names the command for Agent.reply()
        asker: the asker's public key; "" without keys
    """

    verb: str
    request: bytes
    peer: Contact | None
    deadline: float
    records: tuple[Record, ...]
    number: int
    asker: str


def read_command(command: Any) -> Command:
    """A copy of a kvf_command, which is valid only as long as its event."""
    peer = command.peer
    has_peer = peer.endpoint != ffi.NULL
    return Command(
        verb=string(command.verb),
        request=id_out(command.request),
        peer=Contact(string(peer.engine), string(peer.endpoint), string(peer.public_key) or None)
        if has_peer
        else None,
        deadline=command.deadline_ns / 1e9,
        records=records_out(command.records, command.record_count),
        number=command.number,
        asker=string(command.asker),
    )


def kept_record(kept: Iterable[tuple[str, KeptRequest]]) -> Record:
    """The record of a reply to LIST: all are counted, and the first are listed, as many as fit.

    Args:
        kept: requests, each with the engine's name of it
    """
    listed: list[str] = []
    count = size = 0
    for name, request in kept:
        count += 1
        found: dict[str, Any] = {
            "request": name,
            "tokens": request.tokens,
            "consumers": request.consumers,
            "served": request.served,
            "moves": request.moves,
            "age_s": round(request.age, 3),
        }
        if request.left is not None:
            found["left_s"] = round(request.left, 3)
        text = json.dumps(found)
        size += len(text) + 2
        if size <= _MOST_LIST_BYTES:
            listed.append(text)
    return Record(KEPT, f'{{"count": {count}, "kept": [{", ".join(listed)}]}}'.encode())


@dataclass(frozen=True)
class Reply:
    """What one rank replied to a command.

    Attributes:
        status: OK: it did as asked. TIMEOUT: it has not replied, or not done it in time. PERMISSION: the key
            may give no commands there. PEER_LOST: it ended before it had replied. Others are the engine's own
        detail: a sentence; "" if there is nothing to say
        records: of the engine, to be passed on
    """

    status: Status
    detail: str
    records: tuple[Record, ...]

    @property
    def error(self) -> KvferryError | None:
        """Why it was not done, as an exception; None where it was."""
        return None if self.status == Status.OK else error_of(self.status, self.detail)


def _read_replies(asked: Any) -> list[Reply]:
    replies = []
    for rank in range(lib.kvf_asked_rank_count(asked)):
        out = Arena().new("kvf_asked_rank")
        call(lib.kvf_asked_reply, asked, rank, out)
        replies.append(
            Reply(Status(out.status), string(out.detail), records_out(out.records, out.record_count))
        )
    return replies


def ask(
    contact: Contact,
    verb: str,
    request: bytes | str = b"",
    *,
    peer: Contact | None = None,
    deadline: float = 60.0,
    records: Sequence[Record] = (),
    keys: KeyPair | None = None,
    timeout: float | None = None,
) -> list[Reply]:
    """Gives a command to every rank of a running engine; returns what each replied, in their order.

    Each rank carries the command out once. Other threads run while this waits.

    Args:
        contact: where the engine is met
        verb: what is asked
        request: what it is about; empty: nothing
        peer: another engine that it is about
        deadline: seconds that the engine may take
        records: for the engine, such as those of another engine's reply
        keys: the program's own, which need the right to give commands; None: no encryption
        timeout: seconds to wait for the engine's introductions, and then for a first sign of each rank; None: 5

    Raises DeadlineError (nobody answers there), NotPermittedError (the key may not connect), MismatchError
    (another engine answers), OutOfRangeError (the verb, the request or the records), UnsupportedError,
    InputOutputError.
    """
    arena = Arena()
    fields = contact_fields(contact, arena)
    command = arena.new(
        "kvf_command",
        verb=arena.text(verb),
        request={"data": ffi.NULL, "size": 0} if not request else id_fields(request, arena),
        deadline_ns=nanoseconds(deadline, "deadline"),
        **records_in(records, arena),
    )
    if peer is not None:
        command.peer = contact_fields(peer, arena)
    options = arena.new(
        "kvf_ask_options",
        **key_fields(keys, arena),
        timeout_ns=nanoseconds(timeout, "timeout"),
    )
    where = ffi.new("kvf_contact *", fields)
    asked = take(lib.kvf_ask, "kvf_asked *", where, command, options)
    try:
        return _read_replies(asked)
    finally:
        lib.kvf_asked_free(asked)
