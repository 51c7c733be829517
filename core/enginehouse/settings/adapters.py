"""Settings of adapters: ``[models.<name>.adapters.<adapter>]``."""

from __future__ import annotations

import math
from typing import Any

from attrs import field, frozen

from enginehouse.settings.reload import WORKER

__all__ = ["AdapterSettings", "check_adapter_name", "check_adapters", "check_scale"]


def check_scale(_: object, attribute: Any, value: float) -> None:
    """Refuse a scale that is not a finite number. Raises ValueError."""
    if not math.isfinite(value):
        raise ValueError(f"'{attribute.name}' must be a finite number, not {value}")


def check_adapter_name(name: str) -> None:
    """Refuse a name that requests cannot give. Raises ValueError."""
    if not name.strip() or not name.isprintable() or ":" in name or "/" in name:
        raise ValueError(f"the name of an adapter must be printable, without ':' and '/', not {name!r}")


def check_adapters(_: object, __: Any, value: dict[str, Any]) -> None:
    """Validate the names of a model's adapters. Raises ValueError."""
    for name in value:
        check_adapter_name(name)


@frozen(kw_only=True)
class AdapterSettings:
    """One adapter (LoRA) of a model.

    Attributes:
        source: GGUF file, or folder with ``adapter_config.json`` (PEFT, mlx-lm); a path may be relative to the
            configuration file. Also the id of a downloaded repository; for ``remote``, the upstream server's name.
        scale: strength of the adapter where a request gives none; 1 is as trained.
    """

    source: str = field(metadata=WORKER)
    scale: float = field(default=1.0, validator=check_scale, metadata=WORKER)
