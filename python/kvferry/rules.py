"""Rules both sides of a transfer must agree on, and figures that operators read. See kvferry/schedule.h."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry._binding import ffi, lib
from kvferry._native import Arena, call, id_bytes, id_fields, result_of, take
from kvferry._values import list_of, listed, of_type
from kvferry.errors import InvalidError
from kvferry.events import ClockOffset


def base_request_id(request_id: bytes | str) -> bytes:
    """An id without the suffix that front ends add to make it unique: a hyphen and eight hexadecimal digits."""
    name = id_bytes(request_id)
    arena = Arena()
    return name[: lib.kvf_base_request_bytes(id_fields(name, arena))]


def prefill_token_count(prompt_tokens: int, has_state: bool = False, lookahead_tokens: int = 0) -> int:
    """The tokens of a prompt that a producer computes and hands over.

    A state cannot be stepped back, so with state groups the producer leaves the last token to the consumer;
    with speculation that looks `lookahead_tokens` ahead, all but one of those.
    """
    return int(result_of(lib.kvf_prefill_token_count, prompt_tokens, has_state, lookahead_tokens))


def lease_expired(now_ns: int, expiry_ns: int, *, clock_offset_ns: int = 0, margin_ns: int = 0) -> bool:
    """Whether a lease is over, or will be within `margin_ns`.

    Args:
        now_ns: our clock
        expiry_ns: on the clock of the engine that gave the lease; 0: the lease has no end
        clock_offset_ns: that clock minus ours
    """
    return bool(result_of(lib.kvf_lease_expired, now_ns, expiry_ns, clock_offset_ns, margin_ns))


@dataclass(frozen=True)
class ClockProbe:
    """One reading of another clock: sent and received on our clock, remote_ns on the other in between."""

    sent_ns: int
    received_ns: int
    remote_ns: int


def clock_offset(probes: Sequence[ClockProbe]) -> ClockOffset:
    """The other clock minus ours, by the probe with the shortest round trip.

    Raises InvalidError (no probes; one was received before it was sent), SizeOverflowError.
    """
    arena = Arena()
    probes = list_of(ClockProbe, probes)
    items = arena.array("kvf_clock_probe", [vars(probe) for probe in probes])
    offset, error = ffi.new("int64_t *"), ffi.new("uint64_t *")
    call(lib.kvf_clock_offset, items, len(probes), offset, error)
    return ClockOffset(offset[0], error[0])


@dataclass(frozen=True)
class TransferSamples:
    """Samples of transfers, one entry each.

    Attributes:
        failed_transfers, failed_handshakes, failed_notifications: a summary counts them together
        expired, late: requests whose blocks no consumer read in time, and notifications that came after that
    """

    transfer_seconds: Sequence[float] = ()
    post_seconds: Sequence[float] = ()
    bytes: Sequence[float] = ()
    descriptors: Sequence[float] = ()
    failed_transfers: int = 0
    failed_handshakes: int = 0
    failed_notifications: int = 0
    expired: int = 0
    late: int = 0


@dataclass(frozen=True)
class TransferSummary:
    """A summary for operators; str() gives one line of name=value pairs. MB are 2**20 bytes.

    Attributes:
        failed: transfers, handshakes and notifications together, as the public connector counts
    """

    transfers: int
    average_transfer_ms: float
    p90_transfer_ms: float
    average_post_ms: float
    p90_post_ms: float
    average_mb: float
    throughput_mb_per_s: float
    average_descriptors: float
    failed: int
    expired: int
    late: int
    empty: bool

    def __str__(self) -> str:
        summary = Arena().new("kvf_transfer_summary", **vars(self))
        size = lib.kvf_transfer_summary_text(summary, ffi.NULL, 0) + 1
        text = ffi.new("char[]", size)
        lib.kvf_transfer_summary_text(summary, text, size)
        return str(ffi.string(text).decode())


def summarise_transfers(samples: TransferSamples) -> TransferSummary:
    """Sums up samples. Raises InvalidError (lists of different lengths, a negative or infinite sample)."""
    arena, samples = Arena(), of_type(TransferSamples, samples)
    names = ("transfer_seconds", "post_seconds", "bytes", "descriptors")
    lists = [listed(getattr(samples, name), "numbers") for name in names]
    if len({len(values) for values in lists}) != 1:
        raise InvalidError(f"lists of {[len(values) for values in lists]} samples; they must be equally long")
    arrays = {name: arena.numbers("double", values, name) for name, values in zip(names, lists, strict=True)}
    struct = arena.new(
        "kvf_transfer_samples",
        **arrays,
        count=len(lists[0]),
        failed_transfers=samples.failed_transfers,
        failed_handshakes=samples.failed_handshakes,
        failed_notifications=samples.failed_notifications,
        expired=samples.expired,
        late=samples.late,
    )
    found = take(lib.kvf_transfer_summarise, "kvf_transfer_summary", struct)
    return TransferSummary(**{name: getattr(found, name) for name in TransferSummary.__dataclass_fields__})
