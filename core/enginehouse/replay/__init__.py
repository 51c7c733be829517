"""Requests that outlive their worker: a stream goes on where it was when the process behind it died.

The pipeline submits to :class:`Replays` instead of to a model's engine. ``transcript`` knows how far a request has
come, ``generation`` is what the client's side reads while workers come and go, ``home`` keeps the requests of one
model together, ``probation`` finds the one request that kills workers, if there is one, and ``poison`` knows it again.
:func:`ask` is for what is no request: tokens of a text, texts of tokens.

A worker's engine does the work: it is given the prompt and everything that was told of the answer, and goes on
(:mod:`enginehouse.engine.resumption`). Knows nothing of HTTP, prompts or processes.
"""

from __future__ import annotations

from enginehouse.replay.questions import ask
from enginehouse.replay.replays import Replays

__all__ = ["Replays", "ask"]
