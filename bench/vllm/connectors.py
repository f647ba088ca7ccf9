"""The connectors that are compared, each with the settings that this machine needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


def _nothing(port: int) -> dict[str, str]:
    return {}


@dataclass(frozen=True)
class Connector:
    """How a server is configured with a connector.

    Attributes:
        name: the name of the class
        module: where vLLM finds the class; None: it is vLLM's own
        bytes_read: metric of the decode server that counts the bytes read
        transfer: further settings of --kv-transfer-config
        environment: environment variables of a server with this HTTP port
    """

    name: str
    module: str | None
    bytes_read: str
    transfer: dict[str, Any] = field(default_factory=dict)
    environment: Callable[[int], dict[str, str]] = _nothing


# A failed load must show as a failure, so no server recomputes what it could not load. Blocks are kept longer
# than a request may take.
COMMON: dict[str, Any] = {"kv_load_failure_policy": "fail"}
LEASE_SECONDS = 120


def _nixl_environment(port: int) -> dict[str, str]:
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port + 50),
        # The connector refuses models with state in the other order of their convolutions.
        "VLLM_SSM_CONV_STATE_LAYOUT": "DS",
    }


CONNECTORS = {
    "kvferry": Connector(
        "KvferryConnector",
        "kvferry.vllm",
        "vllm:kvferry_bytes_total",
        {**COMMON, "kv_connector_extra_config": {"kv_lease_duration": LEASE_SECONDS}},
    ),
    "nixl": Connector(
        "NixlConnector",
        None,
        "vllm:nixl_bytes_transferred_sum",
        {
            **COMMON,
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"kv_lease_duration": LEASE_SECONDS},
        },
        _nixl_environment,
    ),
}
