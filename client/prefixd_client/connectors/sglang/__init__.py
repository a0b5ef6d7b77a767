"""The connector for SGLang: the node's prefix cache as storage of its hierarchical cache (HiCache).

    python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache \
        --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
        "backend_name": "prefixd", "module_path": "prefixd_client.connectors.sglang",
        "class_name": "PrefixdHiCache", "interface_v1": 1, "hicache_storage_pass_prefix_keys": true,
        "socket": "/run/prefixd/prefixd.sock"}'

docs/howto-sglang.md tells the rest. Needs an environment that has SGLang; see versions.py for which.
"""

from ..engine_settings import UnsupportedEngine
from .backend import PrefixdHiCache

__all__ = ["PrefixdHiCache", "UnsupportedEngine"]
