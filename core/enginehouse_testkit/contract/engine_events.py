"""Contract of an engine's events: order, whole characters, counts, log-probabilities, finish reasons."""

from __future__ import annotations

import codecs
import itertools
import math

import pytest

from enginehouse.contract.errors import RequestError
from enginehouse.contract.types import ChoiceFinished, RequestFinished, Segment, TextDelta
from enginehouse_testkit.contract.engine_base import EngineContractBase
from enginehouse_testkit.contract.engine_driver import EngineDriver

__all__ = ["EngineEventContract"]


class EngineEventContract(EngineContractBase):
    """The events of a request are complete and correct."""

    def test_events_come_in_order(self, engine: EngineDriver) -> None:
        """Text, then the end of each choice, then the end of the request, once."""
        answer = engine.ask(num_choices=2, temperature=1.0)
        kinds = [type(event) for event in answer.events]

        assert kinds.count(RequestFinished) == 1
        assert kinds[-1] is RequestFinished
        for choice in (0, 1):
            own = [type(e) for e in answer.events if isinstance(e, TextDelta | ChoiceFinished) and e.choice == choice]
            assert own.count(ChoiceFinished) == 1
            assert own[-1] is ChoiceFinished

    def test_counts_are_what_happened(self, engine: EngineDriver) -> None:
        """Prompt tokens are counted once; generated tokens are summed over all choices."""
        request = engine.request(num_choices=2, max_tokens=5)
        answer = engine.answer(request)
        prompt = engine.run(engine.engine.tokenize(request.segments, request.add_special))

        assert answer.summary.usage.prompt_tokens == len(prompt)
        choices = [answer.finished(choice).usage for choice in (0, 1)]
        assert [one.completion_tokens for one in choices] == [5, 5]
        assert answer.summary.usage.reasoning_tokens == sum(one.reasoning_tokens for one in choices)
        assert answer.summary.usage.completion_tokens == 10

    def test_max_tokens_ends_with_length(self, engine: EngineDriver) -> None:
        """Exactly ``max_tokens`` tokens are generated."""
        for limit in (1, 4):
            answer = engine.ask(max_tokens=limit)
            assert answer.finished().usage.completion_tokens == limit
            assert answer.finished().finish_reason == "length"

    def test_max_tokens_of_zero_reads_the_prompt_only(self, engine: EngineDriver) -> None:
        """No token and no text, or a refusal."""
        try:
            answer = engine.ask(max_tokens=0)
        except RequestError as refused:
            assert refused.param
            return

        assert (answer.finished().usage.completion_tokens, answer.text()) == (0, "")

    def test_text_is_whole_characters(self, engine: EngineDriver) -> None:
        """The joined deltas equal the tokens' bytes as UTF-8, without an incomplete last character."""
        self.needs_ids()
        self.needs(engine, "temperature", "seed")
        for seed in range(4):
            answer = engine.ask(temperature=2.0, seed=seed, max_tokens=24)
            pieces = engine.run(engine.engine.pieces(answer.token_ids()))
            hidden = {*engine.engine.info.special_tokens.values()}
            shown = b"".join(p for p, i in zip(pieces, answer.token_ids(), strict=True) if i not in hidden)
            assert answer.text() == codecs.getincrementaldecoder("utf-8")("replace").decode(shown)

    def test_stop_strings_end_the_text_and_are_not_shown(self, engine: EngineDriver) -> None:
        """Stop strings may begin anywhere, also inside a token; no part of one is shown."""
        self.needs(engine, "stop")
        whole = engine.ask(max_tokens=16).text()
        assert len(whole) >= 6, "the suite needs a model that says something"
        for start, length in itertools.product((1, len(whole) // 2), (1, 3)):
            stop = whole[start : start + length]
            answer = engine.ask(max_tokens=16, stop=(stop,))
            assert answer.text() == whole[: whole.index(stop)]
            assert answer.finished().finish_reason == "stop"
            assert answer.finished().stop_reason == stop or not self.knows_token_ids

    def test_stop_token_ids_end_the_text(self, engine: EngineDriver) -> None:
        """The token is counted, not shown, and reported."""
        self.needs_ids()
        self.needs(engine, "stop_token_ids")
        whole = engine.ask().token_ids()
        stop = whole[4]
        answer = engine.ask(stop_token_ids=(stop,))

        shown = answer.token_ids()
        assert shown == whole[: len(shown)]
        assert 0 <= whole.index(stop) - len(shown) <= 3, "only an unfinished character may be missing"
        assert answer.finished().stop_reason == stop
        assert answer.finished().usage.completion_tokens == whole.index(stop) + 1

    def test_min_tokens_holds_back_the_end(self, engine: EngineDriver) -> None:
        """Tokens that would end the text are not sampled before."""
        self.needs_ids()
        self.needs(engine, "min_tokens", "stop_token_ids")
        first = engine.ask().token_ids()[0]
        answer = engine.ask(stop_token_ids=(first,), min_tokens=3)

        assert answer.finished().usage.completion_tokens >= 3
        assert first not in answer.token_ids()[:3]

    def test_logprobs_are_those_of_the_model(self, engine: EngineDriver) -> None:
        """One entry per token, best first; the greedy token is the best, and no probability exceeds 1."""
        self.needs_ids()
        self.needs(engine, "num_logprobs")
        answer = engine.ask(num_logprobs=3)
        pieces = engine.run(engine.engine.pieces(answer.token_ids()))

        assert [entry.token_id for entry in answer.logprobs()] == answer.token_ids()
        for entry, piece in zip(answer.logprobs(), pieces, strict=True):
            values = [top.logprob for top in entry.top]
            assert len(values) == 3
            assert values == sorted(values, reverse=True)
            assert sum(map(math.exp, values)) <= 1.0 + 1e-4
            assert entry.token == piece
            assert entry.logprob == pytest.approx(entry.top[0].logprob, abs=1e-4), "greedy takes the best token"

    def test_logprobs_are_only_reported_when_asked_for(self, engine: EngineDriver) -> None:
        """``None`` gives no entries, 0 the sampled token alone."""
        self.needs(engine, "num_logprobs")

        assert engine.ask(max_tokens=3).logprobs() == []
        assert [entry.top for entry in engine.ask(max_tokens=3, num_logprobs=0).logprobs()] == [()] * 3

    def test_prompt_logprobs_agree_with_generation(self, engine: EngineDriver) -> None:
        """Every prompt token but the first has the same score as when the model generates it."""
        self.needs(engine, "num_prompt_logprobs")
        request = engine.request(num_logprobs=1, max_tokens=6)
        drawn = engine.answer(request)
        prompt = engine.run(engine.engine.tokenize(request.segments, request.add_special))
        again = engine.ask(token_ids=[*prompt, *drawn.token_ids()], max_tokens=1, num_prompt_logprobs=1)
        scored = again.prompt_logprobs

        assert [entry.token_id for entry in scored] == [*prompt, *drawn.token_ids()][1:]
        for entry, expected in zip(scored[-6:], drawn.logprobs(), strict=True):
            assert entry.logprob == pytest.approx(expected.logprob, abs=self.max_near_tie)

    def test_tokenize_and_detokenize_are_inverse(self, engine: EngineDriver) -> None:
        """The ids' bytes equal the text's bytes, and control strings typed by users are plain text."""
        special = list(engine.engine.info.special_tokens)[:2]
        for text in ("Größe 日本 🙂", *(f"say {name} now" for name in special)):
            token_ids = engine.run(engine.engine.tokenize([Segment(text)], False))
            found = engine.run(engine.engine.detokenize(token_ids))
            assert found.lstrip() == text
            assert not set(engine.engine.info.special_tokens.values()) & set(token_ids)
