"""Requests as an enemy would send them: legal ones with hostile contents, and bytes that are no message.

Legal ones are generated from the descriptors, so that a new field is fuzzed
without a word here. Placeholders stand for what only a running daemon knows.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st
from prefixd.v1 import types_pb2

from tests.support.node import chain
from tests.support.request_fields import METHODS, Known, sound

SESSION, TOKEN, FINGERPRINT = b"S" * 16, b"T" * 16, b"F" * 32
KEPT = chain("kept", 1, 2, 3)
OTHERS = chain("other", 1, 2)
TEXTS = ["", "x", "revision:1", "sha256:00", "sha256", "bfloat16", "importance", "lru", "auto", "é" * 40]
TEXTS += [
    "x" * 128,
    "x" * 129,
    "x" * 1024,
    "x" * 1025,
    "a\0b",
    "\x1b[2J\n",
    "../../etc/passwd",
    "\U0001f4a3" * 300,
]
BYTES = [b"", b"\0", b"x" * 15, b"x" * 16, b"x" * 17, b"x" * 31, b"x" * 33, b"\xff" * 32, b"x" * 5000]
EDGES = [
    0,
    1,
    2,
    3,
    15,
    16,
    32,
    255,
    1024,
    1025,
    4095,
    4096,
    16_384,
    65_535,
    65_536,
    2**31 - 1,
    2**31,
    2**32 - 1,
]
WIDE = [2**40, 2**53, 2**63 - 1, 2**63, 2**64 - 1]
LONG_COUNTS = [17, 65, 1025, 4097, 16_385]


def hostile_calls(method: str) -> st.SearchStrategy[list[bytes]]:
    """The messages of one call of a method, encoded."""
    kind = METHODS[method].input_type
    legal = messages(kind).map(lambda message: message.SerializeToString())
    one = st.one_of(legal, legal, broken(method))
    return st.lists(one, max_size=4) if METHODS[method].client_streaming else one.map(lambda data: [data])


def messages(kind: Descriptor) -> st.SearchStrategy[Any]:
    """Any message of a kind. Every field is there or not."""

    @st.composite
    def build(draw: st.DrawFn) -> Message:
        message: Any = GetMessageClass(kind)()
        for field in kind.fields:
            if draw(st.integers(0, 9)) < (2 if field.containing_oneof else 8):
                _set(draw, message, field)
        return message

    return build()


def broken(method: str) -> st.SearchStrategy[bytes]:
    """Bytes near to a sound message, or far from any."""
    known = Known(_placeholder_ref(), SESSION, TOKEN)
    whole = sound(method, known)[0].SerializeToString()
    return st.one_of(st.binary(max_size=200), mutated(whole), st.sampled_from(MALFORMED))


MALFORMED = [
    b"\xff" * 20,
    b"\x0a\xff\xff\xff\xff\x0f",
    b"\x0b" * 200,
    b"\x0a\x02\x0a" * 100,
    b"\x08" + b"\x80" * 11 + b"\x01",
    b"\x00",
    b"\x0a\x01\xff",
    b"\x0f\x00",
]
"""A bad tag, lengths beyond the end, groups without end, an endless varint, field 0, no UTF-8, a bad type."""


def mutated(data: bytes) -> st.SearchStrategy[bytes]:
    """The data with some of its bytes changed, cut, doubled or put in."""

    @st.composite
    def mutate(draw: st.DrawFn) -> bytes:
        changed = bytearray(data)
        for _ in range(draw(st.integers(1, 4))):
            at = draw(st.integers(0, len(changed)))
            match draw(st.integers(0, 3)):
                case 0:
                    changed[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
                case 1:
                    del changed[at : at + draw(st.integers(1, 8))]
                case 2:
                    changed[at:at] = changed[max(0, at - draw(st.integers(1, 40))) : at]
                case _:
                    changed[at:at] = draw(st.binary(max_size=8))
        return bytes(changed)

    return mutate()


def filled(message: Any, known: Known) -> None:
    """Puts what the daemon knows in the place of placeholders, wherever they are."""
    for field, value in message.ListFields():
        if field.message_type is None:
            names = {SESSION: known.session_id, TOKEN: known.token}
            if field.type == field.TYPE_BYTES and not field.is_repeated:
                setattr(message, field.name, names.get(value, value))
            elif field.type == field.TYPE_BYTES:
                value[:] = [names.get(item, item) for item in value]
        elif not (field.message_type.GetOptions().map_entry):
            for inner in value if field.is_repeated else [value]:
                if getattr(inner, "fingerprint", b"") == FINGERPRINT:
                    inner.CopyFrom(known.ref)
                filled(inner, known)


def _placeholder_ref() -> Any:
    return types_pb2.NamespaceRef(fingerprint=FINGERPRINT, epoch=1)


def _set(draw: st.DrawFn, message: Any, field: FieldDescriptor) -> None:
    if not field.is_repeated:
        if field.message_type is not None:
            getattr(message, field.name).CopyFrom(draw(_nested(field)))
        else:
            setattr(message, field.name, draw(_scalars(field)))
        return
    elements = _nested(field) if field.message_type is not None else _scalars(field)
    if field.name == "block_hashes" and draw(st.integers(0, 3)):
        values: list[Any] = draw(st.sampled_from([KEPT, KEPT[:1], OTHERS, [*KEPT, *OTHERS], KEPT[::-1]]))
    elif draw(st.integers(0, 30)) == 0:
        values = [draw(elements)] * draw(st.sampled_from(LONG_COUNTS))
    else:
        values = draw(st.lists(elements, max_size=4))
    getattr(message, field.name).extend(values)


def _nested(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    kind = field.message_type
    if kind.full_name == "google.protobuf.Duration":
        return _durations(GetMessageClass(kind))
    if kind.name == "NamespaceRef":
        return st.one_of(st.just(_placeholder_ref()), st.just(_placeholder_ref()), messages(kind))
    if kind.name == "NamespaceSpec":
        return st.one_of(messages(kind), _near_spec())
    return messages(kind)


def _near_spec() -> st.SearchStrategy[Any]:
    """A sound spec with one field of a hostile one."""
    whole: Any = sound("OpenNamespace", Known(_placeholder_ref(), SESSION, TOKEN))[0]

    def merged(other: Any) -> Any:
        spec = type(whole.spec)()
        spec.CopyFrom(whole.spec)
        for field, _ in other.ListFields()[:1]:
            spec.ClearField(field.name)
            one = type(spec)()
            one.CopyFrom(other)
            for further, _ in other.ListFields()[1:]:
                one.ClearField(further.name)
            spec.MergeFrom(one)
        return spec

    return messages(whole.spec.DESCRIPTOR).map(merged)


def _durations(kind: Any) -> st.SearchStrategy[Any]:
    seconds = st.sampled_from([0, 1, -1, 60, 61, 315_576_000_000, 315_576_000_001, 2**63 - 1, -(2**63)])
    nanos = st.sampled_from([0, 1, -1, 999_999_999, 1_000_000_000, 2**31 - 1, -(2**31)])
    return st.builds(lambda s, n: kind(seconds=s, nanos=n), seconds, nanos)


def _scalars(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    f = FieldDescriptor
    if field.type == f.TYPE_BYTES:
        names = {"session_id": SESSION, "token": TOKEN}
        known = st.just(names.get(field.name, TOKEN))
        return st.one_of(known, known, st.sampled_from([*BYTES, *KEPT, *OTHERS]), st.binary(max_size=64))
    if field.type == f.TYPE_STRING:
        return st.one_of(st.sampled_from(TEXTS), st.text(max_size=40))
    if field.type == f.TYPE_ENUM:
        return st.sampled_from([0, 1, 2, 3, 4, 5, 99, -1, 2**31 - 1, -(2**31)])
    if field.type == f.TYPE_BOOL:
        return st.booleans()
    if field.type in {f.TYPE_FLOAT, f.TYPE_DOUBLE}:
        return st.sampled_from([0.0, 0.5, 1.0, -1.0, 1e38, float("inf"), float("nan")])
    wide = field.type in {f.TYPE_UINT64, f.TYPE_FIXED64}
    return st.sampled_from([0, 0, 0, *EDGES, *(WIDE if wide else [])])
