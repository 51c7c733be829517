"""Checks of chat templates in the files of models: they compile, a short chat can be rendered, and their formats.

Templates are foreign code, so they run in rendering processes, as in the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path

from enginehouse.contract.errors import EnginehouseError, RenderError
from enginehouse.contract.types import ModelInfo
from enginehouse.pipeline.chat_formats import ChatFormats, ModelFormats
from enginehouse.pipeline.prompt.chat_prompt import ModelTemplates
from enginehouse.pipeline.prompt.renderer import Renderer
from enginehouse.pipeline.prompting import find_template_problem, render_examples
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import ModelSettings, Settings
from enginehouse_backendkit.template_files import read_templates
from enginehouse_doctor.checkup import Finding

__all__ = ["check_templates"]

_ADVICE = "set chat_template to a file to use another one"


def check_templates(settings: Settings, paths: Mapping[str, Path], registry: PluginRegistry) -> tuple[Finding, ...]:
    """Check the templates of models.

    Args:
        settings: with the models.
        paths: of their files, by model.
        registry: the plugins, whose parsers know formats.
    """
    templates = {name: _templates_of(name, settings.models[name], path) for name, path in paths.items()}
    if not any(templates.values()):
        return ()
    return asyncio.run(_try(settings, templates, registry))


def _templates_of(name: str, model: ModelSettings, path: Path) -> Mapping[str, str]:
    """Return the templates that a model would use; none where its files are of another kind or cannot be read."""
    try:
        found = read_templates(path) if path.is_dir() or path.suffix == ".gguf" else {}
        return ModelTemplates({name: model}).all(name, _info(found))
    except (EnginehouseError, OSError, UnicodeDecodeError):  # the backend or the settings' check says it
        return {}


def _info(templates: dict[str, str]) -> ModelInfo:
    return ModelInfo(backend="", max_context=0, vocab_size=0, chat_templates=templates)


async def _try(
    settings: Settings, templates: Mapping[str, Mapping[str, str]], registry: PluginRegistry
) -> tuple[Finding, ...]:
    renderer = Renderer(settings.limits.render_timeout_s, settings.limits.render_max_chars)
    await renderer.start()
    try:
        formats = ChatFormats(registry, settings.models)
        return tuple(
            [
                finding
                for name, of_model in templates.items()
                for template_name, template in of_model.items()
                for finding in await _examine(renderer, formats, name, template_name, template)
            ]
        )
    finally:
        await renderer.close()


async def _examine(
    renderer: Renderer, formats: ChatFormats, model: str, name: str, template: str
) -> tuple[Finding, ...]:
    subject = f"template {name!r} of {model}"
    try:
        await renderer.check(template)
    except RenderError as error:
        return (Finding(subject, "problem", f"it is broken, so the model does not load: {error.message}", _ADVICE),)
    problem = await find_template_problem(renderer, template, _info({}))
    if problem:
        return (Finding(subject, "problem", f"no chat can use it: {problem}", _ADVICE),)
    chat = await render_examples(renderer, template, _info({}))
    formats.learn(model, chat)
    of_model = f"{model}, with tools" if name == "tool_use" else model
    return (Finding(subject, "ok", "it renders a chat"), *_formats_of(of_model, formats.of(model, chat)))


def _formats_of(subject: str, found: ModelFormats) -> Iterator[Finding]:
    """Report the formats of calls and reasoning, and why they were chosen."""
    lines = getattr(found.tools, "explanation", ())
    warnings = [line.removeprefix("warning: ") for line in lines if line.startswith("warning: ")]
    reasons = "; ".join(line for line in lines if not line.startswith("warning: "))
    text = f"{found.tool_parser or 'none'}" + (f": {reasons}" if reasons else "")
    yield Finding(f"calls of {subject}", "ok", text)
    for warning in warnings:
        yield Finding(f"calls of {subject}", "advice", warning, "set tool_parser if calls are not read")
    if found.reasoning is not None:
        text = f"{found.reasoning_parser}: from {found.reasoning.start!r} to {found.reasoning.end!r}"
        yield Finding(f"reasoning of {subject}", "ok", text)
