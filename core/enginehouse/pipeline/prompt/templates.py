r"""Chat templates: compiled once, rendered in a sandbox with untrusted text marked.

Runs in the rendering process. Does not know processes or sockets.

*Nonce markers* are placeholders for control-token strings in the values that come from a client: each is replaced by
one character, drawn at random for this rendering from Unicode's private planes 15 and 16 among those that no value
contains. A template that slices cannot split a single character; it is not whitespace to strip, and it has no case to
change and no JSON escape. Because it is drawn after all values were read, no client can have written it. After
rendering, each marker becomes an untrusted segment with the text that it replaced.

Two details:

* Values may combine into a control-token string when a template writes one directly after another (``<|im_`` and
  ``end|>``). The end of a value is therefore marked as well if some other value begins with a character that would
  continue a control-token string there.
* Templates search earlier *assistant* messages for reasoning (``content.split('</think>')``). Where a template compares
  with or splits by a control-token string, the caller names it as ``visible`` and it stays in assistant messages. It
  then reaches the model as the control token, as it did when it was generated.

Not covered: a template that builds control-token strings by rewriting user text itself (``lower``, or ``replace`` of a
part in the middle). No known template does.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

import attrs

from enginehouse.contract.errors import RenderError
from enginehouse.contract.types import DecodedAudio, DecodedImage, DecodedMedia, Message, Segment, ToolCall
from enginehouse.engine.text.segments import ControlStrings, control_strings
from enginehouse.pipeline.prompt.chat_prompt import ChatPrompt
from enginehouse.pipeline.prompt.content_parts import MediaForm, as_parts, media_form, roles_with_parts, text_form
from enginehouse.pipeline.prompt.sandbox import ChatTemplate, TemplateExhausted, compile_template

_PLANES = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
_NUM_CODE_POINTS = sum(map(len, _PLANES))


class RequestList(list[Any]):
    """A list of a request, which templates cannot change."""

    __slots__ = ()


class Markers:
    """The markers of one rendering.

    Args:
        control: the model's control-token strings.
        values: all untrusted values of the rendering; plain data, searched for strings.
    """

    def __init__(self, control: ControlStrings, values: Any) -> None:
        self._control = control
        self._strings = [string for string in _strings(values) if string]
        self._text_of: dict[str, str] = {}  # marker to the text it replaces
        self._marker_of: dict[str, str] = {}
        self._used: set[str] | None = None
        self._heads = {stripped[0] for string in self._strings if (stripped := string.lstrip())} if control else set()

    def new(self, text: str) -> str:
        """Return the marker that replaces ``text``; equal texts share one."""
        marker = self._marker_of.get(text)
        if marker is None:
            marker = self._draw()
            self._marker_of[text], self._text_of[marker] = marker, text
        return marker

    def mark(self, value: Any, visible: Collection[str] = ()) -> Any:
        """Return a copy of plain data in which no string contains or begins a control-token string.

        Args:
            value: strings, numbers, lists and dicts; keys of dicts are marked too.
            visible: control-token strings to leave unchanged.
        """
        if isinstance(value, str):
            return self._mark_text(value, visible) if self._control else value
        if isinstance(value, dict):
            return {self.mark(key, visible): self.mark(item, visible) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return RequestList(self.mark(item, visible) for item in value)
        return value

    def restore(self, text: str) -> str:
        """Return ``text`` with every marker replaced by its original text."""
        return "".join(segment.text for segment in self.split(text))

    def split(self, text: str) -> tuple[Segment, ...]:
        """Split rendered text into segments: texts of markers are untrusted, everything else is trusted.

        Adjacent segments of equal trust are merged, so a text without markers is one segment.
        """
        if not self._text_of:
            return (Segment(text, True),) if text else ()
        parts = re.split(f"([{''.join(self._text_of)}])", text)
        restored = ((self._text_of.get(part, part), part not in self._text_of) for part in parts)
        runs = groupby((pair for pair in restored if pair[0]), key=lambda pair: pair[1])
        return tuple(Segment("".join(part for part, _ in run), trusted) for trusted, run in runs)

    def _mark_text(self, text: str, visible: Collection[str]) -> str:
        parts: list[str] = []
        done = 0
        for start, end in self._control.find_all(text):
            if text[start:end] not in visible:
                parts += text[done:start], self.new(text[start:end])
                done = end
        rest = text[done:]
        start, continuations = self._control.unfinished(rest.rstrip())
        if not continuations.isdisjoint(self._heads):
            tail = rest.rstrip()[start:]
            rest = rest[:start] + self.new(tail) + rest[start + len(tail) :]
        return "".join((*parts, rest)) if parts else rest

    def _draw(self) -> str:
        if self._used is None:
            self._used = set().union(*self._strings)
        for _ in range(1000):
            place = secrets.randbelow(_NUM_CODE_POINTS)
            first, second = _PLANES
            marker = chr(first[place] if place < len(first) else second[place - len(first)])
            if marker not in self._used:
                self._used.add(marker)
                return marker
        raise RenderError("The messages use up the private Unicode characters that mark control tokens.", "messages")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


_DAMAGED = "invalid_arguments"

_SPACE = re.compile(r"\s*")


class Arguments(dict[str, Any]):
    """An object that renders as the JSON text from which it was parsed, also when joined to strings."""

    __slots__ = ("_text",)

    def __init__(self, members: dict[str, Any], text: str) -> None:
        super().__init__(members)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def read_arguments(text: str) -> tuple[dict[str, Any], str]:
    """Return the members of call arguments and their JSON text.

    Malformed arguments, which models write and clients repeat, become one member that contains the original text.
    """
    if not text.strip():
        return {}, "{}"
    try:
        members = json.loads(text)
    except (ValueError, RecursionError):
        members = None
    if isinstance(members, dict):
        return members, text
    members = {_DAMAGED: text}
    return members, json.dumps(members, ensure_ascii=False)


_INSTRUCTING = frozenset({"developer", "system"})


def check(template: str) -> None:
    """Raise RenderError if ``template`` cannot be compiled; find out which contents it reads as parts."""
    roles_with_parts(compile_template(template))


def render(prompt: ChatPrompt, max_chars: int) -> tuple[Segment, ...]:
    """Render the prompt; untrusted segments are the control-token strings written by a client.

    Raises:
        RenderError: the template refused the messages, failed, or wrote more than ``max_chars`` characters.
    """
    template = compile_template(prompt.template)
    first_error: RenderError | None = None
    incomplete: tuple[Segment, ...] | None = None
    for messages, must_show in _forms(prompt.messages, template):
        try:
            segments = _render_calls(template, prompt, messages, max_chars)
        except TemplateExhausted:
            raise
        except RenderError as error:
            first_error = first_error or error
            continue
        if not must_show or _shows_instructions(segments, messages):
            return segments
        incomplete = segments if incomplete is None else incomplete
    if incomplete is not None:
        return incomplete
    assert first_error is not None
    raise first_error


def _forms(messages: Sequence[Message], template: ChatTemplate) -> Iterator[tuple[Sequence[Message], bool]]:
    """Yield pairs (messages, instructions must occur in the rendered text), most literal form first."""
    roles = {message.role for message in messages}
    if "developer" in roles:
        if "developer" in template.source:
            yield messages, True
        messages = [attrs.evolve(one, role="system") if one.role == "developer" else one for one in messages]
    instructed = bool(roles & _INSTRUCTING)
    # A template that knows the role may omit text on purpose, for example a switch like "/no_think".
    yield messages, instructed and ("system" not in template.source or roles <= _INSTRUCTING)
    if instructed:
        yield _folded(messages), False


def _shows_instructions(segments: Sequence[Segment], messages: Sequence[Message]) -> bool:
    text = "".join(segment.text for segment in segments)
    return all(message.content.strip() in text for message in messages if message.role in _INSTRUCTING)


def _render_calls(
    template: ChatTemplate, prompt: ChatPrompt, messages: Sequence[Message], max_chars: int
) -> tuple[Segment, ...]:
    """Render with the arguments of calls as objects; as their texts if the template fails, as it may need strings."""
    try:
        return _render(template, prompt, messages, max_chars)
    except TemplateExhausted:
        raise
    except RenderError:
        if not any(message.tool_calls for message in messages):
            raise
        with suppress(RenderError):
            return _render(template, prompt, messages, max_chars, calls_as_text=True)
        raise


def _render(
    template: ChatTemplate,
    prompt: ChatPrompt,
    messages: Sequence[Message],
    max_chars: int,
    *,
    calls_as_text: bool = False,
) -> tuple[Segment, ...]:
    media = [part for message in messages for part in message.parts if isinstance(part, _MEDIA)]
    forms = _forms_of(template, media)
    # A client's text that equals the placeholder of media is marked like a control-token string.
    placeholders = tuple(form.placeholder for form in forms.values() if not form.is_text)
    control = control_strings((*prompt.special_tokens, *placeholders))
    plain = [_plain(message, forms) for message in messages]
    markers = Markers(control, [plain, prompt.extra])
    # In practice reasoning tags, never the ends of turns.
    visible = _inspected_tags(template, control) - {prompt.bos_token, prompt.eos_token, *placeholders}
    marked = RequestList(_marked(message, markers, visible, calls_as_text) for message in plain)
    end = markers.new("") if _continues(prompt, messages) else ""
    if end:
        marked[-1]["content"] += end
    in_parts = roles_with_parts(template)
    for message in marked:
        is_read_so = message["role"] in in_parts or (message["role"] == "developer" and "system" in in_parts)
        if is_read_so and isinstance(message["content"], str):
            message["content"] = RequestList(as_parts(message["content"]))
    variables = {
        "tools": None,
        "documents": None,
        **markers.mark(prompt.extra),
        "messages": marked,
        "bos_token": prompt.bos_token,
        "eos_token": prompt.eos_token,
        "add_generation_prompt": prompt.add_generation_prompt and not end,
    }
    paths = [message.param or f"messages[{index}]" for index, message in enumerate(messages)]
    try:
        text = template.render(variables, paths, max_chars)
    except TemplateExhausted:
        raise
    except RenderError as error:
        param = None if error.param is None else markers.restore(error.param)
        raise RenderError(markers.restore(error.message), param) from None
    segments = markers.split(_up_to(end, text) if end else text)
    return _placed(segments, forms, media, messages) if media else segments


_MEDIA = DecodedImage | DecodedAudio

_Forms = Mapping[str, MediaForm]
"""The forms of the kinds of media in a chat."""


def _forms_of(template: ChatTemplate, media: Sequence[DecodedMedia]) -> _Forms:
    """Return the forms in which the template takes media; recordings may be between texts in every template."""
    forms: dict[str, MediaForm] = {}
    for one in media:
        form = forms.get(one.kind) or media_form(template, one.kind) or (text_form() if one.kind == "audio" else None)
        if form is None:
            reason = "the model's chat template has no place for images; set chat_template to a file that writes them"
            raise RenderError(f"{one.param}: {reason}", one.param)
        forms[one.kind] = form
    return forms


def _placed(
    segments: Sequence[Segment], forms: _Forms, media: Sequence[DecodedMedia], messages: Sequence[Message]
) -> tuple[Segment, ...]:
    """Return the segments with the media in place of their placeholders."""
    placed: list[Segment] = []
    left: dict[str, deque[DecodedMedia]] = {form.placeholder: deque() for form in forms.values()}
    for one in media:
        left[forms[one.kind].placeholder].append(one)
    num_places = 0
    pattern = f"({'|'.join(map(re.escape, left))})"
    for segment in segments:
        for text in re.split(pattern, segment.text) if segment.trusted else (segment.text,):
            if segment.trusted and text in left:
                num_places += 1
                if left[text]:
                    placed.append(Segment(text, True, left[text].popleft()))
            elif text:
                placed.append(Segment(text, segment.trusted))
    if num_places != len(media) or any(left.values()):
        # Templates that write media of users only are the usual reason.
        of_others = [part for one in messages if one.role != "user" for part in one.parts if isinstance(part, _MEDIA)]
        param = (of_others or media)[0].param
        what = " and ".join("images" if kind == "image" else "recordings" for kind in forms)
        reason = f"the chat template wrote {num_places} placeholders for {len(media)} {what}"
        raise RenderError(f"{param}: {reason}, so they cannot be assigned", param)
    return tuple(placed)


def _inspected_tags(template: ChatTemplate, control: ControlStrings) -> set[str]:
    """Return the control-token strings the template looks for, with their counterparts (``<think>``, ``</think>``)."""
    tags = {text for text in template.inspected if text in control}
    closing = {tag[:1] + "/" + tag[1:] for tag in tags}
    opening = {tag.replace("/", "", 1) for tag in tags}
    return tags | {tag for tag in closing | opening if tag in control}


def _continues(prompt: ChatPrompt, messages: Sequence[Message]) -> bool:
    """Return True if the turn of the last message stays open; after calls a new turn follows."""
    if prompt.continues is not None:
        return prompt.continues
    last = messages[-1] if messages else None
    is_open = last is not None and last.role == "assistant" and not last.tool_calls
    return is_open and prompt.add_generation_prompt


def _plain(message: Message, forms: _Forms) -> dict[str, Any]:
    """Return the message in the form that templates expect; members that do not apply are omitted."""
    plain = {
        "role": message.role,
        "content": _content(message, forms),
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning,
        "tool_calls": [_plain_call(call) for call in message.tool_calls] or None,
    }
    return {name: value for name, value in plain.items() if value is not None}


def _content(message: Message, forms: _Forms) -> str | list[dict[str, Any]]:
    """Return the content in parts if it has media; text that was added around the original one stays around it."""
    own = [forms[part.kind] for part in message.parts if isinstance(part, _MEDIA)]
    if not own:
        return message.content
    texts = [part for part in message.parts if isinstance(part, str)]
    found = _span(message.content, texts) if texts else None
    if texts and found is None:
        raise RenderError(f"{message.param}: a content with media cannot be rewritten for this model", message.param)
    before, after = (message.content[: found[0]], message.content[found[1] :]) if found else ("", "")
    if not texts:
        before = message.content
    if all(form.is_text for form in own):
        inner = "\n".join(part if isinstance(part, str) else forms[part.kind].placeholder for part in _known(message))
        return before + inner + after
    return [
        {"type": "text", "text": part} if isinstance(part, str) else dict(forms[part.kind].part)
        for part in (before, *_known(message), after)
        if part
    ]


def _span(content: str, texts: Sequence[str]) -> tuple[int, int] | None:
    """Return where texts with only white space between them begin and end in a content, in linear time."""
    joined = "\n".join(texts)
    begin = content.find(joined)
    if begin >= 0:
        return begin, begin + len(joined)
    words = "".join(joined.split())
    num_before = "".join(content.split()).find(words)
    if not words or num_before < 0:
        return None
    for word in re.finditer(r"\S+", content):
        begin = word.start() + num_before
        if begin < word.end():
            break
        num_before -= len(word[0])
    end = begin
    for text in filter(None, map(str.strip, texts)):
        space = _SPACE.match(content, end)
        end = space.end() if space is not None else end
        if not content.startswith(text, end):
            return None
        end += len(text)
    before, after = joined[: -len(joined.lstrip())], joined[len(joined.rstrip()) :]
    begin -= len(before) if content.endswith(before, 0, begin) else 0
    return begin, end + len(after) if content.startswith(after, end) else end


def _known(message: Message) -> list[str | DecodedMedia]:
    """Return texts and media of a message; there are no other parts once its media are read."""
    return [part for part in message.parts if isinstance(part, str | _MEDIA)]


def _plain_call(call: ToolCall) -> dict[str, Any]:
    members, text = read_arguments(call.arguments)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": members, "text": text}}


def _marked(plain: dict[str, Any], markers: Markers, visible: set[str], calls_as_text: bool) -> dict[str, Any]:
    """Return a copy without control-token strings in client text, except ``visible`` ones in assistant messages."""
    role, content, *rest = plain.items()
    marked = dict([role, ("content", markers.mark(content[1], visible if role[1] == "assistant" else ()))])
    marked |= {name: markers.mark(value) for name, value in rest}
    for call in marked.get("tool_calls", ()):
        function = call["function"]
        text = function.pop("text")
        function["arguments"] = text if calls_as_text else Arguments(function["arguments"], text)
    return marked


def _up_to(end: str, text: str) -> str:
    cut = text.rfind(end)
    if cut < 0:
        raise RenderError("The chat template does not let a last assistant message be continued.", "messages")
    return text[:cut]


def _folded(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages without system messages; the text of each is moved to the next user message."""
    folded: list[Message] = []
    waiting: list[str] = []
    for message in messages:
        if message.role == "system":
            waiting.append(message.content)
        elif message.role == "user" and waiting:
            folded.append(attrs.evolve(message, content="\n\n".join((*waiting, message.content))))
            waiting = []
        else:
            folded.append(message)
    if waiting and folded and folded[-1].role == "user":
        last = folded.pop()
        folded.append(attrs.evolve(last, content="\n\n".join((last.content, *waiting))))
    elif waiting:
        folded.append(Message(role="user", content="\n\n".join(waiting)))
    return folded
