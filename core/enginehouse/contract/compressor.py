"""The contract of compressor plugins, which shorten prompts. Called by the plugin ``compress``.

A compressor only selects character ranges to keep; its caller does the cutting. Kept text is therefore byte-identical,
nothing is added, and what is protected (code, tool calls, the question itself) stays regardless of the compressor's
answer. It runs in the server process, on a thread, before the prompt is rendered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from attrs import frozen

if TYPE_CHECKING:  # most compressors need no NumPy
    import numpy as np
    from numpy.typing import NDArray

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
"""Start and end of a piece of text, in characters."""


@frozen(kw_only=True)
class CompressibleText:
    """A text of a prompt, such as the content of a message.

    Attributes:
        protected: ranges that are always kept; in order, disjoint, none of them empty.
    """

    text: str
    protected: tuple[Range, ...] = ()

    def free(self) -> list[Range]:
        """Return the ranges that are not protected, in order."""
        bounds = [0, *(bound for range_ in self.protected for bound in range_), len(self.text)]
        pairs = zip(bounds[::2], bounds[1::2], strict=True)
        return [(start, end) for start, end in pairs if start < end]


@frozen(kw_only=True)
class CompressionTask:
    """Texts to be compressed, and the token budget.

    Attributes:
        texts: in the order of the prompt; at least one of them has an unprotected range.
        question: the question asked about them, possibly empty. It is in the prompt in any case.
        max_tokens: maximum number of tokens of all texts together after cutting. Protected ranges stay even if they
            alone exceed it.
    """

    texts: tuple[CompressibleText, ...]
    question: str
    max_tokens: int


@frozen
class ScoredToken:
    """A token of a text that was scored.

    Attributes:
        end: end position in that text, in characters; for several tokens that form one character, the position after
            it.
        logprob: natural logarithm of the probability that the model assigned to it.
    """

    end: int
    logprob: float


class CompressionTools(Protocol):
    """Model queries, provided by core. Each call waits for the model, and is cancelled with the request."""

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens of each text, in the vocabulary of the model that will answer."""
        ...

    def token_ends(self, text: str) -> list[int]:
        """Return the end of each token of a text, in characters; tokens that form one character all end after it."""
        ...

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[list[ScoredToken]]:
        """Compute the log-probabilities of texts.

        Args:
            pairs: the context before a text, which must not be empty, and the text. The pairs of one call are computed
                concurrently.

        Returns:
            The tokens of each text. A token that began before the text counts as its first.

        Raises:
            RequestError: a pair is longer than the model's context.
        """
        ...

    def embed(self, texts: Sequence[str], role: Literal["query", "document"] = "document") -> NDArray[np.float32]:
        """Return the embeddings of texts, ``(len(texts), d)`` float32, each of length 1; long texts are cut.

        Args:
            role: what the texts are, for models with a prompt for each.

        Raises:
            EnginehouseError: the settings of the model name no embedder, or it is not loaded or for another task.
        """
        ...

    def explain(self, text: int, part: Range, reason: str, score: float | None = None) -> None:
        """Say why a part of a text is kept or not, for dry runs. Changes nothing.

        Args:
            text: index of the text in the task.
            part: the part, in characters.
            reason: one of few texts, such as what ``score`` measures.
            score: its rating; parts with higher ones are kept first.
        """
        ...


@runtime_checkable
class Compressor(Protocol):
    """A compressor for ``register_compressors``. One object serves all requests, from several threads concurrently.

    Attributes:
        name: unique; settings and requests name it as their ``method``.
        is_budgeted: True: the result has at most ``max_tokens``. False: ``max_tokens`` is ignored.
        is_idempotent: compressing the result with the same budget removes nothing more.
        needs_scores: it calls :meth:`CompressionTools.score`.
        needs_embeddings: optional; True: it calls :meth:`CompressionTools.embed`, so settings must name an embedder.

    Calls:
        compress: for each prompt that is compressed; server, thread of the plugin; may block and ask models,
            ten minutes at most.
    """

    name: str
    api_version: int
    is_budgeted: bool
    is_idempotent: bool
    needs_scores: bool

    def compress(self, task: CompressionTask, tools: CompressionTools) -> Sequence[Sequence[Range]]:
        """Return the ranges of each text to keep: in order and disjoint; protected ranges may be omitted.

        The result must be a function of the arguments: the same task with the same model gives the same ranges. Words
        are never removed from a sentence that is kept, unless they are certainly not numbers, negations, conditions,
        names, quotations, code or addresses.
        """
        ...


def joined(ranges: Iterable[Range]) -> list[Range]:
    """Merge ranges into the smallest number of ranges that cover the same characters, in order."""
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
    """Return the kept and the protected ranges of a text, concatenated.

    Raises:
        ValueError: a range is outside the text.
    """
    ranges = joined([*kept, *text.protected])
    if ranges and not (ranges[0][0] >= 0 and ranges[-1][1] <= len(text.text)):
        raise ValueError(f"a range to keep is outside the text of {len(text.text)} characters")
    return "".join(text.text[start:end] for start, end in ranges)
