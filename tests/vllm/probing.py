"""The connector, made to show and to change what it carries.

CorruptingConnector: while the file that KVFERRY_CORRUPT names exists, one loaded block is changed in one layer.
A comparison of tokens that does not notice proves nothing.

DumpingConnector: writes what was handed over into the folder that KVFERRY_DUMP names, layer by layer and token
by token: for models whose tokens prove nothing. For latents only, whose pages are the tokens in order.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvferry.request import NO_BLOCK
from kvferry.scheduler import Instruction, InstructionKind
from kvferry.vllm import KvferryConnector


class _ProbingConnector(KvferryConnector):
    """Remembers the caches, and the last instruction about blocks."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = kv_caches
        super().register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for instruction in self._get_connector_metadata().instructions:
            if instruction.kind in (InstructionKind.PULL, InstructionKind.HOLD):
                self._last = instruction
                self.told(instruction)
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        if results.finished_recving:
            self.received(self._last)
        return results

    def told(self, instruction: Instruction) -> None:
        """Blocks are to be kept or filled."""

    def received(self, instruction: Instruction) -> None:
        """Blocks were filled."""


class CorruptingConnector(_ProbingConnector):
    """See above."""

    def received(self, instruction: Instruction) -> None:
        if not pathlib.Path(os.environ["KVFERRY_CORRUPT"]).exists():
            return
        blocks = [block for group in instruction.groups for block in group.table.ids if block != NO_BLOCK]
        # State layers are registered as bytes; negated bytes might be no numbers any more.
        cache = next(cache for cache in self._caches.values() if cache.is_floating_point())
        per_block = cache.shape[0] // self._kv_cache_config.num_blocks
        cache[blocks[0] * per_block : (blocks[0] + 1) * per_block].neg_()


class DumpingConnector(_ProbingConnector):
    """See above."""

    def told(self, instruction: Instruction) -> None:
        if instruction.kind == InstructionKind.HOLD:
            self._dump(instruction)

    def received(self, instruction: Instruction) -> None:
        self._dump(instruction)

    def _dump(self, instruction: Instruction) -> None:
        (group,) = instruction.groups
        per_block = {cache.shape[0] // self._kv_cache_config.num_blocks for cache in self._caches.values()}
        assert per_block == {1}, "a page is one kernel block"
        blocks = list(group.table.ids)
        found = {
            name: cache[blocks].transpose(1, 2).flatten(0, 1)[group.begin : group.end].clone()
            for name, cache in self._caches.items()
        }
        torch.save(found, pathlib.Path(os.environ["KVFERRY_DUMP"]) / f"{self._kv_transfer_config.kv_role}.pt")
