"""The table of request fields: one row per field, from which everything else about it is derived.

Derived are the strict bodies of the endpoints (which inherit these classes), refusals and support by model, what report
mode removes, defaults of settings, the collision check for plugins' fields, the OpenAPI document and tables of the
documentation. A field that is passed to the engine unchanged has its row in
:class:`.RequestOptions`. Bodies of requests are checked further in ``api``; fields are given
their meaning in ``pipeline`` and ``engine``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs
from attrs import frozen

from enginehouse.contract import shapes
from enginehouse.contract.adapter_fields import ADAPTERS_SCHEMA, LORA_SCHEMA, PEFT_SCHEMA
from enginehouse.contract.errors import quoted
from enginehouse.contract.rows import INT64_MAX, Row, int64, row, row_of
from enginehouse.contract.shapes import NO_EFFECT, Effort, MessageBody, StreamOptions, ToolBody
from enginehouse.contract.stop_patterns import MAX_PATTERN_CHARS, stop_patterns
from enginehouse.contract.types import RequestOptions, SamplingParams, StopParams

__all__ = [
    "FIELDS",
    "MAX_STOP_CHARS",
    "MAX_STOP_TOKENS",
    "MAX_TOOLS",
    "ChatFields",
    "CompletionFields",
    "ConstraintFields",
    "GenerationFields",
    "ParameterFields",
    "StopField",
]

MAX_STOP_TOKENS = 1024
"""Maximum number of ``stop_token_ids``."""
MAX_STOP_CHARS = 1000
"""Maximum length of one stop string: searching for it takes memory per character while the answer is generated."""
MAX_TOOLS = 128
"""Maximum number of tools of a request."""
_MAX_SALT_CHARS = 1000

StopField = str | tuple[str, ...] | None
"""Value of ``stop``, one string or several."""
_STOP = {**shapes.SOME_TEXT, "maxLength": MAX_STOP_CHARS}
_PATTERN = {**shapes.SOME_TEXT, "maxLength": MAX_PATTERN_CHARS}


def _check_logit_bias(_: Any, attribute: Any, value: dict[str, float]) -> None:
    wrong = [key for key, bias in value.items() if not -100 <= bias <= 100]
    if wrong:
        named = ", ".join(map(quoted, wrong[:20]))
        raise ValueError(f"'{attribute.name}' values must be from -100 to 100; wrong for {named}")


def _check_stop(_: Any, attribute: Any, value: str | tuple[str, ...]) -> None:
    texts = (value,) if isinstance(value, str) else value
    if "" in texts:
        raise ValueError(f"'{attribute.name}' must not hold an empty string")
    longest = max(map(len, texts), default=0)
    if longest > MAX_STOP_CHARS:
        raise ValueError(f"'{attribute.name}' must hold strings of at most {MAX_STOP_CHARS} characters, not {longest}")


def _check_stop_regex(_: Any, attribute: Any, value: str | tuple[str, ...]) -> None:
    try:
        stop_patterns((value,) if isinstance(value, str) else value)
    except ValueError as error:
        raise ValueError(f"'{attribute.name}' holds {error}") from None


def _check_stop_token_ids(_: Any, attribute: Any, value: tuple[int, ...]) -> None:
    if len(value) > MAX_STOP_TOKENS:
        raise ValueError(f"'{attribute.name}' must hold at most {MAX_STOP_TOKENS} token ids, not {len(value)}")
    wrong = [token_id for token_id in value if not 0 <= token_id <= INT64_MAX]
    if wrong:
        raise ValueError(f"'{attribute.name}' must hold token ids, numbers from 0 on, not {wrong[0]}")


def _check_salt(_: Any, attribute: Any, value: str) -> None:
    if len(value) > _MAX_SALT_CHARS:
        raise ValueError(f"'{attribute.name}' must have at most {_MAX_SALT_CHARS} characters, not {len(value)}")


def _parameter(text: str, **known: Any) -> Any:
    """Return the row of a sampling or stopping parameter."""
    return row(text, by="engine", **known)


@frozen(kw_only=True)
class ParameterFields:
    """Sampling and stopping parameters. None means not given; settings can give them defaults."""

    temperature: float | None = _parameter("Divides the logits. 0 is greedy.", step="temperature", bounds=(0, 2))
    top_p: float | None = _parameter(
        "Keep the most probable tokens that together reach this probability, at least one. 1 is off.",
        step="top_p",
        bounds=(0, 1),
    )
    top_k: int | None = _parameter(
        "Keep this many of the most probable tokens. -1 and 0 are off.", step="top_k", bounds=(-1, 2**31 - 1)
    )
    min_p: float | None = _parameter(
        "Keep tokens with at least this share of the most probable token's probability. 0 is off.",
        step="min_p",
        bounds=(0, 1),
    )
    repetition_penalty: float | None = _parameter(
        "Divides positive and multiplies negative logits of tokens seen so far. 1 is off.",
        step="penalties",
        bounds=(0.001, 1000.0),  # smaller ones make logits infinite
    )
    presence_penalty: float | None = _parameter(
        "Subtracted once from tokens that the answer already holds. 0 is off.", step="penalties", bounds=(-2, 2)
    )
    frequency_penalty: float | None = _parameter(
        "Subtracted for each time that the answer holds a token. 0 is off.", step="penalties", bounds=(-2, 2)
    )
    repeat_last_n: int | None = _parameter(
        "Number of tokens at the end of prompt and answer that the three penalties count. -1 is all, 0 is none.",
        bounds=(-1, 2**31 - 1),
    )
    logit_bias: dict[str, float] | None = _parameter(
        "Token id to a value added to its logit; -100 bans a token, 100 forces it.",
        check=_check_logit_bias,
        schema={
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        },
    )
    post_sampling_probs: bool | None = _parameter(
        "Log-probabilities are those of the draw, after penalties, temperature and truncation, instead of the model's. "
        "Only with log-probabilities."
    )
    samplers: tuple[str, ...] | None = _parameter(
        "Names of the steps that draw a token, in order; a step that is not listed does not run."
    )
    seed: int | None = _parameter("The same seed, a signed 64-bit integer, gives the same text.", check=int64)
    stop: str | tuple[str, ...] | None = _parameter(
        f"One or several strings before which the text ends; none empty, each of at most {MAX_STOP_CHARS} characters.",
        check=_check_stop,
        schema={"anyOf": [_STOP, {"type": "array", "items": _STOP}, {"type": "null"}]},
        limit=("maxItems", "max_stop"),
    )
    stop_regex: str | tuple[str, ...] | None = _parameter(
        "One or several regular expressions before whose match the text ends, each of at most "
        f"{MAX_PATTERN_CHARS} characters. Of a longer match, the last {MAX_PATTERN_CHARS} characters are left out.",
        check=_check_stop_regex,
        schema={"anyOf": [_PATTERN, {"type": "array", "items": _PATTERN}, {"type": "null"}]},
        limit=("maxItems", "max_stop"),
    )
    stop_token_ids: tuple[int, ...] | None = _parameter(
        f"Tokens that end the text, like the model's own end tokens; never shown; at most {MAX_STOP_TOKENS}.",
        check=_check_stop_token_ids,
        schema={"items": shapes.TOKEN_ID, "maxItems": MAX_STOP_TOKENS},
    )
    max_tokens: int | None = _parameter(
        "Most tokens of the answer.", bounds=(1, INT64_MAX), limit=("maximum", "max_tokens")
    )
    min_tokens: int | None = _parameter(
        "No token ends the text before this many; stop strings may.", bounds=(0, INT64_MAX)
    )
    ignore_eos: bool | None = _parameter("Go on after the model's end tokens.")

    def sampling(self) -> dict[str, Any]:
        """Return the given fields of :class:`.SamplingParams`; ``logit_bias`` still has the client's own keys."""
        given = {name: getattr(self, name) for name in _SAMPLING}
        if self.top_k == -1:
            given["top_k"] = 0
        return {name: value for name, value in given.items() if value is not None}

    def stopping(self) -> dict[str, Any]:
        """Return the given fields of :class:`.StopParams`."""
        given = {name: getattr(self, name) for name in _STOPPING}
        for name in ("stop", "stop_regex"):
            given[name] = (given[name],) if isinstance(given[name], str) else given[name]
        return {name: value for name, value in given.items() if value is not None}


