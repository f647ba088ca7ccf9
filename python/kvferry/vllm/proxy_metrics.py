"""What the proxy counts, as text for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvferry.vllm.proxy_servers import Servers

BUCKETS = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
#: Counters of requests, and what they count.
COUNTERS = {
    "requests_total": "Requests of clients, by their result",
    "handed_over_total": "Requests whose servers were asked in turn, also with the turn before, or at once",
    "computed_total": "Requests whose prompt was left to a decode server, by the reason",
}
#: Of each server: name, type, what it is, and the field of Server.
OF_SERVERS = (
    ("server_up", "gauge", "Whether a server answers", "up"),
    ("server_drains", "gauge", "Whether a server drains: it gets no new requests", "drains"),
    ("server_refuses", "gauge", "Whether a server gets no requests, as its engine drains", "refuses"),
    ("server_lent", "gauge", "Caches of a server that are not loaded yet", "lent"),
    ("server_requests", "gauge", "Requests that a server is busy with", "now"),
    ("server_requests_total", "counter", "Requests sent to a server", "total"),
    ("server_failures_total", "counter", "Requests that failed at a server", "failed"),
)


class Metrics:
    """The proxy's counters, and the histogram of the time to the first byte."""

    def __init__(self) -> None:
        self._count: Counter[tuple[str, str]] = Counter()  # by name and labels
        self._first = [0] * (len(BUCKETS) + 1)
        self._first_sum = 0.0

    def ended(self, outcome: str) -> None:
        """A client's request has ended."""
        self._count["requests_total", f'outcome="{outcome}"'] += 1

    def handed_over(self, way: str) -> None:
        """A prompt's cache has got to a decode server in this way."""
        self._count["handed_over_total", f'way="{way}"'] += 1

    def computed(self, reason: str) -> None:
        """A prompt is computed by a decode server, for this reason."""
        self._count["computed_total", f'reason="{reason}"'] += 1

    def first_byte(self, seconds: float) -> None:
        """An answer has begun so long after its request."""
        self._first_sum += seconds
        self._first[sum(seconds > limit for limit in BUCKETS)] += 1

    def page(self, kinds: Sequence[Servers]) -> str:
        """All of it, and what is known of each server."""
        lines: list[str] = []
        for name, what in COUNTERS.items():
            counted = {labels: count for (key, labels), count in sorted(self._count.items()) if key == name}
            lines += _metric(name, "counter", what, counted)
        for name, kind, what, field in OF_SERVERS:
            values = {
                f'kind="{servers.kind}",server="{server.url}"': float(getattr(server, field))
                for servers in kinds
                for server in servers.all
            }
            lines += _metric(name, kind, what, values)
        lines += self._histogram()
        return "\n".join(lines) + "\n"

    def _histogram(self) -> list[str]:
        name, total = "kvferry_proxy_first_byte_seconds", 0
        lines = [f"# HELP {name} From a request to the first byte of its answer", f"# TYPE {name} histogram"]
        for limit, count in zip((*map(str, BUCKETS), "+Inf"), self._first, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{limit}"}} {total}')
        return [*lines, f"{name}_sum {self._first_sum:g}", f"{name}_count {total}"]


def _metric(name: str, kind: str, what: str, values: dict[str, float] | dict[str, int]) -> list[str]:
    head = [f"# HELP kvferry_proxy_{name} {what}", f"# TYPE kvferry_proxy_{name} {kind}"]
    return head + [f"kvferry_proxy_{name}{{{labels}}} {value:g}" for labels, value in values.items()]
