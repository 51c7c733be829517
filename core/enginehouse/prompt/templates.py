"""Chat messages to segments: a pure function around one sandboxed rendering.

Called in the rendering processes (:mod:`enginehouse.prompt.render_process`); every place that needs a
model's template goes through here. Knows the customs of chat templates; knows no model by name.

Customs, applied in this order:

1. The role ``developer`` becomes ``system`` where the template does not mention it.
2. Control-token strings in untrusted values are marked (:mod:`enginehouse.prompt.markers`).
3. A last message by the assistant is continued: its turn stays open and nothing follows its text.
4. *Folding.* When the template refuses messages among which is a system message, or knows no such role
   and leaves its text out, system texts are put in front of the next user message (behind the last one
   when none follows), separated by an empty line, and it is tried again. If that is refused, too, the
   first refusal counts. Other refusals, for example of two user messages in a row, are the client's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from enginehouse.errors import RenderError
from enginehouse.prompt.chat_prompt import ChatPrompt
from enginehouse.prompt.control_strings import control_strings
from enginehouse.prompt.markers import Markers
from enginehouse.prompt.sandbox import ChatTemplate, TemplateRefused, compile_template
from enginehouse.types import Message, Segment

__all__ = ["check", "render"]


def check(template: str) -> None:
    """Raise RenderError when ``template`` cannot be compiled."""
    compile_template(template)


def render(prompt: ChatPrompt, max_chars: int) -> tuple[Segment, ...]:
    """The prompt text; untrusted segments are the control-token strings that a client has written.

    Raises:
        RenderError: the template refused the messages, failed, or wrote more than ``max_chars`` characters.
    """
    template = compile_template(prompt.template)
    messages = _with_known_roles(prompt.messages, template)
    system_texts = [message.content.strip() for message in messages if message.role == "system"]
    try:
        segments = _render(template, prompt, messages, max_chars)
    except TemplateRefused as refusal:
        if not system_texts:
            raise
        try:
            return _render(template, prompt, _folded(messages), max_chars)
        except RenderError:
            raise refusal from None
    if system_texts and "system" not in template.source:
        text = "".join(segment.text for segment in segments)
        if not all(system_text in text for system_text in system_texts):
            return _render(template, prompt, _folded(messages), max_chars)
    return segments


def _render(
    template: ChatTemplate, prompt: ChatPrompt, messages: Sequence[Message], max_chars: int
) -> tuple[Segment, ...]:
    control = control_strings(prompt.special_tokens)
    contents = [[message.content, message.name or ""] for message in messages]
    markers = Markers(control, [contents, prompt.extra])
    # Reasoning tags, in practice; the ends of turns never.
    visible = {text for text in template.inspected if text in control} - {prompt.bos_token, prompt.eos_token}
    marked = [_marked(message, markers, visible) for message in messages]
    end = ""
    if prompt.add_generation_prompt and messages and messages[-1].role == "assistant":
        end = markers.new("")
        marked[-1]["content"] += end
    variables = {
        "tools": None,
        "documents": None,
        **markers.mark(prompt.extra),
        "messages": marked,
        "bos_token": prompt.bos_token,
        "eos_token": prompt.eos_token,
        "add_generation_prompt": prompt.add_generation_prompt and not end,
    }
    try:
        text = template.render(variables, max_chars)
    except TemplateRefused as refusal:
        raise TemplateRefused(markers.restore(refusal.reason)) from None
    return markers.split(_up_to(end, text) if end else text)


def _marked(message: Message, markers: Markers, visible: set[str]) -> dict[str, Any]:
    content = markers.mark(message.content, visible if message.role == "assistant" else ())
    marked = {"role": message.role, "content": content}
    if message.name is not None:
        marked["name"] = markers.mark(message.name)
    return marked


def _up_to(end: str, text: str) -> str:
    cut = text.rfind(end)
    if cut < 0:
        raise RenderError("The chat template does not let a last assistant message be continued.", "messages")
    return text[:cut]


def _with_known_roles(messages: Sequence[Message], template: ChatTemplate) -> Sequence[Message]:
    if "developer" in template.source:
        return messages
    return [attrs.evolve(message, role="system") if message.role == "developer" else message for message in messages]


def _folded(messages: Sequence[Message]) -> Sequence[Message]:
    """Messages without system messages; each one's text goes to the next user message."""
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
