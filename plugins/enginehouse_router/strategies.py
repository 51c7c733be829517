"""Routing strategies: each orders the candidates by its criterion and states the reason."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from attrs import field, frozen

from enginehouse.contract.errors import ConfigError
from enginehouse.contract.router import Acceptance, AnswerBeginning, Attempt, Candidate, RouteQuestion, RoutingDecision
from enginehouse.settings.structuring import closest
from enginehouse_router.features import WEIGHTS, Reading, difficulty, features_of, has_code, read_request
from enginehouse_router.options import RouterOptions, Rule

__all__ = ["CascadeRouter", "DifficultyRouter", "LoadRouter", "RulesRouter"]


@frozen
class RulesRouter:
    """Routes by the first matching rule; without one, to the default model."""

    options: RouterOptions = field(factory=RouterOptions)
    name: str = "rules"
    api_version: int = 1

    def check_models(self, models: Sequence[str]) -> None:
        """Refuse rules for models that `auto` cannot select: they would never apply."""
        for index, rule in enumerate(self.options.rules):
            if rule.model not in models:
                path = f"plugins.router.rules[{index}].model"
                hint = closest(rule.model, tuple(models))
                raise ConfigError(f"{path}: {rule.model!r} is not one of the models of the router{hint}", path)

    def route(self, question: RouteQuestion) -> RoutingDecision:
        """Return the model of the first matching rule whose model can serve the request, then the others."""
        reading = read_request(question.request)
        names = {candidate.name for candidate in question.candidates}
        for number, rule in enumerate(self.options.rules, 1):
            if rule.model in names and _holds(rule, reading):
                return RoutingDecision(attempts=_beginning_with(rule.model, question), reason=f"rule {number} holds")
        return RoutingDecision(
            attempts=_beginning_with(question.default, question), reason="no rule matches; the default model"
        )


@frozen
class LoadRouter:
    """Routes to the model with the most free capacity; of equal ones, the one that answers soonest."""

    name: str = "load"
    api_version: int = 1

    def route(self, question: RouteQuestion) -> RoutingDecision:
        """Order by the share of used slots, then by the time to the first token."""
        ordered = sorted(question.candidates, key=_busyness)
        first = ordered[0]
        taken = first.num_running + first.num_waiting
        return RoutingDecision(
            attempts=_attempts(ordered),
            reason=f"{taken} of {first.slots} slots of {first.name} are taken",
            scores={candidate.name: -_taken(candidate) for candidate in ordered},
        )


@frozen
class DifficultyRouter:
    """Routes requests that look harder to later models in ``router.models``."""

    options: RouterOptions = field(factory=RouterOptions)
    name: str = "difficulty"
    api_version: int = 1

    def check_models(self, models: Sequence[str]) -> None:
        """Refuse thresholds that do not match the number of models."""
        given, path = len(self.options.thresholds), "plugins.router.thresholds"
        if given and given != len(models) - 1:
            message = f"{path}: {len(models)} models have {len(models) - 1} thresholds between them, not {given}"
            raise ConfigError(message, path)

    def route(self, question: RouteQuestion) -> RoutingDecision:
        """Return the model for the score range, then stronger ones, then weaker ones."""
        features = features_of(read_request(question.request))
        weights = {**WEIGHTS, **self.options.weights}
        score = difficulty(features, weights)
        candidates = question.candidates
        chosen = self._choose(score, candidates)
        ordered = [*candidates[chosen:], *reversed(candidates[:chosen])]
        seen_features = [name for name in features if name != "base"]
        effects = sorted(seen_features, key=lambda name: -abs(weights[name] * features[name]))
        seen = [name for name in effects[:3] if weights[name] * features[name]]
        return RoutingDecision(
            attempts=_attempts(ordered),
            reason=f"difficulty {score:.2f}" + (f", mostly by {', '.join(seen)}" if seen else ""),
            scores={candidate.name: float(candidate is ordered[0]) for candidate in candidates},
            features={**features, "difficulty": score},
        )

    def _choose(self, score: float, candidates: Sequence[Candidate]) -> int:
        """Return the index of the model for the score range; if it is not a candidate, of the next stronger one."""
        if self.options.thresholds:
            rank = sum(score >= threshold for threshold in self.options.thresholds)
            return min(sum(candidate.rank < rank for candidate in candidates), len(candidates) - 1)
        return min(int(score * len(candidates)), len(candidates) - 1)


@frozen
class CascadeRouter:
    """Starts with the weakest model; if it is not confident in its first words, the next one answers instead."""

    options: RouterOptions = field(factory=RouterOptions)
    name: str = "cascade"
    api_version: int = 1

    def route(self, question: RouteQuestion) -> RoutingDecision:
        """Return all models by rank; all but the last must be confident."""
        accept = Acceptance(self.options.probe_tokens, self._is_sure)
        attempts = tuple(Attempt(candidate.name, accept) for candidate in question.candidates)
        least = self.options.min_probability
        reason = f"the first whose first {self.options.probe_tokens} tokens have a mean probability of {least:g}"
        return RoutingDecision(attempts=attempts, reason=reason)

    def _is_sure(self, probe: AnswerBeginning) -> bool:
        """True if the geometric mean of the model's token probabilities is high enough; False if they are missing."""
        if not probe.logprobs:
            return False
        return math.exp(sum(probe.logprobs) / len(probe.logprobs)) >= self.options.min_probability


def _holds(rule: Rule, reading: Reading) -> bool:
    checks = (
        not rule.contains or _has_any(reading.text, rule.contains),
        not rule.system_contains or _has_any(reading.system, rule.system_contains),
        rule.min_chars is None or reading.num_all_chars >= rule.min_chars,
        rule.max_chars is None or reading.num_all_chars <= rule.max_chars,
        rule.min_turns is None or reading.num_turns >= rule.min_turns,
        rule.tools in (None, reading.has_tools),
        rule.structured in (None, reading.is_structured),
        rule.code is None or rule.code == has_code(reading.text),
    )
    return all(checks)


def _has_any(text: str, phrases: Iterable[str]) -> bool:
    folded = text.casefold()
    return any(re.search(rf"(?<!\w){re.escape(phrase.casefold())}(?!\w)", folded) for phrase in phrases)


def _beginning_with(name: str, question: RouteQuestion) -> tuple[Attempt, ...]:
    return _attempts(sorted(question.candidates, key=lambda candidate: candidate.name != name))


def _attempts(candidates: Iterable[Candidate]) -> tuple[Attempt, ...]:
    return tuple(Attempt(candidate.name) for candidate in candidates)


def _taken(candidate: Candidate) -> float:
    return (candidate.num_running + candidate.num_waiting) / candidate.slots


def _busyness(candidate: Candidate) -> tuple[bool, float, float, int]:
    """Sort key, smaller is better. Loading a model takes longer than any queue."""
    return candidate.state != "ready", _taken(candidate), candidate.first_token_s or 0.0, candidate.rank
