"""A connector for a decode server that does something in the middle of a copy.

KVFERRY_INTERRUPT names a file. While it exists, the connector first fills the blocks of the next load with a
number that no cache has: an element that has changed has arrived. When the first has arrived, it obeys the
file:

    kill N    the processes of group N, which are a server or the proxy, are killed
    tell      nothing: the file is removed in any case, which tells whoever waits for that

and logs how much had arrived then, when the load was cancelled, and when it ended.
"""

from __future__ import annotations

import os
import pathlib
import signal
import time
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.logger import init_logger
from watching import WatchingConnector

from kvferry.request import BlockTable
from kvferry.scheduler import Instruction, InstructionKind

logger = init_logger("vllm.interrupting")

NOTHING = -98765.0
BEGIN_SECONDS = 10


class InterruptingConnector(WatchingConnector):
    """See above. On a prefill server it does nothing, since nothing is loaded there."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = kv_caches
        self._blocks: list[int] = []  # of the observed load
        super().register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        order = pathlib.Path(os.environ["KVFERRY_INTERRUPT"])
        instructions: list[Instruction] = self._get_connector_metadata().instructions
        loads = [item for item in instructions if item.kind in (InstructionKind.PULL, InstructionKind.EXPECT)]
        begins = bool(loads) and order.exists()
        if begins:
            (group,) = loads[0].groups
            assert isinstance(group.table, BlockTable)
            self._blocks = [int(block) for block in group.table.ids]
            self._fill()
        if self._blocks and any(item.kind == InstructionKind.CANCEL for item in instructions):
            self._say("cancelled")
        super().start_load_kv(forward_context, **kwargs)
        if begins:
            self._interrupt(order)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        if results.finished_recving and self._blocks:
            self._say("ended")
            self._blocks = []
        return results

    def _fill(self) -> None:
        count = self._kv_cache_config.num_blocks
        for cache in self._caches.values():
            assert cache.shape[0] == count, "a page is one kernel block"
            cache[self._blocks] = NOTHING

    def _arrived(self) -> tuple[int, int]:
        """How many of the heads' pages in these blocks have received their first element, and of how many: a
        quick check."""
        first = torch.stack([cache[self._blocks, :, 0, 0] for cache in self._caches.values()])
        return int((first != NOTHING).sum()), first.numel()

    def _say(self, when: str) -> None:
        arrived, total = self._arrived()
        logger.info("interrupting: %s after %d of %d pages", when, arrived, total)

    def _interrupt(self, order: pathlib.Path) -> None:
        what, *group = order.read_text().split()
        until = time.monotonic() + BEGIN_SECONDS
        while not self._arrived()[0] and time.monotonic() < until:
            pass
        order.unlink()
        self._say("told")  # before: the group may be this process's own
        if what == "kill":
            os.killpg(int(group[0]), signal.SIGKILL)
            self._say("killed")
