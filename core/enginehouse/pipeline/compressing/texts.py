"""Which texts of a request may be shortened, and what of them must stay whole.

System messages are instructions, calls and results of tools are data, and the last thing that a user says is the
question: none of it is touched. Neither are fenced code and parts that the client marked. Knows no compressor.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from attrs import evolve, frozen

from enginehouse.contract.compressor import CompressibleText, Range, joined
from enginehouse.contract.types import GenerateRequest, Message

__all__ = ["RequestTexts", "find_texts", "with_texts"]

_FENCE = re.compile(r"^[ \t]{0,3}(`{3,}|~{3,})", re.MULTILINE)
_PARAGRAPH_BREAK = re.compile(r"\n[ \t\r]*\n")


@frozen
class RequestTexts:
    """What a request has to be shortened.

    Attributes:
        texts: with something in each that is not protected.
        places: the index of the message that each is the content of; the one text of a raw prompt is at 0.
        question: what is asked.
    """

    texts: tuple[CompressibleText, ...]
    places: tuple[int, ...]
    question: str


def find_texts(request: GenerateRequest, system: bool) -> RequestTexts:
    """The texts of a request, perhaps none; with ``system`` those of system messages, too."""
    if request.messages is None:
        return _of_raw_prompt(request.text or "")
    messages = request.messages
    asked = max((index for index, message in enumerate(messages) if message.role == "user"), default=None)
    question = "" if asked is None else _last_paragraph(messages[asked].content)
    found: list[tuple[int, CompressibleText]] = []
    for index, message in enumerate(messages):
        is_continued = message.role == "assistant" and index == len(messages) - 1
        if is_continued or not _may_be_shortened(message, system):
            continue
        protected = [*message.verbatim, *_fenced(message.content)]
        if index == asked:
            protected.append((len(message.content.rstrip()) - len(question), len(message.content)))
        text = CompressibleText(text=message.content, protected=tuple(joined(protected)))
        if any(message.content[start:end].strip() for start, end in text.free()):
            found.append((index, text))
    return RequestTexts(tuple(text for _, text in found), tuple(index for index, _ in found), question)


def with_texts(request: GenerateRequest, found: RequestTexts, texts: Sequence[str]) -> GenerateRequest:
    """The request with other texts in the places of those that were found."""
    if request.messages is None:
        return evolve(request, text=texts[0]) if texts else request
    messages = list(request.messages)
    for index, text in zip(found.places, texts, strict=True):
        messages[index] = evolve(messages[index], content=text, verbatim=())
    return evolve(request, messages=tuple(messages))


def _of_raw_prompt(text: str) -> RequestTexts:
    """All but the last paragraph, which is what the model goes on with."""
    question = _last_paragraph(text)
    protected = joined([*_fenced(text), (len(text.rstrip()) - len(question), len(text))])
    compressible = CompressibleText(text=text, protected=tuple(protected))
    if not any(text[start:end].strip() for start, end in compressible.free()):
        return RequestTexts((), (), question)
    return RequestTexts((compressible,), (0,), question)


def _may_be_shortened(message: Message, system: bool) -> bool:
    if message.parts or message.tool_calls:
        return False
    return message.role in ("user", "assistant") or (system and message.role == "system")


def _last_paragraph(text: str) -> str:
    """What stands behind the last empty line, without white space around it."""
    stripped = text.rstrip()
    breaks = list(_PARAGRAPH_BREAK.finditer(stripped))
    return stripped[breaks[-1].end() :] if breaks else stripped


def _fenced(text: str) -> list[Range]:
    """Code between fences, these included; a fence that is never closed holds all that follows."""
    found: list[Range] = []
    opening: re.Match[str] | None = None
    for match in _FENCE.finditer(text):
        line_end = text.find("\n", match.end())
        line_end = len(text) if line_end < 0 else line_end + 1
        if opening is None:
            opening = match
        elif match[1].startswith(opening[1]) and not text[match.end() : line_end].strip():
            found.append((opening.start(), line_end))
            opening = None
    if opening is not None:
        found.append((opening.start(), len(text)))
    return found
