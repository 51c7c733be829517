"""Features of a request, from 0 to 1 and verifiable by a person, and the difficulty computed from them.

Words and characters are counted at the beginning and the end of the last user message, so the time of a decision does
not depend on its length. The weights were set by hand on the prompts of docs/routing.md; they can be replaced.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType

from attrs import frozen

from enginehouse.contract.types import GenerateRequest

__all__ = ["WEIGHTS", "Reading", "difficulty", "features_of", "has_code", "read_request"]

_MAX_CHARS = 2000
_OPENING_CHARS = 25  # a request states its subject at its beginning
_REASONING = (
    "why", "explain", "prove", "derive", "compare", "analyse", "analyze", "evaluate", "justify", "argue", "design",
    "debug", "optimise", "optimize", "refactor", "trade-off", "trade-offs", "tradeoff", "tradeoffs", "implications",
    "critique", "strategy", "architecture", "algorithm", "complexity", "step by step", "root cause", "estimate",
    "infer", "deduce", "plan", "diagnose", "reconcile", "assess", "hypothesis", "consequences", "counterexample",
    "implement", "draft", "schedule", "migrate", "migration", "recommend", "discuss", "weigh", "construct", "show that",
    "requirements", "how would you", "solve",
)  # fmt: skip
_LIMITS = (
    "must", "only", "exactly", "at least", "at most", "without", "unless", "except", "given that", "assuming",
    "such that", "each", "both", "while", "however", "neither", "either", "ensure", "subject to",
    "constraint", "constraints",
)  # fmt: skip
_MATHS = (
    "integral", "derivative", "equation", "matrix", "probability", "theorem", "proof", "induction", "eigenvalue",
    "polynomial", "converge", "converges", "modulo", "prime", "logarithm", "variance", "expected value", "how many",
)  # fmt: skip
_SIMPLE = (
    "hello", "hi", "thanks", "thank you", "good morning", "translate", "what is", "what's", "who is", "who was",
    "who wrote", "when is", "when did", "where is", "capital of", "define", "spell", "synonym", "opposite",
    "name", "list", "say", "what colour", "what color", "what day", "how do you say", "convert", "rhyme",
    "capitalise", "capitalize",
)  # fmt: skip
_CODE_MARKS = ("```", "#include", "=>", "Traceback")
_CODE = re.compile(
    r"\b(?:def \w+\(|class \w+[:({]|return\b[^\n]{0,200};|SELECT\b[^\n]{0,200}FROM(?<!\wFROM)\b)|[{};][ \t]*\n|\w\(\)"
)
_NUMBER = re.compile(r"\d+(?:[.,]\d+)?")
_SIGN = re.compile(r"[=+*/^<>√∑∫≤≥±]")
_ITEM = re.compile(r"^[ \t]*(?:\d+[.)]|[-*])\s", re.MULTILINE)

WEIGHTS: Mapping[str, float] = MappingProxyType(
    {
        "length": 2.6,
        "context": 1.5,
        "reasoning": 3.0,
        "limits": 1.6,
        "maths": 2.0,
        "code": 1.8,
        "parts": 1.2,
        "turns": 0.6,
        "tools": 0.8,
        "structured": 0.6,
        "simple": -2.2,
        "base": -2.0,
    }
)
"""Largest contribution of each feature; ``base`` is added to every request."""


def _any_of(phrases: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(phrases, key=len, reverse=True)
    return re.compile(r"\b(?:" + "|".join(map(re.escape, longest_first)) + r")s?\b")


_IS_REASONING, _IS_LIMIT, _IS_MATHS, _IS_SIMPLE = map(_any_of, (_REASONING, _LIMITS, _MATHS, _SIMPLE))


@frozen(kw_only=True)
class Reading:
    """The parts of a request that strategies use.

    Attributes:
        text: beginning and end of the last user message, or of a raw prompt.
        num_chars: full length of that message.
        num_all_chars: total length of all messages.
    """

    text: str
    system: str
    num_chars: int
    num_all_chars: int
    num_turns: int
    has_tools: bool
    is_structured: bool


def read_request(request: GenerateRequest) -> Reading:
    """Extract these parts from a request."""
    messages = request.messages or ()
    users = [message.content for message in messages if message.role == "user"]
    last = users[-1] if users else request.text or (messages[-1].content if messages else "")
    system = " ".join(message.content for message in messages if message.role in ("system", "developer"))
    return Reading(
        text=_shortened(last),
        system=_shortened(system),
        num_chars=len(last),
        num_all_chars=sum(len(message.content) for message in messages) or len(last) + 4 * len(request.token_ids or ()),
        num_turns=max(1, len(users)),
        has_tools=request.tool_use is not None and request.tool_use.choice != "none",
        is_structured=request.constraint is not None,
    )


def features_of(reading: Reading) -> dict[str, float]:
    """Return the features of a request, each from 0 to 1."""
    text = reading.text
    lower = text.lower()  # four times faster than patterns that ignore case
    num_words = reading.num_chars / 6
    return {
        "length": _share(math.log1p(num_words), math.log1p(300)),
        "context": _share(reading.num_all_chars - reading.num_chars, 12_000),
        "reasoning": _share(len(set(_IS_REASONING.findall(lower))), 2),
        "limits": _share(len(_IS_LIMIT.findall(lower)), 4),
        "maths": _share(
            len(_IS_MATHS.findall(lower)) + len(_NUMBER.findall(text)) / 4 + len(_SIGN.findall(text)) / 3, 2
        ),
        "code": 1.0 if has_code(text) else 0.0,
        "parts": _share(max(0, text.count("?") - 1) + len(_ITEM.findall(text)), 3),
        "turns": _share(reading.num_turns - 1, 6),
        "tools": float(reading.has_tools),
        "structured": float(reading.is_structured),
        "base": 1.0,
        "simple": 1.0 if _IS_SIMPLE.search(lower[:_OPENING_CHARS]) and num_words < 30 else 0.0,
    }


def difficulty(features: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Difficulty from 0 to 1: the logistic function of the weighted sum."""
    total = sum(weights[name] * value for name, value in features.items())
    return 1 / (1 + math.exp(-total))


def has_code(text: str) -> bool:
    """True if the text appears to contain code, judged by its punctuation."""
    return any(mark in text for mark in _CODE_MARKS) or _CODE.search(text) is not None


def _share(value: float, most: float) -> float:
    return min(1.0, max(0.0, value / most))


def _shortened(text: str) -> str:
    half = _MAX_CHARS // 2
    return text if len(text) <= _MAX_CHARS else f"{text[:half]}\n{text[-half:]}"
