"""``enginehouse calibrate router``: fits the weights of ``difficulty`` to a labelled log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TextIO

import click

from enginehouse.contract.types import GenerateRequest, Message
from enginehouse_router.features import WEIGHTS, read_request
from enginehouse_router.training import Fitted, Labelled, accuracy, cross_validated, fit

__all__ = ["calibrate_router"]

_MIN_PROMPTS = 20
_MAX_MODELS = 4


@click.command("router")
@click.argument("log", type=click.File(encoding="utf-8"))
@click.option("--models", required=True, help="Names of the models, the weakest first, with commas: small,big.")
def calibrate_router(log: TextIO, models: str) -> None:
    """Fit the weights and thresholds of the strategy `difficulty` from LOG, and print them as settings.

    Each line of LOG is JSON: {"prompt": "...", "model": "small"}, or "messages" as the API takes them in the place of
    "prompt". "model" is the weakest model whose answer was good enough.
    """
    names = [name.strip() for name in models.split(",") if name.strip()]
    if len(set(names)) != len(names) or not 2 <= len(names) <= _MAX_MODELS:
        raise click.UsageError(f"--models needs 2 to {_MAX_MODELS} different names, with commas")
    examples = list(_read(log, names))
    if len(examples) < _MIN_PROMPTS:
        raise click.ClickException(f"{len(examples)} prompts are too few; at least {_MIN_PROMPTS} are needed")
    even = tuple(number / len(names) for number in range(1, len(names)))
    before = accuracy(examples, Fitted(dict(WEIGHTS), even))
    fitted = fit(examples, len(names))
    click.echo(f"# {len(examples)} prompts. Agreement with the labels: {before:.0%} with the built-in weights,")
    click.echo(f"# {cross_validated(examples, len(names)):.0%} with learnt ones on prompts that were not learnt from")
    click.echo(f"# ({accuracy(examples, fitted):.0%} on those that were).")
    click.echo(_as_settings(names, fitted))


def _read(log: TextIO, names: list[str]) -> Iterator[Labelled]:
    for number, line in enumerate(log, 1):
        if not line.strip():
            continue
        try:
            yield _labelled(json.loads(line), names)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise click.ClickException(f"{log.name}, line {number}: {error}") from error


def _labelled(data: dict[str, Any], names: list[str]) -> Labelled:
    model = data["model"]
    if model not in names:
        raise ValueError(f"the model {model!r} is not one of {', '.join(names)}")
    if ("prompt" in data) == ("messages" in data):
        raise ValueError("either prompt or messages is needed")
    if "prompt" in data:
        messages: tuple[Message, ...] = (Message(role="user", content=str(data["prompt"])),)
    else:
        messages = tuple(Message(role=one["role"], content=_text_of(one["content"])) for one in data["messages"])
    return Labelled(read_request(GenerateRequest(request_id="", model=None, messages=messages)), names.index(model))


def _text_of(content: Any) -> str:
    """Return the text of a message, which may consist of parts."""
    if isinstance(content, list):
        return "\n".join(part.get("text", "") for part in content)
    return content or ""


def _as_settings(names: list[str], fitted: Fitted) -> str:
    lines = [
        "[router]",
        'strategy = "difficulty"',
        f"models = {json.dumps(names)}",
        "",
        "[plugins.router]",
        f"thresholds = {json.dumps(list(fitted.thresholds))}",
        "",
        "[plugins.router.weights]",
        *(f"{name} = {weight:.3f}" for name, weight in fitted.weights.items()),
    ]
    return "\n".join(lines)
