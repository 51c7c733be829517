"""A generation whose first batches may be read ahead of its reader. Used where models are tried."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from enginehouse.contract.backend import Generation
from enginehouse.contract.errors import EnginehouseError
from enginehouse.contract.types import CallDelta, Event, ReasoningDelta, TextDelta

__all__ = ["BegunGeneration", "num_tokens_of"]


def num_tokens_of(event: Event) -> int:
    """Return the number of tokens in an event; at least one for engines that do not report token ids."""
    if isinstance(event, TextDelta):
        return max(1, len(event.token_ids))
    return 1 if isinstance(event, ReasoningDelta | CallDelta) else 0


class BegunGeneration:
    """A generation whose first batches may have been read already. Implements ``Generation``.

    Args:
        shows_logprobs: the client asked for the log-probabilities, not only a probe.
        on_begun: called once, when the first batch has arrived.
        on_failed: called with the error if it occurs before the first batch.
        on_end: called when the generation has ended; possibly several times.

    Attributes:
        num_read_tokens: tokens of all choices in the batches that were held back.
    """

    def __init__(
        self,
        generation: Generation,
        *,
        shows_logprobs: bool,
        on_begun: Callable[[], None] = lambda: None,
        on_failed: Callable[[EnginehouseError], None] = lambda error: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._shows_logprobs = shows_logprobs
        self._generation = generation
        self._iterator = generation.__aiter__()
        self._held: list[Sequence[Event]] = []
        self.num_read_tokens = 0
        self._has_begun = False
        self._on_begun, self._on_failed, self._on_end = on_begun, on_failed, on_end

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens, as the generation reports it; some engines know it only at the end."""
        return self._generation.num_prompt_tokens

    @property
    def has_started(self) -> bool:
        """True if the request has left the queue; always true for engines that do not report it."""
        return getattr(self._generation, "has_started", True)

    @property
    def num_replays(self) -> int:
        """Number of times the request continued in another worker."""
        return getattr(self._generation, "num_replays", 0)

    @property
    def num_waiting_events(self) -> int:
        """Number of received but unread events; 0 for engines that do not report it, which produce events on demand."""
        return getattr(self._generation, "num_waiting_events", 0)

    async def read(self) -> Sequence[Event] | None:
        """Read and hold back one more batch; None at the end. Raises the errors of the generation."""
        batch = await self._next()
        if batch is not None:
            self._held.append(batch)
            self.num_read_tokens += sum(map(num_tokens_of, batch))
        return batch

    async def __aiter__(self) -> AsyncIterator[Sequence[Event]]:
        """Iterate over all batches, those held back first."""
        try:
            while self._held:
                yield self._shown(self._held.pop(0))
            while (batch := await self._next()) is not None:
                yield self._shown(batch)
        finally:
            self.cancel()

    async def _next(self) -> Sequence[Event] | None:
        try:
            batch = await anext(self._iterator, None)
        except EnginehouseError as error:
            if not self._has_begun:
                self._on_failed(error)
            raise
        if batch is not None and not self._has_begun:
            self._has_begun = True
            self._on_begun()
        return batch

    def _shown(self, batch: Sequence[Event]) -> Sequence[Event]:
        """Return the batch without log-probabilities that only the probe needed."""
        if self._shows_logprobs:
            return batch
        return [
            msgspec.structs.replace(event, logprobs=None) if isinstance(event, TextDelta) else event for event in batch
        ]

    def cancel(self) -> None:
        """Stop generating; idempotent."""
        self._generation.cancel()
        self._on_end()
