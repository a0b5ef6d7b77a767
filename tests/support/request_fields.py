"""Every field of every request of our services, from the descriptors, and a sound request of each method."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from prefixd.v1 import admin_service_pb2, cache_service_pb2, types_pb2
from prefixd_server.rpc.namespace_spec import spec_to_wire

from tests.support.node import chain
from tests.support.specs import spec

SERVICES = (
    cache_service_pb2.DESCRIPTOR.services_by_name["CacheService"],
    admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"],
)
METHODS: dict[str, MethodDescriptor] = {
    method.name: method for service in SERVICES for method in service.methods
}
HASHES = chain("a", "b", "c")


@dataclass(frozen=True)
class Known:
    """What a caller knows and requests name."""

    ref: types_pb2.NamespaceRef
    session_id: bytes
    token: bytes


def path_of(method: MethodDescriptor) -> str:
    """Its name on the wire."""
    return f"/{method.containing_service.full_name}/{method.name}"


def sound(method: str, known: Known) -> list[Message]:
    """The messages of one sound call of a method."""
    wire: Any = cache_service_pb2
    kind: Any = GetMessageClass(METHODS[method].input_type)
    session, token, run = (
        {"session_id": known.session_id},
        {"token": known.token},
        {"namespace": known.ref, "block_hashes": HASHES},
    )
    match method:
        case "OpenNamespace":
            return [kind(spec=spec_to_wire(spec(block_bytes=4096)))]
        case "OpenSession":
            hello = wire.SessionHello(instance_id="one", readable_devices=["GPU-1"])
            beat = wire.SessionHeartbeat(renew_tokens=[known.token])
            return [kind(hello=hello), kind(heartbeat=beat)]
        case "Put":
            header = wire.PutHeader(namespace=known.ref, parent_hash=HASHES[0])
            block = wire.PutBlock(block_hash=HASHES[1], checksum=1, data=b"x" * 4000)
            return [kind(header=header), kind(block=block), kind(data=b"x" * 96)]
        case "Redeem" | "Abort":
            return [kind(**session, **token)]
        case "Release":
            bad = wire.BadBlock()
            return [kind(**session, releases=[wire.LeaseRelease(**token, shards=[0], bad_blocks=[bad])])]
        case "Commit":
            return [kind(**session, **token, checksums=[1])]
        case "Acquire":
            return [kind(**session, **run, redeem_shards=[0], request_id="r")]
        case "Reserve":
            return [kind(**session, **run)]
        case "Prefetch":
            return [kind(**session, runs=[wire.PrefetchRun(**run)])]
        case "CancelPrefetch":
            return [kind(**session, prefetch_ids=[known.token])]
        case "ReportUsage":
            report = wire.UsageReport(**run, request_id="r", phase=1, attention_mass=[0.0] * len(HASHES))
            return [kind(**session, reports=[report])]
        case "DescribeBlock" | "ExplainBlock":
            return [kind(namespace=known.ref, block_hash=HASHES[0])]
        case "DropNamespace":
            return [kind(namespace=known.ref)]
        case _ if "block_hashes" in kind.DESCRIPTOR.fields_by_name:
            return [kind(**run)]
        case _:
            return [kind()]


def bounded_fields(kind: Descriptor, prefix: str = "") -> Iterator[str]:
    """Paths of strings, bytes and lists in a message of ours; "runs.block_hashes[]" are a list's elements."""
    for field in kind.fields:
        path = prefix + field.name
        textual = field.type in {field.TYPE_STRING, field.TYPE_BYTES}
        if field.is_repeated or textual:
            yield path
        if field.is_repeated and textual:
            yield f"{path}[]"
        if field.message_type is not None and field.message_type.file.package == "prefixd.v1":
            yield from bounded_fields(field.message_type, f"{path}.")


def resized(messages: list[Message], path: str, length: int) -> list[Message]:
    """The call with one field grown or cut: texts and bytes to a length, lists to a count."""
    *above, name = path.split(".")
    root = (above or [name])[0].removesuffix("[]")
    copies: list[Any] = []
    for message in messages:
        copies.append(type(message)())
        copies[-1].CopyFrom(message)
    owner = next(copy for copy in copies if _carries(copy, root))
    for step in above:
        value = getattr(owner, step)
        owner = value if isinstance(value, Message) else value[0]
    _resize(owner, name, length)
    return copies


def _carries(message: Message, name: str) -> bool:
    return message.DESCRIPTOR.fields_by_name[name].containing_oneof is None or message.HasField(name)


def _resize(owner: Any, name: str, length: int) -> None:
    field = owner.DESCRIPTOR.fields_by_name[name.removesuffix("[]")]
    value = getattr(owner, field.name)
    filler: Any = "x" if field.type == field.TYPE_STRING else b"x"
    if name.endswith("[]"):
        value[:] = [filler * length]
    elif not field.is_repeated:
        # What is there stays at the start: some texts have a form.
        setattr(owner, name, (value + filler * length)[:length])
    elif field.message_type is not None:
        first = type(value[0])()
        first.CopyFrom(value[0])
        del value[:]
        value.extend([first] * length)
    else:
        value[:] = [value[0] if len(value) else 0] * length
