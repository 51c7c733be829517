"""``POST /v1/completions``: body, route, and responses: whole, as events, with an echo, the best of several choices."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from attrs import evolve, frozen

from enginehouse.api.generation.assembly import Assembly, Choice
from enginehouse.api.generation.decoding import DecodedCall
from enginehouse.api.generation.details import late_headers
from enginehouse.api.http.errors import error_body
from enginehouse.api.http.state import ApiState
from enginehouse.api.openai.bodies import GenerationBody
from enginehouse.api.openai.encoding import (
    LegacyLogprobs,
    TextChunks,
    held_chunks,
    usage_object,
    with_details,
)
from enginehouse.api.openai.prompt_scores import Echo, read_echo, score_prompts
from enginehouse.api.openai.prompts import read_prompts
from enginehouse.api.openapi.answers import reference
from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.fields import CompletionFields
from enginehouse.contract.surface import Chunk, ErrorAnswer, GenerationRoute, Piece, new_id
from enginehouse.contract.timings import progress_object, timings
from enginehouse.contract.types import GenerateRequest
from enginehouse.contract.usage import Usage
from enginehouse.settings.config import LimitsSettings
from enginehouse.settings.profiles import PROFILES


class CompletionOptions(Protocol):
    """Options that the assembler reads from the request body."""

    @property
    def n(self) -> int:
        """Number of choices to return per prompt."""
        ...

    @property
    def logprobs(self) -> int | None:
        """Number of alternatives to report per token; None reports nothing."""
        ...

    @property
    def include_usage(self) -> bool:
        """True if a stream ends with the token counts."""
        ...

    @property
    def timings_per_token(self) -> bool:
        """True if responses and chunks have the member ``timings``."""
        ...


class CompletionAssembler:
    """Writes ``text_completion`` objects, whole and as events.

    Args:
        echoes: one per prompt if prompts are echoed, else empty.
    """

    def __init__(self, assembly: Assembly, options: CompletionOptions, echoes: Sequence[Echo] = ()) -> None:
        model = assembly.running[0].model
        self._head = {
            "id": assembly.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": assembly.model,
            "system_fingerprint": assembly.running[0].fingerprint,
        }
        self._assembly = assembly
        self._options = options
        self._echoes = echoes
        hidden = frozenset(model.info.special_tokens.values())
        self._logprobs = [
            LegacyLogprobs(hidden, num_chars=len(self._echo_text(index)))
            for index in range(assembly.num_choices * assembly.num_prompts)
        ]
        self._is_echoed = [not echoes] * len(self._logprobs)
        self._has_shown_ids = [not assembly.shows_token_ids] * len(self._logprobs)
        self._tail = {"usage": None} if options.include_usage else {}
        self._profile = PROFILES[assembly.running[0].request.profile]
        has_more = assembly.has_details or options.timings_per_token or bool(self._profile.optimization_headers)
        self._held = held_chunks("own_chunk" if options.include_usage else None, has_more=has_more)
        is_plain = self._held is None and not (echoes or assembly.shows_token_ids or options.timings_per_token)
        self._sends_at_once = assembly.is_streamed and is_plain
        self._texts = TextChunks(self._text_chunk, len(self._logprobs))

    def opening(self) -> Sequence[Chunk]:
        """Return nothing: these chunks have no roles."""
        return ()

    def push(self, piece: Piece) -> Sequence[Chunk | bytes]:
        """Return a chunk with text or with the finish reason; the first one of a choice follows the echoed prompt."""
        index = piece.index
        if self._sends_at_once and piece.text and piece.logprobs is None and piece.finish_reason is None:
            return self._texts.of(piece)
        if not self._assembly.is_streamed:
            return ()
        if piece.progress is not None:
            chunk = self._chunk({"index": index, "text": "", "logprobs": None, "finish_reason": None})
            return (chunk | {"prompt_progress": progress_object(piece.progress)},)
        if piece.scores is not None:
            return (self._chunk({"index": index, "text": "", **piece.scores, "logprobs": None, "finish_reason": None}),)
        logprobs = None if piece.logprobs is None else self._logprobs[index].take(piece.logprobs)
        chunk = self._text_chunk(index, piece.text, logprobs, piece.finish_reason)
        if self._assembly.shows_token_ids:
            chunk["choices"][0] |= self._token_ids(index, piece.token_ids)
        chunk |= self._timings(self._assembly.usage)
        ready = (chunk,) if self._held is None else self._held.push(chunk, piece)
        return ready if self._is_echoed[index] else (self._echo_chunk(index), *ready)

    def _timings(self, usage: Callable[[], Usage]) -> Chunk:
        return {"timings": timings(usage())} if self._options.timings_per_token else {}

    def _token_ids(self, index: int, token_ids: Sequence[int]) -> dict[str, Any]:
        """Return the members of a choice with token ids; the prompt's are in the first chunk of each choice."""
        shown, self._has_shown_ids[index] = self._has_shown_ids[index], True
        prompt = {} if shown else {"prompt_token_ids": self._prompt_token_ids(index)}
        return {**prompt, "token_ids": list(token_ids)}

    def _prompt_token_ids(self, index: int) -> list[int] | None:
        return self._assembly.prompt_token_ids(index // self._assembly.num_choices)

    def _text_chunk(
        self, index: int, text: str, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
    ) -> Chunk:
        return self._chunk({"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason})

    def _chunk(self, choice: dict[str, Any]) -> Chunk:
        return {**self._head, "choices": [choice], **self._tail}

    def _echo_chunk(self, index: int) -> Chunk:
        """Return a chunk with the prompt."""
        self._is_echoed[index] = True
        return self._text_chunk(index, self._echo_text(index), self._echo_logprobs(index))

    def close(self, usage: Usage, details: dict[str, Any] | None) -> list[Chunk]:
        """Return what was held back, or the chunk without choices that has the token counts; with the details."""
        last = self._held.take() if self._held is not None else []
        if self._options.include_usage:
            last.append({**self._head, "choices": [], "usage": self._counts(usage)})
        if last:
            last[-1] |= self._timings(lambda: usage) | late_headers(usage, self._profile)
        return with_details(last, details)

    def fail(self, error: ErrorAnswer) -> list[Chunk]:
        """Return what was held back, and the error."""
        return [*(self._held.take() if self._held is not None else ()), error_body(error)]

    def whole(self, usage: Usage, details: dict[str, Any] | None) -> Chunk:
        """Return the whole response."""
        written = [
            {
                "index": index,
                "text": self._echo_text(choice.index) + choice.text,
                **self._scores(choice.index),
                "logprobs": self._whole_logprobs(choice),
                "finish_reason": choice.finish_reason,
                **(self._token_ids(choice.index, choice.token_ids) if self._assembly.shows_token_ids else {}),
            }
            for index, choice in enumerate(self._shown(self._assembly.choices))
        ]
        counted = {"usage": self._counts(usage), **self._timings(lambda: usage)}
        (whole,) = with_details([{**self._head, "choices": written, **counted}], details)
        return whole

    def _counts(self, usage: Usage) -> Chunk:
        shown = self._assembly.is_streamed or self._options.timings_per_token
        return usage_object(usage, has_times=self._profile.usage_times and shown)

    def _shown(self, choices: Sequence[Choice]) -> list[Choice]:
        """Return the choices, or the ``n`` best ones of each prompt, best first."""
        num_drawn, num_shown = self._assembly.num_choices, self._options.n
        if num_drawn == num_shown:
            return list(choices)
        drawn = [choices[start : start + num_drawn] for start in range(0, len(choices), num_drawn)]
        return [choice for group in drawn for choice in sorted(group, key=_mean_logprob, reverse=True)[:num_shown]]

    def _whole_logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if self._options.logprobs is None:
            return None
        answered = None if choice.logprobs is None else self._logprobs[choice.index].take(choice.logprobs)
        echoed = self._echo_logprobs(choice.index)
        if echoed is None or answered is None:
            return echoed or answered
        unknown = [None] * len(echoed["tokens"])  # the prompt's tokens have no details
        return {name: [*echoed.get(name, unknown), *values] for name, values in answered.items()}

    def _scores(self, index: int) -> dict[str, Any]:
        """Return the members that describe the prompt, the same for all its choices."""
        scores = self._assembly.scores
        return {} if scores is None else scores.members(index // self._assembly.num_choices)

    def _echo_text(self, index: int) -> str:
        return self._echoes[index // self._assembly.num_choices].text if self._echoes else ""

    def _echo_logprobs(self, index: int) -> dict[str, Any] | None:
        """Return the prompt's log-probabilities for a choice, if requested."""
        prompt = index // self._assembly.num_choices
        if not self._echoes or self._options.logprobs is None or self._echoes[prompt].first is None:
            return None
        return self._echoes[prompt].logprobs(self._assembly.prompt_logprobs[prompt], self._options.logprobs)


def _mean_logprob(choice: Choice) -> float:
    """Return OpenAI's ranking key; a choice without tokens comes last."""
    logprobs = choice.logprobs or ()
    return sum(entry.logprob for entry in logprobs) / len(logprobs) if logprobs else -math.inf


@frozen(kw_only=True)
class CompletionBody(GenerationBody, CompletionFields):
    """The request body."""

    def check(self, limits: LimitsSettings) -> None:
        """Check combinations of fields."""
        super().check(limits)
        self._check_best_of(limits)
        if self.token_details and self.logprobs is None:
            raise InvalidRequest("token_details: only allowed together with logprobs", "token_details")
        if self.max_tokens == 0:
            self._check_scoring()
        if self.suffix and self.echo:
            raise InvalidRequest("echo: not allowed together with suffix", "echo")

    def _check_best_of(self, limits: LimitsSettings) -> None:
        if self.best_of is None:
            return
        if self.best_of < self.n:
            raise InvalidRequest(f"best_of: must be at least n ({self.n}), not {self.best_of}", "best_of")
        if self.best_of > limits.max_choices:
            raise InvalidRequest(f"best_of: must be at most {limits.max_choices}, not {self.best_of}", "best_of")
        if self.best_of > self.n and self.stream:
            raise InvalidRequest("best_of: cannot be streamed, for the best answer is known at the end", "best_of")

    def _check_scoring(self) -> None:
        if not self.echo:
            raise InvalidRequest("max_tokens: must be at least 1; only with echo it may be 0", "max_tokens")
        constraint = self.constraint()
        if constraint is not None:
            message = "not allowed when max_tokens is 0, for no answer could be of that form"
            raise InvalidRequest(f"{constraint.param}: {message}", constraint.param)

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives to report for every prompt token except the first, also if the prompt is echoed."""
        counts = (super().num_prompt_logprobs, self.logprobs if self.echo else None)
        return max((count for count in counts if count is not None), default=None)

    @property
    def num_choices(self) -> int:
        """Number of choices to sample per prompt, including those that are not returned."""
        return self.best_of or self.n

    def sampling(self) -> dict[str, Any]:
        """Return the sampling fields, including log-probabilities."""
        ranked = 0 if self.num_choices > self.n else None
        num_logprobs = ranked if self.logprobs is None else self.logprobs
        return {**super().sampling(), **({} if num_logprobs is None else {"num_logprobs": num_logprobs})}

    def prompts(self, max_prompts: int) -> list[dict[str, Any]]:
        """Return each prompt and its options, as fields of :class:`enginehouse.contract.types.GenerateRequest`.

        Raises:
            InvalidRequest: a prompt has none of the forms.
        """
        prompts = read_prompts(self.prompt, max_prompts, may_be_empty=bool(self.suffix))
        if self.suffix and "token_ids" in prompts[0]:
            raise InvalidRequest("suffix: only with prompts that are text, not token ids", "suffix")
        return [{"suffix": self.suffix or None, **prompt} for prompt in prompts]


def completion_route(state: ApiState) -> GenerationRoute:
    """Return the route, without a prefix."""
    max_prompts = state.settings.limits.max_prompts

    def requests(call: DecodedCall[CompletionBody]) -> list[GenerateRequest]:
        changing = [name for name in state.registry.preparers if any(call.extensions.get(name, {}).values())]
        if call.body.echo and changing:
            raise InvalidRequest(f"echo: not allowed together with {changing[0]}", "echo")
        return _requests(call, new_id("cmpl-"), max_prompts)

    async def assemble(call: DecodedCall[CompletionBody], assembly: Assembly) -> CompletionAssembler:
        echoes: list[Echo] = []
        if call.body.echo:
            echoes = await asyncio.gather(*(read_echo(state.pipeline, one) for one in assembly.running))
        score_prompts(assembly, call.body)
        return CompletionAssembler(assembly, call.body, echoes)

    return GenerationRoute(
        path="/completions",
        name="create_completion",
        summary="Continue texts",
        body=CompletionBody,
        requests=requests,
        assemble=assemble,
        request_schema=reference("CompletionRequest"),
        response_schema=reference("Completion"),
        chunk_schema=reference("CompletionChunk"),
    )


def _requests(decoded: DecodedCall[CompletionBody], request_id: str, max_prompts: int) -> list[GenerateRequest]:
    """Return one request per prompt, each with its own id.

    Raises:
        InvalidRequest: a prompt is invalid.
    """
    first, *others = decoded.body.prompts(max_prompts)
    request = decoded.body.request(request_id, **first)
    further = (evolve(request, request_id=f"{request_id}-{number}", **other) for number, other in enumerate(others, 1))
    return [request, *further]
