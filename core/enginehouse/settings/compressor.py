"""``compressor`` of a model in the settings: whether, when and how its prompts are shortened.

A part of ``config``. Which methods there are is known to ``plugins``.
"""

from __future__ import annotations

from typing import Any, Literal

from attrs import field, frozen
from attrs.validators import ge, gt, le, optional

from enginehouse.settings.structuring import strict_converter

__all__ = ["CompressorSettings"]


@frozen(kw_only=True)
class CompressorSettings:
    """``compressor``: a method by its name, or a table with these keys.

    Attributes:
        method: name of a compressor.
        ratio: share of the tokens that is kept of what may be shortened; unset is 0.5, for methods that have one.
        when: ``always``, ``overflow`` only for prompts that the model's context could not hold, which else are
            refused, ``asked`` only where a request says so.
        min_tokens: of ``always``: prompts with less that may be shortened are left alone.
        system: shorten system messages, too.
        scorer: name of the model that compressors ask how probable texts are; unset is the model itself.
    """

    method: str
    ratio: float | None = field(default=None, validator=optional([gt(0), le(1)]))
    when: Literal["always", "overflow", "asked"] = "always"
    min_tokens: int = field(default=256, validator=ge(0))
    system: bool = False
    scorer: str | None = None

    @classmethod
    def read(cls, value: Any) -> CompressorSettings:
        """A name, or a table.

        Raises:
            TypeError: it is neither.
            Exception: whatever the converter raises.
        """
        table = {"method": value} if isinstance(value, str) else value
        if not isinstance(table, dict) or not isinstance(table.get("method"), str):
            raise TypeError("must be the name of a method, or a table that holds it as method")
        return strict_converter().structure(table, cls)
