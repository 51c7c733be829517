"""Steps of sampler plugins, each guarded: an error fails its request only and names the plugin.

Built when a sequence is created (``build_steps``), run by the sampler in the order of its chain.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import isfinite, nan
from typing import Any

import numpy as np
from attrs import frozen
from cattrs import Converter
from numpy.typing import NDArray

from enginehouse.contract.errors import GenerationFailed, InvalidRequest, PluginFailed
from enginehouse.contract.logits_processor import ProcessorSession
from enginehouse.contract.sampler import (
    Candidates,
    FollowingStep,
    PenaltyStep,
    SamplerPlugin,
    SamplerRole,
    SamplerStep,
    TemperatureStep,
    TokenPenalties,
    TruncationStep,
    WeightsStep,
    role_of,
)
from enginehouse.contract.types import SamplingParams
from enginehouse.engine.sampling.candidates import Head, LogitRow, Step, Uniform, bounded_temperature
from enginehouse.engine.sampling.penalties import RowPenalty, TokenHistory
from enginehouse.plugins import Guard, guard_of, guarded, plain
from enginehouse.plugins.guarded import ProcessorSampler
from enginehouse.settings.structuring import Problem, converting, strict_converter

_WANTED: Mapping[SamplerRole, type[Any]] = {
    "penalty": PenaltyStep,
    "temperature": TemperatureStep,
    "truncation": TruncationStep,
    "replacement": TruncationStep,
    "weights": WeightsStep,
    "processor": ProcessorSession,
}


@frozen(eq=False)
class PluginStep:
    """A plugin's step for one sequence.

    Attributes:
        plugin: name of the sampler, and of the step.
        guard: the guard of its plugin, for this request.
        order: position among the steps.
        role: the protocol that ``step`` implements.
    """

    plugin: str
    guard: Guard
    order: int
    role: SamplerRole
    step: Any

    @property
    def name(self) -> str:
        """Name of the step in the request field ``samplers``."""
        return "temperature" if self.role == "temperature" else self.plugin

    def bind(self, history: TokenHistory | None, temperature: float) -> Step:
        """Return this as a step of a chain."""
        if self.role == "processor":
            assert history is not None
            return RowPenalty(self.plugin, _PluginProcessor(self.guard, self.step, history).change)
        if self.role == "penalty":
            assert history is not None
            return RowPenalty(self.plugin, _PluginPenalty(self.guard, self.step, history).change)
        if self.role == "temperature":
            return _PluginTemperature(self.guard, self.step, temperature)
        if self.role == "weights":
            return _PluginWeights(self.plugin, self.guard, self.step)
        return _PluginTruncation(self.plugin, self.guard, self.step)

    @property
    def follows(self) -> bool:
        """True if the step needs to know which tokens were accepted."""
        return isinstance(self.step, FollowingStep)

    def accept(self, token_id: int, probability: float | None) -> None:
        """Report an accepted token; see :class:`enginehouse.contract.sampler.FollowingStep`."""
        self.guard.call("accept", self.step.accept, token_id, probability)


@frozen(eq=False)
class _PluginTruncation:
    """A step that keeps some candidates."""

    name: str
    guard: Guard
    step: TruncationStep

    def apply(self, row: LogitRow, head: Head | None, number: Uniform) -> tuple[LogitRow, Head]:
        """See :class:`Step`. Sorting the whole row costs no more than finding nearly all of the probability.

        Raises:
            GenerationFailed: the plugin raised, returned a wrong shape or left no token.
        """
        head = row.whole() if head is None else head
        keep = np.asarray(self.guard.call("its step", self.step, _candidates(self.name, row, head, number)))
        if keep.dtype != np.bool_ or keep.shape != head.token_ids.shape:
            what = f"gave {keep.dtype} of shape {keep.shape}, bool of shape {(len(head),)} was expected"
            raise self.guard.mistake("its step", what, _code_of(self.step))
        if not keep.any():
            raise self.guard.mistake("its step", "left no token to draw", _code_of(self.step))
        return row, head[keep]


@frozen(eq=False)
class _PluginWeights:
    """A step that changes the probabilities of the draw."""

    name: str
    guard: Guard
    step: WeightsStep

    def apply(self, row: LogitRow, head: Head | None, number: Uniform) -> tuple[LogitRow, Head]:
        """See :class:`Step`.

        Raises:
            GenerationFailed: the plugin raised, or returned a wrong shape or invalid weights.
        """
        head = row.whole() if head is None else head
        weights = np.asarray(self.guard.call("weights", self.step.weights, _candidates(self.name, row, head, number)))
        if weights.dtype != np.float64 or weights.shape != head.token_ids.shape:
            what = f"gave {weights.dtype} of shape {weights.shape}, float64 of shape {(len(head),)} was expected"
            raise self.guard.mistake("weights", what, self.step.weights)
        if not np.isfinite(weights).all() or weights.min() < 0 or weights.max() == 0:
            what = "gave weights that are not finite, negative, or all 0"
            raise self.guard.mistake("weights", what, self.step.weights)
        return row, Head(head.token_ids, head.weights, weights)


def _candidates(plugin: str, row: LogitRow, head: Head, number: Uniform) -> Candidates:
    """Return the candidates for a plugin, whose random numbers are its own even if another one has the same purpose."""
    token_ids = head.token_ids.astype(np.int32)
    scaled = (row.logits[token_ids].astype(np.float64) / row.temperature).astype(np.float32)
    return Candidates(
        token_ids,
        scaled,
        _read_only(row.logits),
        row.temperature,
        lambda purpose: number(f"{plugin}:{purpose}"),
    )


@frozen(eq=False)
class _PluginTemperature:
    """A step that sets the temperature, in place of core's."""

    guard: Guard
    step: TemperatureStep
    temperature: float
    name: str = "temperature"

    def apply(self, row: LogitRow, head: Head | None, number: Uniform) -> tuple[LogitRow, Head | None]:
        """See :class:`Step`.

        Raises:
            GenerationFailed: the plugin raised, or returned a value that is not a finite number of at least 0.
        """
        if head is not None:
            logits = row.logits[head.token_ids]
        else:
            logits = row.logits if row.logits.min() > -np.inf else row.logits[row.logits > -np.inf]
        value = self.guard.call("temperature", self.step.temperature, _read_only(logits), self.temperature)
        wanted = float(value) if isinstance(value, int | float | np.floating) else nan
        if not isfinite(wanted) or wanted < 0:
            what = f"gave {value!r}, a finite number of at least 0 was expected"
            raise self.guard.mistake("temperature", what, self.step.temperature)
        return row.at(bounded_temperature(wanted), head)


