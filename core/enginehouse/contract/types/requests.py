"""One request, before its model is chosen and as an engine gets it, and what it needs to go on elsewhere."""

from __future__ import annotations

from typing import Any

import msgspec
from attrs import field, frozen

from enginehouse.contract.types.chats import Chat, Message, Thinking, ToolUse
from enginehouse.contract.types.events import TokenLogprob
from enginehouse.contract.types.parameters import Constraint, ReasoningParams, SamplingParams, StopParams

__all__ = ["Compression", "EngineRequest", "GenerateRequest", "Resume", "ResumedChoice", "Segment"]


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """A piece of rendered prompt. Only in trusted text are control-token strings control tokens."""

    text: str
    trusted: bool = False


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an engine gets: a rendered prompt and everything needed to answer it.

    Attributes:
        request_id: unique among the requests that the engine holds.
        chat: instead of a prompt, for engines that take messages; else None.
        segments: the rendered prompt; ignored when ``token_ids`` is given.
        token_ids: a prompt given as ids.
        add_special: put the model's usual special prefix (for example BOS) before ``segments``. False for
            rendered chats, whose template writes it.
        num_prompt_logprobs: alternatives to report for every prompt token but the first; None reports nothing.
        num_choices: how many answers to draw from one prefill.
        shown_tokens: control-token strings whose text is shown all the same, for the answer is parsed for them.
        reasoning: how this model marks its reasoning; None when it does not reason.
        constraint: what every answer must look like, after any reasoning; enforced token by token.
        prediction_token_ids: what the client expects as the answer; drafters may propose it.
        priority: lower numbers are served earlier.
        namespace: prefix-cache entries are shared only inside one namespace.
        cache_prompt: reuse what other requests have computed, and keep what this one computes.
        caller: whose request it is; within a priority, callers take turns.
        queue_timeout_s: how long it may wait before it starts; None is no limit.
    """

    request_id: str
    chat: Chat | None = None
    segments: tuple[Segment, ...] = ()
    token_ids: tuple[int, ...] | None = None
    add_special: bool = False
    num_prompt_logprobs: int | None = None
    num_choices: int = 1
    sampling: SamplingParams = SamplingParams()
    stopping: StopParams = StopParams()
    shown_tokens: tuple[str, ...] = ()
    reasoning: ReasoningParams | None = None
    constraint: Constraint | None = None
    prediction_token_ids: tuple[int, ...] = ()
    priority: int = 0
    namespace: str = ""
    cache_prompt: bool = True
    caller: str = ""
    queue_timeout_s: float | None = None


class ResumedChoice(msgspec.Struct, frozen=True, array_like=True):
    """How far a choice has come.

    Attributes:
        choice: index of the choice, 0-based.
        token_ids: everything drawn that its events told of: the visible tokens, then those held back.
        held_logprobs: the log-probabilities of those held back, when the request asked for them.
        probabilities: one per token where a sampler follows its own draws, else empty.
    """

    choice: int
    token_ids: tuple[int, ...] = ()
    held_logprobs: tuple[TokenLogprob, ...] = ()
    probabilities: tuple[float | None, ...] = ()


class Resume(msgspec.Struct, frozen=True, array_like=True):
    """Where a request goes on that another worker, or the same one earlier, has answered in part.

    A sequence is its token ids, and a draw depends on nothing but its position: from these an engine goes on with the
    same answer, and reports nothing again that it has reported before.

    Attributes:
        choices: those that have not ended, in order.
        num_scored: prompt tokens whose log-probabilities were reported.
        is_thinking_stopped: somebody asked for the reasoning to be closed.
    """

    choices: tuple[ResumedChoice, ...]
    num_scored: int = 0
    is_thinking_stopped: bool = False


@frozen(kw_only=True)
class Compression:
    """What a request says about shortening its prompt. None is "not given".

    Attributes:
        is_on: False leaves the prompt as it is, whatever the settings say.
        method: name of a compressor.
        ratio: share of the tokens that is kept of what may be shortened; above 0, at most 1.
    """

    is_on: bool = True
    method: str | None = None
    ratio: float | None = None


@frozen(kw_only=True)
class GenerateRequest:
    """One API call after decoding, before the model is chosen and rendered. None means "not given".

    Exactly one of ``messages``, ``text`` and ``token_ids`` is set. ``sampling`` and ``stopping`` hold only
    the fields that the client gave; the pipeline fills the rest from the model's, the profile's and the
    built-in defaults.

    Attributes:
        request_id: shown to the client as the response id and in the log.
        sampling: :class:`SamplingParams` field name to value.
        stopping: :class:`StopParams` field name to value.
        extensions: plugin name to that plugin's request fields.
        constraint: what every answer must look like; with tools, one that calls nothing.
        tool_use: the tools, if any.
        template_variables: further variables of the chat template; plain data.
        cache_prompt: reuse what other requests have computed, and keep what this one computes.
        prediction: what the caller expects the answer to be, to be counted; it changes no answer.
        compression: whether and how to shorten the prompt; None leaves that to the settings.
        suffix: text that follows what is written, for models that fill gaps; only with ``text``.
        num_prompt_logprobs: alternatives to report for every prompt token but the first; None reports nothing.
        profile: the API that the client speaks; its defaults apply behind the model's.
        caller: whose request it is; callers take turns.
        allowed_models: names of the models that the caller may use; None is all.
        is_large: what is made of it may take long, so it is made beside the event loop.
    """

    request_id: str
    model: str | None
    messages: tuple[Message, ...] | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    num_choices: int = 1
    sampling: dict[str, Any] = field(factory=dict)
    stopping: dict[str, Any] = field(factory=dict)
    extensions: dict[str, dict[str, Any]] = field(factory=dict)
    constraint: Constraint | None = None
    tool_use: ToolUse | None = None
    thinking: Thinking = field(factory=Thinking)
    template_variables: dict[str, Any] = field(factory=dict)
    prediction: str | None = None
    compression: Compression | None = None
    suffix: str | None = None
    num_prompt_logprobs: int | None = None
    priority: int = 0
    namespace: str = ""
    cache_prompt: bool = True
    profile: str = "openai"
    caller: str = ""
    allowed_models: frozenset[str] | None = None
    is_large: bool = False
