"""Prompts that ``/v1/completions`` repeats in front of their answers, with the log-probabilities of their tokens."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

import msgspec
from attrs import frozen

from enginehouse.api.openai.encoding import legacy_logprob, legacy_top_logprobs, token_text
from enginehouse.contract.errors import UnsupportedParameter
from enginehouse.contract.types import TokenLogprob
from enginehouse.pipeline.pipeline import Pipeline, RunningRequest

__all__ = ["Echo", "read_echo"]


@frozen
class Echo:
    """One prompt.

    Attributes:
        text: what is repeated: the client's text, or that of its token ids, control tokens by name.
        first: id and bytes of the first token, which nothing predicts; None when tokens are not reported.
    """

    text: str
    first: tuple[int, bytes] | None = None

    def logprobs(self, scored: Sequence[TokenLogprob], num_top: int) -> dict[str, Any]:
        """OpenAI's four lists for the whole prompt.

        Args:
            scored: every token but the first.
            num_top: alternatives to show per token; there may be more, which something else asked for.
        """
        assert self.first is not None
        scored = [msgspec.structs.replace(entry, top=entry.top[:num_top]) for entry in scored]
        tokens = [self.first[1], *(entry.token for entry in scored)]
        return {
            "tokens": [token_text(token) for token in tokens],
            "token_logprobs": [None, *(legacy_logprob(entry) for entry in scored)],
            "top_logprobs": [None, *(legacy_top_logprobs(entry) for entry in scored)],
            "text_offset": self._offsets(tokens),
        }

    def _offsets(self, tokens: Sequence[bytes]) -> list[int]:
        """Where each token begins in the text.

        Tokens may say more than the text: a begin-of-text token or a space in front, which have no place in it.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        starts = [0]
        for token in tokens:
            starts.append(starts[-1] + len(decoder.decode(token)))
        num_chars = len(self.text)
        surplus = starts[-1] - num_chars
        return [min(max(start - surplus, 0), num_chars) for start in starts[:-1]]


async def read_echo(pipeline: Pipeline, running: RunningRequest) -> Echo:
    """The prompt of an accepted request, which is one of ``text`` and ``token_ids``.

    Raises:
        UnsupportedParameter: the engine does not tell the tokens of a prompt.
        EngineError: the model is gone.
    """
    request, model, replays = running.request, running.model, pipeline.replays
    try:
        text = request.text
        if text is None:
            text = await replays.detokenize(model, request.token_ids or (), request.caller)
        if request.num_prompt_logprobs is None:
            return Echo(text)
        token_ids = await (await pipeline.prompt(request, model)).tokenize(replays, request.caller)
        (piece,) = await replays.pieces(model, token_ids[:1], request.caller)
    except UnsupportedParameter as error:
        raise UnsupportedParameter("echo: this model's engine does not tell the tokens of a prompt", "echo") from error
    return Echo(text, (token_ids[0], piece))