@frozen(eq=False)
class _PluginProcessor:
    """A processor that changes the whole row."""

    guard: Guard
    session: ProcessorSession
    history: TokenHistory

    def change(self, row: NDArray[np.float32]) -> None:
        """Change ``row``, (vocab_size,) float32, in place.

        Raises:
            GenerationFailed: the plugin raised, banned every token, or left NaN or +inf as the maximum.
        """
        self.guard.call("process", self.session.process, row, self.history.view())
        maximum = float(row.max())
        if maximum == -np.inf:
            raise self.guard.mistake("process", "banned every token", self.session.process)
        if not isfinite(maximum):
            raise self.guard.mistake("process", f"left {maximum} among the logits", self.session.process)


@frozen(eq=False)
class _PluginPenalty:
    """A step that lowers some logits."""

    guard: Guard
    step: PenaltyStep
    history: TokenHistory

    def change(self, row: NDArray[np.float32]) -> None:
        """Change ``row``, (vocab_size,) float32, in place.

        Raises:
            GenerationFailed: the plugin raised, or returned token ids or amounts of wrong type, shape or range.
        """
        penalties = self.guard.call("penalties", self.step.penalties, self.history.view())
        if penalties is None:
            return
        if not isinstance(penalties, TokenPenalties):
            raise self._mistake(f"gave {type(penalties).__name__}, TokenPenalties or None was expected")
        token_ids, amounts = np.asarray(penalties.token_ids), np.asarray(penalties.amounts)
        if token_ids.size == 0:
            return
        if token_ids.dtype.kind != "i" or amounts.dtype.kind not in "fi" or token_ids.ndim != 1:
            raise self._mistake(f"gave {amounts.dtype} for ids of {token_ids.dtype}, floats for integers were expected")
        if token_ids.shape != amounts.shape:
            raise self._mistake(f"gave amounts of shape {amounts.shape} for ids of shape {token_ids.shape}")
        if token_ids.min() < 0 or token_ids.max() >= row.size or not np.isfinite(amounts).all():
            raise self._mistake("gave amounts that are not finite, or ids outside the vocabulary")
        row[token_ids] -= amounts.astype(np.float32)

    def _mistake(self, what: str) -> PluginFailed:
        return self.guard.mistake("penalties", what, self.step.penalties)


