"""Values that cross module borders.

Two kinds: values that also cross the worker link are frozen ``msgspec.Struct`` (encoded without code of
ours); values that stay in the parent process are frozen attrs classes. Nothing here imports other
modules of ours, opens files or knows HTTP.

Words: a *request* is one API call; a *choice* is one of its ``n`` answers; a *sequence* is the token
stream behind a choice; a *step* is one scheduler turn; a *batch* is the sequences of one forward pass.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from attrs import field, frozen

__all__ = [
    "CallDelta",
    "Chat",
    "ChoiceFinished",
    "Constraint",
    "ConstraintKind",
    "EngineCapabilities",
    "EngineRequest",
    "EngineSettings",
    "EngineStats",
    "Event",
    "FinishReason",
    "GenerateRequest",
    "HeldTokens",
    "Image",
    "MediaPart",
    "Message",
    "ModelInfo",
    "PromptLogprobs",
    "ReasoningDelta",
    "ReasoningParams",
    "RequestFinished",
    "Resume",
    "ResumedChoice",
    "SamplingParams",
    "Segment",
    "StopParams",
    "TextDelta",
    "Thinking",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "ToolUse",
    "TopLogprob",
]

FinishReason = Literal["stop", "length", "content_filter"]
"""``content_filter``: a remote engine left the rest of the answer out; engines of ours never do."""


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """A piece of rendered prompt. Only in trusted text are control-token strings control tokens."""

    text: str
    trusted: bool = False


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are drawn. Defaults mean "off".

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k most probable tokens; 0 is off.
        top_p: keep the smallest set of tokens whose probability reaches this; 1.0 is off.
        min_p: keep tokens with at least this share of the most probable token's probability; 0 is off.
        repetition_penalty: divides positive and multiplies negative logits of seen tokens (prompt and
            answer); 1.0 is off.
        presence_penalty: subtracted once from tokens that the answer already holds.
        frequency_penalty: subtracted per occurrence in the answer.
        logit_bias: token id to value added to its logit; -100 or less bans, 100 or more forces.
        seed: always set; the pipeline draws one when the client gives none, so that a sequence can be replayed.
        num_logprobs: how many alternatives to report per token; None reports nothing, 0 the chosen token only.
        samplers: names of the steps that run, in order (:mod:`enginehouse.sampler`); None is all, in their own order.
        extensions: plugin name to that plugin's request fields, as plain data.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    num_logprobs: int | None = None
    samplers: tuple[str, ...] | None = None
    extensions: dict[str, dict[str, Any]] = {}


class StopParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When a sequence ends.

    Attributes:
        max_tokens: limit of the answer; None is the rest of the context, 0 only computes the prompt.
        stop: strings before which the text ends; matched on the decoded text.
        stop_token_ids: tokens that end the text like the model's own end tokens; never shown.
        min_tokens: no token ends the text before this many; stop strings may.
        ignore_eos: go on after an end-of-generation token (its text stays hidden).
    """

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False


ConstraintKind = Literal["json_object", "json_schema", "regex", "choice", "lark", "gbnf", "composition"]
"""What a constraint's text is: nothing, a JSON Schema, a regular expression, a JSON list of strings, a grammar, or
a composition of such parts (:mod:`enginehouse.composition`)."""


class Constraint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the answer's text must look like, from its first character (after reasoning) to its last.

    Attributes:
        kind: how to read ``text``.
        text: JSON for ``json_schema`` and ``choice``, the expression or grammar for the others.
        param: the request field it came from, for errors.
    """

    kind: ConstraintKind
    text: str = ""
    param: str = "response_format"


class ReasoningParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the model marks its reasoning, and how much of it there may be.

    Attributes:
        start: the marker that opens reasoning, when the model writes it itself.
        end: the marker that closes it.
        is_open: the prompt already ends inside reasoning.
        budget: most tokens of reasoning; then it is closed by force. None is no limit.
    """

    start: str = "<think>"
    end: str = "</think>"
    is_open: bool = False
    budget: int | None = None


