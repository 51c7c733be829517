"""Drafts with a draft head: reads what the model has computed, then drafts token by token.

A head reads pairs: the feature of a position, which comes from the model's own states there, and the token after it.
The pair of position ``p`` gives the token at ``p + 2``. While the model computes positions, their features are written
to the memory of its keys and values, so that copies, cuts and saved sequences contain them. The head itself runs when
drafts are wanted: first over the pairs that it has not read yet, then over its own drafts. The last token of a text is
not in the model yet, so its pair is read again later, like those of drafts. So the head's keys are always those of the
text, whatever happened to the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Protocol

import numpy as np
import torch
from attrs import define, field, frozen
from numpy.typing import NDArray
from torch import Tensor

from enginehouse.contract.backend import RunnerCapabilities
from enginehouse.contract.drafter import NUM_GRADES, Draft, DraftTask
from enginehouse.contract.errors import CacheFull
from enginehouse_hf.attention import AnyStep

__all__ = ["DraftHead", "Guesses", "HeadDrafts", "HeadLimits", "HeadMemory", "Pairs", "guess"]

_MAX_NEW = 66
"""Pairs up to which a text counts as read: a pass with the longest draft adds no more."""


class DraftHead(Protocol):
    """A loaded head. T are pairs of any sequences, packed as in a step.

    Attributes:
        reads: layers of the model, counted from 0, after which it reads the states; None are those after the output
            norm.
        token_ids: (draft_vocab_size,) int64, the model's token id of each column of logits; None if these are the same.
        identity: what its features depend on besides the model.
    """

    @property
    def reads(self) -> Sequence[int | None]:
        """See above."""
        ...

    @property
    def token_ids(self) -> Tensor | None:
        """See above."""
        ...

    @property
    def identity(self) -> str:
        """See above."""
        ...

    def features(self, states: Sequence[Tensor]) -> Tensor:
        """Return the feature of each token, (T, feature_size).

        Args:
            states: (T, hidden_size) each, as ``reads`` lists them.
        """
        ...

    def run(self, token_ids: Tensor, features: Tensor, positions: Tensor, step: AnyStep) -> Tensor:
        """Run the head over pairs.

        Args:
            token_ids: (T,) int64, the token after each position.
            features: (T, feature_size).
            positions: (T,) int64.
            step: maps the pairs to places for the head's keys and values.

        Returns:
            States, (T, feature_size); in place of a feature for the token that the pair predicts.
        """
        ...

    def logits(self, states: Tensor) -> Tensor:
        """Return logits (T, draft_vocab_size) of states."""
        ...


@frozen
class Pairs:
    """Pairs of one sequence for one pass: positions from ``start`` on, and the tokens after them."""

    sequence: int
    start: int
    token_ids: Sequence[int]

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.start + len(self.token_ids)


@frozen(eq=False)
class Guesses:
    """The most probable token after the last pair of each of some sequences, on the device.

    Attributes:
        states: (n, feature_size), in place of the features of the guessed tokens; valid until the next pass.
        found: (2, n) int32, token ids of the model's vocabulary, and the bits of their probabilities as float32.
    """

    states: Tensor
    found: Tensor

    @staticmethod
    def read(several: Sequence[Guesses]) -> list[list[tuple[int, float]]]:
        """Return token ids and probabilities; waits for the device once."""
        token_ids, bits = torch.cat([guesses.found for guesses in several], 1).cpu().numpy()
        pairs = iter(zip(token_ids.tolist(), bits.view(np.float32).tolist(), strict=True))
        return [list(islice(pairs, len(guesses.states))) for guesses in several]


def guess(head: DraftHead, states: Tensor) -> Tensor:
    """Return the most probable tokens and their probabilities, (2, T) int32 as :attr:`Guesses.found`."""
    logits = head.logits(states).float()
    top, columns = logits.max(-1)
    probabilities = 1.0 / (logits - top[:, None]).exp_().sum(
        -1
    )  # several kernels, but softmax takes a row in one block
    token_ids = columns if head.token_ids is None else head.token_ids[columns]
    return torch.stack([token_ids.to(torch.int32), probabilities.view(torch.int32)])


class HeadMemory(Protocol):
    """Features, and the keys and values of a head, beside those of the model.

    Attributes:
        runs_ahead: passes return before they are done, so that reading a guess before the next pass costs more than
            a pass in vain.
    """

    runs_ahead: bool

    def run(self, pairs: Sequence[Pairs]) -> Guesses:
        """Run the head over pairs of distinct sequences, and guess the token after the last pair of each.

        Args:
            pairs: those of a sequence follow the ones that were run before.

        Raises:
            CacheFull: there is no place for pairs beyond the text; nothing was changed.
        """
        ...

    def extend(self, starts: Mapping[int, int], guesses: Guesses, num_tokens: int) -> Iterator[Guesses]:
        """Run the head over its last guesses, again and again; each pass is run when the next guesses are asked for.

        Args:
            starts: by sequence, in the order of ``guesses``, the position of the pair of the first guess.
            num_tokens: number of passes.

        Raises:
            CacheFull: there is no place for so many pairs; nothing was changed.
        """
        ...

    def drop_drafts(self, sequence: int, length: int) -> None:
        """Free the places of pairs beyond the ``length`` tokens that the model holds."""
        ...

    def close(self) -> None:
        """Stop writing features."""
        ...


@frozen(kw_only=True)
class HeadLimits:
    """Limits of drafts.

    Attributes:
        max_tokens: longest draft.
        min_probability: a draft ends before a token that is less probable than this.
        max_pairs: pairs of long texts that the head reads in one pass, without drafts.
        max_context: positions of a sequence.
    """

    max_tokens: int
    min_probability: float
    max_pairs: int
    max_context: int

    @classmethod
    def of(
        cls, capabilities: RunnerCapabilities, num_layers: int, max_tokens: int, min_probability: float
    ) -> HeadLimits:
        """Return limits under which reading costs no more than a chunk of a prompt: the head is one layer of many."""
        most = min(capabilities.max_batch_tokens, num_layers * capabilities.prefill_chunk_tokens)
        return cls(
            max_tokens=max_tokens,
            min_probability=min_probability,
            max_pairs=most,
            max_context=capabilities.max_context,
        )


@define(eq=False)
class _Growing:
    """Draft of one task."""

    task: DraftTask
    max_tokens: int
    token_ids: list[int] = field(factory=list)
    first_probability: float = 0.0
    has_ended: bool = False

    def take(self, token_id: int, probability: float, min_probability: float) -> None:
        """Append a token, unless it or one before it is too improbable."""
        self.has_ended |= not probability >= min_probability
        if not self.has_ended:
            self.first_probability = self.first_probability or probability
            self.token_ids.append(token_id)

    def finished(self) -> Draft | None:
        """Return the draft, graded by the probability of its first token, or None if it is empty."""
        if not self.token_ids:
            return None
        return Draft(self.token_ids, min(NUM_GRADES - 1, int(self.first_probability * NUM_GRADES)))


class HeadDrafts:
    """Implements :class:`enginehouse.contract.drafter.BoundDrafter`; its runner reports what happens to sequences.

    Args:
        head: the head.
        memory: of the same head.
        limits: of drafts and passes.
    """

    is_free = False
    prior = 0.6

    def __init__(self, head: DraftHead, memory: HeadMemory, limits: HeadLimits) -> None:
        self._head, self._memory, self._limits = head, memory, limits
        self._num_read: dict[int, int] = {}  # pairs of each sequence whose keys the head has written

    # -- calls of the runner -----------------------------------------------------------------------

    def cut(self, sequence: int, length: int) -> None:
        """Forget the pairs of tokens beyond a length."""
        self.share(sequence, sequence, length)

    def share(self, source: int, sequence: int, length: int) -> None:
        """Note that a sequence begins with ``length`` tokens of another one."""
        self._num_read[sequence] = min(self._num_read.get(source, 0), max(0, length - 1))

    def free(self, sequence: int) -> None:
        """Forget a sequence."""
        self._num_read.pop(sequence, None)

    # -- calls of core -----------------------------------------------------------------------------

    def open(self, _: NDArray[np.int32], __: Sequence[int]) -> object:
        """No state is needed for a sequence beside that of the runner."""
        return self

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft | None]:
        """Draft with the head; None for all while it reads long texts, so that the time of drafts is that of drafts."""
        drafts: list[_Growing | None] = [None] * len(tasks)
        most = min(_MAX_NEW, self._limits.max_pairs)
        unread = [task for task in tasks if self._num_unread(task) > most]
        try:
            with torch.inference_mode():
                if unread:
                    self._read(unread, self._limits.max_pairs)
                else:
                    drafts = [self._begin(task) for task in tasks]
                    growing = [draft for draft in drafts if draft is not None]
                    if growing:
                        self._draft(growing, self._read([draft.task for draft in growing], most * len(growing)))
        except CacheFull:
            pass  # not even the first tokens can be drafted
        finally:
            for task in tasks:
                self._memory.drop_drafts(task.sequence, len(task.token_ids) - 1)
        return [draft.finished() if draft is not None else None for draft in drafts]

    def close(self, _: object) -> None:
        """Nothing to release."""

    def shutdown(self) -> None:
        """Stop recording features."""
        self._memory.close()

    def _num_unread(self, task: DraftTask) -> int:
        return len(task.token_ids) - 1 - self._num_read.get(task.sequence, 0)

    def _begin(self, task: DraftTask) -> _Growing | None:
        """Return an empty draft; None if there is no pair yet, or no place for another."""
        num_pairs = len(task.token_ids) - 1
        most = min(task.max_tokens, self._limits.max_tokens, self._limits.max_context - num_pairs)
        return _Growing(task, most) if num_pairs and most > 0 else None

    def _read(self, tasks: Sequence[DraftTask], room: int) -> Guesses:
        """Run the head over at most ``room`` pairs that it has not read: of fewer tasks if these are not enough."""
        pairs = []
        for task in tasks:
            start, size = self._num_read.get(task.sequence, 0), min(self._num_unread(task), room)
            if size:
                pairs.append(Pairs(task.sequence, start, task.token_ids[start + 1 : start + size + 1].tolist()))
            room -= size
        guesses = self._memory.run(pairs)
        lengths = {task.sequence: len(task.token_ids) for task in tasks}
        for one in pairs:
            self._num_read[one.sequence] = min(one.stop, lengths[one.sequence] - 2)
        return guesses

    def _draft(self, growing: Sequence[_Growing], guesses: Guesses) -> None:
        """Add tokens to drafts, as many to each as the shortest may have, as long as they are probable enough.

        If the memory runs ahead, all passes are launched before a guess is read.
        """
        passes = [guesses]
        num_more = min(draft.max_tokens for draft in growing) - 1
        starts = {draft.task.sequence: len(draft.task.token_ids) - 1 for draft in growing}
        if not self._memory.runs_ahead and not self._take(growing, passes):
            return
        try:
            for more in self._memory.extend(starts, guesses, num_more) if num_more else ():
                passes.append(more)
                if not self._memory.runs_ahead and not self._take(growing, passes[-1:]):
                    return
        except CacheFull:
            pass  # the drafts end here
        if self._memory.runs_ahead:
            self._take(growing, passes)

    def _take(self, growing: Sequence[_Growing], passes: Sequence[Guesses]) -> bool:
        """Append guesses to their drafts, each up to the first that is too improbable; False if none goes on."""
        for found in Guesses.read(passes):
            for draft, (token_id, probability) in zip(growing, found, strict=True):
                draft.take(token_id, probability, self._limits.min_probability)
        return not all(draft.has_ended for draft in growing)
