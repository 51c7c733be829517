"""What killed is known again by its text, whatever is asked about it; what others may have written is not refused."""

from __future__ import annotations

import gc
import weakref

import pytest
from attrs import evolve

from enginehouse.contract.errors import RequestKillsWorker
from enginehouse.contract.types import Constraint, EngineRequest, SamplingParams, Segment, StopParams
from enginehouse.recovery.work import (
    _FIRST_PAUSE_S,
    _MAX_PAUSE_S,
    _MAX_REMEMBERED,
    _MIN_UNCOMMON_BYTES,
    _REMEMBERED_S,
    Culprits,
    Offences,
    Work,
)
from enginehouse_testkit.fake_media import fake_image

LONG = "drink this " * _MIN_UNCOMMON_BYTES


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def question(text: str, caller: str = "eve", stage: str = "text") -> Work:
    """``/tokenize`` with a text."""
    work = Work(caller, 0, EngineRequest(request_id="", segments=(Segment(text),), caller=caller), 1.0, (text,))
    work.stage = stage  # type: ignore[assignment]
    return work


def chat(*texts: str, caller: str = "eve", stage: str = "text", **fields) -> Work:
    """A chat of these messages, as a template renders it."""
    rendered = "".join(f"<|im_start|>user\n{text.strip()}<|im_end|>\n" for text in texts)
    request = EngineRequest(request_id="a", segments=(Segment(rendered, trusted=True),), caller=caller, **fields)
    work = Work(caller, 0, request, 1.0, texts)
    work.stage = stage  # type: ignore[assignment]
    return work


def test_text_that_killed_is_known_at_every_address_and_for_every_caller():
    for culprit in (question(LONG), chat(LONG)):
        culprits = Culprits(Clock())
        assert not culprits.refusal(culprit)
        culprits.add(culprit)
        assert culprits.refusal(culprit)
        assert culprits.refusal(question(LONG, "bob"))
        assert culprits.refusal(chat(LONG, caller="bob", num_choices=2, stopping=StopParams(max_tokens=7)))
        assert culprits.refusal(chat(f"{LONG} \n", sampling=SamplingParams(seed=7, temperature=1.5), priority=3))
        assert culprits.refusal(chat("hi", LONG, "and then?", caller="bob")), "a later turn of the conversation"
        assert not culprits.refusal(question(f"{LONG}!"))


def test_refusals_keep_nothing_of_the_refused():
    """A raised error keeps its frames, and what is in them."""
    culprits, refused = Culprits(Clock()), []
    culprits.add(question("bad"))

    def ask() -> None:
        work = question("bad")
        refused.append(weakref.ref(work))
        refusal = culprits.refusal(work)
        assert refusal is not None
        raise refusal

    for _ in range(3):
        with pytest.raises(RequestKillsWorker):
            ask()
    gc.collect()
    assert not any(work() for work in refused)


def test_short_texts_are_refused_to_their_caller_only():
    for culprit in (question("hi"), chat("hi"), chat("hi", stage="request")):
        culprits = Culprits(Clock())
        culprits.add(culprit)
        assert culprits.refusal(culprit)
        assert not culprits.refusal(question("hi", "bob"))
        assert not culprits.refusal(chat("hi", caller="bob"))


@pytest.mark.parametrize("harmless", ["hi", "You are helpful. " * 500])
def test_harmless_message_of_a_killing_prompt_is_refused_to_nobody(harmless):
    culprits = Culprits(Clock())
    culprits.add(chat(harmless, LONG))

    assert culprits.refusal(chat(harmless, LONG, caller="bob"))
    for caller in ("eve", "bob"):
        assert not culprits.refusal(chat(harmless, caller=caller))
        assert not culprits.refusal(question(harmless, caller))
        assert not culprits.refusal(chat(harmless, "something else", caller=caller))


