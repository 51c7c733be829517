"""The intake thread: order, refusals, and cancellations that never wait for a long prompt."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import pytest

from enginehouse.contract.errors import ContextLengthExceeded, InvalidRequest, PluginFailed
from enginehouse.contract.types import Constraint, EngineRequest, EngineSettings, Resume, SamplingParams, Segment
from enginehouse.engine.loop import StepEngine
from enginehouse.engine.media import EncodedPrompt
from enginehouse.workers.intake import Intake
from enginehouse.workers.ipc import MAX_FRAME_BYTES, FrameTooLarge
from enginehouse.workers.messages import (
    Accepted,
    CallFailed,
    Detokenize,
    Detokenized,
    FromWorker,
    Left,
    Rejected,
    StageBegan,
    Submit,
    Tokenize,
    Tokenized,
)
from enginehouse.workers.request_table import NO_CALL
from enginehouse_testkit.fake_media import fake_image
from enginehouse_testkit.fake_runner import FakeOptions, FakeRunner
from enginehouse_testkit.fake_tokenizer import FakeTokenizer


class GatedTokenizer(FakeTokenizer):
    """Waits at a gate before each prompt that says "slow", as a very long prompt would keep it busy."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.is_busy = threading.Event()

    def encode(self, text: str, special: bool) -> list[int]:
        if "slow" in text:
            self.is_busy.set()
            assert self.gate.wait(60)
        if "broken" in text:
            raise KeyError("a bug of the tokenizer")
        return super().encode(text, special)


class GatedDecoder:
    """Compiles a constraint only when its gate opens, as a bomb would keep it busy."""

    name, api_version, kinds = "gated", 1, frozenset({"regex"})

    def __init__(self) -> None:
        self.gate, self.is_busy = threading.Event(), threading.Event()

    def bind(self, tokenizer: object) -> GatedDecoder:
        return self

    def compile(self, constraint: Constraint) -> GatedDecoder:
        self.is_busy.set()
        assert self.gate.wait(60)
        return self

    def start(self) -> object:
        raise AssertionError("nothing is generated")


class Bench:
    """An intake with everything around it recorded."""

    def __init__(self) -> None:
        self.tokenizer, self.decoder = GatedTokenizer(), GatedDecoder()
        self.told: list[FromWorker] = []
        self.entered: list[str] = []
        settings = EngineSettings(slots=1)
        engine = StepEngine(FakeRunner(FakeOptions(context=64)), settings, {}, [self.decoder])  # type: ignore[list-item]
        self.intake = Intake(engine, self.tokenizer, self.told.append, self._enter, enter_pool=lambda *_: None)
        before = set(threading.enumerate())
        self.intake.start()
        self._threads = [one for one in threading.enumerate() if one not in before and "intake" in one.name]

    @property
    def num_threads(self) -> int:
        """Number of its threads that have not ended."""
        return sum(thread.is_alive() for thread in self._threads)

    @property
    def sent(self) -> list[FromWorker]:
        """Its answers, without what it says of its work."""
        return [message for message in self.told if not isinstance(message, StageBegan | Left)]

    def _enter(self, request: EngineRequest, token_ids: list[int], resume: Resume | None) -> None:
        self.entered.append(request.request_id)

    def submit(self, request_id: str, text: str = "hello", **fields: object) -> None:
        request = EngineRequest(request_id=request_id, segments=(Segment(text),), **fields)  # type: ignore[arg-type]
        self.intake.admit(Submit(request))

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, self.sent
            time.sleep(0.002)


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.tokenizer.gate.set()
    bench.decoder.gate.set()
    bench.intake.close()


def test_constraint_that_takes_long_delays_only_others_with_one(bench):
    constraint = Constraint(kind="regex", text="a")
    bench.submit("bomb", constraint=constraint)
    assert bench.decoder.is_busy.wait(60)
    bench.submit("plain")
    bench.submit("constrained", constraint=constraint)
    bench.wait(lambda: bench.entered == ["plain"])
    assert bench.intake.cancel("bomb")
    bench.decoder.gate.set()
    bench.wait(lambda: bench.entered == ["plain", "constrained"])


def test_long_prompt_delays_only_other_long_ones(bench):
    """Also those of questions, and whether there is a constraint or not."""
    bench.intake.call(Tokenize(1, (Segment("slow" * 20_000),), False))
    assert bench.tokenizer.is_busy.wait(60)
    bench.intake.call(Tokenize(2, (Segment("x" * 40_000),), False))
    bench.submit("short")
    bench.intake.call(Tokenize(3, (Segment("y"),), False))
    bench.decoder.gate.set()
    bench.submit("constrained", constraint=Constraint(kind="regex", text="a"))
    bench.wait(lambda: set(bench.entered) == {"short", "constrained"} and Tokenized(3, [ord("y")]) in bench.sent)
    assert not any(isinstance(message, Tokenized) and message.call in (1, 2) for message in bench.sent)
    bench.tokenizer.gate.set()
    bench.wait(lambda: sum(isinstance(message, Tokenized) for message in bench.sent) == 3)


