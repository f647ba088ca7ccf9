"""Engines of several ranks, without servers: vLLM lays out their caches, the connector describes them.

vLLM's own functions group the layers, choose block sizes and place the pages; this file makes only the
configuration that they read. Bytes move between two engines run by run, as planned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from probing import read_layer

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups, get_kv_cache_groups
except ImportError:  # before vLLM 0.33
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, UniformTypeKVCacheSpecs
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvferry import Engine, GroupRequest, Plan, Request
from kvferry.vllm.geometry import RankGeometry, build_engine, group_order
from kvferry.vllm.ranks import Ranks
from kvferry.vllm.tensors import describe

Specs = dict[str, KVCacheSpec]  # of one rank, by vLLM's names for the layers
BLOCKS = 4
#: Where the caches lie.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass
class Rank:
    """One rank: its caches as vLLM would register them, and the connector's description of them."""

    cache: KVCacheConfig
    caches: dict[str, torch.Tensor]
    geometry: RankGeometry
    memory: list[torch.Tensor]

    def specs(self) -> dict[str, tuple[int, KVCacheSpec]]:
        """Group and specification of each layer, after vLLM has chosen block sizes."""
        found = {}
        for number, group in enumerate(self.cache.kv_cache_groups):
            for name in group.layer_names:
                spec = group.kv_cache_spec
                if isinstance(spec, UniformTypeKVCacheSpecs):
                    spec = spec.kv_cache_specs[name]
                found[name] = number, spec
        return found

    def readout(self, tables: Sequence[Sequence[int]]) -> dict[str, Any]:
        """The pages of one request, as cells.py takes them apart."""
        layers = {
            name: read_layer(self.caches[name], spec, tables[group], self.cache.num_blocks)
            for name, (group, spec) in self.specs().items()
        }
        return {"rank": self.geometry.tp_rank, "tp_size": self.geometry.tp_size, "layers": layers}


@dataclass
class Layout:
    """An engine of one pipeline stage."""

    ranks: list[Rank]
    engine: Engine

    def readouts(self, tables: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        """The readouts of all ranks."""
        return [rank.readout(tables) for rank in self.ranks]


def lay_out(
    model: Any,
    specs_of: Callable[[int], Specs],
    tp_size: int,
    name: str,
    blocks: int = BLOCKS,
    order: KVCacheLayout = KVCacheLayout.LBHNC,
    kernel_tokens: int | None = None,
    cache_type: str = "auto",
    layer_type: str = "",
) -> Layout:
    """Lays out an engine.

    Args:
        model: the part of vLLM's model configuration that the connector reads
        specs_of: gives the caches of a rank, from the engine's number of ranks
        order: the order of axes in memory, one of those that CUDA's attention backends declare
        kernel_tokens: the size of the kernels' blocks; None: that of vLLM's
        cache_type: the setting --kv-cache-dtype
        layer_type: the type of the layers' caches, if it is another, as a draft's may be
    """
    layer = SimpleNamespace(
        kv_cache_dtype=layer_type or cache_type, _k_scale=torch.tensor(1.0), _v_scale=torch.tensor(1.0)
    )
    config: Any = SimpleNamespace(
        model_config=model,
        device_config=SimpleNamespace(device_type="other"),  # its kernels follow the tensors' strides
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        compilation_config=SimpleNamespace(static_forward_context=SimpleNamespace(get=lambda name: layer)),
        speculative_config=None,
        cache_config=SimpleNamespace(
            cache_dtype=cache_type,
            get_resolved_kv_cache_layout=lambda: order,
            num_gpu_blocks_override=blocks,
            prefix_cache_retention_interval=None,
            enable_prefix_caching=False,
        ),
    )
    groups = get_kv_cache_groups(config, specs_of(tp_size))
    cache = get_kv_cache_config_from_groups(config, groups, 1 << 30)
    kernel_sizes = None if kernel_tokens is None else [kernel_tokens] * len(groups)
    ranks = []
    for rank in range(tp_size):
        caches = allocate_kv_cache(cache, DEVICE, order, kernel_sizes)
        geometry, memory = describe(config, cache, caches, Ranks(rank, tp_size, 0, 1))
        ranks.append(Rank(cache, caches, geometry, memory))
    return Layout(ranks, build_engine([rank.geometry for rank in ranks], name))


def fill(layout: Layout, seed: int) -> None:
    """Fills the caches of all ranks with the same random bytes."""
    for rank in layout.ranks:
        chance = torch.Generator().manual_seed(seed)
        for region in rank.memory:
            region.copy_(torch.randint(0, 256, region.shape, dtype=torch.uint8, generator=chance))


def move(
    there: Layout,
    here: Layout,
    theirs: Sequence[Sequence[int]],
    ours: Sequence[Sequence[int]],
    steps: Sequence[int],
) -> list[list[int]]:
    """Fills one request's blocks here from those there; returns the ranks that each rank has read from.

    Args:
        theirs, ours: a block table for each group of vLLM
        steps: the number of tokens, or of states, in each of them
    """
    read = []
    for number, rank in enumerate(here.ranks):
        plan = Plan(here.engine.shard(number), there.engine)
        plan.verify()
        sources = [group.source for group in group_order([rank.geometry])]
        groups = zip(here.engine.model.groups, sources, strict=True)
        request = Request(
            plan, [GroupRequest(ours[i], theirs[i], 0, group.step_count(steps[i])) for group, i in groups]
        )
        for source, sender in enumerate(plan.sources):
            for run in request.runs(source):
                local, remote, count = (int(run[i]) for i in ("local_offset", "remote_offset", "bytes"))
                to = rank.memory[run["local_region"]]
                to[local : local + count] = there.ranks[sender].memory[run["remote_region"]][
                    remote : remote + count
                ]
        read.append(plan.sources)
    return read
