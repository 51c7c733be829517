"""The request body of ``POST /v1/responses``, and its fields as those of a generation request."""

from __future__ import annotations

import json
from typing import Any, Literal

from attrs import frozen

from enginehouse.contract.errors import InvalidRequest, UnsupportedParameter
from enginehouse.contract.fields import ParameterFields
from enginehouse.contract.rows import row
from enginehouse.contract.types import Constraint, Thinking
from enginehouse_responses.reading import Node, invalid

__all__ = ["KNOWN_INCLUDES", "InputTokensBody", "PromptBody", "ResponsesBody"]

_NO_EFFECT = "Accepted and repeated in the response; has no effect."
_NOT_REPEATED = "Accepted; has no effect."
_REFUSED = {
    "access_programs": "this server has none",
    "background_options": "only background is supported",
    "context_management": "use truncation",
    "conversation": "use previous_response_id",
    "image": "models of this server write text only",
    "moderation": "this server judges no texts",
    "prompt": "this server keeps no prompts; send instructions and input",
}
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_LOGPROBS = "message.output_text.logprobs"
_SEALED = "reasoning.encrypted_content"
KNOWN_INCLUDES = (_LOGPROBS, _SEALED)
"""Values of ``include`` that have an effect."""
_MAX_PAIRS, _MAX_KEY_CHARS, _MAX_VALUE_CHARS = 16, 64, 512


@frozen(kw_only=True, slots=False)  # so that the whole body can have a second base class
class PromptBody:
    """Fields on which the prompt depends."""

    model: str | None = row("A name or alias of `/models`; the first configured model without it.")
    input: Any = row("A text, or a list of items: messages, calls and their outputs, reasoning.")
    instructions: str | None = row("A system message before everything else; not kept for the next response.")
    previous_response_id: str | None = row("Continue after this stored response.")
    conversation: Any = None
    tools: Any = row("Functions, custom tools and namespaces; hosted tools are left out.", keeps_nulls=True)
    tool_choice: Any = row(
        "`none`, `auto`, `required`, or an object that names a tool or allowed tools.", keeps_nulls=True
    )
    parallel_tool_calls: bool | None = row("Whether one response may hold several calls.")
    text: Any = row("`format` (`text`, `json_object`, `json_schema`) and `verbosity`.", keeps_nulls=True)
    reasoning: Any = row("`effort`, and `summary`, which stays empty: the reasoning itself is in the response.")
    truncation: Literal["auto", "disabled"] | None = row("`auto` leaves out the oldest items of a too long input.")

    def constraint(self) -> Constraint | None:
        """Return the constraint of ``text.format``. Raises InvalidRequest."""
        form = self.format()
        kind = form.one_of("type", "text", "json_object", "json_schema")
        if kind == "json_object":
            return Constraint(kind="json_object", param=form.path)
        if kind == "json_schema":
            form.text("name")
            form.optional_flag("strict")
            schema = form.object("schema")
            return Constraint(kind="json_schema", text=json.dumps(schema.data), param=schema.path)
        return None

    def format(self) -> Node:
        """Return ``text.format``. Raises InvalidRequest."""
        text = Node({}, "text") if self.text is None else _object(self.text, "text")
        return Node({"type": "text"}, text.at("format")) if text.data.get("format") is None else text.object("format")

    def verbosity(self) -> str:
        """Return ``text.verbosity``. Raises InvalidRequest."""
        text = {} if self.text is None else self.text
        return _object(text, "text").one_of("verbosity", "low", "medium", "high", default="medium")

    def effort(self) -> str | None:
        """Return the reasoning effort. Raises InvalidRequest."""
        reasoning = {} if self.reasoning is None else self.reasoning
        effort = _object(reasoning, "reasoning")
        return None if effort.data.get("effort") is None else effort.one_of("effort", *_EFFORTS)


@frozen(kw_only=True)
class InputTokensBody(PromptBody):
    """The body of ``POST /v1/responses/input_tokens``."""


