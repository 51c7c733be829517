"""Requests: before the model is chosen, as an engine gets them, and the state to resume one elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import attrs
import msgspec
from attrs import field, frozen

from enginehouse.contract.adapters import Adapter, cache_key
from enginehouse.contract.rows import row
from enginehouse.contract.types.chats import Chat, DecodedAudio, DecodedImage, Message, Thinking, ToolUse
from enginehouse.contract.types.events import TokenLogprob

__all__ = [
    "Constraint",
    "ConstraintKind",
    "EngineRequest",
    "GenerateRequest",
    "ReasoningParams",
    "RequestOptions",
    "Resume",
    "ResumedChoice",
    "SamplingParams",
    "Segment",
    "StopParams",
]


@frozen(kw_only=True, slots=False)  # without slots, so that bodies can have a second base class
class RequestOptions:
    """Rows of the table of request fields that reach the engine unchanged.

    Request bodies, :class:`.GenerateRequest` and :class:`.EngineRequest` inherit them.
    """

    priority: int = row("Lower numbers are served earlier.", default=0, bounds=(-(2**31), 2**31 - 1))
    cache_prompt: bool = row(
        "Reuse cached prefixes, and add the tokens of this request to the prefix cache.", default=True, by="cache"
    )

    return_progress: bool = row(
        "Report the progress of the prefill, as `prompt_progress` in chunks of a stream.",
        default=False,
        by="engine",
        member="return_progress",
    )
    return_token_ids: bool = row(
        "Report the token ids of the prompt and of each choice, as vLLM does.",
        default=False,
        by="engine",
        member="return_token_ids",
    )
    token_details: bool = row(
        "Report where each token came from; only with `logprobs`.", default=False, by="engine", member="token_details"
    )

    def options(self) -> dict[str, Any]:
        """Return the values by name, for another request."""
        return {name: getattr(self, name) for name in _OPTIONS}


_OPTIONS = tuple(attribute.name for attribute in attrs.fields(RequestOptions))


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters. Defaults mean "off".

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k most probable tokens; 0 is off.
        top_p: keep the smallest set of tokens, at least one, whose probability reaches this; 1.0 is off.
        min_p: keep tokens with at least this share of the most probable token's probability; 0 is off.
        repetition_penalty: divides positive and multiplies negative logits of seen tokens (prompt and answer); 1.0 is
            off.
        presence_penalty: subtracted once from tokens that the answer already contains.
        frequency_penalty: subtracted per occurrence in the answer.
        repeat_last_n: number of tokens at the end of prompt and answer that the three penalties count; -1 is all of
            them, 0 none.
        logit_bias: token id to value added to its logit; -100 or less bans, 100 or more forces.
        seed: always set; the pipeline draws one if the client gives none, so that a sequence can be replayed.
        num_logprobs: number of alternatives to report per token; None reports nothing, 0 the chosen token only.
        post_sampling_probs: log-probabilities are those of the draw, after all steps, instead of the model's.
        samplers: names of the steps that run, in order (``sampler``); None is all, in their own order.
        extensions: plugin name to that plugin's request fields, as plain data.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = -1
    logit_bias: dict[int, float] = {}
    seed: int = 0
    num_logprobs: int | None = None
    post_sampling_probs: bool = False
    samplers: tuple[str, ...] | None = None
    extensions: dict[str, dict[str, Any]] = {}


class StopParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Conditions that end a sequence.

    Attributes:
        max_tokens: limit of the answer; None is the rest of the context, 0 only computes the prompt.
        stop: strings before which the text ends; matched on the decoded text.
        stop_regex: regular expressions before whose match it ends (:mod:`enginehouse.contract.stop_patterns`).
        stop_token_ids: tokens that end the text like the model's own end tokens; never shown.
        min_tokens: no token ends the text before this many; stop strings may.
        ignore_eos: continue after an end-of-generation token (its text stays hidden).
    """

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False


ConstraintKind = Literal["json_object", "json_schema", "regex", "choice", "lark", "gbnf", "composition"]
"""Format of a constraint's text.

An empty text, a JSON Schema, a regular expression, a JSON list of strings, a grammar (``lark``, ``gbnf``), or a
composition of such parts (:mod:`enginehouse.contract.composition`)."""


class Constraint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A constraint on the answer's text, from its first character (after reasoning) to its last.

    Attributes:
        kind: format of ``text``.
        text: JSON for ``json_schema`` and ``choice``, the expression or grammar for the others.
        param: the request field it came from, for errors.
    """

    kind: ConstraintKind
    text: str = ""
    param: str = "response_format"


class ReasoningParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Reasoning markers of the model, and the reasoning budget.

    Attributes:
        start: the marker that opens reasoning, if the model writes it itself.
        end: the marker that closes reasoning.
        is_open: the prompt already ends inside reasoning.
        budget: maximum number of reasoning tokens; then reasoning is closed by force. None means no limit.
    """

    start: str = "<think>"
    end: str = "</think>"
    is_open: bool = False
    budget: int | None = None


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