class Chat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A chat that is not rendered, for engines that take messages; they also find calls and reasoning in answers."""

    messages: tuple[Message, ...]
    tool_use: ToolUse | None = None
    thinking: Thinking | None = None
    template_variables: dict[str, Any] = {}


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
    caller: str = ""
    queue_timeout_s: float | None = None


class TopLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One alternative at a position. ``logprob`` is the raw model's log-softmax value (natural log)."""

    token_id: int
    token: bytes
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The drawn token of one position and the most probable alternatives, best first."""

    token_id: int
    token: bytes
    logprob: float
    top: tuple[TopLogprob, ...] = ()


class HeldTokens(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of a choice that are drawn and not visible yet: their text waits for the rest of a character or stop string.

    Attributes:
        logprobs: one entry per token id when the request asked for them.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class TextDelta(msgspec.Struct, frozen=True, array_like=True, tag="delta"):
    """New text of one choice.

    With ``held`` and ``probabilities`` a reader knows all that the choice's state is made of (see :class:`Resume`).

    Attributes:
        choice: index of the choice, 0-based.
        text: whole characters, never part of a stop string; may be empty when only tokens are reported.
        token_ids: the tokens that became visible with this text.
        logprobs: one entry per token id when the request asked for them.
        held: what is drawn and still invisible after this text; None when nothing is.
        probabilities: of the tokens drawn since the choice's last event, where a sampler follows its own draws; None
            stands for a token that was not drawn.
    """

    choice: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    held: HeldTokens | None = None
    probabilities: tuple[float | None, ...] = ()


class ReasoningDelta(msgspec.Struct, frozen=True, array_like=True, tag="reasoning"):
    """New reasoning of one choice, from an engine that takes messages."""

    choice: int
    text: str


class CallDelta(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """A piece of one tool call of one choice, from an engine that takes messages.

    Attributes:
        call: index of the call in its choice, 0-based and without gaps.
        arguments: the next part of the arguments; may be empty.
        name: of the function, in the first piece of a call and only there.
    """

    choice: int
    call: int
    arguments: str = ""
    name: str | None = None


class ChoiceFinished(msgspec.Struct, frozen=True, array_like=True, tag="choice"):
    """A choice ended. ``num_tokens`` counts all generated tokens, hidden ones (stop text, end tokens) too.

    ``stop_reason`` is the stop string or end token id that ended it, or None for ``length`` and when a
    constraint was complete. ``num_reasoning_tokens`` are those of ``num_tokens`` between reasoning markers,
    ``num_forced_tokens`` those that a constraint forced, so that they were not sampled.
    """

    choice: int
    finish_reason: FinishReason
    num_tokens: int
    stop_reason: str | int | None = None
    num_reasoning_tokens: int = 0
    num_forced_tokens: int = 0


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, tag="prompt"):
    """Log-probabilities of prompt tokens, in pieces and in order, from the second token on.

    ``ranks`` says of each token how many are at least as probable, itself included: 1 is the most probable one.
    """

    entries: tuple[TokenLogprob, ...]
    ranks: tuple[int, ...] = ()


class RequestFinished(msgspec.Struct, frozen=True, array_like=True, tag="request"):
    """The last event of a request. Times are in seconds, measured in the worker.

    Attributes:
        num_prompt_tokens: tokens of the prompt, counted once however many choices.
        num_cached_tokens: of these, how many were reused from the prefix cache.
        num_completion_tokens: generated tokens over all choices, hidden ones too.
        num_forced_tokens: of these, how many a constraint forced, so that they were not sampled.
        num_drafted_tokens: guesses of drafters that were computed.
        num_accepted_tokens: of these, how many were right, so that they cost no forward pass of their own.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    num_forced_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0


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


Event = PromptLogprobs | TextDelta | ReasoningDelta | CallDelta | ChoiceFinished | RequestFinished


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is doing now; counts, and KV positions in tokens."""

    num_waiting: int = 0
    num_running: int = 0
    max_sequences: int = 0
    free_tokens: int = 0
    cached_tokens: int = 0
    num_steps: int = 0
    num_preemptions: int = 0


class EngineCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine makes of request parameters. Said by the process that runs the model, which alone knows.

    Attributes:
        takes_messages: chats come as :class:`Chat` instead of rendered prompts; templates, tool calls and reasoning are
            the engine's. It then names every parameter about these in ``native`` or ``refused``.
        native: parameters that the model's library applies by itself: fields of :class:`SamplingParams` and
            :class:`StopParams`, or any other by the name that clients write.
        refused: such a parameter to why this engine cannot apply it.
        samplers: sampler plugins at work; None is all that the server has.
        constraint_kinds: what kinds of constraints it enforces.
        constraint_problem: why it enforces no others.
        media: what messages may hold besides text; only where ``takes_messages``.
    """

    takes_messages: bool = False
    native: tuple[str, ...] = ()
    refused: dict[str, str] = {}
    samplers: tuple[str, ...] | None = None
    constraint_kinds: tuple[ConstraintKind, ...] = ()
    constraint_problem: str = ""
    media: tuple[Literal["image"], ...] = ()


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the parent process must know about an opened model.

    Attributes:
        backend: name of the backend that opened it.
        max_context: longest sequence (prompt plus answer) in tokens.
        vocab_size: number of logits in a row.
        chat_templates: Jinja sources by name; ``default`` is the usual one. Empty: the fallback is used.
        special_tokens: control-token string to id; user text never forms these.
        bos_token: text of the begin-of-sequence token, "" when there is none.
        eos_token: text of the end-of-sequence token, "" when there is none.
        infill_tokens: control tokens before the text before a gap, before the text after it, and at the end, where
            the model's file names them; else empty.
        engine: what its engine makes of request parameters; filled in by core where core's engine runs it.
        generation_defaults: request fields that the model's own files recommend, such as ``temperature``.
        metadata: anything worth showing (architecture, quantisation, parameter count), as strings.
    """

    backend: str
    max_context: int
    vocab_size: int
    chat_templates: dict[str, str] = {}
    special_tokens: dict[str, int] = {}
    bos_token: str = ""
    eos_token: str = ""
    infill_tokens: tuple[str, ...] = ()
    engine: EngineCapabilities = EngineCapabilities()
    generation_defaults: dict[str, Any] = {}
    metadata: dict[str, str] = {}


@frozen(kw_only=True)
class ToolCall:
    """A call in an assistant's message. ``arguments`` is JSON text as the model wrote it, so it may be damaged."""

    id: str
    name: str
    arguments: str


