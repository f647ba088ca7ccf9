"""An engine of several ranks without vLLM's processes: the scheduler's half, and a worker's half for each rank.

Like halves.py, whose steps() also drives these engines. vLLM's own functions give the ranks of each parallel
group, and how many of a sequence's tokens a rank keeps, from which the row of a token follows.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from halves import LAYERS, SIZE, a_request, blocks_of, output_of, report_of, transfer_of
from vllm.distributed import parallel_state
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec

from kvferry.vllm import worker as worker_module
from kvferry.vllm.messages import KvferryHandshake
from kvferry.vllm.scheduling import Scheduling
from kvferry.vllm.worker import Worker

EMPTY = -1.0  # the content of a cell that was never written
MOST_HEADS = 8


def groups_of_ranks(tp: int, pcp: int, dcp: int, replicas: int = 1) -> dict[str, list[list[int]]]:
    """The groups that vLLM makes, by name, as lists of rank numbers."""
    found: dict[str, list[list[int]]] = {}

    def note(group_ranks: list[list[int]], *_: Any, group_name: str, **__: Any) -> Any:
        found[group_name] = group_ranks
        return SimpleNamespace(rank_in_group=0, world_size=len(group_ranks[0]))

    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            data_parallel_size=replicas, enable_elastic_ep=False, enable_eplb=False, use_all2all=False
        ),
        model_config=None,
        engram_config=None,
    )
    none = {name: None for name in vars(parallel_state) if name.isupper() and name.startswith("_")}
    with (
        mock.patch.dict(vars(parallel_state), none),
        mock.patch.multiple(
            parallel_state,
            init_model_parallel_group=note,
            get_world_group=lambda: SimpleNamespace(local_rank=0, device_group=None),
        ),
        mock.patch.multiple(
            torch.distributed,
            is_initialized=lambda: True,
            get_world_size=lambda *_: replicas * tp * pcp,
            get_rank=lambda *_: 0,
            get_backend=lambda *_: "gloo",
        ),
        mock.patch("vllm.config.get_current_vllm_config", lambda: config),
    ):
        parallel_state.initialize_model_parallel(tp, 1, pcp, dcp)
    return {name: found[name] for name in ("tp", "pcp", "dcp", "pp")}


def rows_of(tokens: int, dcp: int, share: int, interleave: int) -> list[int | None]:
    """The index of each token of a sequence among a rank's own tokens; None: the rank does not keep it."""
    lengths = get_dcp_local_seq_lens(torch.arange(tokens + 1), dcp, share, interleave).tolist()
    return [a if b > a else None for a, b in itertools.pairwise(lengths)]


class _Gathering:
    """Runs ranks as threads: stands in for torch.distributed and vLLM's groups.

    Only `ranks` exist. A group waits until all of its ranks have sent.
    """

    def __init__(self, groups: dict[str, list[list[int]]], ranks: range) -> None:
        self._groups, self._ranks = groups, ranks
        self._own = threading.local()
        self._said: dict[int, Any] = {}
        self._waits = {
            tuple(group): threading.Barrier(len(group), timeout=60)
            for all_ in groups.values()
            for group in all_
        }

    def group(self, name: str) -> Any:
        (ranks,) = (ranks for ranks in self._groups[name] if self._own.rank in ranks)
        return SimpleNamespace(
            rank_in_group=ranks.index(self._own.rank), world_size=len(ranks), cpu_group=tuple(ranks)
        )

    def all_gather(self, found: list[Any], own: Any, group: tuple[int, ...]) -> None:
        self._said[self._own.rank] = own
        self._waits[group].wait()
        found[:] = [self._said[rank] for rank in group]
        self._waits[group].wait()

    def run(self, calls: Sequence[Any]) -> None:
        """Makes a call as each of the ranks; raises the first exception of a rank."""

        def one(rank: int, call: Any) -> None:
            self._own.rank = rank
            try:
                call()
            except BaseException:
                for barrier in self._waits.values():
                    barrier.abort()
                raise

        names = {f"get_{name}_group": lambda name=name: self.group(name) for name in self._groups}
        with (
            mock.patch.multiple(worker_module, **names),
            mock.patch.object(torch.distributed, "all_gather_object", self.all_gather),
            ThreadPoolExecutor(len(self._ranks)) as threads,
        ):
            running = [threads.submit(one, rank, call) for rank, call in zip(self._ranks, calls, strict=True)]
            errors = [done.exception() for done in running]
        for error in errors:
            if error is not None and not isinstance(error, threading.BrokenBarrierError):
                raise error


