"""The contract of compressor plugins: what of a prompt may go. Written by plugin authors, called by ``compressing``.

A compressor only chooses what is kept, as ranges of characters; core cuts. So what is kept is byte-identical, nothing
is added, and what core protects (code, tool calls, the question itself) stays whatever a compressor says. It runs in
the server process, on a thread, before the prompt is rendered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from attrs import frozen

__all__ = [
    "CompressibleText",
    "CompressionTask",
    "CompressionTools",
    "Compressor",
    "Range",
    "ScoredToken",
    "cut",
    "joined",
]

Range = tuple[int, int]
"""Begin and end of a piece of text, in characters."""


@frozen(kw_only=True)
class CompressibleText:
    """A text of a prompt, such as the content of a message.

    Attributes:
        protected: what stays whatever happens; in order, apart from each other, none of them empty.
    """

    text: str
    protected: tuple[Range, ...] = ()

    def free(self) -> list[Range]:
        """What is not protected, in order."""
        borders = [0, *(border for range_ in self.protected for border in range_), len(self.text)]
        pairs = zip(borders[::2], borders[1::2], strict=True)
        return [(start, end) for start, end in pairs if start < end]


@frozen(kw_only=True)
class CompressionTask:
    """What is to be compressed, and how far.

    Attributes:
        texts: in the order of the prompt; at least one of them has something that is not protected.
        question: what is asked about them, perhaps nothing. It stands in the prompt anyway.
        max_tokens: most tokens that all of the texts together should have when they are cut. What is protected stays,
            even where it alone has more.
    """

    texts: tuple[CompressibleText, ...]
    question: str
    max_tokens: int


@frozen
class ScoredToken:
    """A token of a text that was scored.

    Attributes:
        end: where it ends in that text, in characters; of several tokens that make one character, behind it.
        logprob: natural logarithm of the probability that the model gave to it.
    """

    end: int
    logprob: float


class CompressionTools(Protocol):
    """What a compressor may ask a model for. Each call waits for the model, and is cancelled with the request."""

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text, in the vocabulary of the model that will answer."""
        ...

    def token_ends(self, text: str) -> list[int]:
        """Where each token of a text ends, in characters; of several tokens that make one character, behind it."""
        ...

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[list[ScoredToken]]:
        """How probable texts are.

        Args:
            pairs: what stands before a text, which must not be empty, and the text. Several pairs in one call are
                computed at the same time.

        Returns:
            The tokens of each text. One that began before the text counts as its first.

        Raises:
            RequestError: a pair is longer than the model's context.
        """
        ...


@runtime_checkable
class Compressor(Protocol):
    """What ``register_compressors`` hands over. One object for all requests, used by several threads at once.

    Attributes:
        name: unique; settings and requests name it as their ``method``.
        is_budgeted: it keeps to ``max_tokens``; else it takes out what it can whatever that says.
        is_idempotent: compressing what is left, with the same budget, takes nothing more out.
        needs_scores: it calls :meth:`CompressionTools.score`.
    """

    name: str
    api_version: int
    is_budgeted: bool
    is_idempotent: bool
    needs_scores: bool

    def compress(self, task: CompressionTask, tools: CompressionTools) -> Sequence[Sequence[Range]]:
        """What to keep of each text: ranges in order, apart from each other; what is protected need not be named.

        It must be a function of its arguments: the same task with the same model gives the same ranges. It never
        takes words out of a sentence that it keeps, unless it is sure that these are no numbers, negations,
        conditions, names, quotations, code or addresses.
        """
        ...


def joined(ranges: Iterable[Range]) -> list[Range]:
    """The same characters as the fewest ranges, in order."""
    whole: list[Range] = []
    for start, end in sorted(ranges):
        if start >= end:
            continue
        if whole and start <= whole[-1][1]:
            whole[-1] = (whole[-1][0], max(end, whole[-1][1]))
        else:
            whole.append((start, end))
    return whole


def cut(text: CompressibleText, kept: Iterable[Range]) -> str:
    """What is left of a text: the kept ranges and the protected ones, one behind the other.

    Raises:
        ValueError: a range lies outside of the text.
    """
    ranges = joined([*kept, *text.protected])
    if ranges and not (ranges[0][0] >= 0 and ranges[-1][1] <= len(text.text)):
        raise ValueError(f"a range to keep lies outside of the text of {len(text.text)} characters")
    return "".join(text.text[start:end] for start, end in ranges)
