"""Contract suite for runners that take images or recordings, as a test class.

::

    class TestMyImages(MediaContract):
        @pytest.fixture(scope="class")
        @classmethod
        def model(cls):
            return ModelUnderTest(backend=MyBackend(), source=ModelSource("seeing"), options=MyOptions(context=256))

For recordings, the fixture ``image_pair`` gives two of them. The model may have random weights, but its logits must
depend on the pixels or samples by ``min_image_difference``. A small cache finds more: the random walk then makes the
runner move, swap out and drop what it holds.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, cast

import attrs
import numpy as np
import pytest
from attrs import define, field

from enginehouse.contract.backend import CutPlanner, Span, StateKeeper
from enginehouse.contract.errors import CacheFull, InvalidRequest, InvalidSpan
from enginehouse.contract.media import AudioRunner, DecodedImage, MediaChunk, MediaInput, MediaRunner, pseudo_tokens
from enginehouse.contract.types import DecodedMedia
from enginehouse_testkit.contract.base import ContractBase
from enginehouse_testkit.contract.driver import Rows, RunnerDriver, largest_difference

__all__ = ["ImageDriver", "MediaContract", "Prompt", "random_image"]

Prompt = Sequence[int | DecodedMedia]
"""Token ids, and images or recordings."""


def random_image(seed: int, width: int = 64, height: int = 64) -> DecodedImage:
    """Return an image of random pixels."""
    rgb = np.random.default_rng(seed).integers(0, 256, 3 * width * height).astype(np.uint8).tobytes()
    return DecodedImage(hashlib.sha256(rgb).hexdigest(), width, height, rgb)


@define
class ImageDriver:
    """Appends prompts with images to the sequences of a driver."""

    driver: RunnerDriver
    prepared: dict[str, list[Sequence[int] | MediaChunk]] = field(factory=dict)

    @property
    def runner(self) -> MediaRunner:
        """The runner, which takes images or recordings."""
        runner = self.driver.runner
        assert runner.capabilities.media and isinstance(runner, MediaRunner)
        return cast(MediaRunner, runner)

    def prepare(self, media: DecodedMedia) -> Sequence[Sequence[int] | MediaChunk]:
        """Return the tokens and chunks of an image or a recording as the runner gives them."""
        runner = self.runner
        assert media.kind in self.driver.runner.capabilities.media
        if isinstance(media, DecodedImage):
            return runner.prepare_image(media)
        assert isinstance(runner, AudioRunner) and media.rate == runner.audio_rate
        return runner.prepare_audio(media)

    def parts(self, image: DecodedMedia) -> list[Sequence[int] | MediaChunk]:
        """Return the tokens and chunks of an image; chunks have their keys."""
        if image.digest not in self.prepared:
            self.prepared[image.digest] = [
                attrs.evolve(part, key=f"{image.digest} {number}") if isinstance(part, MediaChunk) else part
                for number, part in enumerate(self.prepare(image))
            ]
        return self.prepared[image.digest]

    def chunk(self, image: DecodedMedia) -> MediaChunk:
        """Return the first chunk of an image."""
        return next(part for part in self.parts(image) if isinstance(part, MediaChunk))

    def span(self, sequence: int, chunk: MediaChunk) -> Span:
        """Return a span of a chunk, encoded now."""
        media = MediaInput(chunk, self.runner.encode(chunk), pseudo_tokens(chunk.key, chunk.num_tokens, chunk.kind))
        return Span(sequence, self.driver.runner.length(sequence), media, "none")

    def num_tokens(self, prompt: Prompt) -> int:
        """Return the length of a prompt in tokens."""
        return sum(
            1
            if isinstance(item, int)
            else sum(part.num_tokens if isinstance(part, MediaChunk) else len(part) for part in self.parts(item))
            for item in prompt
        )

    def append(self, sequence: int, prompt: Prompt, chunk_tokens: int | None = None) -> Rows | None:
        """Append a prompt; return the last row, (1, vocab_size), or None if it ends with an image."""
        rows, text = None, list[int]()
        for item in (*prompt, None):
            if isinstance(item, int):
                text.append(item)
                continue
            if text:
                rows, text = self.driver.feed(sequence, text, chunk_tokens=chunk_tokens), []
            if item is not None:
                rows = None
                for part in self.parts(item):
                    if isinstance(part, MediaChunk):
                        self.driver.forward(self.span(sequence, part))
                    elif part:
                        self.driver.feed(sequence, part, "none", chunk_tokens)
        return rows

    def alone(self, prompt: Prompt) -> Rows:
        """Return the last row of a prompt in a sequence of its own."""
        sequence = self.driver.open()
        rows = self.append(sequence, prompt)
        self.driver.free(sequence)
        assert rows is not None
        return rows


class MediaContract(ContractBase):
    """Tests every guarantee of :class:`enginehouse.contract.media.MediaRunner`.

    Attributes:
        min_image_difference: by which the logits after two images differ.
        num_image_steps: steps of the random walk.
    """

    min_image_difference: ClassVar[float] = 0.01
    num_image_steps: ClassVar[int] = 300

    @pytest.fixture(scope="class")
    @classmethod
    def image_pair(cls) -> tuple[DecodedMedia, DecodedMedia]:
        """Two images of one size; override it for a model that cannot take them, or that takes recordings."""
        return random_image(1), random_image(2)

    @pytest.fixture
    def images(self, driver: RunnerDriver) -> ImageDriver:
        """Appends prompts with images."""
        return ImageDriver(driver)

    @pytest.fixture
    def text(self, prompts: list[list[int]]) -> list[int]:
        """Five tokens."""
        return prompts[0][:5]

    def test_every_pixel_counts(
        self, images: ImageDriver, image_pair: tuple[DecodedMedia, DecodedMedia], text: list[int]
    ) -> None:
        """Another image, the same one twice, and one without text before it give other logits."""
        first, second = image_pair
        rows = [images.alone([*text, *shown, text[0]]) for shown in ([first], [second], [first, first], [])]
        rows.append(images.alone([first, text[0]]))
        for number, row in enumerate(rows):
            for other in rows[:number]:
                assert largest_difference(row, other) > self.min_image_difference, f"prompt {number} has no effect"

    def test_logits_do_not_depend_on_the_way(
        self, images: ImageDriver, image_pair: tuple[DecodedMedia, DecodedMedia], text: list[int]
    ) -> None:
        """In other chunks, beside others, in a fork, after a cut, and with an embedding computed before."""
        driver, (first, second) = images.driver, image_pair
        prompt: Prompt = [*text, first, *text[:3], second, text[0]]
        expected, capabilities = images.alone(prompt), driver.runner.capabilities
        for size in (1, 3):
            rows = images.append(driver.open(), prompt, size)
            assert rows is not None
            self.assert_same(rows, expected, capabilities, f"text in chunks of {size} around images")
        beside, sequence = driver.open(), driver.open()
        for item in prompt[:-1]:
            images.append(beside, [second, text[1]] if not isinstance(item, int) else [text[2]])
            images.append(sequence, [item])
        rows = driver.forward(driver.span(beside, text[:1]), driver.span(sequence, text[:1]))[1:]
        self.assert_same(rows, expected, capabilities, "beside a sequence with other images")
        driver.free(beside)
        self._test_fork_and_cut(images, sequence, prompt, expected)

    def _test_fork_and_cut(self, images: ImageDriver, sequence: int, prompt: Prompt, expected: Rows) -> None:
        """``sequence`` holds ``prompt``; each item of it is once the place of a fork and of a cut."""
        driver, capabilities = images.driver, images.driver.runner.capabilities
        for count in range(len(prompt) - 1, 0, -1):
            length = images.num_tokens(prompt[:count])
            if capabilities.fork != "none":
                forked, shared = driver.fork(sequence, length)
                if shared == length:
                    rows = images.append(forked, prompt[count:])
                    assert rows is not None
                    self.assert_same(rows, expected, capabilities, f"a fork after {length} tokens")
                driver.free(forked)
            if driver.runner.truncate(sequence, length) != length:
                break
            rows = images.append(sequence, prompt[count:])
            assert rows is not None
            self.assert_same(rows, expected, capabilities, f"a cut after {length} tokens")

    def test_images_are_prepared_in_threads(
        self, images: ImageDriver, image_pair: tuple[DecodedMedia, DecodedMedia]
    ) -> None:
        """Several at once, with the same runs each time; the pixels reach the right one."""
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(images.prepare, image_pair * 4))
        for number, runs in enumerate(found):
            expected = images.parts(image_pair[number % 2])
            assert len(runs) == len(expected)
            for part, other in zip(runs, expected, strict=True):
                if isinstance(part, MediaChunk) and isinstance(other, MediaChunk):
                    assert (part.num_tokens, part.num_positions) == (other.num_tokens, other.num_positions)
                    left, right = (np.asarray(images.runner.encode(one)) for one in (part, other))
                    assert np.array_equal(left, right), "an embedding is another one each time"
                else:
                    assert list(cast("Sequence[int]", part)) == list(cast("Sequence[int]", other))

    def test_an_image_takes_its_tokens(
        self, images: ImageDriver, image_pair: tuple[DecodedMedia, DecodedMedia], text: list[int]
    ) -> None:
        """Lengths and free positions count tokens."""
        runner, sequence = images.driver.runner, images.driver.open()
        images.append(sequence, text)
        free_tokens = runner.free_tokens()
        prompt: Prompt = [image_pair[0], text[0]]
        images.append(sequence, prompt)

        assert runner.length(sequence) == len(text) + images.num_tokens(prompt)
        assert free_tokens - runner.free_tokens() == images.num_tokens(prompt)

    def test_a_cut_inside_an_image_drops_it(
        self, images: ImageDriver, image_pair: tuple[DecodedMedia, DecodedMedia], text: list[int]
    ) -> None:
        """Cuts and forks keep what is before its chunk, or less."""
        driver, runner = images.driver, images.driver.runner
        chunk, sequence = images.chunk(image_pair[0]), driver.open()
        if chunk.num_tokens < 2:
            pytest.skip("a chunk has one token; it cannot be cut")
        images.append(sequence, text)
        driver.forward(images.span(sequence, chunk))
        images.append(sequence, text)
        start = len(text)
        for length in (start + 1, start + chunk.num_tokens - 1):
            if isinstance(runner, CutPlanner):
                assert runner.kept_length(sequence, length) in (start, 0)
            if runner.capabilities.fork != "none":
                forked, shared = driver.fork(sequence, length)
                assert shared == runner.length(forked) and shared in (start, 0)
                driver.free(forked)
        kept = runner.truncate(sequence, start + 1)
        rows = images.append(sequence, [*text[kept:], text[1]])

        assert kept in (start, 0) and rows is not None
        self.assert_same(rows, images.alone([*text, text[1]]), runner.capabilities, "after a cut inside an image")

    def test_wrong_spans_change_nothing(
        self, images: ImageDriver, image_pair: tuple[DecodedMedia, DecodedMedia], text: list[int]
    ) -> None:
        """A chunk beside other spans, with logits, or at another place; pixels of another number."""
        driver, runner = images.driver, images.driver.runner
        sequence, other = driver.open(), driver.open()
        span = images.span(sequence, images.chunk(image_pair[0]))
        beside, free_tokens = driver.span(other, text), runner.free_tokens()
        wrong = [(span, beside), (beside, span), (attrs.evolve(span, outputs="last"),), (attrs.evolve(span, start=1),)]
        for spans in wrong:
            with pytest.raises(InvalidSpan):
                runner.forward(spans)
        with pytest.raises(InvalidRequest):
            images.prepare(image_pair[0].with_data(b"too short"))

        assert (runner.length(sequence), runner.length(other), runner.free_tokens()) == (0, 0, free_tokens)

    def test_an_image_that_does_not_fit_is_left_out(
        self, images: ImageDriver, image_pair: tuple[DecodedMedia, DecodedMedia], text: list[int]
    ) -> None:
        """CacheFull changes nothing; the image fits when there is room."""
        driver, runner = images.driver, images.driver.runner
        if runner.capabilities.cache_tokens > self.max_fill_tokens:
            pytest.skip(f"the cache has more than {self.max_fill_tokens} tokens; give the model a smaller one")
        chunk, sequence, filling = images.chunk(image_pair[0]), driver.open(), list[int]()
        images.append(sequence, text)
        while (room := runner.free_tokens() - chunk.num_tokens + 1) > 0:
            filling.append(driver.open())
            count = min(room, runner.capabilities.max_context, runner.capabilities.max_batch_tokens)
            driver.feed(filling[-1], text[:1] * count, "none")
        free_tokens, span = runner.free_tokens(), images.span(sequence, chunk)
        with pytest.raises(CacheFull):
            runner.forward([span])
        assert (runner.length(sequence), runner.free_tokens()) == (len(text), free_tokens)
        for one in filling:
            driver.free(one)
        rows = images.append(sequence, [image_pair[0], text[0]])

        assert rows is not None
        expected = images.alone([*text, image_pair[0], text[0]])
        self.assert_same(rows, expected, runner.capabilities, "after a full cache")

    def test_random_steps(
        self, images: ImageDriver, image_pair: tuple[DecodedMedia, DecodedMedia], text: list[int]
    ) -> None:
        """Text, images, forks, cuts and saved states in any order: each sequence equals its own prompt alone."""
        driver, randomness = images.driver, random.Random(20)
        capabilities = driver.runner.capabilities
        longest = max(images.num_tokens([image]) for image in image_pair) + 2
        limit = min(capabilities.max_context - 1, 5 * longest)
        held: dict[int, list[int | DecodedMedia]] = {}
        for _ in range(self.num_image_steps):
            if not held or (len(held) < min(capabilities.max_sequences - 2, 5) and randomness.random() < 0.2):
                held[driver.open()] = []
            chosen = randomness.choice(list(held))
            is_full = driver.runner.free_tokens() < 2 * limit
            if is_full or images.num_tokens(held[chosen]) + longest > limit:
                driver.free(chosen)
                del held[chosen]
                continue
            action = randomness.random()
            if action < 0.35 and held[chosen]:
                self._fork_or_cut(images, held, chosen, randomness)
            elif action < 0.55:
                held[chosen].append(randomness.choice(image_pair))
                images.append(chosen, held[chosen][-1:])
            else:
                held[chosen] += [randomness.choice(text) for _ in range(randomness.randint(1, 3))]
                added = images.num_tokens(held[chosen]) - driver.runner.length(chosen)
                rows = images.append(chosen, held[chosen][-added:])
                if randomness.random() < 0.3 and rows is not None:
                    self.assert_same(rows, images.alone(held[chosen]), capabilities, "after random steps")
        for sequence, prompt in held.items():
            rows = images.append(sequence, text[:1])
            assert rows is not None
            self.assert_same(rows, images.alone([*prompt, text[0]]), capabilities, "after random steps")

    def _fork_or_cut(
        self,
        images: ImageDriver,
        held: dict[int, list[int | DecodedMedia]],
        chosen: int,
        randomness: random.Random,
    ) -> None:
        """Fork, cut, or save and load a sequence; a runner that keeps less loses the sequence."""
        driver, runner = images.driver, images.driver.runner
        count = randomness.randint(1, len(held[chosen]))
        length = images.num_tokens(held[chosen][:count])
        action = randomness.choice(("fork", "cut", "save"))
        if action == "cut":
            if runner.truncate(chosen, length) == length:
                del held[chosen][count:]
            else:
                driver.free(chosen)
                del held[chosen]
        elif len(held) < min(runner.capabilities.max_sequences - 2, 5):
            if action == "save" and runner.capabilities.states:
                keeper = cast(StateKeeper, runner)
                held[driver.adopt(keeper.load(keeper.save(chosen)))] = list(held[chosen])
            elif action == "fork" and runner.capabilities.fork != "none":
                forked, shared = driver.fork(chosen, length)
                if shared == length:
                    held[forked] = held[chosen][:count]
                else:
                    driver.free(forked)