class Stated(list[Any]):
    """The layers of a model, as in vLLM's configuration."""

    def __init__(self, count: int, heads: int) -> None:
        super().__init__([SimpleNamespace(total_num_kv_heads=heads, total_num_attention_heads=heads)] * count)
        self.total_num_hidden_layers = count


class ManyRanks:
    """One engine."""

    def __init__(
        self,
        name: str,
        block_size: int,
        *,
        tp: int = 1,
        pcp: int = 1,
        dcp: int = 1,
        interleave: int = 1,
        heads: int = 2,
        latent: bool = False,
        blocks: int = 16,
        said_interleave: int = 0,
        draft_heads: int = 0,
        draft_shared: bool = True,
        replica: tuple[int, int] = (0, 1),
        **extra: Any,
    ) -> None:
        """
        Args:
            latent: the layers keep latents, which every rank has, instead of keys and values of heads
            draft_heads: heads of the one layer of a draft model, which is in a separate group; 0: there is no
            draft
            draft_shared: its tokens are shared over ranks like those of the model
            said_interleave: what the connector is told, if that is false
            replica: number of this engine among the data-parallel replicas, and how many there are
        """
        self.tp, self.pcp, self.dcp, self.interleave = tp, pcp, dcp, interleave
        self.heads, self.block_size = 1 if latent else heads, block_size
        self.layers = [(f"model.layers.{layer}.attn", self.heads, dcp) for layer in range(LAYERS)]
        if draft_heads:
            self.layers.append((f"model.layers.{LAYERS}.attn", draft_heads, dcp if draft_shared else 1))
        self.groups = groups_of_ranks(tp, pcp, dcp, replica[1])
        self._first = replica[0] * tp * pcp
        local = max(1, self.heads // tp)
        size = 2 * SIZE if latent else SIZE
        kind = MLAAttentionSpec if latent else FullAttentionSpec
        spec = kind(block_size=block_size, num_kv_heads=local, head_size=size, dtype=torch.float32)
        groups = [KVCacheGroupSpec([name for name, *_ in self.layers[:LAYERS]], spec)]
        if draft_heads:
            local = max(1, draft_heads // tp)
            spec = FullAttentionSpec(
                block_size=block_size,
                num_kv_heads=local,
                head_size=SIZE,
                dtype=torch.float32,
                dcp_sharded=draft_shared,
            )
            groups.insert(0, KVCacheGroupSpec([self.layers[LAYERS][0]], spec))  # vLLM may order groups so
        self.cache = KVCacheConfig(blocks, [], groups)
        self.config: Any = SimpleNamespace(
            kv_transfer_config=transfer_of(name, extra),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=tp,
                pipeline_parallel_size=1,
                decode_context_parallel_size=dcp,
                prefill_context_parallel_size=pcp,
                cp_kv_cache_interleave_size=said_interleave or interleave,
                data_parallel_index=replica[0],
            ),
            device_config=SimpleNamespace(device_type="other"),
            model_config=SimpleNamespace(
                model="tiny",
                model_arch_config=Stated(LAYERS, self.heads),
                hf_text_config=SimpleNamespace(to_dict=lambda: {"num_key_value_heads": self.heads}),
            ),
            speculative_config=SimpleNamespace(
                uses_draft_model=lambda: False,
                draft_model_config=SimpleNamespace(
                    model_arch_config=Stated(1, draft_heads),
                    hf_text_config=SimpleNamespace(to_dict=lambda: {"num_key_value_heads": draft_heads}),
                ),
            )
            if draft_heads
            else None,
            num_prefill_lookahead_tokens=0,
        )
        self.ranks = range(tp * pcp)
        self.caches = [
            {
                name: torch.full((blocks, max(1, heads // tp), block_size, 2 * SIZE), EMPTY)
                for name, heads, _ in self.layers
            }
            for _ in self.ranks
        ]
        self.scheduling = Scheduling(self.config, self.cache)
        self.workers = [Worker(self.config, self.cache) for _ in self.ranks]
        self.sent: set[str] = set()
        self.received: set[str] = set()
        self.failed: set[str] = set()
        self.invalid: set[int] = set()
        self._reports: dict[str, Counter[str]] = {"sent": Counter(), "received": Counter()}

    def start(self) -> None:
        """Registers all ranks, and passes their handshakes on as vLLM does."""
        register = [
            lambda worker=worker, caches=caches: worker.register(caches)
            for worker, caches in zip(self.workers, self.caches, strict=True)
        ]
        _Gathering(self.groups, range(self._first, self._first + len(self.ranks))).run(register)
        said: dict[tuple[int, int], KvferryHandshake] = {}
        for rank, worker in enumerate(self.workers):
            own = worker.handshake()
            assert own is not None
            pcp_rank, tp_rank = divmod(rank, self.tp)
            apart = self.pcp > 1 and self.dcp > 1  # otherwise ranks with the same place replace each other
            said[0, tp_rank + (pcp_rank * self.tp if apart else 0)] = own
        self.scheduling.introduce(said)

    def close(self) -> None:
        """Closes all halves."""
        for worker in self.workers:
            worker.close()
        self.scheduling.close()

    # ---- steps and requests, as of Half

    def step(self) -> None:
        """Makes one step in which no request runs. A request has ended when all ranks have reported it."""
        step = self.scheduling.step(output_of())
        ended: dict[str, set[str]] = {"sent": set(), "received": set()}
        failed: set[str] = set()
        for worker in self.workers:
            worker.give_up(step)
            worker.start(step)
            results = worker.take_results()
            self.invalid |= worker.take_invalid()
            failed |= results.failed_recving
            for kind, names in (("sent", results.finished_sending), ("received", results.finished_recving)):
                self._reports[kind].update(names)
                ended[kind] |= {name for name in names if self._reports[kind][name] == len(self.ranks)}
        self.sent |= ended["sent"]
        self.received |= ended["received"]
        self.failed |= failed
        self.scheduling.update(
            SimpleNamespace(
                finished_sending=ended["sent"],
                finished_recving=ended["received"],
                failed_recving=failed,
                kv_connector_worker_meta=report_of(self.workers),
            )
        )

    def serve(self, name: str, tokens: int, table: list[int]) -> dict[str, Any]:
        """A request whose cache another engine wants, and which has finished here."""
        request = a_request(name, tokens, {"do_remote_decode": True, "do_remote_prefill": False})
        self.scheduling.add(request)
        request.num_computed_tokens = tokens
        keep, params = self.scheduling.finished(request, self.tables(table), True)
        assert keep and params is not None
        return params

    def want(self, name: str, tokens: int, params: dict[str, Any], table: list[int], computed: int = 0) -> int:
        """A request whose cache another engine has; returns how many tokens vLLM would wait for."""
        request = a_request(name, tokens, params)
        self.scheduling.add(request)
        load, _ = self.scheduling.match(request, computed)
        self.scheduling.allocated(request, blocks_of(*self.tables(table)), load)
        return load

    def tables(self, table: list[int]) -> list[list[int]]:
        """The same block numbers for each of vLLM's groups, where they are different memory."""
        return [table] * len(self.cache.kv_cache_groups)

    # ---- bytes

    def cells(
        self, table: list[int], tokens: range, layers: range | None = None
    ) -> Iterator[tuple[torch.Tensor, int, int, int]]:
        """Yields each cell, where vLLM's kernels look for it, on each rank that keeps it, with layer, token and
        head."""
        for rank in self.ranks:
            (group,) = (ranks for ranks in self.groups["dcp"] if rank in ranks)
            for layer, (name, heads, dcp) in enumerate(self.layers):
                if layers is not None and layer not in layers:
                    continue
                first = rank % self.tp * heads // self.tp
                rows = rows_of(tokens.stop, dcp, group.index(rank) % dcp, self.interleave)
                for token, row in enumerate(rows):
                    if token not in tokens or row is None:
                        continue
                    page = self.caches[rank][name][table[row // self.block_size], :, row % self.block_size]
                    for local in range(page.shape[0]):
                        yield page[local], layer, token, first + local

    def write(self, table: list[int], tokens: range) -> None:
        """Writes numbers that follow from the coordinates of their cells."""
        for cell, *where in self.cells(table, tokens):
            cell[:] = content(*where)

    def wrong(self, table: list[int], tokens: range, layers: range | None = None) -> int:
        """How many cells, of these layers or of all, are not those of write()."""
        return sum(
            not torch.equal(cell, content(layer, token, head))
            for cell, layer, token, head in self.cells(table, tokens, layers)
        )

    def stray(self, table: list[int], tokens: range) -> int:
        """How many elements outside these cells were written."""
        kept = [{name: cache.clone() for name, cache in caches.items()} for caches in self.caches]
        for cell, *_ in self.cells(table, tokens):
            cell[:] = EMPTY
        found = sum(int((cache != EMPTY).sum()) for caches in self.caches for cache in caches.values())
        for caches, copies in zip(self.caches, kept, strict=True):
            for name, copy in copies.items():
                caches[name].copy_(copy)
        return found


def content(layer: int, token: int, head: int) -> torch.Tensor:
    """The elements of a cell; exact in float32, and never EMPTY."""
    first = 1 + 2 * SIZE * (head + MOST_HEADS * (layer + LAYERS * token))
    return torch.arange(first, first + 2 * SIZE, dtype=torch.float32)