_SAMPLING, _STOPPING = (
    tuple(a.name for a in attrs.fields(ParameterFields) if a.name in struct.__struct_fields__)
    for struct in (SamplingParams, StopParams)
)

_SCHEMA_KINDS = ("json_object", "json_schema")
_GRAMMAR_KINDS = ("lark", "gbnf")


def _constraint(text: str, *kinds: str, **known: Any) -> Any:
    """Return the row of a field that constrains the output."""
    return row(text, by="constraint", kinds=kinds, prompt="shapes", **known)


@frozen(kw_only=True)
class ConstraintFields(ParameterFields):
    """Constraints on the output, as plain data; at most one of them may be given."""

    response_format: Any = _constraint(
        "`text`, `json_object` (optionally with `schema`) or `json_schema`; a schema is enforced with or without "
        "`strict`.",
        *_SCHEMA_KINDS,
        schema=shapes.RESPONSE_FORMAT,
        keeps_nulls=True,
    )
    structured_outputs: Any = _constraint(
        "An object with one of `json`, `regex`, `choice`, `grammar` and `json_object`.",
        *(*_SCHEMA_KINDS, "regex", "choice", *_GRAMMAR_KINDS),
        schema=shapes.STRUCTURED_OUTPUTS,
        keeps_nulls=True,
    )
    guided_json: Any = _constraint(
        "Another name of `structured_outputs.json`.", *_SCHEMA_KINDS, schema=shapes.JSON_SCHEMA, keeps_nulls=True
    )
    guided_regex: Any = _constraint("Another name of `structured_outputs.regex`.", "regex", schema=shapes.SOME_TEXT)
    guided_choice: Any = _constraint("Another name of `structured_outputs.choice`.", "choice", schema=shapes.CHOICES)
    guided_grammar: Any = _constraint(
        "Another name of `structured_outputs.grammar`.", *_GRAMMAR_KINDS, schema=shapes.SOME_TEXT
    )
    grammar: Any = _constraint("A grammar in GBNF or Lark.", *_GRAMMAR_KINDS, schema={"type": "string"})
    json_schema: Any = _constraint(
        "A JSON Schema, or one as JSON text.", *_SCHEMA_KINDS, schema=shapes.JSON_SCHEMA, keeps_nulls=True
    )


