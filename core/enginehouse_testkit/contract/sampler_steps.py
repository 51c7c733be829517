"""Contract of a sampler's steps: valid results for any row, and no changes to their arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginehouse.contract.sampler import (
    Candidates,
    History,
    PenaltyStep,
    SamplerPlugin,
    TemperatureStep,
    WeightsStep,
    role_of,
)
from enginehouse.contract.types import SamplingParams
from enginehouse.settings.structuring import strict_converter
from enginehouse_testkit.contract.sampler_base import VOCAB_SIZE, SamplerContractBase, rows

__all__ = ["SamplerStepContract"]

_BYTES = tuple(bytes([40 + token_id]) for token_id in range(VOCAB_SIZE))


class SamplerStepContract(SamplerContractBase):
    """Direct tests of a step."""

    def test_truncations_keep_a_candidate(self, sampler: SamplerPlugin, requests: list[SamplingParams]) -> None:
        """One bool per candidate, at least one True: also for one candidate, for ties, for extreme values."""
        for step in _steps(sampler, requests, "truncation", "replacement"):
            for candidates in _all_candidates():
                keep = step(candidates)
                assert keep.dtype == np.bool_
                assert keep.shape == candidates.token_ids.shape
                assert keep.any(), f"the step keeps none of {len(keep)} candidates: at least one must be True"

    def test_penalties_are_finite_and_inside_the_vocabulary(
        self, sampler: SamplerPlugin, requests: list[SamplingParams]
    ) -> None:
        """Each token occurs once; an empty history is valid, too."""
        for step in _steps(sampler, requests, "penalty"):
            assert isinstance(step, PenaltyStep)
            for token_ids in ([], [1], [1, 2, 3] * 8, list(range(VOCAB_SIZE))):
                found = step.penalties(History(np.array(token_ids, np.int32), _BYTES))
                if found is not None:
                    assert len(set(found.token_ids.tolist())) == len(found.token_ids) == len(found.amounts)
                    assert np.isfinite(found.amounts).all()
                    assert all(0 <= token_id < VOCAB_SIZE for token_id in found.token_ids)

    def test_temperatures_are_finite(self, sampler: SamplerPlugin, requests: list[SamplingParams]) -> None:
        """The temperature is at least 0 for any row."""
        for step in _steps(sampler, requests, "temperature"):
            assert isinstance(step, TemperatureStep)
            for candidates in _all_candidates():
                found = step.temperature(candidates.row[np.isfinite(candidates.row)], 0.8)
                assert np.isfinite(found)
                assert found >= 0.0

    def test_weights_can_be_drawn_from(self, sampler: SamplerPlugin, requests: list[SamplingParams]) -> None:
        """One number per candidate: finite, not negative, not all 0."""
        for step in _steps(sampler, requests, "weights"):
            assert isinstance(step, WeightsStep)
            for candidates in _all_candidates():
                weights = step.weights(candidates)
                assert weights.dtype == np.float64
                assert weights.shape == candidates.token_ids.shape
                assert np.isfinite(weights).all()
                assert weights.min() >= 0.0
                assert weights.max() > 0.0

    def test_arguments_are_not_changed(self, sampler: SamplerPlugin, requests: list[SamplingParams]) -> None:
        """Rows and histories belong to core, which uses them afterwards."""
        for step in _steps(sampler, requests, "truncation", "replacement", "temperature", "weights"):
            for candidates in _all_candidates():
                parts = (candidates.token_ids, candidates.logits, candidates.row)
                before = [part.copy() for part in parts]
                _ask(step, candidates)
                names = ("token_ids", "logits", "row")
                for name, part, old in zip(names, parts, before, strict=True):
                    assert np.array_equal(part, old), f"the step changed candidates.{name}: copy it first"

    def test_the_same_question_gets_the_same_answer(
        self, sampler: SamplerPlugin, requests: list[SamplingParams]
    ) -> None:
        """Steps are deterministic, so a token can be sampled again; random numbers come from ``uniform`` alone."""
        for step in _steps(sampler, requests, "truncation", "replacement", "temperature", "weights"):
            for candidates in _all_candidates():
                first = _ask(step, candidates)
                again = _ask(step, candidates)
                assert np.array_equal(first, again), "the second call with the same arguments gave another result"


def _steps(sampler: SamplerPlugin, requests: list[SamplingParams], *roles: str) -> Iterator[Any]:
    """Yield a step for each request if the plugin has one of these roles."""
    if role_of(sampler) in roles:
        for params in requests:
            fields = strict_converter().structure(params.extensions[sampler.name], sampler.request_fields)
            yield sampler.create(fields)


def _ask(step: Any, candidates: Candidates) -> Any:
    if isinstance(step, TemperatureStep):
        return step.temperature(candidates.row[np.isfinite(candidates.row)], 0.8)
    return step.weights(candidates) if isinstance(step, WeightsStep) else step(candidates)


def _all_candidates() -> Iterator[Candidates]:
    """Yield rows of every kind, and for each row all candidates, a few, and one."""
    flat, spread = np.zeros(VOCAB_SIZE, np.float32), np.linspace(-60, 60, VOCAB_SIZE, dtype=np.float32)
    masked = rows(1)[0]
    masked[::2] = -np.inf
    sharp = np.full(VOCAB_SIZE, -1e4, np.float32)
    sharp[7] = 1e4
    for row in (*rows(4), flat, spread, masked, sharp):
        for number in (0.0, 0.4, 0.999):
            for size in (None, 5, 1):
                yield _candidates(row, number, size)


def _candidates(row: NDArray[np.float32], number: float, size: int | None) -> Candidates:
    order = np.lexsort((np.arange(row.size), -row))[:size].astype(np.int32)
    order = order[np.isfinite(row[order])]
    return Candidates(order, (row[order] / np.float32(0.8)).astype(np.float32), row, 0.8, lambda _purpose: number)
