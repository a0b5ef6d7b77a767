"""Which namespaces exist, at which epoch, and the spaces they own.

A space is a small number that stands for (tenant, fingerprint, epoch, shard,
KV group) in every block's key; spaces are never reused within a boot. A pool is
a small number for (tenant, slot size): segments belong to one pool at a time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from prefixd_server.base.errors import LimitReached, NotFound, StateConflict
from prefixd_server.base.types import NamespaceRef, NamespaceSpec


@dataclass(slots=True)
class Namespace:
    """One namespace at its current epoch. `spaces` maps (shard, kv_group) to its space.

    number tells it from all others of this boot, other epochs of the same name included.
    """

    tenant: str
    spec: NamespaceSpec
    ref: NamespaceRef
    opened_at: float
    number: int
    spaces: dict[tuple[int, int], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pool:
    """Slots of one size of one tenant."""

    tenant: str
    slot_bytes: int


class Namespaces:
    """Registry of namespaces, spaces and pools. Owned by the event loop."""

    def __init__(self) -> None:
        self._by_name: dict[tuple[str, bytes], Namespace] = {}
        self._epochs: dict[tuple[str, bytes], int] = {}
        self._owners: list[tuple[Namespace, int, int]] = []
        self._pools: list[Pool] = []
        self._pool_ids: dict[Pool, int] = {}
        self._pools_of: dict[str, list[int]] = {}
        self._name_counts: Counter[str] = Counter()
        self._open_counts: Counter[str] = Counter()
        self._space_counts: Counter[str] = Counter()
        self._made_count = 0

    def open(
        self, tenant: str, spec: NamespaceSpec, fresh_epoch: int, opened_at: float, count_max: int
    ) -> Namespace:
        """The namespace of this spec, made at `fresh_epoch` when it is new (or dropped earlier).

        Raises:
            LimitReached: NAMESPACE_LIMIT, when the tenant has `count_max` already.
        """
        name = (tenant, spec.fingerprint())
        existing = self._by_name.get(name)
        if existing is not None:
            return existing
        if self._open_counts[tenant] >= count_max:
            raise LimitReached(
                "NAMESPACE_LIMIT",
                f"{count_max} namespaces are open; drop some with DropNamespace, or raise "
                "catalog.namespace_count_max",
                limit=count_max,
            )
        if name not in self._epochs:
            self._name_counts[tenant] += 1
        epoch = self._epochs.setdefault(name, fresh_epoch)
        made = Namespace(tenant, spec, NamespaceRef(name[1], epoch), opened_at, self._made_count)
        self._made_count += 1
        self._by_name[name] = made
        self._open_counts[tenant] += 1
        return made

    def get(self, tenant: str, ref: NamespaceRef) -> Namespace:
        """The namespace that `ref` names.

        Raises:
            NotFound: NAMESPACE_UNKNOWN, also when it is another tenant's.
            StateConflict: NAMESPACE_EPOCH_STALE, when it was dropped since.
        """
        name = (tenant, ref.fingerprint)
        found = self._by_name.get(name)
        if found is not None and found.ref.epoch == ref.epoch:
            return found
        if name in self._epochs:
            raise StateConflict(
                "NAMESPACE_EPOCH_STALE",
                f"namespace epoch {ref.epoch} is over (the namespace was dropped); call OpenNamespace for "
                "the new one",
                field="namespace.epoch",
                value=ref.epoch,
            )
        raise NotFound(
            "NAMESPACE_UNKNOWN",
            f"no namespace {ref.fingerprint.hex()[:16]}...; call OpenNamespace first (again after "
            "a daemon restart)",
            field="namespace.fingerprint",
            value=ref.fingerprint.hex(),
        )

    def is_open(self, namespace: Namespace) -> bool:
        """Whether it was not dropped."""
        return self._by_name.get((namespace.tenant, namespace.ref.fingerprint)) is namespace

    def drop(self, namespace: Namespace, new_epoch: int) -> list[int]:
        """Forgets the namespace and raises its epoch; its former spaces are returned."""
        name = (namespace.tenant, namespace.ref.fingerprint)
        if new_epoch <= namespace.ref.epoch:
            raise AssertionError(f"epochs only rise: {new_epoch} after {namespace.ref.epoch}")
        self._epochs[name] = new_epoch
        del self._by_name[name]
        self._open_counts[namespace.tenant] -= 1
        return list(namespace.spaces.values())

    def space(self, namespace: Namespace, shard: int, kv_group: int) -> int | None:
        """The space of one shard and KV group, None when nothing was ever stored there."""
        return namespace.spaces.get((shard, kv_group))

    def make_space(self, namespace: Namespace, shard: int, kv_group: int) -> int:
        """Gives the shard and KV group a space of its own. The caller adds it to the tree."""
        space = len(self._owners)
        self._owners.append((namespace, shard, kv_group))
        self._space_counts[namespace.tenant] += 1
        namespace.spaces[shard, kv_group] = space
        return space

    def owner(self, space: int) -> tuple[Namespace, int, int]:
        """(namespace, shard, kv_group) of a space."""
        return self._owners[space]

    def pool(self, tenant: str, slot_bytes: int) -> int:
        """The pool of this tenant and slot size, made when it is new."""
        wanted = Pool(tenant, slot_bytes)
        number = self._pool_ids.get(wanted)
        if number is None:
            number = self._pool_ids[wanted] = len(self._pools)
            self._pools.append(wanted)
            self._pools_of.setdefault(tenant, []).append(number)
        return number

    def has_pool(self, tenant: str, slot_bytes: int) -> bool:
        """Whether the tenant uses slots of this size already."""
        return Pool(tenant, slot_bytes) in self._pool_ids

    def is_known(self, tenant: str, fingerprint: bytes) -> bool:
        """Whether the namespace was open in this boot, now or once."""
        return (tenant, fingerprint) in self._epochs

    def name_count(self, tenant: str) -> int:
        """Namespaces of the tenant that were open in this boot, now or once."""
        return self._name_counts[tenant]

    def space_count(self, tenant: str) -> int:
        """Spaces that were made for the tenant in this boot."""
        return self._space_counts[tenant]

    def pool_of(self, number: int) -> Pool:
        """What a pool number stands for."""
        return self._pools[number]

    @property
    def pool_count(self) -> int:
        """Pools made so far."""
        return len(self._pools)

    def pools_of_tenant(self, tenant: str) -> list[int]:
        """The tenant's pools."""
        return list(self._pools_of.get(tenant, ()))

    def list(self, tenant: str | None = None) -> list[Namespace]:
        """Namespaces, newest first; of one tenant, or of all."""
        chosen = [n for n in self._by_name.values() if tenant is None or n.tenant == tenant]
        return sorted(chosen, key=lambda n: n.opened_at, reverse=True)
