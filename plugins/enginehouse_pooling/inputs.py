"""Inputs of requests to pooling models: texts, token ids and pairs, and how long ones are shortened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from attrs import frozen

from enginehouse.contract.calls import Call
from enginehouse.contract.errors import InvalidRequest, quoted
from enginehouse.contract.rows import INT64_MAX, row
from enginehouse.contract.shapes import NO_EFFECT, PROMPT
from enginehouse.contract.types import PoolingResult, PoolTask, PoolText

__all__ = [
    "FORMS",
    "INPUT",
    "USAGE",
    "Cut",
    "PoolingBody",
    "cut_of",
    "has_list",
    "model_of",
    "one_or_many",
    "prompt_hints",
    "read_inputs",
    "read_texts",
    "usage_of",
]

Cut = Literal["none", "start", "end"]

INPUT = {"anyOf": PROMPT["oneOf"]}
FORMS = "A text, a list of texts, the token ids of a text, or a list of these."
"""Description of inputs with the schema :data:`INPUT`."""

USAGE = {
    "type": "object",
    "properties": {"prompt_tokens": {"type": "integer"}, "total_tokens": {"type": "integer"}},
    "required": ["prompt_tokens", "total_tokens"],
}

_CUTS: Mapping[str, Cut] = MappingProxyType({"none": "none", "start": "start", "end": "end"})
_DIRECTIONS: Mapping[str, Cut] = MappingProxyType({"left": "start", "right": "end"})
_HINTS = MappingProxyType(
    {
        "query": ("query", "search_query"),
        "search_query": ("query", "search_query"),
        "document": ("document", "passage", "search_document"),
        "passage": ("document", "passage", "search_document"),
        "search_document": ("document", "passage", "search_document"),
    }
)
_MODEL = "A name or alias of `/v1/models`; without it, the first model that is loaded for this, else the first one."


@frozen(kw_only=True)
class PoolingBody:
    """Members of all bodies of this surface."""

    model: str | None = row(_MODEL)
    truncate: Any = row(
        "Part at which a text that is too long is shortened: `start`, `end`, or `true` for `end`. `none` and `false` "
        "refuse it, with its index.",
        schema={"anyOf": [{"type": "boolean"}, {"type": "string", "pattern": "^(?i:none|start|end)$"}]},
    )
    truncation: bool | None = row("True shortens texts that are too long at their end.")
    truncation_direction: str | None = row(
        "Part at which `truncate: true` shortens: `left` or `right`.",
        schema={"type": "string", "pattern": "^(?i:left|right)$"},
    )
    truncate_prompt_tokens: int | None = row(
        "Shorten texts to this many tokens, special ones included; -1 is the model's limit.", bounds=(-1, 2**31 - 1)
    )
    priority: int = row("Lower numbers are served earlier.", default=0, bounds=(-(2**31), 2**31 - 1))
    user: str | None = row(NO_EFFECT)


def model_of(call: Call, task: PoolTask) -> str | None:
    """Return the model that the body names, or the first one that is known to be for a task; None: the first one."""
    if call.body.model is not None:
        return str(call.body.model)
    fitting = (entry.name for entry in call.server.models() if entry.info is not None and entry.info.task == task)
    return next(fitting, None)


def cut_of(call: Call, usual: Cut = "none") -> tuple[Cut, int | None]:
    """Return the part at which long texts are shortened, and the number of tokens to keep; None: the model's limit.

    Args:
        usual: the part if the body does not say.

    Raises:
        InvalidRequest: two fields contradict each other, or a value has no meaning.
    """
    body: PoolingBody = call.body
    most, given = body.truncate_prompt_tokens, body.truncate
    side = None if body.truncation_direction is None else _named(_DIRECTIONS, "truncation_direction", body)
    part: Cut | None = None
    if isinstance(given, bool):
        part = (side or "end") if given else "none"
    elif given is not None:
        part = _named(_CUTS, "truncate", body)
    others = [name for name in ("truncation", "truncate_prompt_tokens") if getattr(body, name) not in (None, False)]
    if part == "none" and others:
        raise InvalidRequest(f"{others[0]}: contradicts truncate, which refuses long texts", others[0])
    if most == 0:
        message = "truncate_prompt_tokens: must be at least 1, or -1 for the model's limit"
        raise InvalidRequest(message, "truncate_prompt_tokens")
    if part is None:
        part = (side or "end") if others else "none" if body.truncation is False else usual
    if side is not None and side != part:
        call.ignore("truncation_direction")
    return part, None if most is None or most < 0 else most


def _named(known: Mapping[str, Cut], name: str, body: PoolingBody) -> Cut:
    value = getattr(body, name)
    found = known.get(value.lower()) if isinstance(value, str) else None
    if found is None:
        raise InvalidRequest(f"{name}: must be {_listed(known)}, not {quoted(value)}", name)
    return found


def _listed(names: Mapping[str, Any]) -> str:
    *most, last = map(repr, names)
    return f"{', '.join(most)} or {last}"


def prompt_hints(input_type: str | None) -> tuple[str, ...]:
    """Return names of prompts that fit a kind of text, best first."""
    if input_type is None:
        return ()
    return _HINTS.get(input_type.lower(), (input_type,))


def read_inputs(value: Any, path: str) -> tuple[PoolText, ...]:
    """Read a text, a list of texts, the token ids of a text, or a list with texts and lists of ids.

    Raises:
        InvalidRequest: it has none of these forms, or a text is empty.
    """
    if isinstance(value, str):
        return (_text(value, path),)
    if not isinstance(value, list):
        raise InvalidRequest(f"{path}: must be a string, a list of strings, or lists of token ids", path)
    if not value:
        raise InvalidRequest(f"{path}: must not be empty", path)
    if type(value[0]) in (int, float):
        return (PoolText(token_ids=_token_ids(value, path)),)
    return tuple(_input(item, f"{path}[{index}]") for index, item in enumerate(value))


def has_list(value: Any) -> bool:
    """True if a value that :func:`read_inputs` has read is a list of inputs, not one text or its token ids."""
    return isinstance(value, list) and type(value[0]) not in (int, float)


def _input(item: Any, path: str) -> PoolText:
    if isinstance(item, str):
        return _text(item, path)
    if isinstance(item, list):
        return PoolText(token_ids=_token_ids(item, path))
    raise InvalidRequest(f"{path}: must be a string or a list of token ids", path)


def _text(text: str, path: str) -> PoolText:
    if not text:
        raise InvalidRequest(f"{path}: must not be empty", path)
    return PoolText(text)


def _token_ids(value: list[Any], path: str) -> tuple[int, ...]:
    """Return token ids; their range is checked later, by the model."""
    if not value:
        raise InvalidRequest(f"{path}: must hold at least one token id", path)
    kinds = set(map(type, value))
    if float in kinds:
        value = [int(one) if type(one) is float and one.is_integer() else one for one in value]
        kinds = set(map(type, value))
    # Most lists hold integers only: passes in C instead of a loop.
    if kinds != {int} or not 0 <= min(value) <= max(value) <= INT64_MAX:
        index = next(i for i, one in enumerate(value) if type(one) is not int or not 0 <= one <= INT64_MAX)
        raise InvalidRequest(f"{path}[{index}]: must be a token id, a whole number from 0 on", f"{path}[{index}]")
    return tuple(value)


def read_texts(value: Any, path: str) -> list[str]:
    """Read texts, each a string or an object with the member ``text``; empty ones are allowed.

    Raises:
        InvalidRequest: it is not a list of these, or it is empty.
    """
    if not isinstance(value, list):
        raise InvalidRequest(f"{path}: must be a list of strings", path)
    if not value:
        raise InvalidRequest(f"{path}: must not be empty", path)
    return [_text_of(item, f"{path}[{index}]") for index, item in enumerate(value)]


def _text_of(item: Any, path: str) -> str:
    text = item.get("text") if isinstance(item, dict) else item
    if not isinstance(text, str):
        raise InvalidRequest(f"{path}: must be a string, or an object with the text in 'text'", path)
    return text


def one_or_many(value: Any, path: str) -> Sequence[str]:
    """Read one text or a list of them."""
    return [value] if isinstance(value, str) else read_texts(value, path)


def usage_of(result: PoolingResult) -> dict[str, int]:
    """Return the member ``usage`` of a response."""
    num_tokens = sum(result.num_tokens)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
