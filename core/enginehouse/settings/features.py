"""Settings of optional features: drafters, early exit, routing, adapters, images and recordings."""

from __future__ import annotations

import math
import re
from typing import Any

from attrs import evolve, field, frozen
from attrs.validators import ge, gt

from enginehouse.settings.reload import LIVE, WORKER

__all__ = [
    "AdapterSettings",
    "DrafterSettings",
    "ExitPolicySettings",
    "MediaSettings",
    "RouterSettings",
    "check_adapter_name",
    "check_adapters",
    "check_scale",
]


@frozen(kw_only=True)
class DrafterSettings:
    """One entry of ``drafters``: the name of a drafter, or a table with its name and settings.

    Attributes:
        name: name of the drafter.
        source: source of a second model that the drafter uses, in the format of a model's ``source``.
        backend: name of the backend of that model; unset selects the best match.
        settings: settings of that backend.
        options: further keys of the table; the drafter's options class reads them.
    """

    name: str
    source: str | None = None
    backend: str | None = None
    settings: dict[str, Any] = field(factory=dict)
    options: dict[str, Any] = field(factory=dict)

    @classmethod
    def read(cls, value: Any) -> DrafterSettings:
        """Read a name or a table.

        Raises:
            TypeError: it is neither, or one of core's keys has a wrong type.
        """
        table = {"name": value} if isinstance(value, str) else value
        if not isinstance(table, dict) or not isinstance(table.get("name"), str):
            raise TypeError("must be the name of a drafter, or a table that holds its name")
        for key, wanted, noun in (("source", str, "string"), ("backend", str, "string"), ("settings", dict, "table")):
            if not isinstance(table.get(key, wanted()), wanted):
                raise TypeError(f"{key} of the drafter {table['name']!r} must be a {noun}")
        own = {key: table[key] for key in ("name", "source", "backend", "settings") if key in table}
        return cls(**own, options={key: item for key, item in table.items() if key not in own})

    def with_source(self, source: str | None) -> DrafterSettings:
        """Return a copy with another source."""
        return evolve(self, source=source)


@frozen(kw_only=True)
class ExitPolicySettings:
    """The name of an exit policy, or a table with its name and settings.

    Attributes:
        name: name of the policy.
        options: further keys of the table; the policy's options class reads them.
    """

    name: str
    options: dict[str, Any] = field(factory=dict)

    @classmethod
    def read(cls, value: Any) -> ExitPolicySettings:
        """Read a name or a table.

        Raises:
            TypeError: it is neither.
        """
        table = {"name": value} if isinstance(value, str) else value
        if not isinstance(table, dict) or not isinstance(table.get("name"), str):
            raise TypeError("must be the name of an exit policy, or a table that holds its name")
        return cls(name=table["name"], options={key: item for key, item in table.items() if key != "name"})


@frozen(kw_only=True)
class RouterSettings:
    """``[router]``: model selection for requests for the model ``auto``, and fallback models.

    Attributes:
        strategy: name of the router; the default is ``load``.
        models: the candidate models for ``auto``, the weakest and cheapest first; empty is every model, in their order.
        default: the model to use unless there is a reason for another one; unset is the first of ``models``.
        fallbacks: model to the models that replace it, in this order, while it cannot answer.
        max_failures: number of consecutive failures after which a model is suspended.
        pause_s: time in seconds before one request tries a suspended model again.
    """

    strategy: str | None = field(default=None, metadata=LIVE)
    models: tuple[str, ...] = field(default=(), metadata=LIVE)
    default: str | None = field(default=None, metadata=LIVE)
    fallbacks: dict[str, tuple[str, ...]] = field(factory=dict, metadata=LIVE)
    max_failures: int = field(default=3, validator=ge(1), metadata=LIVE)
    pause_s: float = field(default=30.0, validator=ge(0), metadata=LIVE)

    def named_models(self) -> list[tuple[str, str]]:
        """Return every model named in these settings, with the path of the setting."""
        named = [("router.models", name) for name in self.models]
        if self.default is not None:
            named.append(("router.default", self.default))
        for name, others in self.fallbacks.items():
            path = f"router.fallbacks.{name}"
            named += [("router.fallbacks", name), *((path, other) for other in others)]
        return named


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


def _check_image_hosts(_: object, attribute: Any, value: tuple[str, ...]) -> None:
    for host in value:
        if not host or re.search(r"[/\s@]", host):
            raise ValueError(f"'{attribute.name}' must hold hosts such as images.example, not {host!r}")


@frozen(kw_only=True)
class MediaSettings:
    """``[media]``: images and recordings in messages, for models that support them.

    Attributes:
        allowed_hosts: hosts from which images may be downloaded, besides ``data:`` URLs: ``images.example``,
            ``.example.org`` for every name below it, ``*`` for all; append ``:8443`` for a port other than the default.
        allow_private: also allow hosts whose addresses are not on the public internet.
        max_images: maximum number of images and recordings per request.
        max_bytes: maximum size of an image or a recording.
        max_pixels: maximum number of pixels of an image, according to its header.
        max_audio_s: maximum duration of the recordings of a request, in seconds.
        max_redirects: maximum number of redirects per download.
        timeout_s: time limit for the download of an image, in seconds.
    """

    allowed_hosts: tuple[str, ...] = field(default=(), validator=_check_image_hosts, metadata=LIVE)
    allow_private: bool = field(default=False, metadata=LIVE)
    max_images: int = field(default=16, validator=ge(1), metadata=LIVE)
    max_bytes: int = field(default=10 * 1024 * 1024, validator=gt(0), metadata=LIVE)
    max_pixels: int = field(default=40_000_000, validator=gt(0), metadata=LIVE)
    max_audio_s: float = field(default=300.0, validator=gt(0), metadata=LIVE)
    max_redirects: int = field(default=3, validator=ge(0), metadata=LIVE)
    timeout_s: float = field(default=10.0, validator=gt(0), metadata=LIVE)
