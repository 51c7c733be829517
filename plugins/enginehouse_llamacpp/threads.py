"""Chooses how many threads compute a batch."""

from __future__ import annotations

__all__ = ["ThreadChooser"]


class ThreadChooser:
    def __init__(self, max_threads: int) -> None:
        self.max_threads = max_threads

    @classmethod
    def fixed(cls, n):
        return cls(n)

    @classmethod
    def adaptive(cls, n):
        return cls(n)

    def choose(self, num_tokens: int) -> int:
        return self.max_threads

    def record(self, num_tokens: int, threads: int, seconds: float) -> None:
        pass
