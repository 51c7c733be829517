"""Requests: before the model is chosen, as an engine gets them, and the state to resume one elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from attrs import field, frozen

from enginehouse.contract.adapters import Adapter, cache_key
from enginehouse.contract.types.chats import Chat, DecodedAudio, DecodedImage, Message, Thinking, ToolUse
from enginehouse.contract.types.events import TokenLogprob
from enginehouse.contract.types.parameters import (
    Constraint,
    ReasoningParams,
    RequestOptions,
    SamplingParams,
    StopParams,
)

__all__ = ["EngineRequest", "GenerateRequest", "Resume", "ResumedChoice", "Segment"]


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """A piece of a rendered prompt. Control-token strings become control tokens only in trusted text.

    Attributes:
        media: an image or a recording instead of text; ``text`` is what the template writes for it, and is not part of
            the prompt.
    """

    text: str
    trusted: bool = False
    media: DecodedImage | DecodedAudio | None = None

    @property
    def content(self) -> str:
        """The text, or the hash of the file of its media, for comparing prompts."""
        return self.text if self.media is None else self.media.digest


@frozen(kw_only=True)
class EngineRequest(RequestOptions):
    """A request for an engine: a rendered prompt, everything needed to answer it, and the caller's options.

    Attributes:
        request_id: unique among the requests in the engine.
        chat: instead of a prompt, for engines that take messages; else None.
        segments: the rendered prompt; ignored if ``token_ids`` is given.
        token_ids: a prompt given as ids.
        add_special: put the model's usual special prefix (for example BOS) before ``segments``. False for rendered
            chats, whose template writes it.
        num_prompt_logprobs: alternatives to report for every prompt token but the first; None reports nothing.
        num_choices: number of answers to generate from one prefill.
        shown_tokens: control-token strings whose text is kept in the output, because parsers need them.
        reasoning: reasoning markers of this model; None if it does not reason.
        constraint: constraint on every answer, after any reasoning; enforced token by token.
        prediction_token_ids: the answer that the client expects; drafters may propose it.
        namespace: prefix-cache entries are shared only inside one namespace.
        adapters: adapters that change the model for this request; none has the scale 0.
        caller: name of the caller; within a priority, callers take turns.
        queue_timeout_s: maximum time in the queue; None means no limit.
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
    namespace: str = ""
    adapters: tuple[Adapter, ...] = ()
    caller: str = ""
    queue_timeout_s: float | None = None

    @property
    def cache_namespace(self) -> str:
        """Namespace of its prefix-cache entries and saved states, which no other set of adapters shares."""
        return cache_key(self.namespace, self.adapters)


class ResumedChoice(msgspec.Struct, frozen=True, array_like=True):
    """Progress of a choice.

    Attributes:
        choice: index of the choice, 0-based.
        token_ids: all sampled tokens that its events reported: the visible ones, then the held ones.
        held_logprobs: the log-probabilities of the held tokens, if the request asked for them.
        probabilities: one per token if a sampler depends on previous draws, else empty.
    """

    choice: int
    token_ids: tuple[int, ...] = ()
    held_logprobs: tuple[TokenLogprob, ...] = ()
    probabilities: tuple[float | None, ...] = ()


class Resume(msgspec.Struct, frozen=True, array_like=True):
    """State to resume a partly answered request, in another worker or in the same one.

    A sequence is its token ids, and a draw depends only on its position: from these an engine continues the same
    answer, and does not report again what was already reported.

    Attributes:
        choices: those that have not ended, in order.
        num_scored: prompt tokens whose log-probabilities were reported.
        is_thinking_stopped: the forced end of the reasoning was requested.
    """

    choices: tuple[ResumedChoice, ...]
    num_scored: int = 0
    is_thinking_stopped: bool = False


def _hold_nothing(num_bytes: int) -> None:
    """Let media be decoded without counting their memory."""


@frozen(kw_only=True)
class GenerateRequest(RequestOptions):
    """One API call after decoding, before the model is chosen and the prompt rendered. None means "not given".

    Exactly one of ``messages``, ``text`` and ``token_ids`` is set. ``sampling`` and ``stopping`` hold only the fields
    that the client gave; the pipeline fills the rest from the model's, the profile's and the built-in defaults.

    Attributes:
        request_id: shown to the client as the response id and in the log.
        sampling: :class:`.SamplingParams` field name to value.
        stopping: :class:`.StopParams` field name to value.
        extensions: name of a sampler or preparer to its request fields.
        constraint: constraint on every answer; with tools, on answers without a call.
        tool_use: the tools, if any.
        template_variables: further variables of the chat template; plain data.
        includes_stop: the text ends with the stop string that ended it.
        continues: True continues the last message, an assistant's without calls; False answers it; None continues it
            if it is one.
        opens_turn: the prompt ends with the beginning of an assistant's turn, unless the last message is continued.
        prediction: the answer that the caller expects; its tokens are counted; it does not change the answer.
        suffix: text after the generated text, for models that support infilling; only with ``text``.
        num_prompt_logprobs: alternatives to report for every prompt token but the first; None reports nothing.
        adapters: names, or places in the settings counted from 0, of adapters of the model, each with the scale that
            the request gives. ``model`` may name one as well: ``base:adapter``.
        adapters_param: the field that names them.
        profile: the API of the client; its defaults apply after the model's.
        caller: name of the caller; callers take turns.
        allowed_models: names of the models that the caller may use; None is all.
        is_large: preparing the request may take long, so it is done outside the event loop.
        log_prompt: the client allows the server to log the prompt.
        hold: called with the bytes of the decoded media of the messages before they are decoded, for each model that
            is tried; it may raise an error, which refuses the request.
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
    includes_stop: bool = False
    continues: bool | None = None
    opens_turn: bool = True
    prediction: str | None = None
    suffix: str | None = None
    num_prompt_logprobs: int | None = None
    namespace: str = ""
    adapters: tuple[tuple[str | int, float | None], ...] = ()
    adapters_param: str = ""
    profile: str = "openai"
    caller: str = ""
    allowed_models: frozenset[str] | None = None
    is_large: bool = False
    log_prompt: bool = False
    hold: Callable[[int], None] = field(default=_hold_nothing, eq=False, repr=False)
