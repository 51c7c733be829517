"""The contract of parameters: each one that an engine takes acts as the reference predicts, each other is refused.

The reference is arithmetic on the log-probabilities that the engine reports of the tokens it drew.
"""

from __future__ import annotations

import math
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
    "logit_bias": {"logit_bias": {1: -100.0}},
    "num_logprobs": {"num_logprobs": 2},
    "num_prompt_logprobs": {"num_prompt_logprobs": 2},
    "stop": {"stop": ("never said",)},
    "stop_token_ids": {"stop_token_ids": (1,)},
    "min_tokens": {"min_tokens": 2},
}
"""Parameters, each switched on."""

_CLOSE = 1e-3  # in log-probability; two ways to add up a row differ by less


class EngineParameterContract(EngineContractBase):
    """Capability truth."""

    @pytest.mark.parametrize("name", _SET)
    def test_a_parameter_is_taken_or_refused(self, engine: EngineDriver, name: str) -> None:
        """What the capabilities call refused raises a RequestError, everything else is answered."""
        request = engine.request(max_tokens=3, **_SET[name])
        if name in engine.engine.info.engine.refused:
            with pytest.raises(RequestError):
                engine.submit(request)
        else:
            assert engine.answer(request).finished().num_tokens <= 3

    def test_parameters_of_unknown_samplers_are_refused(self, engine: EngineDriver) -> None:
        """No plugin's field is dropped without a word."""
        with pytest.raises(EnginehouseError):
            engine.submit(engine.request(extensions={"nobody_has_this": {"field": 1}}))

    @pytest.mark.parametrize("kind", get_args(ConstraintKind))
    def test_constraints_that_nobody_enforces_are_refused(self, engine: EngineDriver, kind: ConstraintKind) -> None:
        """A constrained answer is never an unconstrained one."""
        if kind in engine.engine.info.engine.constraint_kinds:
            pytest.skip("the engine enforces this kind; the suite of structured decoders tests it")
        with pytest.raises(RequestError):
            engine.submit(engine.request(constraint=Constraint(kind=kind, text="{}")))

    @pytest.mark.parametrize(
        "fields", [{"token_ids": [10**9]}, {"token_ids": [-1]}, {"token_ids": []}, {"stop_token_ids": (10**9,)}]
    )
    def test_ids_outside_the_vocabulary_are_refused(self, engine: EngineDriver, fields: dict[str, Any]) -> None:
        """Before any token is made."""
        with pytest.raises(RequestError):
            engine.submit(engine.request(**fields))

    def test_a_prompt_that_does_not_fit_is_refused(self, engine: EngineDriver) -> None:
        """The context has to hold the prompt and one token more."""
        with pytest.raises(RequestError):
            engine.submit(engine.request(token_ids=[1] * engine.engine.info.max_context))

    # -- what each one does ------------------------------------------------------------------------

    def test_seeds_replay(self, engine: EngineDriver) -> None:
        """The same seed gives the same text, another one another, and so do the choices of a request."""
        self.needs(engine, "seed", "temperature")
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
        """Two stay in play, and not only the best one is drawn."""
        ranks = [_rank(entry) for entry in self._drawn(engine, temperature=2.0, top_k=2)]

        assert max(ranks) <= 1
        assert 1 in ranks

    def test_top_p_keeps_the_nucleus(self, engine: EngineDriver) -> None:
        """Before the drawn token the better ones do not reach the share yet."""
        for entry in self._drawn(engine, temperature=1.0, top_p=0.5):
            before = sum(math.exp(top.logprob) for top in entry.top if top.logprob > entry.logprob + _CLOSE)
            assert before < 0.5 + _CLOSE

    def test_top_p_of_0_keeps_the_most_probable_token(self, engine: EngineDriver) -> None:
        """However high the temperature."""
        for entry in self._drawn(engine, temperature=2.0, top_p=0.0):
            assert entry.logprob >= entry.top[0].logprob - _CLOSE

    def test_min_p_keeps_what_is_likely_enough(self, engine: EngineDriver) -> None:
        """No drawn token is less than half as probable as the best one."""
        for entry in self._drawn(engine, temperature=1.0, min_p=0.5):
            assert entry.logprob >= entry.top[0].logprob + math.log(0.5) - _CLOSE

    def test_logit_bias_bans_and_forces(self, engine: EngineDriver) -> None:
        """At -100 a token cannot come, at 100 nothing else can."""
        self.needs_ids()
        self.needs(engine, "logit_bias", "num_logprobs")
        best, second = engine.ask(max_tokens=1, num_logprobs=2).logprobs()[0].top

        # Behind an unfinished character others must follow, so that it is shown.
        assert engine.ask(max_tokens=8, logit_bias={best.token_id: -100.0}).token_ids()[0] == second.token_id
        assert set(engine.ask(max_tokens=8, logit_bias={second.token_id: 100.0}).token_ids()) == {second.token_id}

    @pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
    def test_penalties_are_subtracted(self, engine: EngineDriver, name: str) -> None:
        """Greedy with a penalty takes the token that is the best one after the subtraction."""
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
        """A token that is not the model's best one comes only because every better one was seen."""
        self.needs(engine, "repetition_penalty", "num_logprobs")
        request = engine.request(max_tokens=16, num_logprobs=self.vocabulary_width, repetition_penalty=1.5)
        seen = set(engine.run(engine.engine.tokenize(request.segments, request.add_special)))
        for entry in engine.answer(request).logprobs():
            better = {top.token_id for top in entry.top if top.logprob > entry.logprob + _CLOSE}
            assert better <= seen
            seen.add(entry.token_id)

    def _drawn(self, engine: EngineDriver, **sampling: Any) -> list[TokenLogprob]:
        """Tokens of three answers, with the alternatives of each."""
        self.needs(engine, "num_logprobs", "seed", *sampling)
        width = self.vocabulary_width
        answers: list[Answer] = [
            engine.ask(max_tokens=12, seed=seed, num_logprobs=width, **sampling) for seed in range(3)
        ]
        return [entry for answer in answers for entry in answer.logprobs()]


def _rank(entry: TokenLogprob) -> int:
    """How many alternatives are more probable than the drawn token."""
    return sum(top.logprob > entry.logprob + _CLOSE for top in entry.top)


def _times(name: str, seen: list[int], token_id: int) -> int:
    """How often a penalty is subtracted."""
    return seen.count(token_id) if name == "frequency_penalty" else int(token_id in seen)
