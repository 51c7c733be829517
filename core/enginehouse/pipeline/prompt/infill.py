"""Fill-in-the-middle prompts: builds the prompt from the text before a gap and the text after it.

Models trained for it have control tokens that mark the two texts. Called by the pipeline; does not know tokenizers or
backends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from attrs import frozen

from enginehouse.contract.errors import UnsupportedParameter
from enginehouse.contract.types import ModelInfo, Segment

NO_INFILL = "this model does not support infill: its vocabulary has no tokens that mark prefix, suffix and middle"
"""Reason given when ``suffix`` is refused."""


@frozen
class InfillTokens:
    """Control tokens around the two texts.

    Attributes:
        prefix: precedes the text before the gap.
        suffix: precedes the text after the gap.
        middle: ends the prompt; "" for models that do not need it, where the text after the gap comes first.
    """

    prefix: str
    suffix: str
    middle: str

    def __iter__(self) -> Iterator[str]:
        return (token for token in (self.prefix, self.suffix, self.middle) if token)


_KNOWN = (
    InfillTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma
    InfillTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    InfillTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    InfillTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek  # noqa: RUF001 - characters of its own
    InfillTokens("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    InfillTokens("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    InfillTokens("<PRE>", "<SUF>", "<MID>"),
    InfillTokens("[PREFIX]", "[SUFFIX]", ""),  # Codestral
)
"""Known forms by model family. Source: their model cards and tokenizers."""


def find_infill_tokens(info: ModelInfo) -> InfillTokens | None:
    """Return the tokens given in the model's file, else the first known form in its vocabulary; None without any."""
    if len(info.infill_tokens) == 3:
        return InfillTokens(*info.infill_tokens)
    special: Collection[str] = info.special_tokens
    return next((tokens for tokens in _KNOWN if all(token in special for token in tokens)), None)


def infill_segments(info: ModelInfo, before: str, after: str) -> tuple[Segment, ...]:
    """Return the prompt; the two texts never become control tokens.

    Raises:
        UnsupportedParameter: the model has no tokens for it.
    """
    tokens = find_infill_tokens(info)
    if tokens is None:
        raise UnsupportedParameter(f"suffix: {NO_INFILL}", "suffix")
    parts = [Segment(tokens.prefix, trusted=True), Segment(before)]
    suffix = [Segment(tokens.suffix, trusted=True), Segment(after)]
    ordered = [*parts, *suffix, Segment(tokens.middle, trusted=True)] if tokens.middle else [*suffix, *parts]
    return tuple(segment for segment in ordered if segment.text)