def test_watchdog_hears_of_a_long_prompt_that_hangs(bench):
    bench.intake.call(Tokenize(1, (Segment("slow" * 20_000),), False))
    assert bench.tokenizer.is_busy.wait(60)
    bench.intake.call(Detokenize(NO_CALL, ()))
    bench.intake.call(Detokenize(2, ()))
    bench.wait(lambda: Detokenized(2, []) in bench.sent)
    assert Detokenized(NO_CALL, []) not in bench.sent
    bench.tokenizer.gate.set()
    bench.wait(lambda: Detokenized(NO_CALL, []) in bench.sent)


def test_prompt_that_cannot_fit_is_refused_without_tokenizing(bench):
    """The longest token has 12 bytes, so 64 tokens never hold 1,000; the count that is told is a lower bound."""
    most = FakeTokenizer().max_bytes_per_token
    assert most is not None
    bench.submit("long", "slow" * 250)
    bench.wait(lambda: bool(bench.sent))
    (rejected,) = bench.sent
    assert isinstance(rejected, Rejected)
    error = rejected.failure.to_error()
    assert isinstance(error, ContextLengthExceeded)
    assert (error.num_prompt_tokens, error.max_context) == (1000 // most, 64)
    assert f"at least {1000 // most} tokens" in error.message
    assert not bench.tokenizer.is_busy.is_set()


def test_prompt_of_long_tokens_that_fits_is_not_refused(bench):
    """The shortest prompt by its tokens for its bytes."""
    bench.submit("a", "mountain" * 60)
    bench.wait(lambda: bench.entered == ["a"])


def test_watchdog_hears_of_either_thread_that_hangs(bench):
    bench.submit("bomb", constraint=Constraint(kind="regex", text="a"))
    assert bench.decoder.is_busy.wait(60)
    bench.intake.call(Detokenize(NO_CALL, ()))
    bench.intake.call(Detokenize(1, ()))
    bench.wait(lambda: Detokenized(1, []) in bench.sent)
    assert Detokenized(NO_CALL, []) not in bench.sent
    bench.decoder.gate.set()
    bench.wait(lambda: Detokenized(NO_CALL, []) in bench.sent)


def test_request_is_accepted_with_its_length_before_it_enters(bench):
    bench.submit("a")
    bench.wait(lambda: bench.entered == ["a"])

    num_tokens = len(FakeTokenizer().encode("hello", False))
    assert bench.sent == [Accepted("a", num_tokens)]


def test_prompt_of_token_ids_is_taken_as_it_is(bench):
    bench.submit("a", token_ids=(1, 2, 3))
    bench.wait(lambda: bench.entered == ["a"])

    assert bench.sent == [Accepted("a", 3)]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"text": "x" * 500}, ContextLengthExceeded),
        ({"text": ""}, InvalidRequest),
        ({"token_ids": (1, 999_999)}, InvalidRequest),
        ({"token_ids": (-1,)}, InvalidRequest),
        ({"sampling": SamplingParams(logit_bias={999_999: 1.0})}, InvalidRequest),
        ({"text": "broken"}, PluginFailed),
    ],
)
def test_request_that_cannot_be_served_is_rejected_and_the_next_one_is_not(bench, fields, error):
    bench.submit("bad", **fields)
    bench.submit("good")
    bench.wait(lambda: bench.entered == ["good"])

    rejected = bench.sent[0]
    assert isinstance(rejected, Rejected)
    assert rejected.request_id == "bad"
    assert type(rejected.failure.to_error()) is error


def test_cancel_does_not_wait_for_a_long_prompt_and_the_request_never_enters(bench):
    bench.submit("long", "slow")
    bench.submit("queued")
    bench.submit("last")
    assert bench.tokenizer.is_busy.wait(60)

    assert bench.intake.cancel("long"), "cancelled while it is tokenized"
    assert bench.intake.cancel("queued"), "cancelled before its turn"
    assert not bench.intake.cancel("unknown")
    bench.tokenizer.gate.set()
    bench.wait(lambda: bench.entered == ["last"])
    assert not bench.intake.cancel("last"), "the engine thread has it now"


