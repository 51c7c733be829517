"""What a figure was measured on: without machine, date and versions it means nothing."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from attrs import frozen

__all__ = ["Machine", "describe_machine", "on_cores", "usable_cores"]

_DISTRIBUTIONS = ("enginehouse", "llama-cpp-python", "xllamacpp", "litestar", "uvicorn", "numpy")


@frozen
class Machine:
    """The place and time of a measurement. ``load_average`` is that of the last minute before it began."""

    cpu: str
    num_cores: int
    memory_gib: float
    system: str
    python: str
    versions: dict[str, str]
    started: str
    load_average: float

    @property
    def is_quiet(self) -> bool:
        """Whether so little else ran before that the figures may be quoted."""
        return self.load_average < 0.25

    def __str__(self) -> str:
        return f"{self.cpu}, {self.num_cores} cores, {self.memory_gib:.0f} GiB, {self.system}, Python {self.python}"


def usable_cores() -> list[int]:
    """The cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))


@contextlib.contextmanager
def on_cores(cores: Sequence[int] | None) -> Iterator[None]:
    """Run on these cores only; processes started inside inherit them from their first instruction. None is all."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before if cores is None else cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def describe_machine() -> Machine:
    """This machine, now."""
    return Machine(
        cpu=_cpu_name(),
        num_cores=len(usable_cores()),
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        versions=_versions(),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        load_average=os.getloadavg()[0],
    )


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {}
    for distribution in _DISTRIBUTIONS:
        try:
            found[distribution] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return found
