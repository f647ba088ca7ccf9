"""KvferryConnector: vLLM serves prefill and decode apart, and kvferry carries the caches between them.

    --kv-transfer-config '{"kv_connector": "KvferryConnector", "kv_connector_module_path": "kvferry.vllm",
                           "kv_role": "kv_producer"}'

See docs/vllm.md.
"""

from kvferry.vllm import needs

needs.check()

from kvferry.vllm.connector import KvferryConnector  # noqa: E402

__all__ = ["KvferryConnector"]
