"""The contract of logits processors, which modify a whole row of logits before a token is sampled from it.

They run right after the logit bias and before everything else, in the order of their names,
regardless of the order of steps that a request asks for: a token that a processor bans stays banned. A processor sees
only tokens and numbers, so it works on every backend. It must be deterministic for the same arguments, because a token
can be drawn again.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from enginehouse.contract.sampler import History

__all__ = ["LogitsProcessor", "ProcessorSession"]


@runtime_checkable
class ProcessorSession(Protocol):
    """The state of a processor for one sequence.

    Calls:
        process: for each token; worker, engine thread; microseconds, as all sequences wait.
    """

    def process(self, logits: NDArray[np.float32], history: History) -> None:
        """Change the row; called at most once per position.

        Args:
            logits: (vocab_size,) float32, changed in place: ``-inf`` bans a token; NaN and ``+inf`` are errors.
            history: the tokens before this position.
        """
        ...


@runtime_checkable
class LogitsProcessor(Protocol):
    """A logits processor for ``register_logits_processors``.

    Attributes:
        name: unique among processors and samplers; the key of its fields in ``SamplingParams.extensions``.
        request_fields: attrs class; each attribute is a top-level request field whose default means "off". Ranges are
            attrs validators; metadata ``description`` goes to the API document.

    Calls:
        create: for each request that sets a field, to check it: worker, intake thread; then for each choice:
            worker, engine thread; microseconds.
    """

    name: str
    api_version: int
    request_fields: type[Any]

    def create(self, fields: Any) -> ProcessorSession | None:
        """Create the session of one sequence, or None if ``fields`` (an instance of ``request_fields``) is off."""
        ...
