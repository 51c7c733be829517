"""The contract of images and recordings on the fake runner."""

from __future__ import annotations

import pytest

from enginehouse.contract.backend import ModelSource
from enginehouse.contract.types import DecodedMedia
from enginehouse_testkit.contract.opening import ModelUnderTest
from enginehouse_testkit.fake_media import fake_audio
from enginehouse_testkit.fake_runner import FakeBackend, FakeOptions
from enginehouse_testkit.media_contract import MediaContract


class TestFakeMedia(MediaContract):
    """Hashes instead of weights: any mistake changes every later row."""

    max_logit_difference = 0.0

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls) -> ModelUnderTest:
        options = FakeOptions(context=64, cache_tokens=256, image_tokens=6)
        return ModelUnderTest(backend=FakeBackend(), source=ModelSource("fake"), options=options)


class TestFakeRecordings(TestFakeMedia):
    """A recording of more than a second has two chunks."""

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls) -> ModelUnderTest:
        options = FakeOptions(context=64, cache_tokens=256, audio_tokens=3)
        return ModelUnderTest(backend=FakeBackend(), source=ModelSource("fake"), options=options)

    @pytest.fixture(scope="class")
    @classmethod
    def image_pair(cls) -> tuple[DecodedMedia, DecodedMedia]:
        return fake_audio(1, 8100), fake_audio(2, 8100)
