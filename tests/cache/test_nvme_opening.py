"""A disk that fails while it is opened: memory is served, and the tier says why it is not there."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from prefixd_server.base.accounts import Fault
from prefixd_server.base.clock import ManualClock
from prefixd_server.base.config import Config, DramConfig, ServerConfig
from prefixd_server.base.errors import ConfigError
from prefixd_server.cache.build import DiskSeams, build_cache
from prefixd_server.media.movers import Movers
from prefixd_server.media.nvme_format import segment_name

from tests.support.faulty_files import DISK_BROKEN, FaultyFiles
from tests.support.node import MIB, start_node
from tests.support.nvme_node import NVME, cold, fill, make_engine, nvme_stats, read, start


@pytest.mark.parametrize("call", ["open", "write_at", "sync_data", "allocate"])
def test_memory_is_served_without_a_disk_that_fails_at_the_start(tmp_path: Path, call: str) -> None:
    files = FaultyFiles(always={call: DISK_BROKEN})
    node = start_node(nvme=NVME, data_dir=tmp_path, tenants=("red",), disk=DiskSeams(files=files))
    engine = make_engine(node)
    assert engine.hits(engine.put(*range(4))) == 4
    stats = nvme_stats(node)
    assert (stats.state, stats.is_ready, stats.capacity_bytes) == ("failed", False, 0)
    assert "Input/output error" in stats.state_reason
    assert node.cache.check() == []
    node.close()
    node = start(tmp_path, NVME)
    assert nvme_stats(node).state == "ready"
    node.close()


async def test_an_error_that_is_the_configurations_is_refused(tmp_path: Path) -> None:
    disk = DiskSeams(files=FaultyFiles(always={"open": errno.EACCES}))
    config = Config(nvme=NVME, dram=DramConfig(size_bytes=2 * MIB), server=ServerConfig(data_dir=tmp_path))
    movers = Movers(1, 1)
    with pytest.raises(ConfigError, match=r"nvme\.directories.*Permission denied"):
        build_cache(config, ManualClock(), movers, disk=disk)
    movers.close()


def test_a_segment_whose_header_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    node = start(tmp_path, NVME, dram_bytes=2 * MIB)
    runs = cold(make_engine(node), fill(make_engine(node), 14))
    node.close()
    files = FaultyFiles()
    files.spoil(segment_name(0), 0, 4096)
    node = start(tmp_path, NVME, DiskSeams(files=files), dram_bytes=2 * MIB)
    engine = make_engine(node)
    assert nvme_stats(node).fault_counts[Fault.SEGMENT_MISSING] > 0
    assert sum(read(engine, hashes) for hashes in runs) < 5 * len(runs)
    again = fill(engine, 14, name="again")
    assert [read(engine, hashes) for hashes in again] == [5] * 14
    assert node.cache.check() == []
    node.close()
    assert (tmp_path / "nvme" / segment_name(0)).exists()
