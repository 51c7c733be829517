"""A generative model as a reranker: a prompt asks for one of two words, and the score compares their logits.

:class:`RunnerPooler` makes a pooler of any runner. The prompts of one request begin alike (instruction and query), so
that part is computed once and forked. :class:`TemplateArrangement` writes the prompts; texts never form control tokens.

Source: the prompt and the score of Qwen3-Reranker (Zhang et al. 2025, *Qwen3 Embedding*): the probability of ``yes``
among the two words, which is the sigmoid of the difference of their logits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from enginehouse.contract.backend import Outputs, Runner, Span, Tokenizer
from enginehouse.contract.errors import CacheFull, ModelLoadError
from enginehouse.contract.pooler import PoolerCapabilities, PoolerInput, TextLayout
from enginehouse.contract.types import PoolText, Segment
from enginehouse.engine.pooling.inputs import Truncate
from enginehouse.engine.text.segments import encode_segments

QWEN_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""The prompt of Qwen3-Reranker, with its usual instruction."""

_PASS_TOKENS = 2048
"""Prompts share what they have in common within a pass, so a pass is longer than a forward pass of most runners."""

_PLACES = re.compile(r"(\{query\}|\{document\})")


@frozen(eq=False)
class TemplateArrangement:
    """Writes the prompt of a query and a document; see :class:`enginehouse.engine.pooling.inputs.Arrangement`.

    Args:
        template: text with ``{query}`` and ``{document}``, once each, in any order.
        setting: dotted path of the setting, for messages.

    Raises:
        ModelLoadError: the template lacks one of them.
    """

    tokenizer: Tokenizer
    max_tokens: int
    template: str
    setting: str
    _parts: tuple[str, ...] = field(init=False)

    def __attrs_post_init__(self) -> None:
        parts = tuple(_PLACES.split(self.template))
        if sorted(parts[1::2]) != ["{document}", "{query}"]:
            raise ModelLoadError(f"{self.setting}: must contain {{query}} and {{document}}, once each")
        object.__setattr__(self, "_parts", parts)

    def make(
        self, text: PoolText, prompt: str, truncate: Truncate, max_tokens: int | None = None
    ) -> tuple[PoolerInput, int]:
        """Return the input for a pair; a document is shortened in characters, to as many as fit.

        Args:
            max_tokens: of the document.
        """
        document = text.second or ""
        token_ids = self._encode(text.text, document)
        num_tokens = len(token_ids)
        room = self.max_tokens
        if max_tokens is not None:
            room = min(room, len(self._encode(text.text, "")) + max_tokens)
        if num_tokens > room and truncate != "none":
            token_ids = self._shorten(text.text, document, truncate, room)
        return PoolerInput(np.array(token_ids, np.int32)), num_tokens

    def _shorten(self, query: str, document: str, truncate: Truncate, room: int) -> list[int]:
        """Return the ids with as much of the document as fits; with an empty one if none does."""
        fits, too_long = 0, len(document)
        best = self._encode(query, "")
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            part = document[:middle] if truncate == "end" else document[len(document) - middle :]
            token_ids = self._encode(query, part)
            if len(token_ids) <= room:
                fits, best = middle, token_ids
            else:
                too_long = middle
        return best

    def _encode(self, query: str, document: str) -> list[int]:
        texts = {"{query}": query, "{document}": document}
        segments = [Segment(texts.get(part, part), trusted=part not in texts) for part in self._parts]
        return encode_segments(self.tokenizer, segments, add_special=True)


@define(eq=False)
class _Growing:
    """A sequence, and the tokens that it still needs."""

    sequence: int
    rest: NDArray[np.int32]


