"""Engines of several ranks that compute, without servers: the calls of vLLM's engine, layer by layer.

vLLM's own functions lay caches out (layouts.py). Random bytes, made beforehand, stand for the results of a
model: a step copies those of its tokens into the caches, layer after layer, and calls the hooks that vLLM
calls.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from cells import Cells, join_cells
from halves import STEP_SECONDS, a_request, blocks_of, output_of, report_of, transfer_of
from layouts import Layout, Rank
from vllm.v1.kv_cache_interface import MambaSpec

from kvferry.vllm import worker as worker_module
from kvferry.vllm.messages import KvferryStep
from kvferry.vllm.scheduling import Scheduling
from kvferry.vllm.worker import Worker

# : Called after the hook of each layer, with the layer's name; true ends the step there.
Between = Callable[[str], bool]


class Computing:
    """One engine: the scheduler's half and a worker for each rank.

    Args:
        model: the part of vLLM's model configuration that the connector reads
        unhooked: names of layers that call no hook
        microbatches: how many a step is computed in, one after the other
        passes: numbers of layers in the order in which tokens pass through them; each once, in order, if empty
        extra: settings of the connector
    """

    def __init__(
        self,
        layout: Layout,
        model: Any,
        name: str,
        unhooked: Sequence[str] = (),
        microbatches: int = 1,
        passes: Sequence[int] = (),
        **extra: Any,
    ) -> None:
        self.layout, self._unhooked, self._microbatches = layout, set(unhooked), microbatches
        self._passes = list(passes)
        ranks, cache = layout.ranks, layout.ranks[0].cache
        config: Any = SimpleNamespace(
            kv_transfer_config=transfer_of(name, extra),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=len(ranks),
                pipeline_parallel_size=1,
                decode_context_parallel_size=1,
                prefill_context_parallel_size=1,
                cp_kv_cache_interleave_size=1,
                data_parallel_index=0,
                use_ubatching=microbatches > 1,
            ),
            device_config=SimpleNamespace(device_type="other"),
            model_config=SimpleNamespace(**vars(model), model=name),
            speculative_config=None,
            num_prefill_lookahead_tokens=0,
        )
        self.scheduling = Scheduling(config, cache)
        self.workers = [self._worker(config, rank) for rank in ranks]
        found = {(0, i): worker.handshake() for i, worker in enumerate(self.workers)}
        self.scheduling.introduce({where: told for where, told in found.items() if told is not None})
        managers = [SimpleNamespace(num_cached_block={}) for _ in cache.kv_cache_groups]
        manager: Any = SimpleNamespace(
            block_pool=SimpleNamespace(get_num_free_blocks=lambda: len(self.tables)),
            get_block_ids=lambda request: self.tables[request],
            coordinator=SimpleNamespace(single_type_managers=managers),
        )
        self.scheduling.bind(manager)
        self.tables: dict[str, list[list[int]]] = {}
        self.requests: dict[str, Any] = {}
        self.results = [dict[str, set[str]](sent=set(), received=set(), failed=set()) for _ in ranks]
        self.invalid: set[int] = set()  # blocks of failed loads
        self.content = [
            {
                layer: torch.randint(1, 255, whole.shape, dtype=torch.uint8)
                for layer, whole in bytes_of(rank).items()
            }
            for rank in ranks
        ]

    def _worker(self, config: Any, rank: Rank) -> Worker:
        def gather(everyone: list[Any], *_: Any, **__: Any) -> None:
            everyone[:] = [[each.geometry] for each in self.layout.ranks]

        group = SimpleNamespace(
            rank_in_group=rank.geometry.tp_rank, world_size=len(self.layout.ranks), cpu_group=None
        )
        worker = Worker(config, rank.cache)
        with (
            mock.patch.multiple(
                worker_module,
                get_tp_group=lambda: group,
                get_pp_group=lambda: SimpleNamespace(rank_in_group=0, world_size=1),
            ),
            mock.patch("torch.distributed.all_gather_object", gather),
        ):
            worker.register(rank.caches)
        return worker

    def close(self) -> None:
        """Closes the engine."""
        for worker in self.workers:
            worker.close()
        self.scheduling.close()

    # ---- requests

    def add(
        self,
        name: str,
        tokens: int,
        tables: list[list[int]],
        params: dict[str, Any] | None,
        max_tokens: int = 1,
        changed: int | None = None,
    ) -> Any:
        """Adds a request that has arrived; `changed`: where it has another token than other requests."""
        self.tables[name] = tables
        request = self.requests[name] = a_request(name, tokens, params)
        if changed is not None:
            request.all_token_ids[changed] += 1
        request.max_tokens = max_tokens
        self.scheduling.add(request)
        return request

    def want(
        self,
        name: str,
        tokens: int,
        tables: list[list[int]],
        params: dict[str, Any],
        computed: int = 0,
        changed: int | None = None,
    ) -> int:
        """Adds a request whose cache another engine has or will have; returns how many tokens vLLM would wait
        for."""
        request = self.add(name, tokens, tables, params, changed=changed)
        load, _ = self.scheduling.match(request, computed)
        self.scheduling.allocated(request, blocks_of(*tables), load)
        return load

    def finish(self, name: str, well: bool = True) -> tuple[bool, dict[str, Any] | None]:
        """Ends a request that has finished, or was aborted."""
        return self.scheduling.finished(self.requests[name], self.tables[name], well)

    # ---- steps

    def step(
        self,
        compute: dict[str, int] | None = None,
        lost: Sequence[str] = (),
        between: Between | None = None,
        to_zero: Sequence[int] = (),
    ) -> None:
        """One step, in vLLM's order.

        Args:
            compute: how many tokens to compute, by request
            lost: requests that lose their blocks
            to_zero: blocks that vLLM fills with zeros; the test does so
        """
        chunks = dict(compute or {})
        step = self.scheduling.step(output_of(chunks, lost, to_zero))
        for worker in self.workers:
            worker.give_up(step)
            worker.bound(step)
        if self._forward(step, chunks, between):
            for name, count in chunks.items():
                self.requests[name].num_computed_tokens += count
            self._end(step)

    def _forward(self, step: KvferryStep, chunks: dict[str, int], between: Between | None) -> bool:
        layers = sorted(self.layout.ranks[0].caches, key=number_of) if chunks else []
        if self._passes and layers:
            layers = [next(layer for layer in layers if number_of(layer) == number) for number in self._passes]
        for part, (at, layer) in itertools.product(range(self._microbatches), enumerate(layers)):
            for rank in range(len(self.workers)):
                for name, count in chunks.items():
                    done = self.requests[name].num_computed_tokens
                    begin, end = (done + count * i // self._microbatches for i in (part, part + 1))
                    self._compute(rank, layer, name, range(begin, end), is_last=layer not in layers[at + 1 :])
            if layer not in self._unhooked:
                for worker in self.workers:
                    worker.layer_done(step, layer)
            if between is not None and between(layer):
                return False
        return True

    def _compute(self, rank: int, layer: str, name: str, tokens: range, is_last: bool = True) -> None:
        """Writes the bytes of some tokens of a layer, others before the last pass; for a state, those after
        the last token.
        """
        group, spec = self.layout.ranks[rank].specs()[layer]
        table = self.tables[name][group]
        cache, content = bytes_of(self.layout.ranks[rank])[layer], self.content[rank][layer]
        if isinstance(spec, MambaSpec):
            whole = tokens.stop == self.requests[name].num_prompt_tokens
            cache[table[-1]] = content[table[-1]] if whole else 255 - content[table[-1]]
            return
        each = cache.shape[0] // self.layout.ranks[rank].cache.num_blocks
        page = spec.block_size // each
        for token in tokens:
            block, at = divmod(token, spec.block_size)
            row = table[block] * each + at // page
            own = content[row, :, at % page]
            cache[row, :, at % page] = own if is_last else 255 - own

    def _end(self, step: KvferryStep) -> None:
        told = []
        for worker, found in zip(self.workers, self.results, strict=True):
            worker.start(step)
            worker.seal(step)
            results = worker.take_results()
            self.invalid |= worker.take_invalid()
            found["sent"] |= results.finished_sending
            found["received"] |= results.finished_recving
            found["failed"] |= results.failed_recving
            told.append(results)
        # vLLM adds up its workers' reports; here a request counts once the last worker has reported it.
        news = {key: set.intersection(*(found[key] for found in self.results)) for key in ("sent", "received")}
        failed = set.union(*(found["failed"] for found in self.results))
        self.scheduling.update(
            SimpleNamespace(
                finished_sending=news["sent"],
                finished_recving=news["received"],
                failed_recving=failed,
                kv_connector_worker_meta=report_of(self.workers),
            )
        )

    def all_have(self, what: str, name: str) -> bool:
        """Whether every rank has reported a request."""
        return all(name in found[what] for found in self.results)

    # ---- bytes

    def cells(self, name: str, fields: dict[str, Any], tokens: int) -> Cells:
        """The cells of a request in the caches."""
        return join_cells(self.layout.readouts(self.tables[name]), fields, tokens)


def number_of(layer: str) -> int:
    """The number of a layer."""
    (number,) = (int(word) for word in layer.split(".") if word.isdecimal())
    return number


def bytes_of(rank: Rank) -> dict[str, torch.Tensor]:
    """The caches of a rank, as bytes."""
    return {layer: cache.view(torch.uint8) for layer, cache in rank.caches.items()}


def steps(*engines: Computing, until: Callable[[], bool]) -> None:
    """Makes steps of all engines in turn, without computing, until a condition holds."""
    end = time.monotonic() + STEP_SECONDS
    while not until():
        assert time.monotonic() < end, "what was waited for has not happened"
        for engine in engines:
            engine.step()