@frozen(kw_only=True, eq=False)
class ResponsesBody(PromptBody, ParameterFields):
    """The request body. Two are never equal, so that what belongs to one can be looked up by it."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    stream: bool | None = row("Send events while the response is made.")
    stream_options: Any = row(_NOT_REPEATED)
    store: bool | None = row("Keep the response, so that it can be retrieved and continued.")
    background: bool | None = row("Answer at once and generate in the background; needs the store.")
    max_output_tokens: int | None = row("Most tokens of the response.", bounds=(1, 2**63 - 1))
    max_tool_calls: int | None = row(_NO_EFFECT)
    top_logprobs: int | None = row("Alternatives to report per token.", bounds=(0, 20))
    include: tuple[str, ...] | None = row(f"`{_LOGPROBS}` and `{_SEALED}`; others are listed as ignored.")
    metadata: dict[str, str] | None = row(_NO_EFFECT)
    user: str | None = row(_NO_EFFECT)
    safety_identifier: str | None = row(_NO_EFFECT)
    service_tier: str | None = row(_NO_EFFECT)
    prompt_cache_key: str | None = row("Prompts share the prefix cache only with those of the same key.")
    prompt_cache_retention: str | None = row(_NO_EFFECT)
    prompt_cache_options: Any = row(_NOT_REPEATED)
    prompt: Any = None
    moderation: Any = None
    access_programs: Any = None
    background_options: Any = None
    context_management: Any = None
    image: Any = None
    enable_thinking: bool | None = row("Enable or disable reasoning, for models that support both.")
    thinking_budget: int | None = row(
        "Maximum tokens of reasoning; 0 means no reasoning, -1 no limit.", bounds=(-1, 2**31 - 1)
    )
    priority: int = row("Lower numbers are served earlier.", default=0, bounds=(-(2**31), 2**31 - 1))
    return_progress: bool = row(
        "Report the progress of the prefill, as `prompt_progress` in further events `response.in_progress`.",
        default=False,
    )
    timings_per_token: bool = row(
        "Add `timings`, as llama-server does, to the response and to the events of a stream.", default=False
    )
    cache_prompt: bool = row("Reuse cached prefixes, and keep the tokens of this request.", default=True)

    def check(self) -> None:
        """Check what is not a matter of types.

        Raises:
            UnsupportedParameter: a field is known, but not supported.
            InvalidRequest: a combination is not allowed.
        """
        for name, reason in _REFUSED.items():
            if getattr(self, name) not in (None, [], {}):
                raise UnsupportedParameter(f"{name}: not supported: {reason}", name)
        if None not in (self.max_tokens, self.max_output_tokens) and self.max_tokens != self.max_output_tokens:
            raise invalid("max_tokens", "differs from max_output_tokens; give one of them")
        self._check_metadata()
        self.verbosity()
        if self.prompt_cache_key is not None and len(self.prompt_cache_key) > 1000:
            raise invalid("prompt_cache_key", "must have at most 1000 characters")

    def _check_metadata(self) -> None:
        pairs = self.metadata or {}
        if len(pairs) > _MAX_PAIRS:
            raise invalid("metadata", f"must hold at most {_MAX_PAIRS} pairs, not {len(pairs)}")
        for key, value in pairs.items():
            if len(key) > _MAX_KEY_CHARS or len(value) > _MAX_VALUE_CHARS:
                most = f"keys of at most {_MAX_KEY_CHARS} and values of at most {_MAX_VALUE_CHARS} characters"
                raise invalid(f"metadata.{key[:100]}", f"must have {most}")

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report per token; None reports no log-probabilities."""
        is_asked = _LOGPROBS in (self.include or ()) or bool(self.top_logprobs)
        return (self.top_logprobs or 0) if is_asked else None

    @property
    def wants_seal(self) -> bool:
        """True if reasoning items have ``encrypted_content``."""
        return _SEALED in (self.include or ())

    def sampling(self) -> dict[str, Any]:
        """Return the sampling fields, including log-probabilities."""
        num_logprobs = {} if self.num_logprobs is None else {"num_logprobs": self.num_logprobs}
        return {**super().sampling(), **num_logprobs}

    def stopping(self) -> dict[str, Any]:
        """Return the stopping fields."""
        limit = {} if self.max_output_tokens is None else {"max_tokens": self.max_output_tokens}
        return {**super().stopping(), **limit}

    def thinking(self) -> Thinking:
        """Return the reasoning options.

        Raises:
            InvalidRequest: one field enables reasoning and another one disables it.
        """
        effort, enabled = self.effort(), self.enable_thinking
        is_off = effort == "none" or self.thinking_budget == 0
        if is_off and enabled:
            name = "reasoning.effort" if effort == "none" else "thinking_budget"
            raise invalid(name, "contradicts enable_thinking; give one of them")
        return Thinking(
            enabled=False if is_off else enabled,
            budget=None if self.thinking_budget in (-1, 0) else self.thinking_budget,
            effort={"none": None, "max": "xhigh"}.get(effort, effort) if effort is not None else None,
        )


def _object(value: Any, path: str) -> Node:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path}: must be an object", path)
    return Node(value, path)
