"""Messages of the wire as plain values for people and scripts: bytes in hex, spans in seconds."""

from __future__ import annotations

from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp


def plain(message: Message) -> Any:
    """A dict of every field, in the order of the proto, unset ones included.

    bytes become hex, Duration becomes seconds (float), Timestamp becomes ISO
    8601, enums become their names without the type's prefix, maps become dicts,
    uint64 stays a number.
    """
    if isinstance(message, Duration):
        return message.seconds + message.nanos / 1e9
    if isinstance(message, Timestamp):
        return message.ToJsonString()
    return {field.name: _field(message, field) for field in message.DESCRIPTOR.fields}


def _field(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        inner = field.message_type.fields_by_name["value"]
        return {str(key): _one(value[key], inner) for key in sorted(value)}
    if field.is_repeated:
        return [_one(item, field) for item in value]
    if field.message_type is not None and not message.HasField(field.name):
        return None
    return _one(value, field)


def _one(value: Any, field: Any) -> Any:
    if field.message_type is not None:
        return plain(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return str(value) if known is None else _short(known.name, field.enum_type.values[0].name)
    return value.hex() if isinstance(value, bytes) else value


def _short(name: str, zero_name: str) -> str:
    """TIER_DRAM -> DRAM: every enum's zero is <PREFIX>_UNSPECIFIED."""
    return name.removeprefix(zero_name.removesuffix("UNSPECIFIED"))
