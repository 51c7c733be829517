"""``POST /v1/completions``: its body and its route."""

from __future__ import annotations

import asyncio
from typing import Any

from attrs import evolve, frozen

from enginehouse.api.generation.assembly import Assembly
from enginehouse.api.generation.decoding import DecodedCall
from enginehouse.api.http.state import ApiState
from enginehouse.api.openai.bodies import GenerationBody
from enginehouse.api.openai.completion_assembler import CompletionAssembler
from enginehouse.api.openai.prompt_scores import Echo, read_echo, score_prompts
from enginehouse.api.openai.prompts import read_prompts
from enginehouse.api.openapi.answers import reference
from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.fields import CompletionFields
from enginehouse.contract.surface import GenerationRoute, new_id
from enginehouse.contract.types import GenerateRequest
from enginehouse.settings.config import LimitsSettings


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
