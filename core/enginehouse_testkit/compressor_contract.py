"""Contract suite for compressor plugins, as a test class.

::

    class TestMyCompressor(CompressorContract):
        @pytest.fixture(scope="class")
        @classmethod
        def compressor(cls):
            return MyCompressor()
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from attrs import evolve

from enginehouse.contract.compressor import CompressibleText, CompressionTask, Compressor, Range, cut, joined
from enginehouse_testkit.contract.form import FormContract, loader_problem, problem_of
from enginehouse_testkit.fake_compression import FakeCompressionTools

__all__ = ["CompressorContract"]

_QUESTION = "Which code opens the blue door, and when must it not be used?"
_LINES = (
    "The harvest of 1987 was better than that of 1986, by 12.5 percent.",
    "You must not open the blue door unless Mrs. Okafor has said so.",
    "If the lamp is red, nobody enters; otherwise the code is 4711.",
    'She said "never again", and closed the book on page 212.',
    "Call `open_door(3, force=False)` or see https://example.org/doors?id=7&x=1 for more.",
    'The settings are {"door": "blue", "tries": 3, "alarm": false} at the moment.',
    "Rain fell on the hills for eleven days without a break.",
    "The painters of the old school preferred   green to any other colour.  ",
    "- first item: 3 apples, no pears",
    "| name | value |",
    "Don't touch it before 6:40, even if Dr. Vale can't wait.",
    "In the evening the band played, and few people listened.",
)
_MUST_STAY = re.compile(
    r"https?://\S+|`[^`]+`|\"[^\"]*\"|\{[^}]*\}|\d[\d.,:]*|\b(?:not|no|never|nobody|unless|if|without|otherwise|before|"
    r"can't|don't|false|except)\b|(?<=[\w,;] )(?-i:[A-Z])\w+",
    re.IGNORECASE,
)
"""Parts that a kept line must keep: numbers, negations, conditions, names, quotations, code, JSON and URLs."""

_ALPHABET = "ab Z.!?\n\t\r\"'`{}[]()<>|-_0129,;:\u2026\u3002\uff01\u00e9\u6f22\u00a0\u2028\u200b\U0001f600\x00\ud800"


def _document(num_lines: int, seed: int = 1) -> str:
    drawn = random.Random(seed)
    lines = [drawn.choice(_LINES) for _ in range(num_lines)]
    return "\n".join(line + ("\n" if drawn.random() < 0.3 else "") for line in lines)


def _strange_texts() -> Iterator[str]:
    """Yield edge cases: empty texts, white space, one long word, invalid Unicode, and many random texts."""
    yield from ("", " ", "\n\n\n", ".", "x" * 5_000, "a.b." * 1000, "{" * 300, '"' * 301, "```\ncode", "\r\n\r\n  \r\n")
    drawn = random.Random(7)
    for length in range(1, 120):
        yield "".join(drawn.choice(_ALPHABET) for _ in range(length))


def _task(*texts: str, share: float = 0.5, question: str = _QUESTION) -> CompressionTask:
    total = sum(FakeCompressionTools().count_tokens(texts))
    return CompressionTask(
        texts=tuple(CompressibleText(text=text) for text in texts), question=question, max_tokens=int(total * share)
    )


class CompressorContract(FormContract):
    """Tests every externally observable guarantee of :class:`enginehouse.contract.compressor.Compressor`."""

    @pytest.fixture(scope="class")
    @classmethod
    def form(cls, compressor: Compressor) -> str:
        """Reason for which the loader refuses the compressor."""
        return loader_problem("compressors", compressor) or problem_of(
            lambda: _problem_of_ranges(compressor, _task(_document(20), _document(3, seed=2)))
        )

    @staticmethod
    def _compress(compressor: Compressor, task: CompressionTask) -> tuple[list[list[Range]], list[str]]:
        """Return the kept ranges, after checking their form, and the remaining texts."""
        kept = [list(ranges) for ranges in compressor.compress(task, FakeCompressionTools())]
        problem = _problem_of(kept, task)
        assert not problem, problem
        return kept, [cut(text, ranges) for text, ranges in zip(task.texts, kept, strict=True)]

    def test_names_are_texts(self, compressor: Compressor) -> None:
        """The name is valid in settings and requests."""
        assert compressor.name.isidentifier()
        assert isinstance(compressor.api_version, int)
        assert {compressor.is_budgeted, compressor.is_idempotent, compressor.needs_scores} <= {True, False}

    @pytest.mark.parametrize("question", [_QUESTION, "", "?", "why " * 3000])
    def test_what_is_kept_is_byte_identical_and_never_longer(self, compressor: Compressor, question: str) -> None:
        """The result is a subsequence of the text for every question."""
        task = _task(_document(40), _document(7, seed=2), question=question)
        kept, left = self._compress(compressor, task)

        for text, ranges, short in zip(task.texts, kept, left, strict=True):
            assert short == "".join(text.text[start:end] for start, end in joined(ranges))
            assert len(short) <= len(text.text)

    def test_any_text_can_be_compressed(self, compressor: Compressor) -> None:
        """Invalid Unicode, texts without sentences and very long texts are compressed without error or additions."""
        for text in _strange_texts():
            _, (left,) = self._compress(compressor, _task(text))
            assert len(left) <= len(text)

    def test_protected_parts_are_not_touched(self, compressor: Compressor) -> None:
        """Protected ranges are kept, and count towards the budget."""
        for seed in range(5):
            text, drawn = _document(30, seed), random.Random(seed)
            bounds = sorted(drawn.sample(range(len(text)), 8))
            protected = tuple(zip(bounds[::2], bounds[1::2], strict=True))
            task = evolve(_task(text, share=0.3), texts=(CompressibleText(text=text, protected=protected),))
            _, (left,) = self._compress(compressor, task)

            position = 0
            for start, end in protected:
                position = left.index(text[start:end], position) + end - start

    def test_lines_that_are_kept_lose_nothing_that_matters(self, compressor: Compressor) -> None:
        """Whole lines may be removed. A kept line keeps its numbers, negations, names, quotations, code and so on."""
        for seed in range(10):
            task = _task(_document(60, seed), share=0.5)
            (ranges,), _ = self._compress(compressor, task)
            text = task.texts[0].text
            whole = joined(ranges)
            start = 0
            for line in text.splitlines(keepends=True):
                pieces = [text[max(a, start) : min(b, start + len(line))] for a, b in whole if a < start + len(line)]
                left = "".join(piece for piece in pieces if piece)
                if left.strip():
                    assert _MUST_STAY.findall(left) == _MUST_STAY.findall(line), f"{line!r} became {left!r}"
                start += len(line)

    def test_same_task_keeps_the_same(self, compressor: Compressor) -> None:
        """Results are deterministic and stateless, also on several threads at once."""
        tasks = [_task(_document(20 + size, size), share=0.4) for size in range(8)]
        first = [self._compress(compressor, task)[0] for task in tasks]

        def again(task: CompressionTask) -> Sequence[Sequence[Range]]:
            return self._compress(compressor, task)[0]

        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(again, reversed(tasks))) == first[::-1]

    @pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
    def test_compressing_again_takes_nothing_more(self, compressor: Compressor, share: float) -> None:
        """Compression is idempotent if the compressor promises it."""
        if not compressor.is_idempotent:
            pytest.skip("optional: the compressor does not promise it (is_idempotent)")
        task = _task(_document(50), _document(20, seed=3), share=share)
        _, left = self._compress(compressor, task)
        again = evolve(task, texts=tuple(CompressibleText(text=text) for text in left))

        assert self._compress(compressor, again)[1] == left

    @pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5, 0.9, 1.0])
    def test_budget_is_kept(self, compressor: Compressor, share: float) -> None:
        """The budget holds in tokens of the model; only protected ranges may exceed it."""
        if not compressor.is_budgeted:
            pytest.skip("optional: the compressor keeps to no budget (is_budgeted)")
        tools, text = FakeCompressionTools(), _document(60)
        for protected in ((), ((100, 400),)):
            compressible = CompressibleText(text=text, protected=protected)
            task = evolve(_task(text, share=share), texts=(compressible,))
            _, left = self._compress(compressor, task)

            assert sum(tools.count_tokens(left)) <= max(
                task.max_tokens,
                *tools.count_tokens([cut(compressible, ())]),
                *tools.count_tokens([_blank(compressible)]),
            )

    def test_half_of_the_budget_is_used(self, compressor: Compressor) -> None:
        """At least half of the available budget is used."""
        if not compressor.is_budgeted:
            pytest.skip("optional: the compressor keeps to no budget (is_budgeted)")
        task = _task(_document(80), share=0.5)
        _, left = self._compress(compressor, task)

        assert sum(FakeCompressionTools().count_tokens(left)) >= task.max_tokens / 2

    def test_what_fits_is_left_alone(self, compressor: Compressor) -> None:
        """A text within the budget is not shortened."""
        if not compressor.is_budgeted:
            pytest.skip("optional: the compressor keeps to no budget (is_budgeted)")
        task = _task(_document(20), share=1.0)

        assert self._compress(compressor, task)[1] == [task.texts[0].text]


def _problem_of_ranges(compressor: Compressor, task: CompressionTask) -> str:
    return _problem_of([list(ranges) for ranges in compressor.compress(task, FakeCompressionTools())], task)


def _problem_of(kept: Sequence[Sequence[Range]], task: CompressionTask) -> str:
    """Return what is wrong with the form of kept ranges; "" if nothing is."""
    if len(kept) != len(task.texts):
        return f"compress gave ranges of {len(kept)} texts; there are {len(task.texts)}"
    for text, ranges in zip(task.texts, kept, strict=True):
        bounds = [bound for range_ in ranges for bound in range_]
        if bounds != sorted(bounds):
            return f"compress gave ranges that are not in order, or overlap: {list(ranges)[:4]}"
        if not all(0 <= bound <= len(text.text) for bound in bounds):
            return f"compress gave a range outside its text of {len(text.text)} characters: {list(ranges)[-1]}"
    return ""


def _blank(text: CompressibleText) -> str:
    """Return the protected ranges with a line end around each: white space between ranges may stay."""
    return "\n".join(["", *(text.text[start:end] for start, end in text.protected), ""])
