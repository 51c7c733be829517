"""OpenAI's ``prediction``: what a client expects the answer to be. Checked here; counted while the answer comes.

What OpenAI's documentation says cannot be combined with it is refused, for then there is nothing to compare or
speculation could not verify it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from enginehouse.contract.errors import InvalidRequest, UnsupportedParameter

__all__ = ["check_prediction", "find_ignored_in_prediction", "read_prediction"]


def read_prediction(value: Any) -> str | None:
    """The predicted text; None without one. Parts follow each other without a separator.

    Raises:
        InvalidRequest: it has another form than OpenAI's.
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
    """Check what else the request asks for: field name to whether it asks for what no prediction can go with.

    Raises:
        UnsupportedParameter: something does.
    """
    wrong = next((name for name, asks in others.items() if asks), None)
    if wrong is not None:
        raise UnsupportedParameter(f"prediction: not supported together with {wrong}", "prediction")


def find_ignored_in_prediction(value: Any) -> Iterator[str]:
    """Paths of unknown members."""
    if isinstance(value, Mapping):
        yield from (f"prediction.{name}" for name in value if name not in ("type", "content"))


def _read_part(part: Any, path: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise InvalidRequest(f"{path}.type: must be 'text'", f"{path}.type")
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{path}.text: must be a string", f"{path}.text")
    text: str = part["text"]
    return text
