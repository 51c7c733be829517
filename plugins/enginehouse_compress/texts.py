"""Selection of the texts of a request that may be shortened, and of the protected ranges in them.

System messages are instructions, calls and results of tools are data, and the last user message is the question: none
of them is changed. Nor are fenced code and parts that the client marked. Does not know any compressor.
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
    """Compressible texts of a request.

    Attributes:
        texts: each has some unprotected content.
        places: index of the message that holds each text; 0 for the single text of a raw prompt.
        question: the text of the question.
    """

    texts: tuple[CompressibleText, ...]
    places: tuple[int, ...]
    question: str


def find_texts(request: GenerateRequest, system: bool) -> RequestTexts:
    """Return the compressible texts of a request, possibly none; ``system`` includes system messages."""
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
    """Return the request with ``texts`` in place of those that were found."""
    if request.messages is None:
        return evolve(request, text=texts[0]) if texts else request
    messages = list(request.messages)
    for index, text in zip(found.places, texts, strict=True):
        messages[index] = evolve(messages[index], content=text, verbatim=())
    return evolve(request, messages=tuple(messages))


def _of_raw_prompt(text: str) -> RequestTexts:
    """Return all but the last paragraph, which the model continues."""
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
    """Return the text after the last empty line, stripped."""
    stripped = text.rstrip()
    breaks = list(_PARAGRAPH_BREAK.finditer(stripped))
    return stripped[breaks[-1].end() :] if breaks else stripped


def _fenced(text: str) -> list[Range]:
    """Ranges of fenced code, fences included; an unclosed fence extends to the end of the text."""
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
