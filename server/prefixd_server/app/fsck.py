"""Checks a store on disk: every record's place, every block's bytes, every block's ancestors.

What is found is a value; forgetting is the caller's (offline.py). Problems are
damage; leftovers are what a daemon ignores and deletes by itself when it starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import xxhash
from numpy.typing import NDArray

from prefixd_server.app.offline_store import OfflineStore
from prefixd_server.index.chains import chains_of
from prefixd_server.index.records import Keys, Records, distinct_spaces, keys_of
from prefixd_server.media.aligned import aligned_buffer, round_up
from prefixd_server.media.nvme_files import open_direct
from prefixd_server.media.nvme_format import HEADER_BYTES

READ_BYTES = 8 << 20
"""Bytes of one read: large enough for the disk's full speed."""


class Finding(Enum):
    """What may be wrong with a record, in the order in which it is looked for."""

    FOREIGN_STORE = "of another store"
    SEGMENT_MISSING = "its segment file is missing"
    SEGMENT_DAMAGED = "its segment's header or length is wrong"
    STALE_GENERATION = "of an earlier use of its segment"
    NAMESPACE_GONE = "its namespace was dropped or is unknown"
    OUT_OF_PLACE = "not where a slot of its size can be"
    SLOT_SHARED = "another record names the same slot"
    BYTES_UNREADABLE = "the disk does not give its bytes"
    BYTES_WRONG = "its bytes do not match their checksum"
    ORPHANED = "an ancestor is missing"


LEFTOVERS = frozenset({Finding.STALE_GENERATION, Finding.NAMESPACE_GONE, Finding.ORPHANED})
"""What crashes leave behind without any damage."""


@dataclass(slots=True)
class Verdict:
    """Records by finding; good + sum of findings = records. Byte counts are of blocks read."""

    record_count: int = 0
    good_count: int = 0
    read_bytes: int = 0
    corrupt_record_count: int = 0
    index_damage: str = ""
    missing_directories: list[str] = field(default_factory=list)
    damaged_segments: list[int] = field(default_factory=list)
    findings: dict[Finding, int] = field(default_factory=dict)
    doomed: Keys | None = None
    """Keys of all records with a finding."""

    @property
    def problem_count(self) -> int:
        """Damaged things; leftovers do not count."""
        damaged = sum(count for finding, count in self.findings.items() if finding not in LEFTOVERS)
        return (
            damaged
            + self.corrupt_record_count
            + bool(self.index_damage)
            + len(self.missing_directories)
            + len(self.damaged_segments)
        )


