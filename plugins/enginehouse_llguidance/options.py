"""Settings of the plugin, ``[plugins.llguidance]``: limits for the size and depth of constraints."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge, le

__all__ = ["LlguidanceOptions"]


@frozen(kw_only=True)
class LlguidanceOptions:
    """Limits for compiled constraints.

    Attributes:
        max_bytes: maximum length of a constraint in bytes of UTF-8.
        max_depth: maximum nesting of a schema's subschemas, and of groups in a regular expression.
        max_subschemas: maximum number of subschemas of a schema, references included.
        max_choices: maximum number of strings of a choice, and of values of an enum.
        max_cached: number of compiled constraints cached for each model.
        max_cached_bytes: maximum memory of the cached constraints, estimated from their size.
    """

    max_bytes: int = field(default=262_144, validator=[ge(1), le(16_777_216)])
    max_depth: int = field(default=64, validator=[ge(1), le(200)])
    max_subschemas: int = field(default=10_000, validator=[ge(1), le(100_000)])
    max_choices: int = field(default=20_000, validator=[ge(1), le(1_000_000)])
    max_cached: int = field(default=128, validator=[ge(1), le(100_000)])
    max_cached_bytes: int = field(default=33_554_432, validator=ge(0))
