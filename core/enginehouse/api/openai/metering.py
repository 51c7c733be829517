"""Counts what a generating request uses: an estimate before it runs, and what it used when it has ended.

The estimate is made of text, before anything is rendered or tokenized: a refusal must cost nearly nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from enginehouse.api.openai.answer import Assembly
from enginehouse.api.openai.open_answers import OpenAnswer
from enginehouse.contract.types import GenerateRequest

__all__ = ["estimate_tokens", "used_tokens"]

_BYTES_PER_TOKEN = 4
"""Of usual text in usual vocabularies."""

_ANSWER_TOKENS = 256
"""Assumed of an answer whose request sets no limit."""


def estimate_tokens(requests: Sequence[GenerateRequest]) -> int:
    """Tokens of prompts and answers, set aside until the requests have ended."""
    return sum(_prompt_tokens(one) + one.num_choices * _answer_tokens(one) for one in requests)


def used_tokens(answer: OpenAnswer) -> int:
    """Tokens of prompts and answers, and those that were computed on the way: thrown away, or read by a scorer."""
    assembly = answer.assembly
    if assembly is None:
        return answer.num_discarded_tokens
    num_scored = sum(one.compressed.scored_tokens for one in assembly.running if one.compressed is not None)
    return answer.num_discarded_tokens + num_scored + _answered(assembly)


def _answered(assembly: Assembly) -> int:
    """Exact where the engine has reported it, else what has come so far: judged by its text where it has no tokens."""
    if len(assembly.finished) == assembly.num_prompts:
        return sum(event.num_prompt_tokens + event.num_completion_tokens for event in assembly.finished)
    started = [one for one in assembly.running if getattr(one.generation, "has_started", True)]
    prompts = sum(one.generation.num_prompt_tokens or _prompt_tokens(one.request) for one in started)
    return prompts + (assembly.num_tokens or sum(map(_num_tokens, _texts(assembly))))


def _texts(assembly: Assembly) -> Iterator[str]:
    """Everything that has been said so far."""
    for choice in assembly.choices:
        yield choice.text
        yield choice.reasoning
        yield from ("".join(call.arguments) for call in choice.calls)


def _prompt_tokens(request: GenerateRequest) -> int:
    if request.token_ids is not None:
        return len(request.token_ids)
    if request.messages is None:
        return _num_tokens(request.text or "")
    tools = request.tool_use.tools if request.tool_use is not None else ()
    return sum(_num_tokens(message.content) for message in request.messages) + sum(
        _num_tokens(str(tool.definition)) for tool in tools
    )


def _answer_tokens(request: GenerateRequest) -> int:
    limit = request.stopping.get("max_tokens")
    return _ANSWER_TOKENS if limit is None else int(limit)


def _num_tokens(text: str) -> int:
    """Tokens of a text, roughly; none of none."""
    num_bytes = len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
    return -(-num_bytes // _BYTES_PER_TOKEN)
