"""Settings of a model, ``compressor`` in ``[models.<name>]``: reads and checks them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import field, frozen
from attrs.validators import ge, gt, le, optional

from enginehouse.contract.compressor import Compressor
from enginehouse.contract.errors import ConfigError
from enginehouse.settings.config import structure_options
from enginehouse.settings.structuring import closest

__all__ = ["CompressorSettings", "needs_embeddings", "read_settings"]


@frozen(kw_only=True)
class CompressorSettings:
    """``compressor``: the name of a method, or a table with these keys.

    Attributes:
        method: name of a compressor.
        ratio: share of the compressible tokens that is kept; unset is 0.5, for methods that have a ratio.
        when: ``always``, ``overflow`` only for prompts that exceed the model's context and would otherwise be refused,
            ``asked`` only if a request asks for it.
        min_tokens: for ``always``: prompts with fewer compressible tokens are not compressed.
        system: also compress system messages.
        scorer: name of the model that compressors use to score texts; unset is the model itself.
        embedder: name of the model for embeddings that compressors use to compare texts; ``semantic`` needs one.
    """

    method: str
    ratio: float | None = field(default=None, validator=optional([gt(0), le(1)]))
    when: Literal["always", "overflow", "asked"] = "always"
    min_tokens: int = field(default=256, validator=ge(0))
    system: bool = False
    scorer: str | None = None
    embedder: str | None = None


def needs_embeddings(compressor: Compressor) -> bool:
    """Return True if a compressor embeds texts."""
    return getattr(compressor, "needs_embeddings", False) is True


def read_settings(models: Mapping[str, Any], compressors: Mapping[str, Compressor]) -> dict[str, CompressorSettings]:
    """Return the settings of the models that have some.

    Args:
        models: name of each served model to its setting ``compressor``, as written.
        compressors: the registered compressors.

    Raises:
        ConfigError: a setting is malformed, a compressor, scorer or embedder is unknown, a ratio is given to a method
            that has none, or no embedder to a method that needs one.
    """
    found = {name: _read(value, f"models.{name}.compressor") for name, value in models.items() if value is not None}
    for name, settings in found.items():
        _check(settings, f"models.{name}.compressor", tuple(models), compressors)
    return found


def _read(value: Any, path: str) -> CompressorSettings:
    table = {"method": value} if isinstance(value, str) else value
    if not isinstance(table, dict) or not isinstance(table.get("method"), str):
        raise ConfigError(f"{path}: must be the name of a method, or a table that holds it as method", path)
    return structure_options(CompressorSettings, table, path)


def _check(
    settings: CompressorSettings, path: str, models: tuple[str, ...], compressors: Mapping[str, Compressor]
) -> None:
    compressor = compressors.get(settings.method)
    if compressor is None:
        hint = closest(settings.method, tuple(compressors))
        raise ConfigError(f"{path}: no plugin registers a compressor {settings.method!r}{hint}", path)
    if settings.ratio is not None and not compressor.is_budgeted:
        raise ConfigError(f"{path}.ratio: the method {settings.method!r} has no ratio", f"{path}.ratio")
    for key, model in (("scorer", settings.scorer), ("embedder", settings.embedder)):
        if model is not None and model not in models:
            raise ConfigError(f"{path}.{key}: no model {model!r} is served{closest(model, models)}", f"{path}.{key}")
    if settings.embedder is None and needs_embeddings(compressor):
        message = f"{path}.embedder: the method {settings.method!r} needs the name of a model for embeddings"
        raise ConfigError(message, f"{path}.embedder")
