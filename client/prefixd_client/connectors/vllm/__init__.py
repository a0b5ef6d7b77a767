"""The connector for vLLM: serves an engine from the node's prefix cache, and fills it.

    vllm serve MODEL --kv-transfer-config '{
        "kv_connector": "PrefixdConnector", "kv_connector_module_path": "prefixd_client.connectors.vllm",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": "/run/prefixd/prefixd.sock"}}'

docs/howto-vllm.md tells the rest. Needs an environment that has vLLM; see versions.py for which.
"""

from ..engine_settings import UnsupportedEngine
from .connector import PrefixdConnector

__all__ = ["PrefixdConnector", "UnsupportedEngine"]
