"""The fields that the bodies of both generating endpoints have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from attrs import frozen

from enginehouse.api.generation.decoding import RequestBody
from enginehouse.api.openai.constraints import check_members, find_ignored_in_constraints, read_constraint
from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.fields import GenerationFields
from enginehouse.contract.shapes import StreamOptions
from enginehouse.contract.types import Constraint, GenerateRequest
from enginehouse.settings.config import LimitsSettings

__all__ = ["GenerationBody"]


@frozen(kw_only=True)
class GenerationBody(RequestBody, GenerationFields):
    """Base of the bodies of both generating endpoints. The fields are rows of the table of request fields."""

    def check(self, limits: LimitsSettings) -> None:
        """Check rules that involve several fields or the server's limits. Raises RequestError."""
        check_members(self)
        if self.n > limits.max_choices:
            raise InvalidRequest(f"n: must be at most {limits.max_choices}, not {self.n}", "n")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options: only allowed when stream is true", "stream_options")
        if self.return_progress and not self.stream:
            raise InvalidRequest("return_progress: only allowed when stream is true", "return_progress")

    @staticmethod
    def find_ignored(data: Mapping[str, Any]) -> Iterator[str]:
        """Yield paths of unknown fields inside known ones; ``data`` is the decoded data."""
        known = {attribute.name for attribute in attrs.fields(StreamOptions)}
        yield from (f"stream_options.{key}" for key in data.get("stream_options", ()) if key not in known)
        yield from find_ignored_in_constraints(data)

    def constraint(self) -> Constraint | None:
        """Return the constraint on the output. Raises InvalidRequest."""
        return read_constraint(self)

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives to report for every prompt token except the first; None reports nothing."""
        return 0 if self.loglikelihood and self.prompt_logprobs is None else self.prompt_logprobs

    @property
    def namespace(self) -> str:
        """The prefix-cache namespace within the caller's own."""
        # The same text may be written in two ways, but only with the salt, known only to those who share it.
        return f"{self.cache_salt}\0{self.prompt_cache_key}" if self.prompt_cache_key else self.cache_salt

    @property
    def num_choices(self) -> int:
        """Number of choices to sample per prompt, including those that are not returned."""
        return self.n

    @property
    def include_usage(self) -> bool:
        """True if a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def request(self, request_id: str, **prompt: Any) -> GenerateRequest:
        """Return the request of the body; ``prompt`` is messages, text or token_ids, and their options."""
        return GenerateRequest(
            request_id=request_id,
            model=self.model,
            num_choices=self.num_choices,
            sampling=self.sampling(),
            stopping=self.stopping(),
            constraint=self.constraint(),
            num_prompt_logprobs=self.num_prompt_logprobs,
            namespace=self.namespace,
            log_prompt=self.log_prompt,
            includes_stop=self.include_stop_str_in_output,
            **self.options(),
            **prompt,
        )
