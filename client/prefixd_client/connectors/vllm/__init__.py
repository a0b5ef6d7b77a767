"""The connector for vLLM: serves an engine from the node's prefix cache, and fills it.

    vllm serve MODEL --kv-transfer-config '{
        "kv_connector": "PrefixdConnector", "kv_connector_module_path": "prefixd_client.connectors.vllm",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": "/run/prefixd/prefixd.sock"}}'

docs/howto-vllm.md tells the rest. PrefixdConnector needs an environment that has vLLM (see versions.py for
which), and is imported when it is asked for: what copies KV works without.
"""

from typing import TYPE_CHECKING, Any

from ..engine_settings import UnsupportedEngine

if TYPE_CHECKING:
    from .connector import PrefixdConnector

__all__ = ["PrefixdConnector", "UnsupportedEngine"]


def __getattr__(name: str) -> Any:
    if name == "PrefixdConnector":
        from .connector import PrefixdConnector  # noqa: PLC0415 - see the module

        return PrefixdConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
