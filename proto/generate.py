"""Generates the Python code of prefixd.v1.

Runs as hatchling's build hook (so that every install has the code) and by
hand, `python proto/generate.py`. grpcio-tools is pinned to 1.76: code from
later releases does not import under protobuf 6.33, which some engines carry.
"""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path

PROTO_ROOT = Path(__file__).resolve().parent


def generate(root: Path = PROTO_ROOT) -> None:
    """Write *_pb2.py, *_pb2.pyi and *_pb2_grpc.py beside each .proto file.

    Raises:
        SystemExit: when protoc refuses a file; it has printed why.
    """
    from grpc_tools import protoc  # noqa: PLC0415 - only in build environments

    sources = sorted(str(path.relative_to(root)) for path in (root / "prefixd").rglob("*.proto"))
    well_known = str(files("grpc_tools") / "_proto")
    arguments = ["protoc", f"-I{root}", f"-I{well_known}"]
    arguments += [f"--python_out={root}", f"--pyi_out={root}", f"--grpc_python_out={root}", *sources]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed; its message is above")


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # not in a build: the command line needs no hook
    pass
else:

    class GenerateHook(BuildHookInterface):
        """Generates the code before a wheel or an editable install is built."""

        PLUGIN_NAME = "custom"

        def initialize(self, version: str, build_data: dict[str, object]) -> None:  # noqa: ARG002 - see the interface
            """See BuildHookInterface."""
            generate(Path(self.root) / "proto")


if __name__ == "__main__":
    generate()
    sys.exit(0)
