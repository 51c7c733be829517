"""Engines over the fake runner, requests to them, and what their clients see."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np

from enginehouse.contract.errors import (
    EnginehouseError,
    GenerationFailed,
    InvalidRequest,
)
from enginehouse.contract.types import (
    ChoiceFinished,
    Constraint,
    EngineRequest,
    EngineSettings,
    RequestFinished,
    SamplingParams,
    StopParams,
    TextDelta,
)
from enginehouse.engine.loop import StepEngine
from enginehouse_testkit.fake_runner import FakeOptions, FakeRunner

_ids = itertools.count()


def make_engine(options: FakeOptions | None = None, **engine_settings: object) -> StepEngine:
    return StepEngine(FakeRunner(options), EngineSettings(**engine_settings), {})  # type: ignore[arg-type]


def make_request(max_tokens: int | None = 20, **fields: object) -> EngineRequest:
    fields.setdefault("sampling", SamplingParams(temperature=0))
    stop = fields.pop("stop", ())
    ignore_eos = fields.pop("ignore_eos", False)
    stopping = StopParams(max_tokens=max_tokens, stop=stop, ignore_eos=ignore_eos)  # type: ignore[arg-type]
    return EngineRequest(request_id=f"r{next(_ids)}", stopping=stopping, **fields)  # type: ignore[arg-type]


class Result:
    """What a client of one request saw."""

    def __init__(self) -> None:
        self.text: dict[int, str] = {}
        self.token_ids: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.finished: dict[int, ChoiceFinished] = {}
        self.summary: RequestFinished | None = None
        self.error: EnginehouseError | None = None

    def take(self, event: object) -> None:
        assert self.summary is None and self.error is None, "an event after the last one"
        match event:
            case TextDelta():
                assert event.choice not in self.finished, "text after the end of its choice"
                self.text[event.choice] = self.text.get(event.choice, "") + event.text
                self.token_ids.setdefault(event.choice, []).extend(event.token_ids)
                if event.logprobs is not None:
                    assert [entry.token_id for entry in event.logprobs] == list(event.token_ids)
                    self.logprobs.setdefault(event.choice, []).extend(e.logprob for e in event.logprobs)
            case ChoiceFinished():
                self.finished[event.choice] = event
            case RequestFinished():
                self.summary = event
            case EnginehouseError():
                self.error = event


def drive(engine: StepEngine, results: dict[str, Result], max_steps: int = 5000) -> None:
    for _ in range(max_steps):
        if not engine.has_work():
            return
        for request_id, event in engine.step():
            results[request_id].take(event)
    raise AssertionError(f"still busy after {max_steps} steps")


def run(engine: StepEngine, requests: Iterable[tuple[EngineRequest, list[int]]]) -> list[Result]:
    results: dict[str, Result] = {}
    for request, prompt in requests:
        results[request.request_id] = Result()
        engine.check(request, len(prompt))
        engine.add(request, prompt)
    drive(engine, results)
    return list(results.values())


class WholeRunner(FakeRunner):
    """Does not say what a cut keeps, so that sequences are reused whole."""

    kept_length = None  # type: ignore[assignment]


def run_each(engine: StepEngine, prompts: list[list[int]]) -> list[Result]:
    """One after the other."""
    return [run(engine, [(make_request(), prompt)])[0] for prompt in prompts]


def alone(request: EngineRequest, prompt: list[int], options: FakeOptions | None = None) -> Result:
    return run(make_engine(options, prefix_cache=False), [(request, prompt)])[0]


def prompt_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(97, 123, length).tolist()


def free_tokens(engine: StepEngine) -> int:
    return engine.stats().free_tokens


class WatchedClose(FakeRunner):
    """Notes how many sequences are open when it is closed: an engine at rest has freed all."""

    num_left = -1

    def close(self) -> None:
        self.num_left = len(self.sequences)
        super().close()


class LiteralMatcher:
    """Allows exactly one text, in any tokenization; with ``forces`` the tokens are named in advance."""

    def __init__(self, text: bytes, token_bytes, forces: bool, end_ids) -> None:
        self.left, self.token_bytes, self.forces, self.end_ids = text, token_bytes, forces, end_ids

    def _fits(self) -> list[int]:
        return [i for i, piece in enumerate(self.token_bytes) if piece and self.left.startswith(piece)]

    def fill_bitmask(self, bitmask) -> None:
        bits = np.zeros(len(bitmask) * 32, np.uint8)
        bits[self._fits() if self.left else list(self.end_ids)] = 1
        bitmask[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token_id: int) -> None:
        piece = self.token_bytes[token_id]
        if not self.left.startswith(piece):
            raise GenerationFailed(f"{piece!r} is not allowed")
        self.left = self.left[len(piece) :]

    def forced_token_ids(self) -> list[int]:
        return [self.left[0]] if self.forces and self.left else []

    def is_finished(self) -> bool:
        return not self.left


class LiteralDecoder:
    """Enforces ``regex`` constraints whose text is taken literally."""

    name = "literal"
    api_version = 1
    kinds = frozenset({"regex"})

    def __init__(self, forces: bool = False) -> None:
        self.forces = forces
        self.num_bound = 0

    def bind(self, tokenizer):
        self.num_bound += 1
        decoder = self

        class Compiler:
            def compile(self, constraint: Constraint):
                if "(" in constraint.text:
                    raise InvalidRequest("'(' is not supported", constraint.param)

                class Grammar:
                    def start(self):
                        text = constraint.text.encode()
                        return LiteralMatcher(text, tokenizer.token_bytes, decoder.forces, tokenizer.end_token_ids)

                return Grammar()

        return Compiler()
