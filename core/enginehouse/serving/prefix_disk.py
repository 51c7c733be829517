"""Where a model's prefix cache keeps sequences on the disk -> what its worker is told."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from enginehouse.contract.backend import Backend
from enginehouse.contract.errors import ConfigError
from enginehouse.settings.config import ModelSettings
from enginehouse.workers import PrefixDiskLoad

__all__ = ["plan_prefix_disk"]


def plan_prefix_disk(name: str, settings: ModelSettings, backend: Backend) -> PrefixDiskLoad | None:
    """A folder of the model's own below the one that the settings name; None where they name none.

    Raises:
        ConfigError: there is no prefix cache that could be kept.
    """
    if settings.prefix_cache_dir is None:
        return None
    path = f"models.{name}.prefix_cache_dir"
    if not settings.prefix_cache:
        raise ConfigError(f"{path}: there is nothing to save without a prefix cache; remove one of the two", path)
    if backend.opens != "runner":
        reason = f"the backend {backend.name!r} hands requests on; it has no prefix cache here"
        raise ConfigError(f"{path}: {reason}", path)
    # A name may hold slashes or be dots only; quoted, it is one folder, and no other name is the same one.
    quoted = quote(name, safe=" ").replace(".", "%2E") if name.startswith(".") else quote(name, safe=" ")
    folder = Path(settings.prefix_cache_dir).expanduser() / quoted
    return PrefixDiskLoad(folder=str(folder), max_bytes=settings.prefix_cache_disk.num_bytes, setting=path)
