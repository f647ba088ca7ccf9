"""Stands in for the Triton kernels with which vLLM builds DeepSeek V4's metadata: Triton has none for CPUs.

They say which entry of a cache each token belongs to; what is computed and kept stays vLLM's own. A process of
vLLM takes them if KVFERRY_WITHOUT_TRITON is set.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

SETTING = "KVFERRY_WITHOUT_TRITON"


class Kernel:
    """A function that is called like a Triton kernel: kernel[grid](...)."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._run


def no_kernel(*_: Any, **__: Any) -> None:
    """For kernels whose results nothing reads on a CPU."""


def requests_of_tokens(
    query_start: torch.Tensor, found: torch.Tensor, requests: int, tokens: int, room: int, **_: Any
) -> None:
    """The request of each token of a batch, in which the tokens of a request are neighbours."""
    at = torch.arange(tokens, dtype=query_start.dtype)
    number = torch.searchsorted(query_start[1:].contiguous(), at, right=True)
    found[:room] = 0
    found[:tokens] = number.clamp_(max=requests - 1).to(found.dtype)


def slots_of_entries(
    found: torch.Tensor,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    lengths: torch.Tensor,
    tables: torch.Tensor,
    entries_per_block: int,
    ratio: int,
    ranks: int,
    _interleave: int,
) -> None:
    """The slot of the entry that each token completes; -1 for tokens that complete none."""
    assert ranks == 1
    for request, table in enumerate(tables.long()):
        begin, end = query_start[request : request + 2].tolist()
        length = int(lengths[request])
        token = torch.arange(length - (end - begin), length)
        completes = ((token + 1) % ratio == 0) & (slots[begin:end] != -1)
        entry = token // ratio
        block = table[torch.where(completes, entry // entries_per_block, 0)]
        found[begin:end] = torch.where(completes, block * entries_per_block + entry % entries_per_block, -1)


def entries_to_index(
    query_start: torch.Tensor,
    lengths: torch.Tensor,
    sums: torch.Tensor,
    rows: torch.Tensor,
    requests_of_entries: torch.Tensor,
    begins: torch.Tensor,
    ends: torch.Tensor,
    first: int,
    last: int,
    *_: Any,
    num_reqs: int,
    COMPRESS_RATIO: int,
) -> None:
    """For the tokens [first, last) of a batch, the entries that an indexer looks at: those complete."""
    for request in range(num_reqs):
        begin, end = query_start[request : request + 2].tolist()
        requests_of_entries[int(sums[request]) : int(sums[request + 1])] = request
        seen = (int(lengths[request]) - (end - begin) + 1 + torch.arange(end - begin)) // COMPRESS_RATIO
        low, high = max(begin, first), min(end, last)
        if low < high:
            begins[low - first : high - first] = rows[request]
            ends[low - first : high - first] = rows[request] + seen[low - begin : high - begin].to(ends.dtype)


def stand_in() -> None:
    """Puts the functions in the kernels' places, if the setting says so."""
    if SETTING not in os.environ:
        return
    from vllm.models.deepseek_v4.cpu import cpu_mla
    from vllm.v1.attention.backends.mla import compressor_utils, indexer, sparse_swa
    from vllm.v1.attention.ops import metadata

    replaced: dict[Any, dict[str, Any]] = {
        metadata: {"_token_request_mapping_kernel": Kernel(requests_of_tokens)},
        compressor_utils: {"_COMPRESSED_SLOT_MAPPING_KERNEL": slots_of_entries},
        indexer: {"_BUILD_PREFILL_CHUNK_METADATA_KERNEL": entries_to_index},
        sparse_swa: {
            "_COMPUTE_SWA_INDICES_AND_LENS_KERNEL": no_kernel,
            "_COMPUTE_PREFILL_METADATA_KERNEL": no_kernel,
        },
        # vLLM's own method for CPUs leaves out two of the kinds of layers for which it is asked.
        cpu_mla.DeepseekV4CPUSparseSWAMetadataBuilder: {
            "build_tile_scheduler": lambda *_: dict.fromkeys(("swaonly", "c1a", "c2a", "c4a", "c128a"))
        },
    }
    for place, functions in replaced.items():
        for name, function in functions.items():
            assert hasattr(place, name), f"vLLM has no {name} here"
            setattr(place, name, function)
