"""The class that vLLM loads. It is made once beside the scheduler and once in every worker."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from kvferry.errors import UnsupportedError
from kvferry.transfer_params import is_push
from kvferry.vllm.compat import (
    CacheHitSource,
    KVCacheConfig,
    KVConnectorBase_V1,
    KVConnectorFactory,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorPromMetrics,
    KVConnectorRole,
    KVConnectorStats,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    RequestStatus,
    SupportsHMA,
    init_logger,
)
from kvferry.vllm.messages import KvferryHandshake, KvferryStep
from kvferry.vllm.needs import unknown_hooks
from kvferry.vllm.scheduling import Scheduling
from kvferry.vllm.statistics import KvferryMetrics, KvferryStats
from kvferry.vllm.worker import Worker

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvferry")

# Engines can sleep only if vLLM announces that memory goes. Before 0.33 it took the memory without a call.
CAN_SLEEP = hasattr(KVConnectorBase_V1, "unregister_kv_caches")


class KvferryConnector(KVConnectorBase_V1, SupportsHMA):
    """Hands caches over between engines of different shape: consumers read, or producers write."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        if vllm_config.model_config.enable_sleep_mode and not CAN_SLEEP:
            raise UnsupportedError(
                "enable_sleep_mode is set, but this vLLM does not tell connectors when it frees the caches: "
                "KVConnectorBase_V1 has no unregister_kv_caches"
            )
        super().__init__(vllm_config, role, kv_cache_config)
        scheduler = role == KVConnectorRole.SCHEDULER
        newer = unknown_hooks(KVConnectorBase_V1)
        if scheduler and newer:
            logger.warning(
                "this vLLM's connectors have methods that kvferry does not know: %s", ", ".join(newer)
            )
        self._scheduling = Scheduling(vllm_config, kv_cache_config) if scheduler else None
        self._worker = None if scheduler else Worker(vllm_config, kv_cache_config)

    # ---- beside the scheduler

    @property
    def scheduling(self) -> Scheduling:
        """The scheduler's half."""
        assert self._scheduling is not None
        return self._scheduling

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The handshakes of all ranks; keys are (pipeline stage, tensor-parallel rank)."""
        ranks = {where: found for where, found in metadata.items() if isinstance(found, KvferryHandshake)}
        self.scheduling.introduce(ranks)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Keeps the manager, which knows the blocks of requests."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduling.bind(kv_cache_manager)

    def on_new_request(self, request: Request) -> None:
        """A request has arrived."""
        self.scheduling.add(request)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Groups whose new blocks vLLM need not fill with zeros because a load writes all of them.

        A load writes tokens, not blocks, so the end of the last block keeps its old content. In another group's
        type these bytes may be NaN, and attention multiplies them by a weight of zero. Only the groups that
        vLLM would otherwise compute again (bounded replay) must be named.
        """
        return tuple(
            group
            for group in self._kv_cache_config.transfer_group_ids
            if self._kv_cache_config.kv_cache_groups[group].kv_cache_spec.prefix_replay_tokens > 0
        )

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded, and whether that takes time. None: vLLM asks again in the next step."""
        return self.scheduling.match(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The request has blocks."""
        self.scheduling.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The workers' tasks in this step."""
        return self.scheduling.step(scheduler_output)

    def has_pending_block_frees(self) -> bool:
        """Whether a running request that lacks blocks gets kept ones soon; if not, vLLM takes another's."""
        return self.scheduling.gives_way()

    def reset_cache(self) -> bool | None:
        """Lets go of what is kept for later requests. What is handed over now is a request's own, and stays."""
        self.scheduling.reset()
        return True

    def has_pending_push_work(self) -> bool:
        """Whether vLLM must make steps though no request runs: workers hear of a reset in a step."""
        return self.scheduling.resets

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Takes in the reports of the workers."""
        self.scheduling.update(connector_output)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has finished. Returns whether its blocks are kept, and the parameters for the client."""
        well = request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        return self.scheduling.finished(request, block_ids, well)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The same if all layers are in one group: beside a connector that supports only one."""
        return self.request_finished_all_groups(request, (block_ids,))

    # ---- in a worker

    @property
    def worker(self) -> Worker:
        """The worker's half."""
        assert self._worker is not None
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The caches have been allocated."""
        self.worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What the scheduler's half needs to know of this rank."""
        return self.worker.handshake()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The step's tasks are there. vLLM has queued what fills new blocks, and not yet what it computes."""
        super().bind_connector_metadata(connector_metadata)
        self.worker.bound(self._step)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Starts the instructions of the scheduler's half; the agent moves bytes in a thread of its own."""
        self.worker.start(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: whole requests wait, before they are scheduled."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """A layer's attention has run: pushes may go up to the layers that are complete."""
        self.worker.layer_done(self._step, layer_name)

    def wait_for_save(self) -> None:
        """The step has computed everything: all of its chunks may go."""
        self.worker.seal(self._step)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """A step begins. vLLM may overwrite blocks that are being pushed: those pushes end here."""
        assert isinstance(kv_connector_metadata, KvferryStep)
        self.worker.give_up(kv_connector_metadata)

    @property
    def _step(self) -> KvferryStep:
        step = self._get_connector_metadata()
        assert isinstance(step, KvferryStep)
        return step

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """The transfers that have ended since the last step."""
        return self.worker.take_results()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of failed loads; for models with several groups, whole requests are reported instead."""
        return self.worker.take_invalid()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """The worker's report to the scheduler's half."""
        return self.worker.report()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """The counters since the last step."""
        return self._worker.take_stats() if self._worker is not None else None

    # ---- where statistics are shown

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """The statistics in a worker's data."""
        return KvferryStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """The metrics for vLLM's Prometheus endpoint."""
        return KvferryMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- both

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """A full graph replays without calling us; between pieces we learn which layers are computed."""
        return is_push(extra_config.get("transfer_mode", "pull"))

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Whether the memory of caches may go away and come back."""
        return CAN_SLEEP

    def unregister_kv_caches(self) -> None:
        """The memory of the caches goes."""
        self.worker.sleep()

    def restore_kv_caches(self) -> None:
        """The memory of the caches is there again."""
        self.worker.wake()

    def shutdown(self) -> None:
        """The engine ends."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduling is not None:
            self._scheduling.close()


# A MultiConnector looks its connectors up by name to read their statistics, though they were loaded by module.
with contextlib.suppress(ValueError):  # known already
    KVConnectorFactory.register_connector(KvferryConnector.__name__, __name__, KvferryConnector.__name__)
