"""Images in the serving loop: their place in the history, what is encoded when, and what others see of it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from enginehouse.contract.backend import ForwardOutput, Runner, Span
from enginehouse.contract.drafter import Draft, DraftTask
from enginehouse.contract.errors import InvalidRequest, PluginFailed, UnsupportedParameter
from enginehouse.contract.media import DecodedImage, MediaChunk, MediaInput, pseudo_tokens, whole_chunks
from enginehouse.contract.types import EngineRequest, EngineSettings, Resume, ResumedChoice, SamplingParams, Segment
from enginehouse.engine.loop import StepEngine
from enginehouse.engine.media import EncodedPrompt, encode_prompt
from enginehouse.plugins import guard_of
from enginehouse_testkit.fake_media import fake_image
from enginehouse_testkit.fake_runner import FakeFaults, FakeOptions, FakeRunner

from .harness import Result, drive, make_request, prompt_of, run

_TOKENS = 8
_IMAGE_BYTES = 4 * 4 * 3


class Watched(FakeRunner):
    """Notes what each step of the engine computes: the token count of a pass, "image", or "encode"."""

    def __init__(self, options: FakeOptions) -> None:
        super().__init__(options)
        self.steps: list[str] = []

    def forward(self, spans: Sequence[Span]) -> ForwardOutput:
        is_chunk = any(isinstance(span.input, MediaInput) for span in spans)
        self.steps.append("image" if is_chunk else "+".join(str(span.num_tokens) for span in spans))
        return super().forward(spans)

    def encode(self, chunk: MediaChunk) -> NDArray[np.uint64]:
        self.steps.append("encode")
        return super().encode(chunk)


def engine_over(settings: EngineSettings | None = None, **options: object) -> tuple[StepEngine, Watched]:
    runner = Watched(FakeOptions(image_tokens=_TOKENS, **options))  # type: ignore[arg-type]
    return StepEngine(runner, settings or EngineSettings(), {}), runner


def prompt_with(engine: StepEngine, *parts: str | DecodedImage) -> EncodedPrompt:
    segments = [Segment(part, True) if isinstance(part, str) else Segment("", True, part) for part in parts]
    runner = FakeRunner(FakeOptions(image_tokens=_TOKENS))
    return encode_prompt(runner.tokenizer, segments, False, engine.chunk_makers, guard_of(runner, "backend"))


def ask(
    engine: StepEngine, *parts: str | DecodedImage, request: EngineRequest | None = None, resume: Resume | None = None
) -> tuple[EngineRequest, Result]:
    """Add a request without driving the engine."""
    prompt, request = prompt_with(engine, *parts), request or make_request()
    engine.check(request, len(prompt.token_ids), prompt.chunks)
    engine.add(request, prompt.token_ids, resume, prompt.chunks)
    return request, Result()


def answer(engine: StepEngine, *parts: str | DecodedImage, request: EngineRequest | None = None) -> Result:
    request, result = ask(engine, *parts, request=request)
    drive(engine, {request.request_id: result})
    return result


def test_pseudo_tokens_tell_where_a_chunk_begins() -> None:
    ids = np.concatenate([[5], pseudo_tokens("a", 3), pseudo_tokens("b", 2), [6]]).astype(np.int32)

    assert [whole_chunks(ids, length) for length in range(8)] == [0, 1, 1, 1, 4, 4, 6, 7]
    assert (ids[1:6] < 0).all() and not np.array_equal(pseudo_tokens("a", 2), pseudo_tokens("b", 2))
    assert np.array_equal(pseudo_tokens("a", 3)[:2], pseudo_tokens("a", 2))


def test_an_answer_depends_on_the_image_and_on_nothing_else() -> None:
    """Not on other requests, the cache, preemption, the size of prefill chunks, or the kind of runner."""
    alone = [answer(engine_over()[0], "look: ", fake_image(number), " what?").text for number in range(3)]
    assert len({text[0] for text in alone}) == 3

    kinds: list[dict[str, object]] = [
        {},
        {"fork": "copy"},
        {"fork": "none"},
        {"mixed_batch": False},
        {"device_sampling": True},
        {"cache_tokens": 64, "context": 64},
    ]
    for options in kinds:
        for settings in (EngineSettings(), EngineSettings(prefill_chunk_tokens=3, prefix_cache=False)):
            engine, _ = engine_over(settings, **options)
            for _ in range(2):
                asked = [ask(engine, "look: ", fake_image(number), " what?") for number in (0, 1, 0, 2)]
                drive(engine, {request.request_id: result for request, result in asked})

                assert [result.text for _, result in asked] == [alone[0], alone[1], alone[0], alone[2]], options


def test_tokens_of_images_are_counted() -> None:
    engine, _ = engine_over()
    result = answer(engine, "a", fake_image(1), "b", fake_image(2, 100, 10), "c")

    assert result.summary is not None
    assert result.summary.usage.image_tokens == 3 * _TOKENS  # the second one is divided into two chunks
    assert result.summary.usage.prompt_tokens == 3 * _TOKENS + len("a[]b[|]c")


def test_a_cached_prefix_needs_no_encoding_and_an_evicted_one_uses_the_kept_embedding() -> None:
    engine, runner = engine_over()
    first = answer(engine, "look: ", fake_image(1), " what?")
    again = answer(engine, "look: ", fake_image(1), " what?")
    assert runner.num_encoded == 1
    assert again.summary is not None and again.summary.usage.cached_tokens >= len("look: []") + _TOKENS

    elsewhere = answer(engine, "another text: ", fake_image(1), " what?")
    metrics = engine.metrics()

    assert first.text == again.text != elsewhere.text
    assert (runner.num_encoded, metrics.num_encoded_chunks, metrics.num_reused_chunks) == (1, 1, 1)
    assert metrics.num_embedding_bytes == 8 * _TOKENS


def test_kept_embeddings_are_bounded() -> None:
    """The least recently used one leaves; one that does not fit is still used once."""
    settings = EngineSettings(embedding_cache_bytes=_IMAGE_BYTES + 2 * 8 * _TOKENS, prefix_cache=False)
    engine, runner = engine_over(settings)
    for number in (1, 2, 1, 3, 1, 2):
        answer(engine, "x", fake_image(number), "y")
    assert runner.num_encoded == 4  # 1, 2, 3, and 2 again
    assert engine.metrics().num_embedding_bytes == 2 * 8 * _TOKENS

    engine, runner = engine_over(EngineSettings(embedding_cache_bytes=1, prefix_cache=False))
    texts = [answer(engine, "x", fake_image(1), "y").text for _ in range(2)]
    assert texts[0] == texts[1] and runner.num_encoded == 2 and engine.metrics().num_embedding_bytes == 0


def test_chunks_of_requests_take_memory_from_kept_embeddings() -> None:
    settings = EngineSettings(embedding_cache_bytes=2 * _IMAGE_BYTES + 8 * _TOKENS, prefix_cache=False)
    engine, _ = engine_over(settings)
    answer(engine, "x", fake_image(1), "y")
    assert engine.metrics().num_embedding_bytes == 8 * _TOKENS

    asked = [ask(engine, "x", fake_image(number), "y") for number in (2, 3, 4)]
    assert engine.metrics().num_embedding_bytes == 0
    for request, _ in asked:
        engine.cancel(request.request_id)
    answer(engine, "x", fake_image(5), "y")
    assert engine.metrics().num_embedding_bytes == 8 * _TOKENS


def test_streams_go_on_between_the_steps_of_images() -> None:
    """Each step that encodes or computes a chunk is followed by one of the others."""
    engine, runner = engine_over()
    stream, seen = ask(engine, "hello", request=make_request(200, ignore_eos=True))
    results = {stream.request_id: seen}
    while not seen.token_ids:
        for request_id, event in engine.step():
            results[request_id].take(event)
    runner.steps.clear()
    asked, result = ask(
        engine, "a", fake_image(1, 100, 100), "b", fake_image(2, 100, 100), "c", request=make_request(5)
    )
    results[asked.request_id] = result
    drive(engine, results)

    of_images = [number for number, step in enumerate(runner.steps) if step in ("image", "encode")]
    assert [runner.steps[number] for number in of_images] == ["encode", "image"] * 4
    assert all(later - earlier > 1 for earlier, later in pairwise(of_images))
    assert seen.finished[0].usage.completion_tokens == 200 and result.finished[0].usage.completion_tokens == 5


def test_one_pass_per_adapter_and_images_take_turns() -> None:
    """A group of sequences that all wait for an image leaves no step empty."""
    engine, runner = engine_over(mixing="per_pass")
    asked = [ask(engine, "a", fake_image(number), "b") for number in range(3)]
    drive(engine, {request.request_id: result for request, result in asked})

    assert all(result.finished for _, result in asked) and "" not in runner.steps


def test_choices_share_the_image_and_a_preempted_sequence_recomputes_it() -> None:
    engine, runner = engine_over()
    result = answer(engine, "a", fake_image(1), "b", request=make_request(10, num_choices=3))
    assert len(result.text) == 3 and runner.num_encoded == 1

    alone = [answer(engine_over()[0], "a" * 10, fake_image(n), "b", request=make_request(60)).text for n in (1, 2)]
    engine, runner = engine_over(EngineSettings(prefix_cache=False), context=96, cache_tokens=110)
    asked = [ask(engine, "a" * 10, fake_image(number), "b", request=make_request(60)) for number in (1, 2)]
    drive(engine, {request.request_id: result for request, result in asked})
    assert engine.stats().num_preemptions > 0 and runner.num_encoded == 2
    assert [result.text for _, result in asked] == alone


def test_a_request_resumes_after_its_image() -> None:
    whole = answer(engine_over()[0], "a", fake_image(1), "b")
    engine, _ = engine_over()
    resume = Resume((ResumedChoice(0, tuple(whole.token_ids[0][:7])),))
    request, rest = ask(engine, "a", fake_image(1), "b", resume=resume)
    drive(engine, {request.request_id: rest})

    assert rest.token_ids[0] == whole.token_ids[0][7:]


@pytest.mark.parametrize("num_steps", range(1, 6))
def test_a_cancelled_request_leaves_no_part_of_its_image(num_steps: int) -> None:
    """Wherever it is cancelled; the next request with the image gets the same answer."""
    expected = answer(engine_over()[0], "a", fake_image(1), "b").text
    engine, _ = engine_over()
    request, _ = ask(engine, "a", fake_image(1), "b")
    for _ in range(num_steps):
        engine.step()
    engine.cancel(request.request_id)

    assert answer(engine, "a", fake_image(1), "b").text == expected


def test_a_runner_that_fails_to_encode_fails_one_request() -> None:
    engine, _ = engine_over(faults=FakeFaults(raise_at_encode=1))
    broken, failed = ask(engine, "a", fake_image(1), "b")
    other, result = ask(engine, "hello")
    drive(engine, {broken.request_id: failed, other.request_id: result})

    assert isinstance(failed.error, PluginFailed) and "encode" in failed.error.message
    assert result.finished and answer(engine, "a", fake_image(1), "b").finished


def test_an_embedding_that_is_none_names_the_runner() -> None:
    class Sized:
        nbytes = "many"

    for wrong, problem in ((None, "encode gave None"), (Sized(), "encode gave Sized whose nbytes is 'many'")):

        class Broken(FakeRunner):
            def encode(self, chunk: MediaChunk, given: Any = wrong) -> Any:
                return given

        engine = StepEngine(Broken(FakeOptions(image_tokens=_TOKENS)), EngineSettings(), {})
        result = answer(engine, "a", fake_image(1), "b")
        assert isinstance(result.error, PluginFailed)
        assert "Broken" in result.error.message and problem in result.error.message


def test_encoding_of_a_cancelled_request_is_aborted() -> None:
    """The next request does not wait for it."""

    class Slow(FakeRunner):
        begun = threading.Event()
        is_over = threading.Event()

        def encode(self, chunk: MediaChunk) -> NDArray[np.uint64]:
            usual, self.options = self.options, FakeOptions(image_tokens=_TOKENS, step_delay_s=600)
            self.begun.set()
            try:
                return super().encode(chunk)
            finally:
                self.options = usual
                self.is_over.set()

    runner = Slow(FakeOptions(image_tokens=_TOKENS))
    engine = StepEngine(runner, EngineSettings(), {})
    request, _ = ask(engine, "", fake_image(1), "b")

    def interrupt() -> None:
        runner.begun.wait()
        while not runner.is_over.wait(0.001):  # the flag is cleared when encoding begins
            engine.interrupt(request.request_id)

    leaving = threading.Thread(target=interrupt)
    leaving.start()
    while not runner.is_over.is_set():
        engine.step()
    leaving.join()
    engine.cancel(request.request_id)

    assert runner.num_encoded == 1 and engine.metrics().num_encoded_chunks == 0


def test_an_image_that_fails_beside_a_stream_sampled_on_the_device_fails_at_once() -> None:
    """Not only when the stream has ended: its tokens that are still on the device postpone the failure by a step."""
    prompt = prompt_with(engine_over()[0], "a", fake_image(1), "b")
    faults = FakeFaults(raise_at_token=int(prompt.chunks[0].token_ids[0]))
    engine, runner = engine_over(device_sampling=True, faults=faults)
    stream, seen = ask(engine, "hello", request=make_request(200, ignore_eos=True))
    results = {stream.request_id: seen}
    while not seen.token_ids:
        for request_id, event in engine.step():
            results[request_id].take(event)
    broken, failed = ask(engine, "a", fake_image(1), "b")
    results[broken.request_id] = failed
    drive(engine, results)

    assert isinstance(failed.error, PluginFailed) and runner.steps.count("image") <= 2
    assert seen.finished[0].usage.completion_tokens == 200


def test_embeddings_are_shared_within_a_namespace_only() -> None:
    """As cached prefixes are: the time of an answer must not tell which images others have sent."""
    engine, runner = engine_over()
    for namespace in ("ann", "bob", "ann", "bob"):
        answer(
            engine, f"{namespace} {runner.num_steps}", fake_image(1), "b", request=make_request(3, namespace=namespace)
        )

    assert runner.num_encoded == 2


def test_saved_states_hold_images(tmp_path: object) -> None:
    """What the runner saves and loads is found by the pseudo-tokens."""
    runner = FakeRunner(FakeOptions(image_tokens=_TOKENS))
    prompt = prompt_with(engine_over()[0], "a", fake_image(1), "b")
    (placed,) = prompt.chunks
    sequence = runner.open_sequence()
    runner.forward([Span(sequence, 0, np.array(prompt.token_ids[: placed.start], np.int32), "none")])
    media = MediaInput(placed.chunk, runner.encode(placed.chunk), placed.token_ids)
    runner.forward([Span(sequence, placed.start, media, "none")])
    loaded = runner.load(runner.save(sequence))

    assert runner.sequences[loaded] == runner.sequences[sequence] == prompt.token_ids[: placed.end]
    assert runner.truncate(loaded, placed.start + 3) == placed.start


def test_what_follows_an_image_sees_no_pseudo_tokens() -> None:
    """Penalties, log-probabilities and drafters."""
    seen: list[int] = []

    class Recorder:
        is_free, prior = True, 0.5

        def open(self, prompt: NDArray[np.int32], prediction: Sequence[int]) -> object:
            seen.append(int(prompt.min()))
            return object()

        def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Draft | None]:
            seen.extend(int(task.token_ids.min()) for task in tasks)
            return [Draft([97, 98]) for _ in tasks]

        def close(self, session: object) -> None: ...

        def shutdown(self) -> None: ...

    runner: Runner = FakeRunner(FakeOptions(image_tokens=_TOKENS))
    engine = StepEngine(runner, EngineSettings(), {}, drafters={"recorder": Recorder()})
    sampling = SamplingParams(temperature=0, repetition_penalty=1.5, presence_penalty=0.5, num_logprobs=3)
    drafted = answer(engine, "a", fake_image(1), "b", request=make_request(sampling=sampling))
    plain = answer(engine_over()[0], "a", fake_image(1), "b", request=make_request(sampling=sampling))

    assert drafted.text == plain.text and drafted.logprobs == plain.logprobs
    assert seen and min(seen) >= 0


def test_prompts_that_cannot_be_served_are_refused() -> None:
    engine, _ = engine_over(context=64)
    with pytest.raises(InvalidRequest, match="ends with an image"):
        bare = EncodedPrompt([97], prompt_with(engine, "", fake_image(1), "").chunks)
        engine.check(make_request(), bare.chunks[-1].end, bare.chunks)
    with pytest.raises(UnsupportedParameter, match="prompt_logprobs"):
        ask(engine, "a", fake_image(1), "b", request=make_request(num_prompt_logprobs=1))
    with pytest.raises(InvalidRequest, match=r"messages\.0: it has 4 bytes of pixels"):
        prompt_with(engine, "a", DecodedImage("", 2, 2, b"1234", param="messages.0"), "b")
    with pytest.raises(InvalidRequest, match="takes text only"):
        prompt_with(StepEngine(FakeRunner(), EngineSettings(), {}), "a", fake_image(1), "b")


def test_a_runner_that_gives_no_chunk_is_named() -> None:
    class Broken(FakeRunner):
        def prepare_image(self, image: DecodedImage) -> Sequence[Sequence[int] | MediaChunk]:
            return [[97]]

    engine = StepEngine(Broken(FakeOptions(image_tokens=_TOKENS)), EngineSettings(), {})
    with pytest.raises(PluginFailed, match="prepare_image gave no chunk"):
        prompt_with(engine, "a", fake_image(1), "b")


def test_text_and_image_prompts_never_match() -> None:
    """A text that a client could write has no ids in common with an image."""
    engine, _ = engine_over()
    answer(engine, "a", fake_image(1), "b")
    result = run(engine, [(make_request(), [97, ord("["), *prompt_of(1, _TOKENS), ord("]"), 98])])[0]

    assert result.summary is not None and result.summary.usage.cached_tokens == 2