def test_a_text_beside_an_image_that_killed_is_refused_to_nobody():
    """The image was prepared in the same stage; the prompt with it is refused, also to others."""
    culprits = Culprits(Clock())

    def beside(number: int, caller: str = "eve") -> Work:
        work = chat(LONG, caller=caller)
        segments = (*work.request.segments, Segment("", True, fake_image(number)))
        asked = Work(caller, 0, evolve(work.request, segments=segments), 1.0, (LONG,))
        asked.stage = "text"
        return asked

    culprits.add(beside(1))

    assert culprits.refusal(beside(1)) and culprits.refusal(beside(1, "bob"))
    for harmless in (beside(2), question(LONG), chat(LONG), chat(LONG, caller="bob")):
        assert not culprits.refusal(harmless)


def test_what_died_while_it_computed_is_refused_whatever_its_sampling_and_to_its_caller_only():
    """Something else than the prompt may have been to blame, and others may have the same prompt."""
    culprits = Culprits(Clock())
    culprits.add(chat(LONG, stage="request", stopping=StopParams(max_tokens=7)))

    assert culprits.refusal(chat(LONG, stopping=StopParams(max_tokens=8), sampling=SamplingParams(seed=1)))
    assert not culprits.refusal(chat(LONG, constraint=Constraint(kind="regex", text="a")))
    assert not culprits.refusal(chat(LONG, caller="bob"))
    assert not culprits.refusal(question(LONG)), "its text has been tokenized without harm"


def test_constraint_that_killed_is_known_beside_every_prompt():
    bomb = Constraint(kind="regex", text="(a|b)" * _MIN_UNCOMMON_BYTES)
    culprits = Culprits(Clock())
    culprits.add(chat("hi", stage="constraint", constraint=bomb))

    assert culprits.refusal(chat("something else", caller="bob", constraint=bomb))
    assert not culprits.refusal(chat("hi"))


def test_token_ids_that_killed_are_known():
    culprits = Culprits(Clock())
    work = Work("eve", 0, EngineRequest(request_id="", token_ids=(1, 2, 3)), 1.0)
    work.stage = "request"
    culprits.add(work)

    assert culprits.refusal(Work("eve", 1, EngineRequest(request_id="b", token_ids=(1, 2, 3)), 1.0))
    assert not culprits.refusal(Work("eve", 1, EngineRequest(request_id="b", token_ids=(1, 2)), 1.0))


def test_question_about_nothing_is_never_remembered():
    """A picture of the engine has no text."""
    culprits = Culprits(Clock())
    view = Work("eve", 0, EngineRequest(request_id=""), 1.0)
    view.stage = "request"
    culprits.add(view)
    assert not culprits.refusal(view)


def test_culprits_are_forgotten_and_their_number_is_bounded():
    clock = Clock()
    culprits = Culprits(clock)
    culprits.add(question("bad"))
    clock.now_s = _REMEMBERED_S - 1
    assert culprits.refusal(question("bad"))
    clock.now_s = _REMEMBERED_S
    assert not culprits.refusal(question("bad"))
    for number in range(_MAX_REMEMBERED + 1):
        culprits.add(question(f"bad {number}"))
    assert not culprits.refusal(question("bad 0"))
    assert culprits.refusal(question(f"bad {_MAX_REMEMBERED}"))


def test_pauses_grow_with_each_offence_of_a_caller_and_of_no_other():
    clock = Clock()
    offences = Offences(clock)
    assert offences.pause_s("eve") == 0
    for number in range(10):
        offences.add("eve")
        assert offences.pause_s("eve") == min(_FIRST_PAUSE_S * 2**number, _MAX_PAUSE_S)
    assert offences.count("eve") == 10
    assert offences.pause_s("bob") == 0
    clock.now_s = 10.0
    assert offences.pause_s("eve") == _MAX_PAUSE_S - 10
    clock.now_s = _REMEMBERED_S
    assert offences.count("eve") == 0
    offences.add("eve")
    assert offences.pause_s("eve") == _FIRST_PAUSE_S


def test_number_of_callers_on_record_is_bounded():
    offences = Offences(Clock())
    for number in range(_MAX_REMEMBERED + 1):
        offences.add(str(number))
    assert offences.count("0") == 0
    assert offences.count("1") == 1
