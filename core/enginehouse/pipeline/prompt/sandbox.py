"""The environment in which model-supplied templates run.

Called by :mod:`enginehouse.pipeline.prompt.templates` only. A template comes with a model file and may be hostile: it
gets plain data, cannot reach Python's internals, cannot modify its input, and can write a limited number of characters.
Time and memory are limited by the process around it (:mod:`enginehouse.pipeline.prompt.renderer`), since Jinja cannot
limit either.

The dialect is that of Hugging Face chat templates: ``trim_blocks``, ``lstrip_blocks``, loop controls,
``{% generation %}``, ``raise_exception``, ``strftime_now``, and a ``tojson`` that does not escape characters.

Source: https://huggingface.co/docs/transformers/chat_templating_writing; written anew. Changed: our generation tag only
renders its body, as the marks are needed for training only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from attrs import frozen
from jinja2 import Environment, Template, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from enginehouse.contract.errors import RenderError

_MAX_MESSAGE_CHARS = 1000


class TemplateRefused(RenderError):
    """The template called ``raise_exception``; ``reason`` is its argument."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"The chat template refused the messages: {reason}", "messages")
        self.reason = reason


class TemplateExhausted(RenderError):
    """The template used up its memory; its process must not be used again."""


@frozen(eq=False)
class ChatTemplate:
    """A compiled template.

    Attributes:
        inspected: string constants that the template compares with or passes to methods, as in
            ``'</think>' in content`` or ``content.split('</think>')``.
    """

    source: str
    inspected: frozenset[str]
    _template: Template

    def render(self, variables: Mapping[str, Any], max_chars: int) -> str:
        """Run the template.

        Raises:
            TemplateRefused: it called ``raise_exception``.
            TemplateExhausted: not enough memory.
            RenderError: it failed otherwise, or wrote more than ``max_chars`` characters.
        """
        parts, num_chars = [], 0
        with _explaining("messages"):
            for part in self._template.root_render_func(self._template.new_context(dict(variables))):
                num_chars += len(part)
                if num_chars > max_chars:
                    raise RenderError(f"The rendered prompt exceeds {max_chars} characters.", "messages")
                parts.append(part)
        return "".join(parts)


@lru_cache(maxsize=32)
def compile_template(source: str) -> ChatTemplate:
    """Compile ``source``; templates in use are cached.

    Raises:
        RenderError: it is not a valid template; the message gives position and reason.
    """
    environment = _environment()
    with _explaining(None):
        tree = environment.parse(source)
        inspected = _inspected(tree)
        return ChatTemplate(source, inspected, environment.from_string(tree))


@contextmanager
def _explaining(param: str | None) -> Iterator[None]:
    """Guard of templates, which are foreign code: any exception, also of Jinja and Python's compiler, is explained."""
    try:
        yield
    except RenderError:
        raise
    except MemoryError:
        raise TemplateExhausted("The chat template needs too much memory.", param) from None
    except Exception as error:
        raise _explained(error) from error


class _GenerationExtension(Extension):
    """The tag ``{% generation %}...{% endgeneration %}`` around assistant text: renders its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the body in its own scope: other implementations also hide variables set inside."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


@lru_cache(maxsize=1)
def _environment() -> Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _GenerationExtension]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefused(str(message)[:_MAX_MESSAGE_CHARS])


def _strftime_now(format: str) -> str:
    return datetime.now().astimezone().strftime(format)


def _inspected(tree: nodes.Template) -> frozenset[str]:
    places: list[nodes.Node] = list(tree.find_all(nodes.Compare))
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr):
            places += call.args
    found = {place.value for place in places if isinstance(place, nodes.Const)}
    found |= {const.value for place in places for const in place.find_all(nodes.Const)}
    return frozenset(value for value in found if isinstance(value, str))


def _explained(error: Exception) -> RenderError:
    if isinstance(error, TemplateSyntaxError):
        return RenderError(f"The chat template has a syntax error in line {error.lineno}: {error.message}")
    if isinstance(error, RecursionError):
        return RenderError("The chat template nests too deeply.")
    if isinstance(error, SecurityError):
        return RenderError(f"The chat template tried something that is not allowed: {error}"[:_MAX_MESSAGE_CHARS])
    kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
    return RenderError(f"The chat template failed: {kind}{error}"[:_MAX_MESSAGE_CHARS], "messages")
