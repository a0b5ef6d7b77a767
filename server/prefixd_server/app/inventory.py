"""What is in a store on disk, by namespace and age, from the index alone."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixd_server.app.offline_store import OfflineStore
from prefixd_server.index.records import Records, distinct_spaces

AGE_LIMITS_S = (3600.0, 86_400.0)
"""Ages that tell bytes apart: below an hour, below a day, older."""


@dataclass(slots=True)
class InventoryLine:
    """One namespace at its epoch. idle_s: seconds since the last use of any block."""

    tenant: str
    fingerprint: str
    epoch: int
    model_id: str
    block_count: int
    block_bytes: int
    idle_s: float
    bytes_by_age: tuple[int, int, int]


@dataclass(slots=True)
class Inventory:
    """See the module. dead_record_count: of dropped namespaces, lost or reused segments, or corrupt."""

    store_uuid: str
    directories: tuple[str, ...]
    segment_count: int
    segment_bytes: int
    index_bytes: int
    dead_record_count: int
    lines: list[InventoryLine]

    def facts(self) -> dict[str, object]:
        """As plain values."""
        return dataclasses.asdict(self)


def take_inventory(store: OfflineStore, now: float) -> Inventory:
    """Counts what the index holds at wall time `now`; reads no block."""
    present = _in_place(store)
    records = store.records[present]
    rows_of: dict[bytes, list[NDArray[np.int64]]] = {}
    for identity, where in distinct_spaces(records):
        rows_of.setdefault(identity, []).append(np.arange(where.start, where.stop))
    lines, live = [], 0
    for namespace in store.namespaces:
        if namespace.spec is None:
            continue
        chosen = [rows for identity in namespace.spaces() for rows in rows_of.get(identity, [])]
        mine = records[np.concatenate(chosen)] if chosen else records[:0]
        live += len(mine)
        lines.append(
            InventoryLine(
                tenant=namespace.tenant,
                fingerprint=namespace.fingerprint.hex(),
                epoch=namespace.epoch,
                model_id=namespace.spec.model_id,
                block_count=len(mine),
                block_bytes=int(mine["block_bytes"].sum(dtype=np.int64)),
                idle_s=max(0.0, now - float(mine["last_use"].max())) if len(mine) else 0.0,
                bytes_by_age=_by_age(mine, now),
            )
        )
    headers = [file.header for file in store.segments.values() if file.header]
    index = store.index_directory
    return Inventory(
        store_uuid=store.marker.store_uuid.hex(),
        directories=store.marker.directories,
        segment_count=len(headers),
        segment_bytes=max((header.segment_bytes for header in headers), default=0),
        index_bytes=sum(p.stat().st_size for p in index.iterdir() if p.is_file()) if index.is_dir() else 0,
        dead_record_count=len(store.records) - live + len(store.corrupt_keys),
        lines=sorted(lines, key=lambda line: line.block_bytes, reverse=True),
    )


def _in_place(store: OfflineStore) -> NDArray[np.bool_]:
    """Records of the present generation of a whole segment."""
    present = np.zeros(len(store.records), dtype=np.bool_)
    for number, file in store.segments.items():
        if file.whole and file.header is not None:
            here = store.records["segment"] == number
            present |= here & (store.records["generation"] == file.header.generation)
    return present


def _by_age(records: Records, now: float) -> tuple[int, int, int]:
    ages = np.digitize(now - records["last_use"], AGE_LIMITS_S)
    sizes = np.bincount(ages, weights=records["block_bytes"].astype(np.float64), minlength=3)
    return int(sizes[0]), int(sizes[1]), int(sizes[2])