@frozen(kw_only=True)
class GenerationFields(RequestOptions, ConstraintFields):
    """Fields of both generating endpoints."""

    model: str | None = row("A name or alias of `/models`; the first configured model without it.", prompt="shapes")
    n: int = row("Number of choices.", default=1, bounds=(1, None), limit=("maximum", "max_choices"))
    stream: bool = row("Stream the answer as events.", default=False)
    stream_options: StreamOptions | None = row("Only with `stream`.")
    timings_per_token: bool = row(
        "Add `timings`, as llama-server does, to the response and to the chunks of a stream.", default=False
    )
    include_stop_str_in_output: bool = row(
        "End the text with the stop string that ended it, instead of before it.",
        default=False,
        by="engine",
        member="includes_stop",
    )
    cache_salt: str = row(
        "Prompts share the prefix cache only with those of the same salt; at most 1000 characters.",
        default="",
        by="cache",
        check=_check_salt,
        schema={"maxLength": _MAX_SALT_CHARS},
    )
    prompt_cache_key: str | None = row(
        "Like `cache_salt`, by OpenAI's name; both may be given.",
        by="cache",
        check=_check_salt,
        schema={"maxLength": _MAX_SALT_CHARS},
    )
    adapters: Any = row(
        "Adapters (LoRA) of the model: a name, a list of names, or an object of names and scales. `model` may name one "
        "as well, as `model:adapter`.",
        by="adapters",
        member="adapters",
        schema=ADAPTERS_SCHEMA,
        keeps_nulls=True,
        off=([], {}),
    )
    peft: Any = row(
        "Another name of `adapters`, of OctoAI: a name, or an object of names and scales.",
        by="adapters",
        member="adapters",
        schema=PEFT_SCHEMA,
        keeps_nulls=True,
        off=({},),
    )
    lora: Any = row(
        "Another name of `adapters`, of llama-server: a list of `id` and `scale`; an id is the adapter's place in the "
        "settings, from 0.",
        by="adapters",
        member="adapters",
        schema=LORA_SCHEMA,
        keeps_nulls=True,
        off=([],),
    )
    prompt_logprobs: int | None = row(
        "Report how probable the prompt's tokens are, with this many alternatives.",
        by="engine",
        member="num_prompt_logprobs",
        bounds=(0, 20),
    )
    loglikelihood: bool = row(
        "Report the log-probabilities of the prompt's tokens, except the first.",
        default=False,
        by="engine",
        member="num_prompt_logprobs",
    )
    log_prompt: bool = row("Allow the server to log the prompt, if its settings allow it as well.", default=False)
    user: str | None = row(NO_EFFECT, by="caller")
    metadata: dict[str, str] | None = row(NO_EFFECT, by="caller")
    store: bool | None = row(NO_EFFECT, by="caller")
    service_tier: str | None = row(NO_EFFECT, by="caller")
    safety_identifier: str | None = row(NO_EFFECT, by="caller")
    prompt_cache_retention: str | None = row(NO_EFFECT, by="caller")
    prompt_cache_options: dict[str, Any] | None = row(NO_EFFECT, by="caller")


