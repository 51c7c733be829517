"""Compressors for tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from enginehouse.contract.compressor import CompressionTask, CompressionTools, Range
from enginehouse.contract.hookspecs import API_VERSION


class Halving:
    """Keeps the beginning of what is free, as far as the budget goes; remembers the tasks."""

    name = "halving"
    api_version = API_VERSION
    is_budgeted = True
    is_idempotent = True
    needs_scores = False

    def __init__(self) -> None:
        self.tasks: list[CompressionTask] = []

    def compress(self, task: CompressionTask, tools: CompressionTools) -> Sequence[Sequence[Range]]:
        self.tasks.append(task)
        num_left = task.max_tokens
        kept: list[list[Range]] = []
        for text in task.texts:
            num_left -= sum(tools.count_tokens([text.text[start:end] for start, end in text.protected]))
        for text in task.texts:
            kept.append([])
            for start, end in text.free():
                size = min(end - start, max(0, num_left))
                kept[-1] += [(start, start + size)] if size else []
                num_left -= size
        return kept


class Unbudgeted(Halving):
    """Takes out all that it may."""

    name = "unbudgeted"
    is_budgeted = False

    def compress(self, task: CompressionTask, tools: CompressionTools) -> Sequence[Sequence[Range]]:
        return [[] for _ in task.texts]


class Failing(Halving):
    """Fails."""

    name = "failing"

    def compress(self, task: CompressionTask, tools: CompressionTools) -> Sequence[Sequence[Range]]:
        raise RuntimeError("no idea")


class Gated(Halving):
    """Waits until it is let."""

    name = "gated"

    def __init__(self) -> None:
        super().__init__()
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def compress(self, task: CompressionTask, tools: CompressionTools) -> Sequence[Sequence[Range]]:
        self.has_begun.set()
        assert self.may_end.wait(20)
        return [[(0, len(text.text))] for text in task.texts]


class Confused(Halving):
    """Names ranges that there are not."""

    name = "confused"

    def compress(self, task: CompressionTask, tools: CompressionTools) -> Sequence[Sequence[Range]]:
        return [[(0, len(text.text) + 7)] for text in task.texts]


class Forgetful(Halving):
    """Says nothing about some of the texts."""

    name = "forgetful"

    def compress(self, task: CompressionTask, tools: CompressionTools) -> Sequence[Sequence[Range]]:
        return []


class Slow(Halving):
    """Asks the model again and again until it is stopped."""

    name = "slow"

    def __init__(self) -> None:
        super().__init__()
        self.has_begun, self.has_ended = threading.Event(), threading.Event()

    def compress(self, task: CompressionTask, tools: CompressionTools) -> Sequence[Sequence[Range]]:
        try:
            for number in range(100_000):
                tools.count_tokens([f"question {number}"])
                self.has_begun.set()
                time.sleep(0.001)
            return [[] for _ in task.texts]
        finally:
            self.has_ended.set()


class Scoring(Halving):
    """Keeps the lines that the model finds least probable; remembers what it was told."""

    name = "scoring"
    needs_scores = True

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[list[float]] = []
        self.ends: list[list[int]] = []

    def compress(self, task: CompressionTask, tools: CompressionTools) -> Sequence[Sequence[Range]]:
        scored = tools.score([(f"{task.question}\n", text.text) for text in task.texts])
        self.scores = [[token.logprob for token in tokens] for tokens in scored]
        self.ends = [[token.end for token in tokens] for tokens in scored]
        return super().compress(task, tools)