class MediaPart(msgspec.Struct, frozen=True, kw_only=True, tag="media"):
    """A part of a message that is no text, as the client wrote it: unread, so of any form.

    Attributes:
        kind: such as ``image_url``.
        value: what stands under that name in the part.
        param: where the part stands in the request, for errors.
    """

    kind: str
    value: Any
    param: str


class Image(msgspec.Struct, frozen=True, kw_only=True, tag="image"):
    """A checked image. ``media_type`` is what the bytes really are; ``detail`` is how closely to look, if said."""

    media_type: str
    data: bytes
    detail: Literal["auto", "low", "high"] | None = None


@frozen(kw_only=True)
class Message:
    """One chat message. Text parts are already joined; ``name`` is the optional author name.

    Attributes:
        parts: texts and others in their order, where a message holds others; else empty.
        reasoning: what an assistant thought before its content; None when not known.
        tool_calls: the calls of an assistant's message.
        tool_call_id: which call a message of the role ``tool`` answers.
    """

    role: str
    content: str
    name: str | None = None
    parts: tuple[str | MediaPart | Image, ...] = ()
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


@frozen(kw_only=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: JSON Schema of its arguments, an object; without any, it takes no arguments.
        definition: all of it in OpenAI's form, as the client wrote it; templates show this.
        strict: calls of the model's own choice must match ``parameters`` as well.
        param: where the function stands in the request, for errors.
    """

    name: str
    parameters: dict[str, Any]
    definition: dict[str, Any]
    strict: bool = False
    param: str = "tools"


@frozen(kw_only=True)
class ToolUse:
    """The tools of a request and how they may be used.

    Attributes:
        tools: with different names, at least one.
        choice: ``required`` is at least one call, ``none`` hides the tools from the model.
        only: the one function that must be called; with ``required``.
        parallel: whether one answer may hold several calls; None is what suits the model.
    """

    tools: tuple[Tool, ...]
    choice: Literal["auto", "none", "required"] = "auto"
    only: str | None = None
    parallel: bool | None = None

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        if self.choice == "none":
            return ()
        return tuple(tool for tool in self.tools if self.only in (None, tool.name))


@frozen(kw_only=True)
class Thinking:
    """What a request says about reasoning. None is "not given".

    Attributes:
        enabled: whether the model reasons, where it has the choice.
        budget: most tokens of reasoning; None is no limit.
        effort: how hard to think, for templates that know efforts.
    """

    enabled: bool | None = None
    budget: int | None = None
    effort: str | None = None


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
        prediction: what the caller expects the answer to be, to be counted; it changes no answer.
        suffix: text that follows what is written, for models that fill gaps; only with ``text``.
        num_prompt_logprobs: alternatives to report for every prompt token but the first; None reports nothing.
        profile: the API that the client speaks; its defaults apply behind the model's.
        caller: whose request it is; callers take turns.
        allowed_models: names of the models that the caller may use; None is all.
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
    thinking: Thinking = Thinking()
    template_variables: dict[str, Any] = field(factory=dict)
    prediction: str | None = None
    suffix: str | None = None
    num_prompt_logprobs: int | None = None
    priority: int = 0
    namespace: str = ""
    profile: str = "openai"
    caller: str = ""
    allowed_models: frozenset[str] | None = None


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How :class:`enginehouse.engine.loop.StepEngine` schedules.

    Attributes:
        slots: sequences that decode at once.
        max_queue: requests that wait; one more is refused.
        max_queue_tokens: tokens of their prompts; a request that brings more is refused, unless none waits.
        max_queue_per_caller: requests of one named caller that wait; None is a share of ``max_queue``.
        prefill_chunk_tokens: most prompt tokens in a step that other sequences decode in; None is the runner's choice.
        max_prefill_tokens: most prompt tokens in a step that nothing decodes in; None is twice the runner's chunk.
        prefix_cache: keep finished sequences for requests that share a beginning.
    """

    slots: int = 8
    max_queue: int = 128
    max_queue_tokens: int = 1_000_000
    max_queue_per_caller: int | None = None
    prefill_chunk_tokens: int | None = None
    max_prefill_tokens: int | None = None
    prefix_cache: bool = True
