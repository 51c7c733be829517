"""Settings of the plugin, ``[plugins.llguidance]``: how large and how deep constraints may be."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge, le

__all__ = ["LlguidanceOptions"]


@frozen(kw_only=True)
class LlguidanceOptions:
    """Bounds of what is compiled.

    Attributes:
        max_bytes: longest constraint, as UTF-8.
        max_depth: deepest nesting of a schema's subschemas, and of groups in a regular expression.
        max_subschemas: most subschemas that a schema may lead to.
        max_choices: most strings of a choice, and most values of an enum.
        max_cached: compiled constraints that are kept for each model.
        max_cached_bytes: memory that these may take, as estimated from their size.
    """

    max_bytes: int = field(default=262_144, validator=[ge(1), le(16_777_216)])
    max_depth: int = field(default=64, validator=[ge(1), le(200)])
    max_subschemas: int = field(default=5_000, validator=[ge(1), le(100_000)])
    max_choices: int = field(default=20_000, validator=[ge(1), le(1_000_000)])
    max_cached: int = field(default=128, validator=[ge(1), le(100_000)])
    max_cached_bytes: int = field(default=33_554_432, validator=ge(0))
