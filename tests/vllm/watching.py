"""A connector that writes out what it keeps, so that a test sees what faults have left behind.

KVFERRY_READOUT names a folder. With every step of vLLM `<engine>.scheduler.kept` there has what the scheduler's
half keeps of requests, and `<engine>.<rank>.kept` what a worker and its agent keep: counts as JSON, all of them
0 when nothing is under way, and the memory that the agent has allocated for peers.

KVFERRY_LAYERS_EACH is the number of layers to send at a time, whatever that costs: otherwise the caches of tiny
models go as one.
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import torch
from servers import MEMORY
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.parallel_state import get_tp_group
from without_triton import stand_in

from kvferry.vllm import KvferryConnector
from kvferry.vllm.pushing import Pieces

stand_in()


def sizes(part: object, *lasting: str) -> dict[str, int]:
    """The sizes of an object's containers, except those of what lasts as long as the engine."""
    return {
        f"{type(part).__name__}.{name}": len(value)
        for name, value in vars(part).items()
        if isinstance(value, (dict, list, set)) and name not in lasting
    }


class WatchingConnector(KvferryConnector):
    """See above."""

    # ---- in the scheduler

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        step = super().build_connector_meta(scheduler_output)
        half = self.scheduling
        kept = sizes(half, "_groups") | sizes(half._accepting) | sizes(half._turns)
        if half._early is not None:
            kept |= sizes(half._early, "_groups")
        if half._schedule is not None:
            kept["Schedule.requests"] = half._schedule.counts.requests
        self._write_kept("scheduler", kept)
        return step

    # ---- in a worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        each = int(os.environ.get("KVFERRY_LAYERS_EACH", "0"))
        if each:
            setattr(Pieces, "layers_each", lambda *_: each)  # noqa: B010
        super().register_kv_caches(kv_caches)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        worker = self.worker
        kept = sizes(worker, "_ended", "_counted", "_each", "_gone")
        if worker._layers is not None:
            kept |= sizes(worker._layers)
        if worker._agent is not None:
            stats = worker._agent.stats
            kept |= {f"agent.{kind.name.lower()}": count for kind, count in stats.requests_now.items()}
            for name in ("leases_now", "blocks_held_now", "blocks_filling_now", "blocks_in_doubt_now", MEMORY):
                kept[name] = getattr(stats, name)
        self._write_kept(str(get_tp_group().rank_in_group), kept)
        return results

    # ---- in both

    def _write_kept(self, part: str, kept: dict[str, int]) -> None:
        folder = pathlib.Path(os.environ["KVFERRY_READOUT"])
        written = folder / f"{self._kv_transfer_config.engine_id}.{part}.new"
        written.write_text(json.dumps(kept))
        written.rename(written.with_suffix(".kept"))
