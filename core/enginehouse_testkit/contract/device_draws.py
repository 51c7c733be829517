"""Contract suite for runners that draw tokens on their device: the same tokens as core's sampler, and the same text.

::

    class TestDraws(DeviceDrawsContract):
        @pytest.fixture(scope="class")
        @classmethod
        def model(cls): ...             # draws on the device, in float32, with four slots and a context of 128

        @pytest.fixture(scope="class")
        @classmethod
        def plain_model(cls): ...       # the same model; core draws
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from enginehouse.contract.backend import Draw, Runner, Span
from enginehouse.contract.types import EngineRequest, EngineSettings, SamplingParams, StopParams, TextDelta
from enginehouse.engine.constraints import TokenMask
from enginehouse.engine.loop import StepEngine
from enginehouse.engine.sampling.candidates import uniform
from enginehouse.engine.sampling.sampler import SequenceSampler
from enginehouse_testkit.contract.opening import ModelUnderTest
from enginehouse_testkit.contract.steps import events_of

__all__ = ["TEXTS", "DeviceDrawsContract", "prompts_of"]

TEXTS = (
    "The capital of France is",
    "def add(left, right):\n    return",
    "Once upon a time, in a land of mountains and stops, a small engine",
    "1, 2, 3, 4,",
)
_PARAMS = (
    SamplingParams(temperature=0.8, logit_bias={5: 3.0, 9: -100.0}, num_logprobs=3, seed=1),
    SamplingParams(
        temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.3, presence_penalty=0.2, repeat_last_n=4, seed=2
    ),
    SamplingParams(temperature=1.3, top_k=20, seed=3),
    SamplingParams(temperature=0.0, num_logprobs=0, seed=4),
)


def prompts_of(runner: Runner) -> list[list[int]]:
    """Token ids of four texts of different lengths."""
    return [[*runner.tokenizer.prefix_token_ids, *runner.tokenizer.encode(text, False)] for text in TEXTS]


class DeviceDrawsContract:
    """Tests that a runner's draws are core's: settings, masks, log-probabilities, and whole texts."""

    @pytest.fixture
    def runner(self, model: ModelUnderTest) -> Iterator[Runner]:
        """A runner that draws."""
        opened = model.open_runner()
        yield opened
        opened.close()

    def test_changed_logits_masks_and_logprobs_are_those_of_core(self, runner: Any) -> None:
        """Bias, penalties and bitmasks, each row with its own; log-probabilities are the raw model's."""
        vocab_size, prompts = runner.info.vocab_size, prompts_of(runner)
        bits = np.random.default_rng(0).integers(-(2**31), 2**31, (vocab_size + 31) // 32).astype(np.int32)
        samplers = [
            SequenceSampler(one, choice=0, vocab_size=vocab_size, prompt_token_ids=prompt)
            for one, prompt in zip(_PARAMS, prompts, strict=True)
        ]
        for token_id in (7, 7, 8):
            samplers[1].accept(token_id)
        penalties = samplers[1].penalties
        assert penalties is not None
        changes: list[dict[str, Any]] = [
            {"bias_ids": np.array([5, 9]), "bias_values": np.array([3.0, -np.inf], np.float32)},
            dict(zip(("seen_ids", "seen_counts"), penalties.seen, strict=True)),
            {"bitmask": bits},
            {},
        ]
        sequences = [runner.open_sequence() for _ in prompts]
        output = runner.forward([Span(s, 0, np.array(p, np.int32)) for s, p in zip(sequences, prompts, strict=True)])
        draws = [
            Draw(row=i, sequence=s, sampling=p, number=uniform(p.seed, 0, 4), **change)
            for i, (s, p, change) in enumerate(zip(sequences, _PARAMS, changes, strict=True))
        ]
        found = runner.sample(output, draws).host()
        masks = [None, None, TokenMask(bits), None]
        expected = [
            sampler.sample(row, 4, mask) for sampler, row, mask in zip(samplers, output.host(), masks, strict=True)
        ]

        assert [one.token_id for one in found] == [one.token_id for one in expected]
        top_ids, top_logprobs = expected[0].top_ids, expected[0].top_logprobs
        assert top_ids is not None and top_logprobs is not None
        assert found[0].top_ids.tolist() == top_ids.tolist()
        assert np.allclose(found[0].top_logprobs, top_logprobs, atol=1e-4)
        assert found[0].logprob == pytest.approx(expected[0].logprob, abs=1e-4)
        assert found[3].logprob == pytest.approx(expected[3].logprob, abs=1e-4)
        assert found[1].logprob is None

    @pytest.mark.parametrize("temperature", [0.0, 0.9])
    def test_the_engine_gives_the_same_text_whoever_draws(
        self, model: ModelUnderTest, plain_model: ModelUnderTest, temperature: float
    ) -> None:
        """Launched ahead and drawn on the device, or step by step and drawn by core: the same tokens, in float32."""
        found, expected = (_answers(one.open_runner(), temperature) for one in (model, plain_model))

        assert found == expected


def _answers(runner: Runner, temperature: float) -> dict[str, list[int]]:
    """Serve all texts at once and close the runner; returns the tokens of each."""
    engine = StepEngine(runner, EngineSettings(slots=4), {})
    tokens: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts_of(runner)):
        sampling = SamplingParams(
            temperature=temperature,
            seed=index,
            top_p=0.95 if index % 2 else 1.0,
            repetition_penalty=1.3 if index == 2 else 1.0,
            repeat_last_n=5,
        )
        stopping = StopParams(max_tokens=20 + index, ignore_eos=True)
        tokens[str(index)] = []
        engine.add(EngineRequest(request_id=str(index), sampling=sampling, stopping=stopping), prompt)
    for request_id, event in events_of(engine):
        if isinstance(event, TextDelta):
            tokens[request_id] += event.token_ids
    engine.close()
    return tokens
