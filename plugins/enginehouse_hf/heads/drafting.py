"""Drafts with a draft head: keeps its features and keys beside those of the model, and runs it token by token.

A head reads pairs: the feature of a position, which comes from the model's own states there, and the token after it.
The pair of position ``p`` gives the token at ``p + 2``. While the model computes positions, their features are written
to the memory of its keys and values, so that copies, cuts and saved sequences contain them. The head itself runs when
drafts are wanted: first over the pairs that it has not read yet, then over its own drafts, which are written after
these and overwritten later. So its keys are always those of the text, whatever happened to the sequence.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from attrs import define, field, frozen
from numpy.typing import NDArray
from torch import Tensor, nn

from enginehouse.contract.backend import RunnerCapabilities
from enginehouse.contract.drafter import NUM_GRADES, Draft, DraftTask
from enginehouse_hf.attention import KvMemory, Segment, Step
from enginehouse_hf.layer_access import states_of

__all__ = ["DraftHead", "HeadDrafts", "HeadLimits"]


class DraftHead(Protocol):
    """A loaded head. T are pairs of any sequences, packed as in a step.

    Attributes:
        watched: modules of the model whose output states, (T, hidden_size), features are made of.
        token_ids: (draft_vocab_size,) int64, the model's token id of each column of logits; None if these are the same.
        identity: what its features depend on besides the model.
    """

    @property
    def watched(self) -> Sequence[nn.Module]:
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
        """Return the feature of each token, (T, feature_size); ``states`` are those of ``watched``, in order."""
        ...

    def run(self, token_ids: Tensor, features: Tensor, positions: Tensor, step: Step) -> Tensor:
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


@frozen(kw_only=True)
class HeadLimits:
    """Limits of drafts.

    Attributes:
        max_tokens: longest draft.
        min_probability: a draft ends before a token that is less probable than this.
        max_pairs: pairs that the head reads before it drafts; a sequence with more is not drafted for yet.
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

    def take(self, token_id: int, probability: float, min_probability: float) -> bool:
        """Append a token unless it is too improbable; return True if another one is wanted."""
        if not probability >= min_probability:
            return False
        self.first_probability = self.first_probability or probability
        self.token_ids.append(token_id)
        return len(self.token_ids) < self.max_tokens

    def finished(self) -> Draft | None:
        """Return the draft, graded by the probability of its first token, or None if it is empty."""
        if not self.token_ids:
            return None
        return Draft(self.token_ids, min(NUM_GRADES - 1, int(self.first_probability * NUM_GRADES)))


@frozen
class _Pairs:
    """Pairs of one sequence for one pass: positions from ``start`` on, and the tokens after them."""

    sequence: int
    start: int
    token_ids: Sequence[int]


