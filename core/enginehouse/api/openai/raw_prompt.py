"""The prompts of ``/v1/completions``, in their four forms, and the raw ``prompt`` of a chat request.

No chat template is applied; control-token strings in them are control tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.fields import FIELDS
from enginehouse.contract.rows import INT64_MAX
from enginehouse.settings.structuring import without_fraction

__all__ = ["TEMPLATE_FIELDS", "check_raw_prompt", "read_prompts", "read_token_ids"]

TEMPLATE_FIELDS = tuple(name for name, row in FIELDS.items() if row.prompt == "template")
"""Fields of a chat request that are read only by its template or that template's parsers."""

_NEUTRAL: tuple[Any, ...] = (None, (), {}, "none", "auto")


def check_raw_prompt(prompt: str, fields: Mapping[str, Any]) -> None:
    """Check the ``prompt`` of a chat request; ``fields`` are its :data:`TEMPLATE_FIELDS`.

    Raises:
        InvalidRequest: it is empty, or a field requires a chat template.
    """
    if not prompt:
        raise InvalidRequest("prompt: must not be empty", "prompt")
    for name, value in fields.items():
        if value not in _NEUTRAL:
            raise InvalidRequest(f"{name}: only with messages; no chat template wraps a raw prompt", name)


def read_prompts(prompt: Any, max_prompts: int, *, may_be_empty: bool = False) -> list[dict[str, Any]]:
    """Return the prompts, each as the keyword argument ``text`` or ``token_ids`` of a request.

    Args:
        may_be_empty: allow an empty text, as before a fill-in-the-middle gap.

    Raises:
        InvalidRequest: it has none of the four forms, or is empty somewhere.
    """
    if isinstance(prompt, str):
        return [_text(prompt, "prompt", may_be_empty)]
    if not isinstance(prompt, list):
        raise InvalidRequest("prompt: must be a string, a list of strings, or lists of token ids", "prompt")
    if not prompt:
        raise InvalidRequest("prompt: must not be empty", "prompt")
    if _is_id(without_fraction(prompt[0])):
        return [{"token_ids": read_token_ids(prompt, "prompt")}]
    if len(prompt) > max_prompts:
        raise InvalidRequest(f"prompt: at most {max_prompts} prompts are allowed, not {len(prompt)}", "prompt")
    paths = [f"prompt[{index}]" for index in range(len(prompt))]
    if isinstance(prompt[0], str):
        return [_text(item, path, may_be_empty) for path, item in zip(paths, prompt, strict=True)]
    return [{"token_ids": read_token_ids(item, path)} for path, item in zip(paths, prompt, strict=True)]


def read_token_ids(value: Any, path: str, *, may_be_empty: bool = False) -> tuple[int, ...]:
    """Return token ids; their range is checked later, by the model.

    Raises:
        InvalidRequest: it is not a list of whole numbers of at least 0.
    """
    if not isinstance(value, list) or not (value or may_be_empty):
        raise InvalidRequest(f"{path}: must be a list of at least one token id", path)
    if float in set(map(type, value)):
        value = list(map(without_fraction, value))
    for index, token_id in enumerate(value):
        if not _is_id(token_id) or not 0 <= token_id <= INT64_MAX:
            where = f"{path}[{index}]"
            raise InvalidRequest(f"{where}: must be a token id, a whole number from 0 on", where)
    return tuple(value)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _text(value: Any, path: str, may_be_empty: bool) -> dict[str, Any]:
    if not isinstance(value, str):
        raise InvalidRequest(f"{path}: must be a string, as the prompts before it", path)
    if not (value or may_be_empty):
        raise InvalidRequest(f"{path}: must not be empty", path)
    return {"text": value}
