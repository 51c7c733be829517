"""The methods keep the contract; whatever the text, in time that grows with it and no faster."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from enginehouse.contract.compressor import CompressibleText, CompressionTask, Compressor, cut
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import PluginsSettings
from enginehouse_compress.extractive import ExtractiveCompressor
from enginehouse_compress.lossless import LosslessCompressor
from enginehouse_compress.options import CompressOptions
from enginehouse_compress.scored import ScoredCompressor
from enginehouse_compress.semantic import SemanticCompressor
from enginehouse_testkit.compressor_contract import CompressorContract
from enginehouse_testkit.fake_compression import FakeCompressionTools

METHODS = [
    LosslessCompressor(),
    pytest.param(ExtractiveCompressor(CompressOptions()), marks=pytest.mark.compress),
    ScoredCompressor(CompressOptions()),
    SemanticCompressor(),
]
every_method = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)


class TestLossless(CompressorContract):
    @pytest.fixture(scope="class")
    @classmethod
    def compressor(cls) -> Compressor:
        return LosslessCompressor()


@pytest.mark.compress
class TestExtractive(CompressorContract):
    @pytest.fixture(scope="class")
    @classmethod
    def compressor(cls) -> Compressor:
        return ExtractiveCompressor(CompressOptions())


class TestScored(CompressorContract):
    @pytest.fixture(scope="class")
    @classmethod
    def compressor(cls) -> Compressor:
        return ScoredCompressor(CompressOptions())


class TestSemantic(CompressorContract):
    @pytest.fixture(scope="class")
    @classmethod
    def compressor(cls) -> Compressor:
        return SemanticCompressor()


@pytest.mark.compress
def test_plugin_registers_its_methods() -> None:
    registry = PluginRegistry.load(PluginsSettings(allow=("compress",)))

    assert list(registry.compressors) == ["lossless", "extractive", "scored", "semantic"]


PIECES = st.sampled_from(
    [
        "a",
        "Tom ",
        "12.5",
        " ",
        "  ",
        "\n",
        "\n\n",
        ". ",
        "! ",
        "? ",
        '"',
        "“",
        "”",
        "{",
        "}",
        "```\n",
        "- ",
        "not ",
        "\t",
    ]
)


@every_method
@settings(max_examples=150, deadline=None)
@given(
    text=st.lists(PIECES | st.text(max_size=5), max_size=60).map("".join),
    question=st.text(max_size=30),
    share=st.floats(0, 1),
    borders=st.lists(st.integers(0, 200), max_size=6, unique=True),
)
@example(text="a  a\t", question="", share=0.0, borders=[])
def test_any_text_stays_a_part_of_itself(
    method: Compressor, text: str, question: str, share: float, borders: list[int]
) -> None:
    """What is left is a subsequence with what was protected in it, and compressing it again changes nothing."""
    borders = sorted(border for border in borders if border <= len(text))
    protected = tuple(zip(borders[::2], borders[1::2], strict=False))
    tools = FakeCompressionTools()
    compressible = CompressibleText(text=text, protected=protected)
    (total,) = tools.count_tokens([text])
    task = CompressionTask(texts=(compressible,), question=question, max_tokens=int(share * total))

    (ranges,) = method.compress(task, tools)
    left = cut(compressible, ranges)

    rest = iter(text)
    assert all(char in rest for char in left)
    if method.is_budgeted:
        # What is protected stays, and may need something between its pieces.
        least = sum(tools.count_tokens([text[start:end] for start, end in protected])) + len(compressible.free())
        assert tools.count_tokens([left])[0] <= max(task.max_tokens, least)
    position = 0
    for start, end in protected:
        position = left.index(text[start:end], position) + end - start
    if not protected:
        again = CompressionTask(texts=(CompressibleText(text=left),), question=question, max_tokens=task.max_tokens)
        assert cut(again.texts[0], method.compress(again, tools)[0]) == left


@every_method
@pytest.mark.parametrize(
    "piece", [" ", "\n", ".", "a. ", '"', '". ', "{", "[\n", "a  b ", "\t \n", "。", "`", "x"], ids=repr
)
def test_time_grows_with_the_text_and_no_faster(method: Compressor, piece: str) -> None:
    """A text that is made to be slow takes about as long as any other of its length."""

    def seconds(length: int) -> float:
        text = (piece * length)[:length]
        task = CompressionTask(texts=(CompressibleText(text=text),), question="why?", max_tokens=length // 4)
        began = time.thread_time()
        method.compress(task, FakeCompressionTools())
        return time.thread_time() - began

    seconds(100)  # imports
    # A quadratic one needs 64 times as long, thus minutes. Other threads may still end what tests before began.
    assert min(seconds(64_000) for _ in range(1)) < 40 * max(seconds(8_000), 0.02)