def build_steps(
    params: SamplingParams, samplers: Mapping[str, SamplerPlugin], request_id: str = ""
) -> tuple[PluginStep, ...]:
    """Create the plugins' steps for one sequence, sorted by order.

    Args:
        params: its ``extensions`` name the plugins.
        samplers: the plugins of this process, by name.
        request_id: the request of the sequence.

    Raises:
        GenerationFailed: a plugin is missing, failed, or returned a wrong step; the error names it.
        RequestError: a plugin refused its fields, or more than one plugin sets the temperature.
    """
    if not params.extensions:
        return ()
    steps: list[PluginStep] = []
    converter = _converter()
    for name, values in params.extensions.items():
        plugin = samplers.get(name)
        if plugin is None:
            raise GenerationFailed(f"the sampler plugin {name!r} is not installed where the model runs", name)
        kind = "logits processor" if role_of(plugin) == "processor" else "sampler"
        guard = guard_of(plugin, kind).of_request(request_id)
        step = guarded(plain(plugin), SamplerPlugin, guard).create(_read(converter, plugin, values, guard))
        if step is not None:
            steps.append(_checked(plugin, step, guard))
    setters = [step.plugin for step in steps if step.role == "temperature"]
    if len(setters) > 1:
        raise InvalidRequest(f"{' and '.join(setters)} cannot both set the temperature", "temperature")
    return tuple(sorted(steps, key=lambda step: (step.order, step.plugin)))


@cache
def _converter() -> Converter:
    """Cached: creating a converter takes longer than creating all steps of a sequence."""
    return strict_converter()


def _read(converter: Converter, plugin: SamplerPlugin, values: Any, guard: Guard) -> Any:
    """Return the fields of a plugin; the server has validated them, possibly with another version of the plugin."""

    def refuse(problems: Sequence[Problem]) -> GenerationFailed:
        text = "; ".join(map(str, problems))
        return GenerationFailed(f"{guard} does not take these fields: {text}", guard.plugin)

    with converting(refuse):
        return converter.structure(values, plugin.request_fields)


def _checked(plugin: SamplerPlugin, step: SamplerStep, guard: Guard) -> PluginStep:
    role = role_of(plugin)
    if not isinstance(step, _WANTED[role]):
        what = f"gave {type(step).__name__}, {_WANTED[role].__name__} or None was expected"
        own = plain(plugin)
        raise guard.mistake("create", what, own.processor.create if isinstance(own, ProcessorSampler) else own.create)
    return PluginStep(plugin.name, guard, plugin.order, role, step)


def _code_of(step: Any) -> Callable[..., Any] | None:
    """Return the function of a step that is called itself, for its file and line."""
    return step if inspect.isfunction(step) else type(step).__call__


def _read_only(row: NDArray[np.float32]) -> NDArray[np.float32]:
    view = row.view()
    view.flags.writeable = False
    return view
