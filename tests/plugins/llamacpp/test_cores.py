"""How many threads may run, from the topology and the container's quota."""

from __future__ import annotations

from pathlib import Path

import pytest

from enginehouse_llamacpp.cores import count_cores, read_quota, usable_cores

pytestmark = pytest.mark.llamacpp


def test_hardware_threads_of_one_core_count_once(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings)

    assert count_cores(range(4), tmp_path) == 2
    assert count_cores([0, 2], tmp_path) == 1


def test_cpus_count_where_the_topology_is_unknown(tmp_path: Path) -> None:
    assert count_cores(range(3), tmp_path) == 3


@pytest.mark.parametrize(("text", "cores"), [("max 100000", None), ("150000 100000", 2), ("100000 100000", 1)])
def test_quota_is_rounded_up(tmp_path: Path, text: str, cores: int | None) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(text)

    assert read_quota(file) == cores
    assert read_quota(tmp_path / "missing") is None


def test_this_machine_has_a_core() -> None:
    assert usable_cores() >= 1
