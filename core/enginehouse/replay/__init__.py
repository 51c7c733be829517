"""Work that outlives its worker: a stream goes on where it was when the process behind it died.

The pipeline brings requests and questions to :class:`Replays` instead of to a model's engine. Both are ``work``.
``transcript`` knows how far a request has come, ``generation`` is what the client's side reads while workers come and
go, ``questions`` asks for tokens of a text, texts of tokens and pictures of an engine. ``model_work`` keeps the work of
one model together, ``quarantine`` finds what of it kills workers, if anything does, and ``culprits`` knows that again.

A worker's engine does the work: it is given the prompt and everything that was told of the answer, and goes on
(:mod:`enginehouse.engine.admission`). Knows nothing of HTTP, prompts or processes.
"""

from __future__ import annotations

from enginehouse.replay.replays import Replays

__all__ = ["Replays"]
