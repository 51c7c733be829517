"""The processors keep the contract, and no answer holds what they ban."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.contract.errors import GenerationFailed
from enginehouse.contract.logits_processor import LogitsProcessor
from enginehouse.contract.sampler import History
from enginehouse.contract.types import (
    EngineRequest,
    EngineSettings,
    RequestFinished,
    SamplingParams,
    StopParams,
    TextDelta,
)
from enginehouse.engine.loop import StepEngine
from enginehouse.engine.sampling.plugin_steps import build_steps
from enginehouse.engine.sampling.sampler import SequenceSampler
from enginehouse.plugins import PluginRegistry
from enginehouse.plugins.guarded import ProcessorSampler
from enginehouse.settings.config import PluginsSettings
from enginehouse_bans.bad_words import BadWords, BadWordsFields
from enginehouse_bans.repeated_ngrams import RepeatedNgrams, RepeatedNgramsFields
from enginehouse_testkit.fake_runner import FakeRunner
from enginehouse_testkit.logits_processor_contract import LogitsProcessorContract

PROMPT = [ord(character) for character in "the cat and the hat"]


class TestBadWords(LogitsProcessorContract):
    active = ({"bad_words": ["H", "RS", "abc"]},)

    @pytest.fixture(scope="class")
    @classmethod
    def logits_processor(cls) -> LogitsProcessor:
        return BadWords()


class TestRepeatedNgrams(LogitsProcessorContract):
    active = ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 1})

    @pytest.fixture(scope="class")
    @classmethod
    def logits_processor(cls) -> LogitsProcessor:
        return RepeatedNgrams()


def test_the_plugin_registers_its_processors() -> None:
    registry = PluginRegistry.load(PluginsSettings())

    assert list(registry.logits_processors) == ["bad_words", "no_repeat_ngram"]
    assert {"bad_words", "no_repeat_ngram_size"} <= set(registry.request_fields)


def answer(extensions: dict[str, dict[str, object]], temperature: float, seed: int = 0) -> tuple[str, list[int]]:
    """Text and tokens of an answer of the fake model, whose pieces spell most words in several ways."""
    steps = {one.name: ProcessorSampler(one) for one in (BadWords(), RepeatedNgrams())}
    engine = StepEngine(FakeRunner(), EngineSettings(), steps)
    sampling = SamplingParams(temperature=temperature, seed=seed, extensions=extensions)
    stopping = StopParams(max_tokens=120, ignore_eos=True)
    engine.add(EngineRequest(request_id="r", sampling=sampling, stopping=stopping), PROMPT)
    text, token_ids = "", list[int]()
    while engine.has_work():
        for _, event in engine.step():
            if isinstance(event, TextDelta):
                text, token_ids = text + event.text, [*token_ids, *event.token_ids]
            elif not isinstance(event, RequestFinished) and isinstance(event, GenerationFailed):
                raise event
    return text, token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.8])
def test_an_answer_never_holds_a_bad_word(temperature: float) -> None:
    plain = [answer({}, temperature, seed)[0] for seed in range(4)]
    words = [word for word in ("th", "e", "an", " a", "日", "é") if any(word in text for text in plain)]
    assert len(words) >= 2
    for seed in range(4):
        text, _ = answer({"bad_words": {"bad_words": words}}, temperature, seed)

        assert len(text) > 20
        assert not [word for word in words if word in text]


@given(
    words=st.lists(
        st.binary(min_size=1, max_size=4).map(lambda b: bytes(97 + c % 3 for c in b).decode()), min_size=1, max_size=4
    ),
    answer=st.text("abc", max_size=8),
)
def test_exactly_the_tokens_that_complete_a_word_are_banned(words: list[str], answer: str) -> None:
    tokens = tuple(token.encode() for token in ("a", "b", "c", "ab", "bc", "ca", "abc", "cab", "bcabc", "d", ""))
    before = answer
    history = History(np.array([9, *["abc".index(c) for c in before]], np.int32), tokens, 1)
    session = BadWords().create(BadWordsFields(tuple(words)))
    assert session is not None
    row = np.zeros(len(tokens), np.float32)
    session.process(row, history)
    for token, logit in zip(tokens, row, strict=True):
        text = before.encode() + token
        new = any(
            text[end - len(word.encode()) : end] == word.encode()
            for word in words
            for end in range(len(before) + 1, len(text) + 1)
        )

        assert (logit == -np.inf) == new, token


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_no_run_of_tokens_stands_twice(size: int, temperature: float) -> None:
    _, token_ids = answer({"no_repeat_ngram": {"no_repeat_ngram_size": size}}, temperature)
    text = [*PROMPT, *token_ids]
    runs = [tuple(text[i : i + size]) for i in range(len(text) - size + 1)]
    before = len(set(runs[: len(PROMPT) - size + 1]))

    assert len(set(runs)) - before == len(runs) - (len(PROMPT) - size + 1)


def test_a_request_that_bans_everything_fails_by_name() -> None:
    params = SamplingParams(extensions={"bad_words": {"bad_words": ["a", "b"]}})
    steps = build_steps(params, {"bad_words": ProcessorSampler(BadWords())})
    sampler = SequenceSampler(params, choice=0, vocab_size=3, steps=steps, token_bytes=(b"a", b"b", b"ab"))

    with pytest.raises(GenerationFailed, match=r"'bad_words' .* banned every token"):
        sampler.sample(np.zeros(3, np.float32), 0)


@pytest.mark.parametrize("fields", [{"bad_words": ("",)}, {"bad_words": ("x" * 257,)}, {"bad_words": ("a",) * 129}])
def test_wrong_words_are_refused(fields: dict[str, tuple[str, ...]]) -> None:
    with pytest.raises(ValueError, match="bad_words"):
        BadWordsFields(**fields)


def test_a_size_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="no_repeat_ngram_size"):
        RepeatedNgramsFields(-1)
