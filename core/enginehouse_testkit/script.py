"""Script format of the engine ``scripted``: a JSON file.

::

    {"tokens": [{"text": "Hel"}, {"bytes": [240, 159]}, {"delay_s": 0.1}, {"error": "boom"}],
     "tokens_per_step": 1, "loop": false, "replies": [{"when": "4 files", "tokens": [{"text": "Done."}]}]}

``text`` and ``bytes`` are one token each, ``delay_s`` waits that many seconds, ``error`` fails the
request there. Without ``loop`` the answer ends after the last token. The answer to a prompt that contains ``when`` is
that of the reply; of several, the last one in the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from attrs import field, frozen
from attrs.validators import ge, gt, optional

from enginehouse.contract.backend import ModelSource
from enginehouse.contract.errors import ModelLoadError
from enginehouse.settings.structuring import find_problems, strict_converter

__all__ = ["Script", "ScriptToken", "ScriptedReply", "read_script", "write_script"]


@frozen(kw_only=True)
class ScriptToken:
    """One entry of a script; exactly one attribute is set."""

    text: str | None = None
    bytes: tuple[int, ...] | None = None
    delay_s: float | None = field(default=None, validator=optional(ge(0)))
    error: str | None = None

    def __attrs_post_init__(self) -> None:
        given = [value for value in (self.text, self.bytes, self.delay_s, self.error) if value is not None]
        if len(given) != 1:
            raise ValueError("needs exactly one of text, bytes, delay_s and error")
        if self.bytes is not None and not all(0 <= byte < 256 for byte in self.bytes):
            raise ValueError("bytes must be numbers from 0 to 255")


@frozen(kw_only=True)
class ScriptedReply:
    """The answer to prompts that contain the text ``when``, so that a conversation goes on."""

    when: str
    tokens: tuple[ScriptToken, ...]


@frozen(kw_only=True)
class Script:
    """A script. ``tokens_per_step`` tokens come in one batch of events, as with speculative decoding."""

    tokens: tuple[ScriptToken, ...]
    tokens_per_step: int = field(default=1, validator=gt(0))
    loop: bool = False
    replies: tuple[ScriptedReply, ...] = ()

    def __attrs_post_init__(self) -> None:
        if self.loop and all(token.text is None and token.bytes is None for token in self.tokens):
            raise ValueError("a loop needs a token")


def read_script(source: ModelSource) -> Script:
    """Read and check a script file. Raises ModelLoadError."""
    if source.path is None:
        raise ModelLoadError(f"{source.text!r} is not a file")
    try:
        data = msgspec.json.decode(source.path.read_bytes())
        return strict_converter().structure(data, Script)
    except (OSError, msgspec.DecodeError) as error:
        raise ModelLoadError(f"cannot read the script {source.text!r}: {error}") from error
    except Exception as error:  # all problems found by the converter become one message
        problems = "; ".join(map(str, find_problems(error)))
        raise ModelLoadError(f"the script {source.text!r} is wrong: {problems}") from error


def write_script(
    path: Path,
    tokens: Sequence[str | Mapping[str, Any]],
    *,
    replies: Mapping[str, Sequence[str | Mapping[str, Any]]] | None = None,
    **options: Any,
) -> str:
    """Write a script file; strings become text tokens, ``options`` are the other keys. Return the source.

    Args:
        replies: a text of the prompt to the tokens of the answer to it.
    """
    following = [{"when": when, "tokens": _entries(said)} for when, said in (replies or {}).items()]
    path.write_bytes(msgspec.json.encode({"tokens": _entries(tokens), "replies": following, **options}))
    return str(path)


def _entries(tokens: Sequence[str | Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{"text": token} if isinstance(token, str) else dict(token) for token in tokens]
