"""Contract suite for logits processors, as a test class.

::

    class TestMyProcessor(LogitsProcessorContract):
        active = ({"my_field": 3},)

        @pytest.fixture(scope="class")
        @classmethod
        def logits_processor(cls):
            return MyProcessor()

``active`` are request fields that enable it; without any the suite tries values that the plugin's validators allow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest

from enginehouse.contract.logits_processor import LogitsProcessor, ProcessorSession
from enginehouse.contract.sampler import History
from enginehouse.contract.types import SamplingParams
from enginehouse.engine.sampling.plugin_steps import build_steps
from enginehouse.engine.sampling.sampler import SequenceSampler
from enginehouse.plugins.guarded import ProcessorSampler
from enginehouse.settings.structuring import strict_converter
from enginehouse_testkit.contract.form import FormContract, loader_problem
from enginehouse_testkit.contract.sampler_base import VOCAB_SIZE, rows, tries_of

__all__ = ["LogitsProcessorContract"]

_TEXTS = tuple(chr(60 + token_id).encode() for token_id in range(VOCAB_SIZE))
_PROMPT = [1, 2, 3, 1, 2]


class LogitsProcessorContract(FormContract):
    """Tests every externally observable guarantee of :class:`enginehouse.contract.logits_processor.LogitsProcessor`.

    Attributes:
        active: request fields that enable it.
    """

    active: ClassVar[Sequence[Mapping[str, Any]]] = ()

    @pytest.fixture(scope="class")
    @classmethod
    def form(cls, logits_processor: LogitsProcessor) -> str:
        """Reason for which the loader refuses the logits processor."""
        return loader_problem("logits_processors", logits_processor)

    @pytest.fixture(scope="class")
    @classmethod
    def requests(cls, logits_processor: LogitsProcessor) -> list[SamplingParams]:
        """Sampling parameters of the requests that enable it: greedy, and random with other steps after it."""
        active = cls.active or tries_of(ProcessorSampler(logits_processor))
        assert active, "no value that was tried switches it on; list some in ``active``"
        kinds: tuple[dict[str, Any], ...] = (
            {"temperature": 0.0},
            {"temperature": 1.2, "seed": 5},
            {"temperature": 0.8, "seed": 6, "top_k": 20, "repetition_penalty": 1.2},
            {"temperature": 0.8, "seed": 7, "top_p": 0.9, "samplers": ("top_p", "temperature")},
        )
        return [
            SamplingParams(**kind, extensions={logits_processor.name: dict(fields)})
            for fields in active
            for kind in kinds
        ]

    def test_fields_say_what_they_mean(self, logits_processor: LogitsProcessor) -> None:
        """The description is part of the API's documentation."""
        for attribute in attrs.fields(logits_processor.request_fields):
            assert attribute.metadata.get("description"), f"{attribute.name} has no description"

    def test_defaults_are_off(self, logits_processor: LogitsProcessor) -> None:
        """A request without the fields is not changed."""
        assert logits_processor.create(logits_processor.request_fields()) is None

    def test_it_changes_what_is_drawn(self, logits_processor: LogitsProcessor, requests: list[SamplingParams]) -> None:
        """Some of the requests that enable it give other tokens than without it."""
        assert any(_drawn(logits_processor, one) != _drawn(None, _without(one)) for one in requests)

    def test_a_token_can_be_drawn_again(
        self, logits_processor: LogitsProcessor, requests: list[SamplingParams]
    ) -> None:
        """The same arguments give the same row, in a new session as well."""
        for params in requests:
            assert _drawn(logits_processor, params) == _drawn(logits_processor, params)
        session = _session(logits_processor, requests[0])
        assert session is not None
        history = History(np.array([*_PROMPT, 4, 5], np.int32), _TEXTS, len(_PROMPT))
        first, second = rows(1)[0], rows(1)[0]
        session.process(first, history)
        session.process(second, history)

        assert np.array_equal(first, second)

    def test_its_rows_are_sound(self, logits_processor: LogitsProcessor, requests: list[SamplingParams]) -> None:
        """The row keeps at least one token and has no NaN; the history is not changed."""
        for params in requests:
            session = _session(logits_processor, params)
            for length in range(len(_PROMPT), 30):
                token_ids = np.resize(np.array(_PROMPT, np.int32), length)
                before, row = token_ids.copy(), rows(1, seed=length)[0]
                session.process(row, History(token_ids, _TEXTS, len(_PROMPT)))

                assert np.array_equal(token_ids, before)
                assert np.isfinite(row).any()
                assert not np.isnan(row).any() and not np.isposinf(row).any()

    def test_sequences_do_not_touch_each_other(
        self, logits_processor: LogitsProcessor, requests: list[SamplingParams]
    ) -> None:
        """Two interleaved sequences give the same tokens as each alone."""
        one, other = requests[0], requests[-1]
        alone = [_drawn(logits_processor, one), _drawn(logits_processor, other)]
        samplers = [_sampler(logits_processor, params) for params in (one, other)]
        found: list[list[int]] = [[], []]
        for position, (row, again) in enumerate(zip(rows(30), rows(30), strict=True)):
            for sampler, drawn, logits in zip(samplers, found, (row, again), strict=True):
                drawn.append(sampler.sample(logits, position).token_id)
                sampler.accept(drawn[-1])

        assert found == alone

    def test_a_second_draw_of_the_same_row_is_the_same(
        self, logits_processor: LogitsProcessor, requests: list[SamplingParams]
    ) -> None:
        """Sampling does not change its state, so a token can be sampled again."""
        for params in requests:
            sampler, found = _sampler(logits_processor, params), list[int]()
            for position, (row, again) in enumerate(zip(rows(20), rows(20), strict=True)):
                first = sampler.sample(row, position).token_id
                second = sampler.sample(again, position).token_id
                sampler.accept(second)
                found.append(second)
                assert first == second
            assert found == _drawn(logits_processor, params, 20)


def _without(params: SamplingParams) -> SamplingParams:
    """Return the same request without the processor's fields."""
    values = {name: getattr(params, name) for name in params.__struct_fields__ if name != "extensions"}
    return SamplingParams(**values)


def _session(processor: LogitsProcessor, params: SamplingParams) -> ProcessorSession:
    (fields,) = params.extensions.values()
    session = processor.create(strict_converter().structure(fields, processor.request_fields))
    assert session is not None
    return session


def _sampler(processor: LogitsProcessor | None, params: SamplingParams) -> SequenceSampler:
    steps = {processor.name: ProcessorSampler(processor)} if processor is not None else {}
    return SequenceSampler(
        params,
        choice=0,
        vocab_size=VOCAB_SIZE,
        prompt_token_ids=_PROMPT,
        steps=build_steps(params, steps),
        token_bytes=_TEXTS,
    )


def _drawn(processor: LogitsProcessor | None, params: SamplingParams, num_tokens: int = 30) -> list[int]:
    """Sample tokens one after another."""
    sampler, found = _sampler(processor, params), list[int]()
    for position, row in enumerate(rows(num_tokens)):
        found.append(sampler.sample(row, position).token_id)
        sampler.accept(found[-1])
    return found
