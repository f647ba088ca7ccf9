"""A connector that records when it computes and when a load has ended: one line of JSON each, in a file.

KVFERRY_TIMES names the file. Times are seconds of the monotonic clock, which all processes of a machine share.
A prefill server that writes is read from instead if a request's parameters have "bench_pull", so that one
server serves both ways.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvferry.vllm import KvferryConnector


class TimedConnector(KvferryConnector):
    """Records each step that computes, with the times at which its layers' attention had run, and each load
    that has ended."""

    _layers: tuple[float, ...] = ()

    def on_new_request(self, request: Any) -> None:
        scheduling = self.scheduling
        settings = scheduling._settings
        if (request.kv_transfer_params or {}).get("bench_pull"):
            scheduling._settings = replace(settings, push=False)
        super().on_new_request(request)
        scheduling._settings = settings

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self._layers += (time.monotonic(),)
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def wait_for_save(self) -> None:
        if self._layers:
            self._note({"computed": time.monotonic(), "layers": self._layers})
        self._layers = ()
        super().wait_for_save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        if results.finished_recving:
            self._note({"loaded": time.monotonic()})
        return results

    @staticmethod
    def _note(what: dict[str, Any]) -> None:
        with open(os.environ["KVFERRY_TIMES"], "a", encoding="ascii") as file:
            file.write(json.dumps(what) + "\n")
