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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from attrs import frozen
from jinja2 import Environment, Template, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from enginehouse.contract.errors import RenderError
from enginehouse.pipeline.prompt.failures import (
    Failure,
    KnownUndefined,
    NumberedTags,
    find_failure,
    find_tag,
    number_tags,
)

_MAX_MESSAGE_CHARS = 1000
_MAX_TAGS = 20_000  # take about 3 s; the longest templates in use have a tenth of that
_LIST_METHODS = frozenset({"append", "extend", "insert", "pop"})
_MAX_BITS = 4096


class _Refusal(Exception):
    """The template called ``raise_exception``."""


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

    def render(self, variables: Mapping[str, Any], paths: Sequence[str], max_chars: int) -> str:
        """Run the template.

        Args:
            variables: with ``messages``, a list of objects.
            paths: of the messages in the request, for errors.

        Raises:
            TemplateExhausted: not enough memory.
            RenderError: it refused the messages, failed, or wrote more than ``max_chars`` characters. The message says
                where, and what it needed.
        """

        def explain(error: Exception) -> RenderError:
            failure = find_failure(error, self._template, self.source, variables, paths)
            return _explained(error, failure, variables["messages"], paths)

        parts, num_chars = [], 0
        with _template_code(explain, "messages"):
            for part in self._template.root_render_func(self._template.new_context(dict(variables))):
                num_chars += len(part)
                if num_chars > max_chars:
                    raise RenderError(f"The rendered prompt exceeds {max_chars} characters.", "messages")
                parts.append(part)
        return "".join(parts)


@contextmanager
def _template_code(explain: Callable[[Exception], RenderError], path: str | None = None) -> Iterator[None]:
    """Guard of a template's code, and of compilers that read it: any exception in the block becomes a RenderError."""
    try:
        yield
    except RenderError:
        raise
    except MemoryError:
        raise TemplateExhausted("The chat template needs too much memory.", path) from None
    except Exception as error:
        raise explain(error) from error


@lru_cache(maxsize=32)
def compile_template(source: str) -> ChatTemplate:
    """Compile ``source``; templates in use are cached.

    Raises:
        RenderError: it is not a valid template; the message gives position and reason.
    """
    environment = _environment()
    num_tags = source.count("{{") + source.count("{%")
    if num_tags > _MAX_TAGS:
        raise RenderError(f"The chat template has {num_tags} tags; at most {_MAX_TAGS} are compiled.")
    try:
        number_tags(environment, source)  # a text that cannot be split into tags has no numbers, but lines
    except TemplateSyntaxError as error:
        raise RenderError(f"The chat template has a syntax error in line {error.lineno}: {error.message}") from error

    def explain(error: Exception) -> RenderError:
        if not isinstance(error, TemplateSyntaxError):
            return _explained(error, Failure(), (), ())
        where = find_tag(environment, source, error.lineno)
        return RenderError(f"The chat template has a syntax error in {where}: {error.message}")

    with _template_code(explain):
        tree = environment.parse(source)
        inspected = _inspected(tree)
        return ChatTemplate(source, inspected, environment.from_string(tree))


class _GenerationExtension(Extension):
    """The tag ``{% generation %}...{% endgeneration %}`` around assistant text: renders its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the body in its own scope: other implementations also hide variables set inside."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


@lru_cache(maxsize=1)
def _environment() -> Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[LoopControlExtension, _GenerationExtension, NumberedTags],
        undefined=KnownUndefined,
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which a template may also change lists that it has made; those of Kimi K2 do."""

    intercepted_binops = frozenset({"**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Bound powers, which are computed in one operation, for constants while the template is compiled."""
        if isinstance(left, int) and isinstance(right, int) and abs(left).bit_length() * right > _MAX_BITS:
            raise SecurityError(f"a power of more than {_MAX_BITS} bits")
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allow what Jinja allows, and the methods of a list; those of requests are of another type."""
        return (type(obj) is list and attr in _LIST_METHODS) or super().is_safe_attribute(obj, attr, value)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode a value; what ``map`` and ``select`` give is encoded as a list."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_listed,
    )


def _listed(value: object) -> list[Any]:
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot be encoded as JSON")


def _raise_exception(message: object) -> NoReturn:
    raise _Refusal(str(message))


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


def _explained(
    error: Exception, failure: Failure, messages: Sequence[Mapping[str, Any]], paths: Sequence[str]
) -> RenderError:
    """Return the error for a failure; its ``param`` is what the template needed, else the message that it was at."""
    where = f" ({failure.tag})" if failure.tag else ""
    if isinstance(error, RecursionError):
        return RenderError(f"The chat template nests too deeply{where}.")
    if isinstance(error, SecurityError):
        return RenderError(f"The chat template tried something that is not allowed{where}: {_said(error)}")
    path = "messages" if failure.message is None else paths[failure.message]
    if isinstance(error, _Refusal):
        return _refused(_said(error), failure, messages, path)
    if failure.is_variable:
        path = "chat_template_kwargs"
        message = f"The chat template needs the variable {failure.needed!r}{where}; define it in {path}."
    elif failure.needed == "tools":
        path = "tools"
        message = f"tools: the chat template needs tools, and this request offers none{where}"
    elif failure.needed:
        path = failure.needed
        message = f"{path}: the chat template needs this value, which is missing{where}"
    elif failure.message is not None:
        message = f"{path}: the chat template failed at this message{where}: {_said(error)}"
    else:
        message = f"The chat template failed{where}: {_said(error)}"
    return RenderError(message, path)


def _refused(reason: str, failure: Failure, messages: Sequence[Mapping[str, Any]], path: str) -> RenderError:
    """Return the error for a call of ``raise_exception``; most of them are about the order of roles."""
    line = f"line {failure.tag.line}" if failure.tag else "no line"
    if failure.message is None:
        return RenderError(f"The chat template refused the messages ({line}): {reason}", path)
    role, *before = (messages[index].get("role") for index in (failure.message, failure.message - 1) if index >= 0)
    order = f"role {role!r} after {before[0]!r}" if before else f"role {role!r} first"
    return RenderError(f"{path}: the chat template refused this message ({order}; {line}): {reason}", path)


def _said(error: Exception) -> str:
    kind = "" if isinstance(error, TemplateError | _Refusal) else f"{type(error).__name__}: "
    return f"{kind}{error}"[:_MAX_MESSAGE_CHARS]
