"""Entry points of the wheel, read from the folders of plugins/ and contrib/. Hatchling calls this for every build."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

__all__ = ["PluginEntryPoints"]


class PluginEntryPoints(MetadataHookInterface):
    """Makes ``enginehouse_<name>`` in plugins/ or contrib/ the plugin ``<name>``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the field of [project] that pyproject.toml declares as dynamic."""
        folders = [*Path(self.root, "plugins").iterdir(), *Path(self.root, "contrib").iterdir()]
        plugins = sorted(folder.name for folder in folders if (folder / "__init__.py").is_file())
        metadata["entry-points"] = {
            "enginehouse": {name.removeprefix("enginehouse_"): name for name in plugins},
            "pytest11": {"enginehouse": "enginehouse_testkit.pytest_plugin"},
        }
