"""The converter that reads all settings, and the options of backends and plugins, from plain data."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from cattrs import Converter

from enginehouse.settings.auth import KeyField, KeySettings
from enginehouse.settings.features import DrafterSettings, ExitPolicySettings
from enginehouse.settings.limits import ByteCount, MemoryBudget
from enginehouse.settings.structuring import strict_converter


@lru_cache(maxsize=4)
def settings_converter(folder: str) -> Converter:
    """Return a strict converter, which is kept, as it compiles a function for each class.

    Args:
        folder: folder to which values of the type ``Path`` are relative; empty is the working folder.
    """
    converter = strict_converter()

    def structure_key(value: Any, _: Any) -> Any:
        if isinstance(value, str):
            return value
        if not isinstance(value, dict) or not isinstance(value.get("key", ""), str):
            # The value is not shown: it may be a key.
            raise TypeError("must be a string, or a table whose key is a string")
        return converter.structure(value, KeySettings)

    converter.register_structure_hook_func(lambda kind: kind == KeyField, structure_key)
    converter.register_structure_hook(Path, lambda value, _: Path(folder, Path(value).expanduser()))
    for with_text_form in (ByteCount, MemoryBudget, DrafterSettings, ExitPolicySettings):
        converter.register_structure_hook(with_text_form, lambda value, kind: kind.read(value))
    return converter
