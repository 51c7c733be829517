"""Answers with a draft head are those without one, in every way in which the engine treats sequences.

A pass costs a second here, so drafts are used at every step. With a *chain*, it is known which of them are right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from enginehouse.contract.backend import ModelSource
from enginehouse.contract.drafter import BoundDrafter
from enginehouse.contract.types import (
    EngineRequest,
    EngineSettings,
    RequestFinished,
    SamplingParams,
    StopParams,
    TextDelta,
)
from enginehouse.engine.disk import DiskTier, StateFolder
from enginehouse.engine.disk.state_folder import MIN_SAVED_TOKENS
from enginehouse.engine.loop import StepEngine
from enginehouse_testkit.contract.steps import events_of

torch = pytest.importorskip("torch")
from .models import VOCAB_SIZE, follower  # noqa: E402 - it needs torch

pytestmark = [pytest.mark.hf, pytest.mark.timeout(300)]

PROMPT = [10 + number * 41 % 380 for number in range(30)]
NUM_TOKENS = 40

Open = Callable[..., tuple[Any, Mapping[str, BoundDrafter]]]


@pytest.fixture(params=["eagle3", "glm4_moe", "deepseek_v3", "qwen3_5_text"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def opened(
    kind: str, headed_model: Callable[..., Path], eagle3: Callable[..., Path], open_model: Callable[..., Any]
) -> Open:
    """A function from settings of the model to its runner and the drafter, if one is wanted."""

    def open_one(*, is_chain: bool = False, has_head: bool = True, **settings: Any) -> Any:
        folder = headed_model("llama" if kind == "eagle3" else kind, is_chain=is_chain)
        runner = open_model(folder, **settings)
        if not has_head:
            return runner, {}
        path = eagle3(is_chain=folder if is_chain else None) if kind == "eagle3" else None
        source = None if path is None else ModelSource(str(path), path)
        return runner, {"head": runner.open_head(source, max_tokens=4, min_probability=0.0)}

    return open_one


def requests(num: int = 1, **fields: Any) -> list[tuple[EngineRequest, list[int]]]:
    """Requests for texts of several lengths with the same beginning."""
    sampling = fields.pop("sampling", SamplingParams(temperature=0))
    return [
        (
            EngineRequest(
                request_id=str(number),
                sampling=sampling,
                stopping=StopParams(max_tokens=NUM_TOKENS, ignore_eos=True),
                **fields,
            ),
            PROMPT[: len(PROMPT) - 3 * number],
        )
        for number in range(num)
    ]


class Run:
    """An engine whose clock counts passes, and what it said."""

    def __init__(self, opened: tuple[Any, Mapping[str, BoundDrafter]], disk: Path | None = None, **settings: Any):
        self.runner, drafters = opened
        self.num_passes, forward = 0, self.runner.forward

        def counted(spans: Any) -> Any:
            self.num_passes += 1
            return forward(spans)

        self.runner.forward = counted
        tier = None
        if disk is not None:
            digest = blake2b(self.runner.state_format.encode(), digest_size=16).digest()
            tier = DiskTier(self.runner, StateFolder(disk, digest, 2**30, can_cut=True), clock=lambda: 0.0)
        settings = {"slots": 4} | settings
        self.engine = StepEngine(
            self.runner, EngineSettings(**settings), {}, clock=lambda: self.num_passes, drafters=drafters, disk=tier
        )
        self.drafted = self.accepted = self.cached = self.loaded = 0

    def answers(self, asked: Sequence[tuple[EngineRequest, list[int]]]) -> dict[tuple[str, int], list[int]]:
        """Token ids of each choice of requests that run at the same time."""
        for request, token_ids in asked:
            self.engine.add(request, token_ids)
        found: dict[tuple[str, int], list[int]] = {}
        for request_id, event in events_of(self.engine):
            if isinstance(event, TextDelta):
                found.setdefault((request_id, event.choice), []).extend(event.token_ids)
            elif isinstance(event, RequestFinished):
                self.drafted += event.usage.drafted_tokens
                self.accepted += event.usage.accepted_draft_tokens
                self.cached += event.usage.cached_tokens
                self.loaded += event.usage.loaded_prompt_tokens
        return found


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[list[tuple[EngineRequest, list[int]]]]]] = {
    "alone": ({}, {}, [requests()]),
    "several": ({}, {}, [requests(4)]),
    "sampled": ({}, {}, [requests(3, sampling=SamplingParams(temperature=1.0, seed=5, repetition_penalty=1.1))]),
    "forks": ({}, {}, [requests(1, num_choices=4, sampling=SamplingParams(temperature=1.0, seed=5))]),
    "chunks": ({}, {"prefill_chunk_tokens": 4, "max_prefill_tokens": 8}, [requests(3)]),
    "cached prefixes": ({}, {}, [requests(1), requests(4), requests(2)]),
    "without prefix cache": ({}, {"prefix_cache": False}, [requests(2), requests(2)]),
    "preempted": ({"cache_tokens": 150}, {}, [requests(4)]),
    "reading in parts": ({"max_batch_tokens": 16}, {}, [requests(2)]),
}


@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_without_a_head(opened: Open, case: str) -> None:
    """And drafts were used: most of those of a random head are wrong."""
    model, settings, batches = CASES[case]
    plain, drafted = Run(opened(has_head=False, **model), **settings), Run(opened(**model), **settings)
    for asked in batches:
        assert drafted.answers(asked) == plain.answers(asked)

    assert plain.drafted == 0
    assert drafted.drafted > drafted.accepted
    assert drafted.cached == plain.cached
    plain.engine.close()
    drafted.engine.close()


@pytest.mark.parametrize("case", ["alone", "several", "chunks", "cached prefixes", "reading in parts"])
def test_a_head_that_knows_is_always_right(opened: Open, case: str) -> None:
    """Whatever part of the text came from a cache; each pass then gives five tokens of a sequence."""
    model, settings, batches = CASES[case]
    run = Run(opened(is_chain=True, **model), **settings)
    for asked in batches:
        before = run.num_passes
        for (request_id, _), token_ids in run.answers(asked).items():
            text = asked[int(request_id)][1][-1:]
            while len(text) <= NUM_TOKENS:
                text.append(int(follower(text[-1])))
            assert token_ids == text[1:]

        assert run.num_passes - before < NUM_TOKENS
    num_answers = sum(len(asked) for asked in batches)
    assert run.drafted == run.accepted
    assert run.accepted >= num_answers * NUM_TOKENS * 0.5
    run.engine.close()


def test_a_saved_prefix_is_drafted_for(opened: Open, tmp_path: Path) -> None:
    """By another process: every draft of a chain is right after its prefix was loaded from disk."""
    ((request, prompt),) = requests()
    for _ in range(2):
        run = Run(opened(is_chain=True), disk=tmp_path / "states")
        ((_, token_ids),) = run.answers([(request, prompt)]).items()
        prompt = prompt + token_ids
        run.engine.close()

        assert run.drafted == run.accepted > NUM_TOKENS * 0.5
    assert run.loaded > MIN_SAVED_TOKENS


def test_a_head_that_reads_the_models_states_is_right_once(
    headed_model: Callable[..., Path], eagle3: Callable[..., Path], open_model: Callable[..., Any]
) -> None:
    """It knows the token after the next from the last state of the model, and takes its own state for the same."""
    folder = headed_model("llama", is_chain=True)
    path, runner = eagle3(is_chain=folder, reads_feature=True), open_model(folder)
    head = runner.open_head(ModelSource("head", path), max_tokens=3, min_probability=0.0)
    run = Run((runner, {"head": head}))
    ((_, token_ids),) = run.answers(requests()).items()
    num_verified = run.num_passes - 1

    assert token_ids[1] == follower(token_ids[0]) < VOCAB_SIZE
    assert run.drafted > run.accepted > 10
    assert run.accepted <= num_verified
    assert 1 + num_verified + run.accepted == NUM_TOKENS
    run.engine.close()
