"""Contract of parameters: each supported one acts as the reference predicts, each other one is refused.

The reference is computed from the log-probabilities that the engine reports for the sampled tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

import pytest

from enginehouse.contract.errors import EnginehouseError, RequestError
from enginehouse.contract.types import Constraint, ConstraintKind, TokenLogprob
from enginehouse_testkit.contract.engine_base import EngineContractBase
from enginehouse_testkit.contract.engine_driver import Answer, EngineDriver

__all__ = ["EngineParameterContract"]

_SET: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.5},
    "min_p": {"min_p": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "repeat_last_n": {"frequency_penalty": 0.5, "repeat_last_n": 4},
    "logit_bias": {"logit_bias": {1: -100.0}},
    "num_logprobs": {"num_logprobs": 2},
    "post_sampling_probs": {"num_logprobs": 2, "post_sampling_probs": True},
    "num_prompt_logprobs": {"num_prompt_logprobs": 2},
    "stop": {"stop": ("never said",)},
    "stop_regex": {"stop_regex": ("never said",)},
    "stop_token_ids": {"stop_token_ids": (1,)},
    "min_tokens": {"min_tokens": 2},
}
"""Parameters with values that enable them."""

_CLOSE = 1e-3  # in log-probability; larger than the rounding difference of two ways to sum a row


@contextmanager
def _refusing(why: str, error: type[EnginehouseError] = RequestError) -> Iterator[None]:
    """Fail with a sentence unless the block, which submits a request, raises the error."""
    try:
        yield
    except error:
        return
    pytest.fail(f"{why}, but submit accepts the request: raise a {error.__name__}", pytrace=False)


class EngineParameterContract(EngineContractBase):
    """Tests that the declared capabilities are correct."""

    @pytest.mark.parametrize("name", _SET)
    def test_a_parameter_is_taken_or_refused(self, engine: EngineDriver, name: str) -> None:
        """Parameters declared as refused raise a RequestError, all others are answered."""
        request = engine.request(max_tokens=3, **_SET[name])
        if name in engine.engine.info.engine.refused:
            with _refusing(f"{name} is in info.engine.refused"):
                engine.submit(request)
        else:
            assert engine.answer(request).finished().usage.completion_tokens <= 3

    def test_parameters_of_unknown_samplers_are_refused(self, engine: EngineDriver) -> None:
        """A field of an unknown plugin is not silently ignored."""
        with _refusing("sampling.extensions has the field of a sampler that is not installed", EnginehouseError):
            engine.submit(engine.request(extensions={"nobody_has_this": {"field": 1}}))

    @pytest.mark.parametrize("kind", get_args(ConstraintKind))
    def test_constraints_that_nobody_enforces_are_refused(self, engine: EngineDriver, kind: ConstraintKind) -> None:
        """A constraint that is not enforced is refused, never ignored."""
        if kind in engine.engine.info.engine.constraint_kinds:
            pytest.skip(f"optional: the engine enforces {kind} (constraint_kinds); StructuredDecoderContract tests it")
        with _refusing(f"info.engine.constraint_kinds does not name {kind}"):
            engine.submit(engine.request(constraint=Constraint(kind=kind, text="{}")))

    @pytest.mark.parametrize(
        "fields", [{"token_ids": [10**9]}, {"token_ids": [-1]}, {"token_ids": []}, {"stop_token_ids": (10**9,)}]
    )
    def test_ids_outside_the_vocabulary_are_refused(self, engine: EngineDriver, fields: dict[str, Any]) -> None:
        """Refused before any token is generated."""
        if "stop_token_ids" in fields:
            self.needs(engine, "stop_token_ids")
        with _refusing(f"{fields} has no ids of the vocabulary"):
            engine.submit(engine.request(**fields))

    def test_a_prompt_that_does_not_fit_is_refused(self, engine: EngineDriver) -> None:
        """The context must hold the prompt and one more token."""
        with _refusing(f"the prompt has max_context tokens ({engine.engine.info.max_context})"):
            engine.submit(engine.request(token_ids=[1] * engine.engine.info.max_context))

    # -- effect of each parameter ------------------------------------------------------------------

    def test_seeds_replay(self, engine: EngineDriver) -> None:
        """The same seed gives the same text, another seed another one; the same holds for choices of a request."""
        self.needs(engine, "seed", "temperature")
        self._assert_draws_differ(engine, 1.0)
        first = engine.ask(temperature=1.0, seed=3, num_choices=3)
        again = engine.ask(temperature=1.0, seed=3, num_choices=3)
        alone = engine.ask(temperature=1.0, seed=3)
        texts = [first.text(choice) for choice in range(3)]

        assert [again.text(choice) for choice in range(3)] == texts
        if self.exact is not False:
            assert alone.text() == texts[0]
        others = [engine.ask(temperature=1.0, seed=seed).text() for seed in (4, 5)]
        assert len({*texts, *others}) > 3

    def test_top_k_keeps_k_tokens(self, engine: EngineDriver) -> None:
        """With ``top_k`` 2, two tokens remain, and not only the best one is sampled."""
        self.needs(engine, "num_logprobs", "seed", "temperature", "top_k")
        self._assert_draws_differ(engine, 2.0)
        ranks = [_rank(entry) for entry in self._drawn(engine, temperature=2.0, top_k=2)]

        assert max(ranks) <= 1
        assert 1 in ranks

    def test_top_p_keeps_the_nucleus(self, engine: EngineDriver) -> None:
        """The tokens that are more probable than the sampled one sum to less than ``top_p``."""
        for entry in self._drawn(engine, temperature=1.0, top_p=0.5):
            before = sum(math.exp(top.logprob) for top in entry.top if top.logprob > entry.logprob + _CLOSE)
            assert before < 0.5 + _CLOSE

    def test_top_p_of_0_keeps_the_most_probable_token(self, engine: EngineDriver) -> None:
        """At any temperature."""
        for entry in self._drawn(engine, temperature=2.0, top_p=0.0):
            assert entry.logprob >= entry.top[0].logprob - _CLOSE

    def test_min_p_keeps_what_is_likely_enough(self, engine: EngineDriver) -> None:
        """No sampled token is less than half as probable as the best one."""
        for entry in self._drawn(engine, temperature=1.0, min_p=0.5):
            assert entry.logprob >= entry.top[0].logprob + math.log(0.5) - _CLOSE

    def test_logit_bias_bans_and_forces(self, engine: EngineDriver) -> None:
        """A bias of -100 excludes a token, 100 forces it."""
        self.needs_ids()
        self.needs(engine, "logit_bias", "num_logprobs")
        best, second = engine.ask(max_tokens=1, num_logprobs=2).logprobs()[0].top

        # After an incomplete character other tokens must follow for it to be shown.
        assert engine.ask(max_tokens=8, logit_bias={best.token_id: -100.0}).token_ids()[0] == second.token_id
        assert set(engine.ask(max_tokens=8, logit_bias={second.token_id: 100.0}).token_ids()) == {second.token_id}

    @pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
    def test_penalties_are_subtracted(self, engine: EngineDriver, name: str) -> None:
        """Greedy decoding with a penalty takes the best token after the subtraction."""
        self.needs(engine, name, "num_logprobs")
        sampling: dict[str, Any] = {name: 1.5, "num_logprobs": self.vocabulary_width}
        answer = engine.ask(max_tokens=16, **sampling)
        seen: list[int] = []
        for entry in answer.logprobs():
            penalised = {top.token_id: top.logprob - 1.5 * _times(name, seen, top.token_id) for top in entry.top}
            drawn = entry.logprob - 1.5 * _times(name, seen, entry.token_id)
            assert drawn >= max(penalised.values()) - _CLOSE
            seen.append(entry.token_id)

    def test_repetition_penalty_favours_new_tokens(self, engine: EngineDriver) -> None:
        """A token other than the model's best one is sampled only if every better one was seen."""
        self.needs(engine, "repetition_penalty", "num_logprobs")
        request = engine.request(max_tokens=16, num_logprobs=self.vocabulary_width, repetition_penalty=1.5)
        seen = set(engine.run(engine.engine.tokenize(request.segments, request.add_special)))
        for entry in engine.answer(request).logprobs():
            better = {top.token_id for top in entry.top if top.logprob > entry.logprob + _CLOSE}
            assert better <= seen
            seen.add(entry.token_id)

    def _assert_draws_differ(self, engine: EngineDriver, temperature: float) -> None:
        """Assert that not all seeds give the greedy text: otherwise no test of sampling can find anything."""
        texts = {engine.ask(temperature=temperature, seed=seed).text() for seed in range(6)}
        if texts == {engine.ask(temperature=0.0).text()}:
            pytest.fail(
                f"at temperature {temperature:g} the model draws the same token always: lower the scale of its random "
                "weights, or take another model",
                pytrace=False,
            )

    def _drawn(self, engine: EngineDriver, **sampling: Any) -> list[TokenLogprob]:
        """Return the tokens of three answers, with the alternatives of each."""
        self.needs(engine, "num_logprobs", "seed", *sampling)
        width = self.vocabulary_width
        answers: list[Answer] = [
            engine.ask(max_tokens=12, seed=seed, num_logprobs=width, **sampling) for seed in range(3)
        ]
        return [entry for answer in answers for entry in answer.logprobs()]


def _rank(entry: TokenLogprob) -> int:
    """Number of alternatives that are more probable than the sampled token."""
    return sum(top.logprob > entry.logprob + _CLOSE for top in entry.top)


def _times(name: str, seen: list[int], token_id: int) -> int:
    """Number of times that a penalty is subtracted."""
    return seen.count(token_id) if name == "frequency_penalty" else int(token_id in seen)
