"""Number of threads that this process can run in parallel on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["count_cores", "read_quota", "usable_cores"]

_CPU_FOLDER = Path("/sys/devices/system/cpu")
_QUOTA_FILE = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """Number of physical cores that this process may use, at least 1.

    Two hardware threads of one core share its arithmetic units, so a second one only adds barrier waits. A container's
    CPU quota also counts: threads beyond it are paused for whole scheduler periods.
    """
    if hasattr(os, "sched_getaffinity"):
        cpus: Iterable[int] = os.sched_getaffinity(0)
    else:
        cpus = range(os.cpu_count() or 1)
    cores = count_cores(cpus, _CPU_FOLDER)
    quota = read_quota(_QUOTA_FILE)
    return max(1, min(cores, quota) if quota else cores)


def count_cores(cpus: Iterable[int], folder: Path) -> int:
    """Count distinct cores among the logical CPUs; if the topology is unknown, each CPU counts."""
    cores = set()
    for cpu in cpus:
        try:
            cores.add((folder / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text())
        except OSError:
            cores.add(str(cpu))
    return len(cores)


def read_quota(file: Path) -> int | None:
    """Number of cores allowed by the cgroup, rounded up; None means no limit."""
    try:
        quota, period = file.read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else -(-int(quota) // int(period))
