"""Strategy ``semantic``: the model of the labelled examples that are nearest to the request by their embeddings.

Core computes the similarities, so nothing here knows embedders. Prompts and examples may be in any language that the
embedder knows.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from enginehouse.contract.errors import ConfigError
from enginehouse.contract.regular_files import read_regular_text
from enginehouse.contract.router import Attempt, RouteQuestion, RoutingDecision
from enginehouse.contract.types import GenerateRequest
from enginehouse.settings.structuring import closest
from enginehouse_router.features import read_request
from enginehouse_router.options import RouterOptions

__all__ = ["Example", "SemanticRouter", "read_examples"]

_MAX_CHARS = 1000  # more than most embedders read
_MAX_EXAMPLES = 5000  # compared in about a millisecond
_MAX_FILE_BYTES = 64_000_000
_PATH = "plugins.router"


@frozen
class Example:
    """A prompt, and the model that should get prompts like it."""

    prompt: str
    model: str
    line: int


@define(slots=False)
class SemanticRouter:
    """Implements :class:`enginehouse.contract.router.Router`, and its optional interface ``ComparesTexts``."""

    options: RouterOptions = field(factory=RouterOptions)
    name: str = "semantic"
    api_version: int = 1

    @property
    def embedder(self) -> str:
        """Name of the model for embeddings."""
        return self.options.embedder or ""

    @cached_property
    def labelled(self) -> tuple[Example, ...]:
        """The examples of the file, read once."""
        path = self.options.examples
        return () if path is None else tuple(read_examples(path, self.options.labels))

    def examples(self) -> Sequence[str]:
        """Return their texts."""
        return [_shortened(example.prompt) for example in self.labelled]

    def check_models(self, models: Sequence[str]) -> None:
        """Refuse settings without an embedder or examples, and examples of models that `auto` cannot select."""
        for key in ("embedder", "examples"):
            if getattr(self.options, key) is None:
                raise ConfigError(f"{_PATH}.{key}: the strategy 'semantic' needs it", f"{_PATH}.{key}")
        for example in self.labelled:
            if example.model not in models:
                hint = closest(example.model, tuple(models))
                what = f"line {example.line}: {example.model!r} is not one of the models of the router{hint}"
                raise ConfigError(f"{_PATH}.examples: {self.options.examples}, {what}", f"{_PATH}.examples")
        if not self.labelled:
            raise ConfigError(f"{_PATH}.examples: {self.options.examples} has no examples", f"{_PATH}.examples")

    def text_of(self, request: GenerateRequest) -> str:
        """Return the last user message, or of a long one its beginning and end."""
        return _shortened(read_request(request).text)

    def route(self, question: RouteQuestion) -> RoutingDecision:
        """Return the model with most of the similarity of the nearest examples, then the others in that order."""
        names = {candidate.name for candidate in question.candidates}
        pairs = zip(question.similarities, self.labelled, strict=False)
        known = ((similarity, example) for similarity, example in pairs if example.model in names)
        near = heapq.nlargest(self.options.num_neighbours, known, key=lambda pair: pair[0])
        if not near or near[0][0] < self.options.min_similarity:
            nearest = f"the nearest example has a similarity of {near[0][0]:.2f}" if near else "there is no example"
            attempts = sorted(names, key=lambda name: (name != question.default, _rank(question, name)))
            reason = f"{nearest}; the default model"
            return RoutingDecision(attempts=tuple(map(Attempt, attempts)), reason=reason, features=_features(near, 0.0))
        weights = dict.fromkeys(names, 0.0)
        for similarity, example in near:
            weights[example.model] += max(similarity, 0.001)
        total = sum(weights.values())
        scores = {name: weight / total for name, weight in weights.items()}
        ordered = sorted(names, key=lambda name: (-scores[name], _rank(question, name)))
        margin = scores[ordered[0]] - (scores[ordered[1]] if len(ordered) > 1 else 0.0)
        num_for = sum(example.model == ordered[0] for _, example in near)
        similarity, example = near[0]
        return RoutingDecision(
            attempts=tuple(map(Attempt, ordered)),
            reason=f"{num_for} of the {len(near)} nearest examples, margin {margin:.2f}; "
            f"the nearest is line {example.line}, similarity {similarity:.2f}",
            scores=scores,
            features=_features(near, margin),
        )


def read_examples(path: Path, labels: Mapping[str, str]) -> Iterator[Example]:
    """Yield the examples of a file: lines of JSON with a ``prompt``, and a ``model`` or a ``label``.

    Args:
        labels: the model of each label.

    Raises:
        ConfigError: the file cannot be read, or a line is wrong; names the line.
    """
    where = f"{_PATH}.examples"
    try:
        text = read_regular_text(path, _MAX_FILE_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: {path} cannot be read: {error}", where) from error
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if len(lines) > _MAX_EXAMPLES:
        raise ConfigError(f"{where}: {path} has {len(lines)} examples; at most {_MAX_EXAMPLES} are allowed", where)
    for number, line in lines:
        try:
            yield _example(json.loads(line), labels, number)
        except ValueError as error:
            raise ConfigError(f"{where}: {path}, line {number}: {error}", where) from error


def _example(data: Any, labels: Mapping[str, str], number: int) -> Example:
    if not isinstance(data, dict) or not isinstance(prompt := data.get("prompt"), str) or not prompt.strip():
        raise ValueError("must be an object with a text as prompt")
    given = [key for key in ("model", "label") if isinstance(data.get(key), str)]
    if len(given) != 1:
        raise ValueError("needs either model or label, as a text")
    if given == ["model"]:
        return Example(prompt, data["model"], number)
    if data["label"] not in labels:
        raise ValueError(f"the label {data['label']!r} has no model in {_PATH}.labels")
    return Example(prompt, labels[data["label"]], number)


def _features(near: Sequence[tuple[float, Example]], margin: float) -> dict[str, float]:
    return {"similarity": near[0][0] if near else 0.0, "margin": margin}


def _rank(question: RouteQuestion, name: str) -> int:
    return next(candidate.rank for candidate in question.candidates if candidate.name == name)


def _shortened(text: str) -> str:
    half = _MAX_CHARS // 2
    return text if len(text) <= _MAX_CHARS else f"{text[:half]}\n{text[-half:]}"
