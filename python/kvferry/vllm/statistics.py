"""Puts the workers' counters into vLLM's log line and its metrics.

Counters only grow: seconds are summed over all loads, and divided by the number of loads they are means. The
histograms show the distribution of single loads; the workers report every value for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvferry.events import AgentStats
from kvferry.vllm.compat import KVConnectorPromMetrics, KVConnectorStats, create_metric_per_engine

MEANINGS = {
    "loads": "Requests whose cache a worker loaded from another engine",
    "failed_loads": "Requests whose cache a worker could not load",
    "handed_over": "Requests whose blocks a worker kept until other engines had them",
    "failed_handovers": "Requests whose blocks a worker kept, but not all consumers loaded",
    "expired": "Requests whose blocks no consumer loaded in time",
    "bytes": "Bytes that workers have read from other engines",
    "written_bytes": "Bytes that workers have written into other engines",
    "packed_bytes": "Bytes of these two that went packed",
    "load_seconds": "Total time from a load's start to its last byte",
    "copy_seconds": "Total time from a load's first run to its last byte",
}


@dataclass(frozen=True)
class Spread:
    """A histogram: the meaning of its values, and the limits of its buckets."""

    meaning: str
    limits: tuple[float, ...]


_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
SPREADS = {
    "load_time_seconds": Spread("Time from being told to load until the last byte arrived", _SECONDS),
    "load_size_bytes": Spread(
        "Bytes of a worker's load, including those that producers wrote", tuple(4.0**i for i in range(6, 18))
    ),
    "handover_time_seconds": Spread(
        "Time from when a worker was told to keep or to write until the consumers had everything", _SECONDS
    ),
}


def counted(stats: AgentStats) -> dict[str, float]:
    """An agent's counters by our names, except those of vLLM's requests."""
    return {
        "expired": stats.leases_expired,
        "bytes": stats.bytes_read,
        "written_bytes": stats.bytes_written,
        "packed_bytes": stats.bytes_packed,
        "load_seconds": stats.total.sum_ns / 1e9,
        "copy_seconds": stats.transfer.sum_ns / 1e9,
    }


class KvferryStats(KVConnectorStats):
    """The counts of one or several workers over a period."""

    def reset(self) -> None:
        """Sets all counts to zero."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Adds what another worker has counted."""
        self.data = {name: self.data.get(name, 0) + other.data.get(name, 0) for name in MEANINGS} | {
            name: [*self.data.get(name, ()), *other.data.get(name, ())] for name in SPREADS
        }
        return self

    def reduce(self) -> dict[str, int | float]:
        """The values for a line of the log."""
        said = {name: round(self.data.get(name, 0), 3) for name in MEANINGS}
        for name in SPREADS:
            values = sorted(self.data.get(name, ()))
            if values:
                said |= {f"{name}_p{p}": round(values[(len(values) - 1) * p // 100], 4) for p in (50, 99)}
        return said

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())


class KvferryMetrics(KVConnectorPromMetrics):
    """The same as counters and histograms of Prometheus, `vllm:kvferry_<name>`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(
                    name=f"vllm:kvferry_{name}", documentation=meaning, labelnames=self._labelnames
                ),
                self.per_engine_labelvalues,
            )
            for name, meaning in MEANINGS.items()
        }
        self._histograms = {
            name: create_metric_per_engine(
                self._histogram_cls(
                    name=f"vllm:kvferry_{name}",
                    documentation=spread.meaning,
                    buckets=spread.limits,
                    labelnames=self._labelnames,
                ),
                self.per_engine_labelvalues,
            )
            for name, spread in SPREADS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds what was counted since the last time."""
        for name, counters in self._counters.items():
            counters[engine_idx].inc(transfer_stats_data.get(name, 0))
        for name, histograms in self._histograms.items():
            for value in transfer_stats_data.get(name, ()):
                histograms[engine_idx].observe(value)
