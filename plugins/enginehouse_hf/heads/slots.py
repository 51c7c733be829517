"""Memory of a draft head in that of the plain runner: two more layers of its slots."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from enginehouse_hf.attention import KvMemory, Segment, Step
from enginehouse_hf.heads.drafting import DraftHead, Guesses, Pairs, guess
from enginehouse_hf.layer_access import states_of, watched_module

__all__ = ["SlotHeadMemory"]


class SlotHeadMemory:
    """Implements :class:`enginehouse_hf.heads.drafting.HeadMemory`.

    The pair of a position has the place of that position; features are the keys of a layer without values.

    Args:
        head: the head; its attention uses the layer after those of the model.
        model: the transformers model.
        memory: keys and values of the runner; gets two more layers.
    """

    runs_ahead = False

    def __init__(self, head: DraftHead, model: Any, memory: KvMemory) -> None:
        self._head, self._memory, self._device = head, memory, model.device
        config = model.config.get_text_config()
        self._index = int(config.num_hidden_layers) + 1
        self._seen: dict[int, Tensor] | None = None
        self._never = threading.Event()
        self._hooks = [
            watched_module(model, layer).register_forward_hook(partial(self._see, place))
            for place, layer in enumerate(head.reads)
        ]
        with torch.inference_mode():  # a first pass, so that the two layers of the memory have their shapes
            states = [torch.zeros(1, config.hidden_size, dtype=model.dtype, device=model.device)] * len(head.reads)
            self._write(head.features(states), Step(memory, [Segment(0, 0, 0, 1)], self._never))
            self.run([Pairs(0, 0, [0])])

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

    def run(self, pairs: Sequence[Pairs]) -> Guesses:
        """See :class:`enginehouse_hf.heads.drafting.HeadMemory`."""
        segments: list[Segment] = []
        for one in pairs:
            begin = segments[-1].end if segments else 0
            segments.append(Segment(one.sequence, one.start, begin, begin + len(one.token_ids)))
        kept, _ = self._memory.known(self._index)
        features = torch.cat([kept[one.slot, 0, one.start : one.stop] for one in segments])
        ids = torch.tensor([token_id for one in pairs for token_id in one.token_ids], device=self._device)
        return self._run(segments, ids, features)

    def extend(self, starts: Mapping[int, int], guesses: Guesses, num_tokens: int) -> Iterator[Guesses]:
        """See :class:`enginehouse_hf.heads.drafting.HeadMemory`."""
        for number in range(num_tokens):
            places = enumerate(starts.items())
            segments = [Segment(slot, start + number, index, index + 1) for index, (slot, start) in places]
            guesses = self._run(segments, guesses.found[0].long(), guesses.states)
            yield guesses

    def _run(self, segments: Sequence[Segment], token_ids: Tensor, features: Tensor) -> Guesses:
        positions = torch.cat([torch.arange(one.start, one.stop, device=self._device) for one in segments])
        states = self._head.run(token_ids, features, positions, Step(self._memory, segments, self._never))
        states = states[[one.end - 1 for one in segments]]
        return Guesses(states, guess(self._head, states))

    def drop_drafts(self, sequence: int, length: int) -> None:
        """Nothing to free: a slot has places for a whole context."""

    def close(self) -> None:
        """Take the hooks out of the model."""
        for hook in self._hooks:
            hook.remove()

    def _see(self, place: int, _module: nn.Module, _arguments: Any, result: Any) -> None:
        if self._seen is not None:
            self._seen[place] = states_of(result)[0]

    def _write(self, features: Tensor, step: Step) -> None:
        step.append(self._index, features[None, None], features[None, None, :, :0])
