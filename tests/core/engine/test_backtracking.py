"""Constraints that masks do not enforce: wrong values are taken back before any of their text is sent."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest

from enginehouse.contract.drafter import BoundDrafter, Draft
from enginehouse.contract.errors import GenerationFailed, InvalidRequest, PluginFailed
from enginehouse.contract.types import Constraint, EngineSettings, Resume, ResumedChoice, SamplingParams, TextDelta
from enginehouse.engine.loop import StepEngine
from enginehouse_testkit.fake_runner import FakeOptions, FakeRunner

from .harness import Result, drive, make_request, run

PROMPT = [ord(letter) for letter in "three multiples: "]


class Multiples:
    """Allows ``count`` numbers of some digits, each a multiple; which ones are shows only at their end."""

    def __init__(self, spec: str, token_bytes: Any, end_ids: Any) -> None:
        self.divisor, self.digits, self.count = map(int, spec.split())
        self.token_bytes, self.end_ids = token_bytes, end_ids
        self.texts, self.wrong = [b""], set[bytes]()

    def _fits(self, text: bytes) -> bool:
        numbers = text.split(b" ")
        whole = all(len(one) == self.digits and one.isdigit() for one in numbers[:-1])
        last = numbers[-1]
        return (
            whole
            and len(numbers) <= self.count
            and len(last) <= self.digits
            and (not last or last.isdigit())
            and not any(text.startswith(one) for one in self.wrong)
        )

    def _is_right(self, number: bytes) -> bool:
        return int(number) > 0 and not int(number) % self.divisor

    def _allowed(self) -> list[int]:
        if self.is_finished():
            return list(self.end_ids)
        text = self.texts[-1]
        return [one for one in b" 0123456789" if self._fits(text + self.token_bytes[one])]

    def fill_bitmask(self, bitmask: Any) -> None:
        bits = np.zeros(len(bitmask) * 32, np.uint8)
        bits[self._allowed()] = 1
        bitmask[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token_id: int) -> None:
        self.texts.append(self.texts[-1] + (b"" if token_id in self.end_ids else self.token_bytes[token_id]))

    def backtrack(self) -> int:
        number = self.texts[-1].rpartition(b" ")[2]
        if len(number) < self.digits or self._is_right(number):
            return 0
        num_wrong = 0
        while not num_wrong or not self._allowed():
            if not self.num_held():
                raise GenerationFailed("no multiple has so many digits")
            self.wrong.add(self.texts.pop())
            num_wrong += 1
        return num_wrong

    def num_held(self) -> int:
        text = self.texts[-1]
        begin = text.rfind(b" ") + 1
        is_whole = len(text) - begin == self.digits and self._is_right(text[begin:])
        return 0 if is_whole else sum(len(one) > begin for one in self.texts)

    def forced_token_ids(self) -> list[int]:
        text = self.texts[-1]
        is_whole = text and text[-1:].isdigit() and len(text.rpartition(b" ")[2]) == self.digits
        return [32] if is_whole and not self.is_finished() else []

    def is_finished(self) -> bool:
        return len(self.texts[-1]) == (self.digits + 1) * self.count - 1


class MultiplesDecoder:
    """Enforces ``regex`` constraints of three numbers: the divisor, the digits of each number, how many there are."""

    name = "multiples"
    api_version = 1
    kinds = frozenset({"regex"})
    matcher = Multiples

    def bind(self, tokenizer: Any) -> Any:
        decoder = self

        class Compiler:
            def compile(self, constraint: Constraint) -> Any:
                class Grammar:
                    def start(self) -> Any:
                        return decoder.matcher(constraint.text, tokenizer.token_bytes, tokenizer.end_token_ids)

                return Grammar()

        return Compiler()


class Tens:
    """Drafts zeros, which are right now and then."""

    is_free = True
    prior = 0.9

    def open(self, prompt: Any, prediction: Any) -> list[int]:
        return [0]

    def propose(self, tasks: Any) -> list[Draft]:
        for task in tasks:  # a session follows a text that only grows
            assert len(task.token_ids) > task.session[0]
            task.session[0] = len(task.token_ids)
        return [Draft([48, 49, 48][: task.max_tokens], 3) for task in tasks]

    def close(self, session: Any) -> None: ...

    def shutdown(self) -> None: ...


def engine(options: FakeOptions | None = None, drafter: BoundDrafter | None = None, decoder: Any = None) -> StepEngine:
    drafters = {"tens": drafter} if drafter is not None else {}
    return StepEngine(FakeRunner(options), EngineSettings(), {}, [decoder or MultiplesDecoder()], drafters=drafters)


def request(spec: str = "7 3 4", **fields: Any) -> Any:
    sampling = SamplingParams(**{"temperature": 1.3, "seed": 5, **fields.pop("sampling", {})})
    return make_request(60, sampling=sampling, constraint=Constraint(kind="regex", text=spec, param="regex"), **fields)


def numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(" ")]


SAMPLING: dict[str, dict[str, Any]] = {
    "random": {},
    "greedy": {"temperature": 0.0},
    "logprobs": {"num_logprobs": 2},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.7, "repeat_last_n": 6},
}


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
def test_every_value_is_right_and_the_same_however_it_is_computed(sampling: dict[str, Any]) -> None:
    """Three choices: with drafts, in a cache that is too small, sampled on the device, with a sliding window."""
    seen = []
    for options, drafter in (
        (None, None),
        (None, Tens()),
        (FakeOptions(cache_tokens=70), None),
        (FakeOptions(device_sampling=True), None),
        (FakeOptions(window=4, window_slack=2), None),
        (FakeOptions(num_checkpoints=4), None),
        (FakeOptions(num_checkpoints=4, device_sampling=True), Tens()),
    ):
        (result,) = run(engine(options, drafter), [(request(num_choices=3, sampling=sampling), PROMPT)])
        assert result.error is None
        for choice in range(3):
            assert len(numbers(result.text[choice])) == 4
            assert not any(number % 7 for number in numbers(result.text[choice]))
            usage = result.finished[choice].usage
            assert usage.completion_tokens == len(result.token_ids[choice]) == 15
            assert usage.forced_tokens == (0 if "num_logprobs" in sampling else 3)
            assert len(result.logprobs.get(choice, ())) == (15 if "num_logprobs" in sampling else 0)
        seen.append((result.text, result.token_ids))

    assert seen[:4] == [seen[0]] * 4


def test_text_is_sent_as_soon_as_its_value_stands_and_not_before() -> None:
    one = engine()
    asked = request()
    one.add(asked, PROMPT)
    parts = []
    while one.has_work():
        parts += [event.text for _, event in one.step() if isinstance(event, TextDelta)]

    assert "".join(parts).count(" ") == 3
    assert all(int(part) % 7 == 0 for text in parts for part in text.split())


@pytest.mark.parametrize("place", range(5))
def test_a_stop_string_ends_the_answer_where_it_would_without_the_constraint(place: int) -> None:
    """Tokens of the same value that follow it are not counted, although they were generated."""
    whole = run(engine(), [(request(), PROMPT)])[0].text[0]
    stop = whole[place : place + 2]
    (result,) = run(engine(), [(request(stop=(stop,)), PROMPT)])

    assert result.text.get(0, "") == whole[: whole.index(stop)]
    assert result.finished[0].stop_reason == stop
    assert result.finished[0].usage.completion_tokens == whole.index(stop) + len(stop)


def test_an_answer_that_is_cut_shows_the_beginning_of_its_value() -> None:
    whole = run(engine(), [(request(), PROMPT)])[0].text[0]
    asked = make_request(
        6, sampling=SamplingParams(temperature=1.3, seed=5), constraint=Constraint(kind="regex", text="7 3 4")
    )
    (result,) = run(engine(), [(asked, PROMPT)])

    assert result.finished[0].finish_reason == "length"
    assert result.text[0][:4] == whole[:4]
    assert len(result.token_ids[0]) == 6


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
def test_it_continues_in_another_engine_from_whatever_was_reported(sampling: dict[str, Any]) -> None:
    asked = request(sampling=sampling)
    whole = run(engine(), [(asked, PROMPT)])[0]
    first = engine()
    first.add(asked, PROMPT)
    told: list[int] = []
    while first.has_work():
        for event in [event for _, event in first.step() if isinstance(event, TextDelta)]:
            assert event.held is None
            told += event.token_ids
            second, result = engine(), Result()
            if len(told) < 15:
                second.add(asked, PROMPT, Resume((ResumedChoice(0, tuple(told)),)))
                drive(second, {asked.request_id: result})
                assert [*told, *result.token_ids[0]] == whole.token_ids[0]
                assert result.finished == whole.finished


@pytest.mark.parametrize(
    ("spec", "message"), [("101 2 2", "no multiple has so many digits"), ("99991 5 1", "taken back 1000 times")]
)
def test_values_that_are_not_found_end_the_request_with_the_reason(spec: str, message: str) -> None:
    (result,) = run(engine(), [(request(spec), PROMPT)])

    assert isinstance(result.error, GenerationFailed)
    assert message in result.error.message
    assert not result.text


def test_a_runner_that_cannot_go_back_refuses_the_constraint() -> None:
    runner = FakeRunner()
    runner.capabilities = attrs.evolve(runner.capabilities, truncate="none")
    one = StepEngine(runner, EngineSettings(), {}, [MultiplesDecoder()])
    with pytest.raises(InvalidRequest, match="regex: cannot be enforced with this model") as refused:
        one.check(request(), len(PROMPT))

    assert refused.value.param == "regex"


@pytest.mark.parametrize(("method", "found"), [("backtrack", 9), ("backtrack", -1), ("num_held", None)])
def test_a_matcher_that_takes_back_what_was_sent_is_named(method: str, found: Any) -> None:
    class Wrong(MultiplesDecoder):
        matcher = type("Wrong", (Multiples,), {method: lambda self: found})

    (result,) = run(engine(decoder=Wrong()), [(request(), PROMPT)])

    assert isinstance(result.error, PluginFailed)
    assert method in result.error.message
