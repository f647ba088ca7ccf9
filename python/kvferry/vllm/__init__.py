"""KvferryConnector: vLLM serves prefill and decode separately, and kvferry moves the caches between them.

    --kv-transfer-config '{"kv_connector": "KvferryConnector", "kv_connector_module_path": "kvferry.vllm",
                           "kv_role": "kv_producer"}'

and a proxy in front of such servers, `python -m kvferry.vllm.proxy`, which needs no vLLM. See docs/vllm.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.vllm.connector import KvferryConnector

__all__ = ["KvferryConnector"]


def __getattr__(name: str) -> Any:
    """Imports the connector, and with it vLLM, at first use; checks that vLLM has all that it needs."""
    if name != "KvferryConnector":
        raise AttributeError(f"module {__name__} has no {name}")
    from kvferry.vllm import needs

    needs.check()

    from kvferry.vllm.connector import KvferryConnector

    return KvferryConnector
