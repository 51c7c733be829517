"""The response object: what it repeats of its request, and its state. Every member is always written."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from attrs import define, field

from enginehouse.contract.usage import Usage
from enginehouse_responses.body import ResponsesBody
from enginehouse_responses.tools import Toolbox

__all__ = ["Resource", "usage_of"]


@define
class Resource:
    """A response without its output items, which belong to the writer.

    Attributes:
        head: the members that never change.
    """

    head: dict[str, Any]
    status: str = "in_progress"
    completed_at: int | None = None
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None
    details: dict[str, Any] | None = None
    timings: dict[str, Any] | None = None
    created_at: int = field(factory=lambda: int(time.time()))

    @classmethod
    def of(
        cls,
        answer_id: str,
        model: str,
        body: ResponsesBody,
        toolbox: Toolbox,
        *,
        is_stored: bool,
        defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> Resource:
        """Return the response to a request that was accepted.

        Args:
            defaults: the model's parameters where the request gives none.
        """
        form = body.format().data
        if form.get("type") == "json_schema":
            form = {"description": None, "strict": True, **form}

        def used(name: str, built_in: float) -> float:
            given: float | None = getattr(body, name)
            return given if given is not None else float(defaults.get(name, built_in))

        head = {
            "id": answer_id,
            "object": "response",
            "background": bool(body.background),
            "conversation": None,
            "frequency_penalty": used("frequency_penalty", 0),
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens if body.max_output_tokens is not None else body.max_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": model,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "presence_penalty": used("presence_penalty", 0),
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "prompt_cache_retention": body.prompt_cache_retention,
            "reasoning": {"effort": body.effort(), "summary": (body.reasoning or {}).get("summary")},
            "safety_identifier": body.safety_identifier,
            "service_tier": body.service_tier or "default",
            "store": is_stored,
            "temperature": used("temperature", 1.0),
            "text": {"format": form, "verbosity": body.verbosity()},
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": toolbox.echoed,
            "top_logprobs": body.top_logprobs or 0,
            "top_p": used("top_p", 1.0),
            "truncation": body.truncation or "disabled",
            "user": body.user,
        }
        return cls(head)

    @property
    def id(self) -> str:
        """The id of the response."""
        return str(self.head["id"])

    def to_plain(self, output: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the response as it is now, with these items."""
        more = {"enginehouse": self.details, "timings": self.timings}
        return {
            **self.head,
            "created_at": self.created_at,
            "completed_at": self.completed_at,
            "status": self.status,
            "error": self.error,
            "incomplete_details": self.incomplete_details,
            "output": output,
            "usage": self.usage,
            **{name: value for name, value in more.items() if value is not None},
        }

    def finish(self, reason: str | None) -> None:
        """Set the state at the end of the output; ``reason`` is the finish reason of the choice."""
        if reason in ("length", "content_filter"):
            self.status = "incomplete"
            self.incomplete_details = {"reason": "max_output_tokens" if reason == "length" else reason}
        else:
            self.status, self.completed_at = "completed", int(time.time())

    def fail(self, code: str, message: str) -> None:
        """Set the state of a response that breaks off."""
        self.status, self.error = "failed", {"code": code, "message": message}

    def cancel(self) -> None:
        """Set the state of a response that its client has cancelled."""
        self.status = "cancelled"


def usage_of(usage: Usage, *, is_kept: bool) -> dict[str, Any]:
    """Return token counts in the form of this API; ``is_kept``: new prompt tokens were added to the prefix cache."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.prompt_tokens - usage.cached_tokens if is_kept else 0,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
