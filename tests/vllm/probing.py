"""A connector that writes out, and can change, the blocks that it moves.

Both sides of a case run with it. Its output is raw: the pages of one request, and vLLM's own data about them.
The block numbers come from vLLM's scheduler, and nothing comes from kvferry's description of the cache.
cells.py finds the cells in the pages.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec, MLAAttentionSpec, UniformTypeKVCacheSpecs
from watching import WatchingConnector

from kvferry.scheduler import InstructionKind

NULL_BLOCK = 0  # vLLM's block without content


class ProbingConnector(WatchingConnector):
    """Writes a handed-over request, as blocks of each side.

    KVFERRY_READOUT names a folder: `<role>.blocks.json` lists the blocks of the last request, and
    `<role>.<rank>.pt` has their content: at a prefill server when they are kept for the other server, at a
    decode server when they are filled.

    While the file that KVFERRY_CORRUPT names exists, a filled block is changed before it is written out: if the
    file says "state", the state of a sequence, otherwise a block of keys and values.
    """

    # ---- in the scheduler

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        kept, params = super().request_finished_all_groups(request, block_ids)
        if params is not None:
            self._note_blocks(block_ids)
        return kept, params

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens > 0:
            self._note_blocks(blocks.get_block_ids())

    def _note_blocks(self, block_ids: Sequence[Sequence[int]]) -> None:
        found = json.dumps([list(group) for group in block_ids])
        written = self._folder / f"{self.role_name}.blocks.new"
        written.write_text(found)
        written.rename(self._folder / f"{self.role_name}.blocks.json")

    # ---- in a worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = kv_caches
        super().register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._get_connector_metadata()
        computed = {chunk.request for chunk in step.chunks}  # and pushed meanwhile: read out at its end
        if step.ended or any(
            item.kind in (InstructionKind.HOLD, InstructionKind.PUSH)
            and item.request.id.decode() not in computed
            for item in step.instructions
        ):
            self._read_out()
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        if results.finished_recving:
            mark = pathlib.Path(os.environ["KVFERRY_CORRUPT"])
            if mark.exists():
                self._corrupt(mark.read_text())
            self._read_out()
        return results

    # ---- in both

    @property
    def role_name(self) -> str:
        """kv_producer or kv_consumer."""
        return str(self._kv_transfer_config.kv_role)

    @property
    def _folder(self) -> pathlib.Path:
        return pathlib.Path(os.environ["KVFERRY_READOUT"])

    def _layers(self) -> list[tuple[str, KVCacheSpec, list[int]]]:
        """Name, specification and blocks (of the last request) of every layer on this rank."""
        block_ids = json.loads((self._folder / f"{self.role_name}.blocks.json").read_text())
        found = []
        for group, ids in zip(self._kv_cache_config.kv_cache_groups, block_ids, strict=True):
            for name in group.layer_names:
                spec = group.kv_cache_spec
                if isinstance(spec, UniformTypeKVCacheSpecs):
                    spec = spec.kv_cache_specs[name]
                if name in self._caches:
                    found.append((name, spec, ids))
        return found

    def _corrupt(self, what: str) -> None:
        for name, spec, ids in self._layers():
            if isinstance(spec, MambaSpec) != (what == "state"):
                continue
            cache = self._caches[name]
            each = cache.shape[0] // self._kv_cache_config.num_blocks
            block = next(block for block in ids if block != NULL_BLOCK)
            pages = cache[block * each : (block + 1) * each]
            if what == "state" or cache.dtype == torch.uint8:
                pages.zero_()  # bytes: negated, they might be NaN
            else:
                pages.neg_()
            return

    def _read_out(self) -> None:
        rank = get_tp_group()
        layers = {
            name: read_layer(self._caches[name], spec, ids, self._kv_cache_config.num_blocks)
            for name, spec, ids in self._layers()
        }
        found = {"rank": rank.rank_in_group, "tp_size": rank.world_size, "layers": layers}
        written = self._folder / f"{self.role_name}.{rank.rank_in_group}.new"
        torch.save(found, written)
        written.rename(written.with_suffix(".pt"))


def read_layer(cache: torch.Tensor, spec: KVCacheSpec, ids: Sequence[int], block_count: int) -> dict[str, Any]:
    """The pages of some blocks of a layer, for cells.py."""
    each = cache.shape[0] // block_count
    return {
        "blocks": ids,
        "block_tokens": spec.block_size,
        "entry_tokens": getattr(spec, "tokens_per_state", 1),
        "pages": {  # for each block: one row per kernel block, as bytes
            block: copied(cache[block * each : (block + 1) * each]) for block in ids if block != NULL_BLOCK
        },
        "item_bytes": cache.element_size(),
        "shape": tuple(cache.shape[1:]),
        "window": getattr(spec, "sliding_window", None),
        "is_latent": isinstance(spec, MLAAttentionSpec),
        "head_size": getattr(spec, "head_size", None),
        "states": state_tensors(spec) if isinstance(spec, MambaSpec) else None,
    }


def copied(pages: torch.Tensor) -> torch.Tensor:
    """The bytes of pages, on the host."""
    return pages.contiguous().flatten(1).view(torch.uint8).to("cpu", copy=True)


def state_tensors(spec: MambaSpec) -> list[tuple[tuple[int, ...], int]]:
    """Shape and element size of each tensor of a state, in their order in the page."""
    return [
        (tuple(shape), torch.empty(0, dtype=dtype).element_size())
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    ]