@frozen(kw_only=True)
class ChatFields(GenerationFields):
    """Fields of chats."""

    messages: tuple[MessageBody, ...] | None = row(
        "The chat; either this or `prompt`.",
        by="template",
        prompt="shapes",
        schema={"minItems": 1},
        limit=("maxItems", "max_messages"),
    )
    prompt: str | None = row("Raw text without a chat template, instead of `messages`.", schema={"minLength": 1})
    max_completion_tokens: int | None = row(
        "Another name of `max_tokens`.", bounds=(1, INT64_MAX), limit=("maximum", "max_tokens")
    )
    logprobs: bool = row(
        "Report how probable each token of the answer was.", default=False, by="engine", member="sampling.num_logprobs"
    )
    top_logprobs: int | None = row(
        "Alternatives to report per token; only with `logprobs`.",
        by="engine",
        member="sampling.num_logprobs",
        bounds=(0, 20),
        off=(0,),
    )
    tools: tuple[ToolBody, ...] = row(
        "Functions that the model may call.",
        default=(),
        by="tools",
        prompt="template",
        schema={"maxItems": MAX_TOOLS},
        keeps_nulls=True,
        off=([],),
    )
    tool_choice: Any = row(
        "`none`, `auto`, `required`, or an object that names a function.",
        by="tool_choice",
        prompt="template",
        schema=shapes.TOOL_CHOICE,
        off=("none", "auto"),
    )
    parallel_tool_calls: bool | None = row(
        "Whether one answer may hold several calls.", by="parallel_tool_calls", prompt="shapes", off=(True, False)
    )
    enable_thinking: bool | None = row(
        "Enable or disable reasoning, for models that support both.",
        by="reasoning_switch",
        prompt="template",
        member="thinking.enabled",
    )
    reasoning_effort: Effort | None = row(
        "Reasoning effort, for chat templates that support it; `none` disables reasoning.",
        by="effort",
        prompt="template",
        member="thinking.effort",
    )
    thinking_budget: int | None = row(
        "Maximum tokens of reasoning; 0 means no reasoning, -1 no limit.",
        by="reasoning",
        prompt="template",
        member="thinking.budget",
        bounds=(-1, 2**31 - 1),
    )
    continue_final_message: bool | None = row(
        "Continue the last message, which must be an assistant's without calls, instead of answering it. Without this "
        "field such a message is continued.",
        by="last_turn",
        prompt="template",
        member="continues",
    )
    add_generation_prompt: bool | None = row(
        "Open the turn of the assistant after the messages; false ends the prompt with the last message. Not true "
        "together with `continue_final_message`.",
        by="last_turn",
        prompt="template",
        member="opens_turn",
        off=(True,),
    )
    chat_template_kwargs: dict[str, Any] = row(
        "Further variables of the chat template.",
        default=attrs.Factory(dict),
        by="template_variables",
        prompt="template",
        member="template_variables",
        keeps_nulls=True,
        off=({},),
    )
    prediction: Any = row(
        "The predicted output; the usage counts the part of it that was generated.",
        by="counting",
        member="prediction",
        schema=shapes.PREDICTION,
    )


@frozen(kw_only=True)
class CompletionFields(GenerationFields):
    """Fields of text completions."""

    prompt: Any = row(
        "A string, a list of strings, a list of token ids, or a list of such lists.",
        default=attrs.NOTHING,
        schema=shapes.PROMPT,
    )
    suffix: str = row(
        "Text that follows the completion, for fill-in-the-middle models.",
        default="",
        by="infill",
        member="suffix",
        off=("",),
    )
    echo: bool = row(
        "Prepend the prompt to each completion, and its log-probabilities to those of the completion.",
        default=False,
        off=(False,),
    )
    logprobs: int | None = row(
        "Number of alternatives to report per token; 0 reports the sampled token only.",
        by="engine",
        member="sampling.num_logprobs",
        bounds=(0, 20),
    )
    best_of: int | None = row(
        "Sample this many completions and return the `n` with the highest mean token log-probability.",
        bounds=(1, None),
        limit=("maximum", "max_choices"),
        off=(1,),
    )
    max_tokens: int | None = _parameter(
        "At least 1; with `echo` also 0, which only reports the prompt.",
        bounds=(0, INT64_MAX),
        limit=("maximum", "max_tokens"),
    )


def _table() -> Mapping[str, Row]:
    rows: dict[str, Row] = {}
    for attribute in (*attrs.fields(ChatFields), *attrs.fields(CompletionFields)):
        known = row_of(attribute)
        for struct, group in ((SamplingParams, "sampling"), (StopParams, "stopping")):
            if attribute.name in struct.__struct_fields__:
                known = attrs.evolve(known, member=f"{group}.{attribute.name}")
        rows.setdefault(attribute.name, known)
    return MappingProxyType(rows)


FIELDS = _table()
"""Row of every field of the generating endpoints, by name; the chat's row where the two differ."""
