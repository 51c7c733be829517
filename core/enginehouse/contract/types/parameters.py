"""Request parameters for sampling, stopping, reasoning and structured output."""

from __future__ import annotations

from typing import Any, Literal

import attrs
import msgspec
from attrs import frozen

from enginehouse.contract.rows import row

__all__ = ["Constraint", "ConstraintKind", "ReasoningParams", "RequestOptions", "SamplingParams", "StopParams"]


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
        return {attribute.name: getattr(self, attribute.name) for attribute in attrs.fields(RequestOptions)}


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