class RunnerPooler:
    """Implements :class:`enginehouse.contract.pooler.Pooler` with a runner.

    A row is one number: the logit of the first answer less that of the second one, at the last position.

    Args:
        runner: an opened model; closed by ``close``.
        answers: two words, each one token.
        setting: dotted path of the setting of the words, for messages.

    Raises:
        ModelLoadError: a word is not one token.
    """

    def __init__(self, runner: Runner, answers: tuple[str, str], setting: str) -> None:
        self._runner = runner
        limits = runner.capabilities
        self.tokenizer = runner.tokenizer
        self.info = msgspec.structs.replace(runner.info, task="rerank", max_context=limits.max_context)
        most = max(limits.max_context, limits.cache_tokens * 2 // 3)  # the common beginning is held in addition
        self.capabilities = PoolerCapabilities(
            max_tokens=limits.max_context,
            max_batch_tokens=most,
            max_batch_texts=max(1, limits.max_sequences - 1),
            pass_tokens=min(most, max(_PASS_TOKENS, limits.max_batch_tokens)),
            dimensions=1,
            pair=TextLayout(),
            pooling="yes_no",
            is_normalized=False,
            activation="sigmoid",
            batch_invariant=limits.batch_invariant,
        )
        self._answers = tuple(self._token_id(word, setting) for word in answers)
        self._common: tuple[NDArray[np.int32], int] | None = None  # ids, and the sequence that holds them

    def _token_id(self, word: str, setting: str) -> int:
        token_ids = self.tokenizer.encode(word, True)
        if len(token_ids) != 1:
            raise ModelLoadError(
                f"{setting}: {word!r} has {len(token_ids)} tokens in this model; a word of one is needed"
            )
        return token_ids[0]

    def pool(self, inputs: Sequence[PoolerInput]) -> NDArray[np.float32]:
        """See :class:`enginehouse.contract.pooler.Pooler`."""
        token_ids = [one.token_ids for one in inputs]
        try:
            return self._score(token_ids, _common_length(token_ids) if len(token_ids) > 1 else 0)
        except CacheFull:  # it depends on the runner how many positions a fork takes
            self._forget()
            return np.concatenate([self._score([one], 0) for one in token_ids])

    def _score(self, token_ids: Sequence[NDArray[np.int32]], num_common: int) -> NDArray[np.float32]:
        growing: list[_Growing] = []
        try:
            num_held = self._hold(token_ids[0][:num_common])
            growing.extend(self._begin(one, num_held) for one in token_ids)
            return self._grow(growing)
        finally:
            for one in growing:
                self._runner.free_sequence(one.sequence)

    def _hold(self, token_ids: NDArray[np.int32]) -> int:
        """Have a sequence that begins with these tokens, or with the first ones; returns how many.

        That of the last pass stays if it begins so: passes of one request have the same beginning.
        """
        if self._common is not None and len(token_ids):
            num_equal = _first_true(self._common[0][: len(token_ids)] != token_ids[: len(self._common[0])])
            if num_equal in (len(token_ids), len(self._common[0])):
                return num_equal
        self._forget()
        if len(token_ids):
            sequence = self._runner.open_sequence()
            self._common = token_ids.copy(), sequence
            self._grow([_Growing(sequence, token_ids)], "none")
        return len(token_ids)

    def _forget(self) -> None:
        if self._common is not None:
            self._runner.free_sequence(self._common[1])
            self._common = None

    def _begin(self, token_ids: NDArray[np.int32], num_common: int) -> _Growing:
        if not num_common or self._common is None:
            return _Growing(self._runner.open_sequence(), token_ids)
        sequence, num_shared = self._runner.fork(self._common[1], num_common)
        return _Growing(sequence, token_ids[num_shared:])

    def _grow(self, growing: Sequence[_Growing], outputs: Outputs = "last") -> NDArray[np.float32]:
        """Append the tokens that sequences need; returns the score of each, ``(num_sequences, 1)``."""
        scores = np.zeros((len(growing), 1), np.float32)
        while waiting := [place for place, one in enumerate(growing) if len(one.rest)]:
            spans, ending = self._spans(growing, waiting, outputs)
            output = self._runner.forward(spans)
            if ending:
                rows = output.host()
                scores[ending, 0] = rows[:, self._answers[0]] - rows[:, self._answers[1]]
        return scores

    def _spans(
        self, growing: Sequence[_Growing], waiting: Sequence[int], outputs: Outputs
    ) -> tuple[list[Span], list[int]]:
        """Return the spans of the next forward pass, and the places of the sequences that end with it."""
        limits = self._runner.capabilities
        room, spans, ending = limits.max_batch_tokens, list[Span](), list[int]()
        for place in waiting:
            one = growing[place]
            chunk = one.rest[:room]
            is_mixed = bool(spans) and (len(chunk) == 1) != (spans[0].num_tokens == 1)
            if not room or (is_mixed and not limits.mixed_batch):
                continue
            one.rest = one.rest[len(chunk) :]
            room -= len(chunk)
            is_last = not len(one.rest) and outputs == "last"
            spans.append(Span(one.sequence, self._runner.length(one.sequence), chunk, "last" if is_last else "none"))
            if is_last:
                ending.append(place)
        return spans, ending

    def abort(self) -> None:
        """See :class:`enginehouse.contract.pooler.Pooler`."""
        self._runner.abort()

    def close(self) -> None:
        """See :class:`enginehouse.contract.pooler.Pooler`."""
        self._runner.close()


def _common_length(token_ids: Sequence[NDArray[np.int32]]) -> int:
    """Return the number of leading ids that all have in common, less than the shortest has."""
    shortest = min(map(len, token_ids)) - 1
    first = token_ids[0][:shortest]
    lengths = [_first_true(first != one[:shortest]) for one in token_ids[1:]]
    return min([shortest, *lengths])


def _first_true(values: NDArray[np.bool_]) -> int:
    return int(values.argmax()) if values.any() else len(values)
