"""OpenAI's `prediction`: the predicted output of a request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from enginehouse.contract.errors import InvalidRequest, UnsupportedParameter

__all__ = ["check_prediction", "find_ignored_in_prediction", "read_prediction"]


def read_prediction(value: Any) -> str | None:
    """Return the predicted text, or None. Parts are joined without a separator.

    Raises:
        InvalidRequest: it does not have OpenAI's form.
    """
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InvalidRequest("prediction: must be an object", "prediction")
    if value.get("type") != "content":
        raise InvalidRequest("prediction.type: must be 'content'", "prediction.type")
    content, path = value.get("content"), "prediction.content"
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{path}: must be a string or a list of text parts", path)
    return "".join(_read_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def check_prediction(**others: bool) -> None:
    """Check the rest of the request: field name to True if the field is used in a way incompatible with a prediction.

    Raises:
        UnsupportedParameter: a field is.
    """
    wrong = next((name for name, asks in others.items() if asks), None)
    if wrong is not None:
        raise UnsupportedParameter(f"prediction: not supported together with {wrong}", "prediction")


def find_ignored_in_prediction(value: Any) -> Iterator[str]:
    """Yield paths of unknown members."""
    if isinstance(value, Mapping):
        yield from (f"prediction.{name}" for name in value if name not in ("type", "content"))


def _read_part(part: Any, path: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise InvalidRequest(f"{path}.type: must be 'text'", f"{path}.type")
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{path}.text: must be a string", f"{path}.text")
    text: str = part["text"]
    return text
