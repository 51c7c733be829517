"""A generative model as a reranker: the same scores however prompts are packed, and the common part computed once."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from enginehouse.contract.backend import Runner, Span
from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.types import PoolText
from enginehouse.engine.pooling.generative import QWEN_TEMPLATE, RunnerPooler, TemplateArrangement
from enginehouse_testkit.fake_runner import FakeOptions, FakeRunner
from enginehouse_testkit.pooler_contract import PoolerContract

TEMPLATE = "<|im_start|>judge {query} for {document}<|im_end|>"
SMALL = {"context": 128, "cache_tokens": 512, "max_batch_tokens": 32, "slots": 4}


def pooler(**options: Any) -> tuple[RunnerPooler, FakeRunner]:
    runner = FakeRunner(FakeOptions(**{**SMALL, **options}))
    return RunnerPooler(cast(Runner, runner), ("y", "n"), "models.m.rerank_answers"), runner


def arrangement(made: RunnerPooler, template: str = TEMPLATE) -> TemplateArrangement:
    return TemplateArrangement(made.tokenizer, made.capabilities.max_tokens, template, "models.m.rerank_template")


class TestShared(PoolerContract):
    """The contract of poolers, for the usual runner."""

    variant: dict[str, Any] = {}

    @pytest.fixture(scope="class")
    @classmethod
    def make_pooler(cls) -> Any:
        return lambda: pooler(**cls.variant)[0]


class TestOthers(TestShared):
    """And for one that can neither fork nor mix long and short spans."""

    variant = {"fork": "none", "mixed_batch": False}


def reference(runner: FakeRunner, token_ids: np.ndarray[Any, Any]) -> float:
    """The difference of the two logits of a prompt in one pass."""
    row = FakeRunner(FakeOptions(context=128, max_batch_tokens=128))
    sequence = row.open_sequence()
    logits = row.forward([Span(sequence, 0, token_ids, "last")]).host()[0]
    encode = runner.tokenizer.encode
    return float(logits[encode("y", False)[0]] - logits[encode("n", False)[0]])


@pytest.mark.parametrize("options", [{}, {"fork": "copy"}, {"fork": "none"}, {"cache_tokens": 130}])
def test_scores_are_those_of_each_prompt_alone(options: dict[str, Any]) -> None:
    made, runner = pooler(**options)
    make = arrangement(made).make
    documents = ("one", "only one", "", "x" * 60, "another one")
    inputs = [make(PoolText("a query", None, document), "", "none")[0] for document in documents]
    expected = [reference(runner, one.token_ids) for one in inputs]
    for _ in range(2):  # the second time with the common part of the first
        assert made.pool(inputs)[:, 0] == pytest.approx(expected, abs=1e-5)

    made.close()
    assert runner.sequences == {}


def test_the_common_part_is_computed_once() -> None:
    made, runner = pooler(max_batch_tokens=128)
    make = arrangement(made).make
    inputs = [make(PoolText("q" * 50, None, document), "", "none")[0] for document in ("one", "two", "six")]
    made.pool(inputs)
    num_steps = runner.num_steps
    made.pool(inputs[1:])

    assert (num_steps, runner.num_steps) == (2, 3)
    assert len(runner.sequences) == 1


def test_texts_form_no_control_tokens_and_documents_are_shortened() -> None:
    made, _ = pooler()
    make, bos = arrangement(made).make, made.tokenizer.special_tokens["<|im_end|>"]
    plain, num_tokens = make(PoolText("q", None, "<|im_end|>"), "", "none")
    (end, before), (start, _) = (make(PoolText("q", None, "ab" * 200), "", side) for side in ("end", "start"))

    assert list(plain.token_ids).count(bos) == 1
    assert num_tokens == len(plain.token_ids)
    assert before > 400
    assert len(end.token_ids) == len(start.token_ids) == 128
    assert len(make(PoolText("q", None, "ab" * 200), "", "end", 5)[0].token_ids) == num_tokens - len("<|im_end|>") + 5


@pytest.mark.parametrize("template", ["no places", "{query} only", "{query} {document} {query}"])
def test_templates_without_both_places_are_refused(template: str) -> None:
    with pytest.raises(ModelLoadError, match="rerank_template"):
        arrangement(pooler()[0], template)


def test_answers_of_several_tokens_are_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"rerank_answers: 'yes' has 3 tokens"):
        RunnerPooler(cast(Runner, FakeRunner()), ("yes", "no"), "models.m.rerank_answers")


def test_the_usual_template_has_both_places() -> None:
    arrangement(pooler()[0], QWEN_TEMPLATE)
