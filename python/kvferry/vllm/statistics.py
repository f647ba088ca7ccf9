"""What the workers count, in vLLM's log line and its metrics.

Every name counts up. Seconds are those of all loads added together; divided by the loads they are means.
"""

from __future__ import annotations

from typing import Any

from kvferry.events import AgentStats
from kvferry.vllm.compat import KVConnectorPromMetrics, KVConnectorStats, create_metric_per_engine

MEANINGS = {
    "loads": "Requests whose cache a worker has got from another engine",
    "failed_loads": "Requests whose cache a worker could not get",
    "handed_over": "Requests whose blocks a worker kept until other engines had them",
    "failed_handovers": "Requests whose blocks a worker kept, and not all who wanted them have got",
    "expired": "Requests whose blocks nobody came for in time",
    "bytes": "Bytes that workers have read from other engines",
    "written_bytes": "Bytes that workers have written into other engines",
    "load_seconds": "From a load's begin to its last byte, added up",
    "copy_seconds": "From a load's first run to its last byte, added up",
}


def counted(stats: AgentStats) -> dict[str, float]:
    """An agent's counters by our names: those that are not of requests as vLLM knows them."""
    return {
        "expired": stats.leases_expired,
        "bytes": stats.bytes_read,
        "written_bytes": stats.bytes_written,
        "load_seconds": stats.total.sum_ns / 1e9,
        "copy_seconds": stats.transfer.sum_ns / 1e9,
    }


class KvferryStats(KVConnectorStats):
    """What was counted in some time, by one worker or several."""

    def reset(self) -> None:
        """Nothing was counted."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Adds what another worker has counted."""
        self.data = {name: self.data.get(name, 0) + other.data.get(name, 0) for name in MEANINGS}
        return self

    def reduce(self) -> dict[str, int | float]:
        """What a line of the log says."""
        return {name: round(value, 3) for name, value in self.data.items()}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())


class KvferryMetrics(KVConnectorPromMetrics):
    """The same as counters of Prometheus, `vllm:kvferry_<name>`."""

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

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds what was counted since the last time."""
        for name, counters in self._counters.items():
            counters[engine_idx].inc(transfer_stats_data.get(name, 0))