class Check:
    """One check of one store. run() reads every block."""

    def __init__(self, store: OfflineStore) -> None:
        self._store = store
        self._records = store.records
        self._finding: NDArray[np.int8] = np.full(len(self._records), -1, dtype=np.int8)
        """Place in Finding of what is wrong with each record; -1 for nothing."""
        self._kinds = list(Finding)
        self._read_bytes = 0

    def run(self) -> Verdict:
        """The verdict. Raises OSError when a file cannot be opened."""
        self._check_places()
        for segment in np.unique(self._records["segment"]).tolist():
            self._check_bytes(segment)
        self._check_ancestors()
        store = self._store
        wrong = self._finding >= 0
        counts = np.bincount(self._finding[wrong], minlength=len(self._kinds)).tolist()
        return Verdict(
            record_count=len(self._records),
            good_count=int((~wrong).sum()),
            read_bytes=self._read_bytes,
            corrupt_record_count=len(store.corrupt_keys),
            index_damage=store.index_damage,
            missing_directories=store.missing_directories(),
            damaged_segments=sorted(number for number, file in store.segments.items() if not file.whole),
            findings={kind: count for kind, count in zip(self._kinds, counts, strict=True) if count},
            doomed=keys_of(self._records[wrong]),
        )

    def _mark(self, where: NDArray[np.bool_], finding: Finding) -> None:
        """The first finding of a record stands."""
        self._finding[where & (self._finding < 0)] = self._kinds.index(finding)

    # -- places --------------------------------------------------------------------------------

    def _check_places(self) -> None:
        records, segments = self._records, self._records["segment"]
        uuid = np.frombuffer(self._store.marker.store_uuid, dtype=np.uint8)
        self._mark((records["store_uuid"] != uuid).any(axis=1), Finding.FOREIGN_STORE)
        self._mark(~np.isin(segments, list(self._store.segments)), Finding.SEGMENT_MISSING)
        for number, file in self._store.segments.items():
            here = segments == number
            if not file.whole or file.header is None:
                self._mark(here, Finding.SEGMENT_DAMAGED)
                continue
            header = file.header
            self._mark(here & (records["generation"] != header.generation), Finding.STALE_GENERATION)
            needed = -(-records["block_bytes"].astype(np.int64) // 4096) * 4096
            slot_count = header.segment_bytes // header.slot_bytes if header.slot_bytes else 0
            outside = (needed != header.slot_bytes) | (records["slot"] >= slot_count)
            self._mark(here & outside, Finding.OUT_OF_PLACE)
        known = {identity for record in self._store.namespaces for identity in record.spaces()}
        for identity, where in distinct_spaces(records):
            if identity not in known:
                gone = np.zeros(len(records), dtype=np.bool_)
                gone[where] = True
                self._mark(gone, Finding.NAMESPACE_GONE)
        self._check_sharing()

    def _check_sharing(self) -> None:
        """Of several records for one slot at most one can be right; which one, its bytes tell."""
        places = self._records["segment"].astype(np.uint64) << np.uint64(32) | self._records["slot"]
        candidates = np.flatnonzero(self._finding < 0)
        _, inverse, counts = np.unique(places[candidates], return_inverse=True, return_counts=True)
        self._shared = np.zeros(len(self._records), dtype=np.bool_)
        self._shared[candidates[counts[inverse] > 1]] = True

    # -- bytes ---------------------------------------------------------------------------------

    def _check_bytes(self, segment: int) -> None:
        chosen = np.flatnonzero((self._records["segment"] == segment) & (self._finding < 0))
        if not len(chosen):
            return
        chosen = chosen[np.argsort(self._records["slot"][chosen], kind="stable")]
        file = self._store.segments[segment]
        fd, _ = open_direct(self._store.files, file.path, os.O_RDONLY)
        try:
            for group in _groups(self._records, chosen):
                self._check_group(fd, group)
        finally:
            self._store.files.close(fd)

    def _check_group(self, fd: int, group: NDArray[np.int64]) -> None:
        """Blocks whose slots lie close together, in one read."""
        first, last = self._records[group[0]], self._records[group[-1]]
        stride = round_up(int(first["block_bytes"]))
        start = int(first["slot"]) * stride
        extent = aligned_buffer((int(last["slot"]) + 1) * stride - start)
        if not self._filled(fd, extent, HEADER_BYTES + start):
            if len(group) == 1:
                self._finding[group] = self._kinds.index(Finding.BYTES_UNREADABLE)
            else:
                for place in group:
                    self._check_group(fd, np.array([place]))
            return
        self._read_bytes += extent.nbytes
        for place in group.tolist():
            record = self._records[place]
            at = int(record["slot"]) * stride - start
            if xxhash.xxh3_64_intdigest(extent[at : at + int(record["block_bytes"])]) != record["checksum"]:
                finding = Finding.SLOT_SHARED if self._shared[place] else Finding.BYTES_WRONG
                self._finding[place] = self._kinds.index(finding)

    def _filled(self, fd: int, target: memoryview, offset: int) -> bool:
        done = 0
        try:
            while done < target.nbytes:
                got = self._store.files.read_at(fd, target[done:], offset + done)
                if got == 0:
                    return False
                done += got
        except OSError:
            return False
        return True

    # -- ancestors -----------------------------------------------------------------------------

    def _check_ancestors(self) -> None:
        rng = np.random.default_rng()
        good = np.flatnonzero(self._finding < 0)
        for _, where in distinct_spaces(self._records[good]):
            of_space = good[where]
            orphans = chains_of(self._records[of_space], rng).orphans
            self._finding[of_space[orphans]] = self._kinds.index(Finding.ORPHANED)


def _groups(records: Records, chosen: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Cuts records, ordered by slot, into groups that one read of at most READ_BYTES covers."""
    strides = -(-records["block_bytes"][chosen].astype(np.int64) // 4096) * 4096
    starts = records["slot"][chosen].astype(np.int64) * strides
    ends = starts + strides
    at = 0
    while at < len(chosen):
        end = max(at + 1, int(np.searchsorted(ends, starts[at] + READ_BYTES, side="right")))
        yield chosen[at:end]
        at = end
