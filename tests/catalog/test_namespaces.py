"""Namespaces, epochs, spaces and pools."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from prefixd_server.base.errors import LimitReached, NotFound, StateConflict
from prefixd_server.base.types import KvGroup, KvGroupKind, NamespaceRef, NamespaceSpec
from prefixd_server.catalog.namespaces import Namespaces

from tests.support.specs import spec


def test_equal_specs_are_one_namespace() -> None:
    names = Namespaces()
    first = names.open("red", spec(), 1, 0.0, 10)
    assert names.open("red", spec(), 5, 1.0, 10) is first
    assert first.ref.epoch == 1


@pytest.mark.parametrize("field", [item.name for item in fields(NamespaceSpec)])
def test_every_field_of_the_spec_is_part_of_the_identity(field: str) -> None:
    base = spec()
    value = getattr(base, field)
    if field == "kv_groups":
        other: object = (*value, KvGroup(KvGroupKind.FULL_ATTENTION, 4096, 1))
    elif isinstance(value, str):
        other = value + "x"
    else:
        other = value + 1
    assert replace(base, **{field: other}).fingerprint() != base.fingerprint()


def test_text_cannot_move_between_neighbouring_fields_unnoticed() -> None:
    one = replace(spec(), kv_dtype="ab", kv_scales_fingerprint="c")
    other = replace(spec(), kv_dtype="a", kv_scales_fingerprint="bc")
    assert one.fingerprint() != other.fingerprint()


def test_the_same_spec_is_another_namespace_for_another_tenant() -> None:
    names = Namespaces()
    red, blue = names.open("red", spec(), 1, 0.0, 10), names.open("blue", spec(), 1, 0.0, 10)
    assert red is not blue
    assert names.make_space(red, 0, 0) != names.make_space(blue, 0, 0)


def test_a_foreign_namespace_looks_like_one_that_does_not_exist() -> None:
    names = Namespaces()
    red = names.open("red", spec(), 1, 0.0, 10)
    with pytest.raises(NotFound) as foreign:
        names.get("blue", red.ref)
    with pytest.raises(NotFound) as unknown:
        Namespaces().get("blue", red.ref)
    assert str(foreign.value) == str(unknown.value)


def test_an_old_epoch_is_refused_after_a_drop_and_the_new_one_is_higher() -> None:
    names = Namespaces()
    first = names.open("red", spec(), 3, 0.0, 10)
    names.drop(first, 4)
    with pytest.raises(StateConflict) as stale:
        names.get("red", first.ref)
    assert stale.value.reason == "NAMESPACE_EPOCH_STALE"
    second = names.open("red", spec(), 3, 0.0, 10)
    assert second.ref == NamespaceRef(first.ref.fingerprint, 4)


def test_spaces_are_never_used_again() -> None:
    names = Namespaces()
    first = names.open("red", spec(), 1, 0.0, 10)
    space = names.make_space(first, 0, 0)
    assert names.drop(first, 2) == [space]
    second = names.open("red", spec(), 1, 0.0, 10)
    assert names.make_space(second, 0, 0) != space


def test_a_tenant_at_its_limit_is_refused_and_others_are_not() -> None:
    names = Namespaces()
    names.open("red", spec("a"), 1, 0.0, 1)
    with pytest.raises(LimitReached):
        names.open("red", spec("b"), 1, 0.0, 1)
    names.open("blue", spec("b"), 1, 0.0, 1)


def test_pools_are_told_apart_by_tenant_and_slot_size() -> None:
    names = Namespaces()
    pools = {names.pool(tenant, size) for tenant in ("red", "blue") for size in (4096, 8192)}
    assert len(pools) == 4
    assert names.pool("red", 4096) in pools
    assert sorted(names.pools_of_tenant("red")) == sorted({names.pool("red", 4096), names.pool("red", 8192)})