def test_it_tells_what_it_works_on_before_it_does(bench):
    """So a death is held against nothing that only waited, and not against what it was not working on."""
    bench.submit("long", "slow")
    bench.submit("queued")
    assert bench.tokenizer.is_busy.wait(60)
    assert bench.told == [StageBegan("long", "text")]
    bench.submit("bomb", constraint=Constraint(kind="regex", text="a"))
    assert bench.decoder.is_busy.wait(60)
    assert bench.told[1:] == [StageBegan("bomb", "text"), StageBegan("bomb", "constraint")]
    bench.intake.call(Tokenize(7, (Segment("hello"),), False))
    bench.tokenizer.gate.set()
    bench.wait(lambda: isinstance(bench.told[-1], Tokenized))
    assert bench.told[-2] == StageBegan(7, "text")


def test_cancelled_request_has_left_when_nothing_works_on_it_any_more(bench):
    bench.submit("long", "slow")
    bench.submit("queued")
    assert bench.tokenizer.is_busy.wait(60)
    assert bench.intake.cancel("queued")
    assert bench.told[-1] == Left("queued"), "at once: nothing has begun with it"
    assert bench.intake.cancel("long")
    assert Left("long") not in bench.told
    bench.tokenizer.gate.set()
    bench.wait(lambda: bench.told[-1] == Left("long"))

    assert bench.entered == []


def test_calls_are_answered_in_order(bench):
    ids = FakeTokenizer().encode("hello", False)
    bench.intake.call(Tokenize(1, (Segment("hello"),), False))
    bench.intake.call(Detokenize(2, tuple(ids)))
    bench.intake.call(Detokenize(3, (-1,)))
    bench.intake.call(Tokenize(4, (Segment("broken"),), False))
    bench.wait(lambda: len(bench.sent) == 4)

    assert bench.sent[:2] == [Tokenized(1, ids), Detokenized(2, [b"he", b"ll", b"o"])]
    failed = bench.sent[2:]
    assert [type(message.failure.to_error()) for message in failed if isinstance(message, CallFailed)] == [
        InvalidRequest,
        PluginFailed,
    ]


def test_tokens_that_fit_no_frame_are_refused():
    sent: list[FromWorker] = []

    def send(message: FromWorker) -> None:
        if isinstance(message, Tokenized):
            raise FrameTooLarge(MAX_FRAME_BYTES + 1)
        if not isinstance(message, StageBegan):
            sent.append(message)

    engine = StepEngine(FakeRunner(FakeOptions(context=64)), EngineSettings(slots=1), {})
    intake = Intake(engine, FakeTokenizer(), send, lambda *_: None, enter_pool=lambda *_: None)
    intake.start()
    intake.call(Tokenize(1, (Segment("hello"),), False))
    deadline = time.monotonic() + 60
    while not sent and time.monotonic() < deadline:
        time.sleep(0.002)
    intake.close()

    (failed,) = sent
    assert isinstance(failed, CallFailed)
    assert isinstance(failed.failure.to_error(), InvalidRequest)


def test_closing_waits_for_the_prompt_at_work_and_for_no_other(bench):
    bench.submit("first", "slow")
    assert bench.tokenizer.is_busy.wait(60)
    for number in range(3):
        bench.submit(f"later {number}", "slow")
    bench.intake.call(Tokenize(1, (Segment("slow"),), False))
    closing = threading.Thread(target=bench.intake.close)
    closing.start()
    bench.wait(lambda: bench.num_threads == 1)  # the other two have nothing to do, and hear of the end
    bench.tokenizer.is_busy.clear()
    bench.tokenizer.gate.set()
    closing.join(60)

    assert not closing.is_alive()
    assert not bench.tokenizer.is_busy.is_set(), "a second prompt was begun"
    assert [type(message) for message in bench.sent] == [Accepted]


def test_the_engine_thread_gets_no_pixels() -> None:
    """The runner has made its chunks of them; a request may wait for long, and have 48 MiB."""
    entered: SimpleQueue[tuple[EngineRequest, EncodedPrompt]] = SimpleQueue()
    engine = StepEngine(FakeRunner(FakeOptions(image_tokens=4)), EngineSettings(slots=1), {})
    intake = Intake(
        engine,
        FakeTokenizer(),
        lambda message: None,
        lambda request, prompt, resume: entered.put((request, prompt)),
        enter_pool=lambda *_: None,
    )
    intake.start()
    intake.admit(
        Submit(
            EngineRequest(request_id="a", segments=(Segment("a"), Segment("", True, fake_image(1)), Segment("b"))), None
        )
    )
    request, prompt = entered.get(timeout=60)
    intake.close()

    assert [placed.chunk.num_tokens for placed in prompt.chunks] == [4]
    assert not any(segment.media is not None for segment in request.segments)