class HeadDrafts:
    """Implements :class:`enginehouse.contract.drafter.BoundDrafter` for the runner whose memory it shares.

    Args:
        head: the head; its attention uses the layer ``index`` of the memory.
        memory: keys and values of the runner; gets two more layers: the head's own, and the features.
        index: number of layers of the model.
        hidden_size: width of the model's states.
        limits: of drafts and passes.
        device: of the model.
    """

    is_free = False
    prior = 0.6

    def __init__(
        self,
        head: DraftHead,
        memory: KvMemory,
        *,
        index: int,
        hidden_size: int,
        limits: HeadLimits,
        device: torch.device,
    ) -> None:
        self._head, self._memory, self._limits, self._device = head, memory, limits, device
        self._features = index + 1
        self._num_read: dict[int, int] = {}  # pairs of each sequence whose keys the head has written
        self._seen: dict[int, Tensor] | None = None
        self._never = threading.Event()
        self._hooks = [
            module.register_forward_hook(partial(self._see, place)) for place, module in enumerate(head.watched)
        ]
        with torch.inference_mode():  # a first pass, so that the two layers of the memory have their shapes
            states = [torch.zeros(1, hidden_size, device=device)] * len(head.watched)
            self._write(head.features(states), Step(memory, [Segment(0, 0, 0, 1)], self._never))
            head.logits(self._run([_Pairs(0, 0, [0])]))

    # -- calls of the runner -----------------------------------------------------------------------

    @contextmanager
    def recording(self, step: Step) -> Iterator[None]:
        """Write the features of the tokens of a step, while all layers of the model run over them."""
        self._seen = {}
        try:
            yield
            with torch.inference_mode():
                self._write(self._head.features([self._seen[place] for place in range(len(self._hooks))]), step)
        finally:
            self._seen = None

    def cut(self, sequence: int, length: int) -> None:
        """Forget the pairs of tokens beyond a length."""
        self._num_read[sequence] = min(self._num_read.get(sequence, 0), max(0, length - 1))

    def share(self, source: int, sequence: int, length: int) -> None:
        """Note that a sequence begins with a copy of another one."""
        self._num_read[sequence] = min(self._num_read.get(source, 0), max(0, length - 1))

    def free(self, sequence: int) -> None:
        """Forget a sequence."""
        self._num_read.pop(sequence, None)

    def _see(self, place: int, _module: nn.Module, _arguments: Any, result: Any) -> None:
        if self._seen is not None:
            self._seen[place] = states_of(result)[0]

    def _write(self, features: Tensor, step: Step) -> None:
        """Write features, (T, feature_size), as keys of a layer whose values are empty."""
        step.append(self._features, features[None, None], features[None, None, :, :0])

    # -- calls of core -----------------------------------------------------------------------------

    def open(self, _: NDArray[np.int32], __: Sequence[int]) -> object:
        """No state is needed for a sequence beside that of the runner."""
        return self

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft | None]:
        """Draft with the head; None for sequences whose text it has not read yet."""
        drafts: list[_Growing | None] = []
        with torch.inference_mode():
            states, growing = self._read(tasks, drafts)
            while growing:
                growing, states = self._extend(growing, states)
        return [draft.finished() if draft is not None else None for draft in drafts]

    def close(self, _: object) -> None:
        """Nothing to release."""

    def shutdown(self) -> None:
        """Take the hooks out of the model."""
        for hook in self._hooks:
            hook.remove()

    def _read(self, tasks: Sequence[DraftTask], drafts: list[_Growing | None]) -> tuple[Tensor, list[_Growing]]:
        """Run the head over the pairs that it has not read.

        Args:
            drafts: filled with a draft for each task, None if its pairs are too many for this pass.

        Returns:
            States, (num_growing, feature_size), of the last pair of each draft, and the drafts.
        """
        room, pairs, rows, end = self._limits.max_pairs, [], [], 0
        for task in tasks:
            num_pairs = len(task.token_ids) - 1
            start = min(self._num_read.get(task.sequence, 0), max(0, num_pairs - 1))  # the last token may be another
            stop = min(num_pairs, start + room)
            if start < stop:
                pairs.append(_Pairs(task.sequence, start, task.token_ids[start + 1 : stop + 1].tolist()))
                self._num_read[task.sequence] = stop
                room, end = room - (stop - start), end + stop - start
            is_ready = 0 < num_pairs == stop
            if is_ready:
                rows.append(end - 1)
            most = min(task.max_tokens, self._limits.max_tokens, self._limits.max_context - num_pairs)
            drafts.append(_Growing(task, most) if is_ready else None)
        growing = [draft for draft in drafts if draft is not None]
        if not pairs:
            return torch.empty(0), growing
        return self._run(pairs)[rows], growing

    def _extend(self, growing: list[_Growing], states: Tensor) -> tuple[list[_Growing], Tensor]:
        """Add a token to each draft; return those that go on, and the states after their last tokens."""
        probabilities, columns = self._head.logits(states).float().softmax(-1).max(-1)
        ids = columns if self._head.token_ids is None else self._head.token_ids[columns]
        chosen = zip(growing, ids.tolist(), probabilities.tolist(), strict=True)
        goes_on = [draft.take(token_id, share, self._limits.min_probability) for draft, token_id, share in chosen]
        rows = [row for row, goes in enumerate(goes_on) if goes]
        growing = [growing[row] for row in rows]
        if not growing:
            return [], states
        pairs = [
            _Pairs(draft.task.sequence, len(draft.task.token_ids) - 2 + len(draft.token_ids), draft.token_ids[-1:])
            for draft in growing
        ]
        return growing, self._run(pairs, states[rows])

    def _run(self, pairs: Sequence[_Pairs], features: Tensor | None = None) -> Tensor:
        """Run the head over pairs; their features are those in the memory, unless given."""
        segments, token_ids, places, end = [], [], [], 0
        kept, _ = self._memory.known(self._features)
        for one in pairs:
            begin, end = end, end + len(one.token_ids)
            segments.append(Segment(one.sequence, one.start, begin, end))
            token_ids += one.token_ids
            places.append(torch.arange(one.start, segments[-1].stop, device=self._device))
        if features is None:
            features = torch.cat([kept[one.slot, 0, one.start : one.stop] for one in segments])
        ids = torch.tensor(token_ids, device=self._device)
        return self._head.run(ids, features, torch.cat(places), Step(self._memory, segments, self._never))
