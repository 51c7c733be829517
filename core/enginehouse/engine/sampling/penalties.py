"""Logit bias, penalties, and the token history that penalties use.

Called by the sampler, once per token. Bias and penalties write into the row of logits in place and touch only the
affected tokens, never the whole vocabulary (except for a forced token, which bans all others). Penalties that a request
orders after other steps (:class:`RowPenalty`) change a copy of the row.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.sampler import History
from enginehouse.engine.sampling.candidates import Head, LogitRow, Uniform


class TokenHistory:
    """Token ids of the prompt and of the generated tokens.

    Args:
        prompt_token_ids: initial content.
        token_bytes: bytes of each id of the vocabulary.
    """

    def __init__(self, prompt_token_ids: Sequence[int] | NDArray[np.int32], token_bytes: Sequence[bytes]) -> None:
        prompt = np.asarray(prompt_token_ids, np.int32)
        self._buffer = np.empty(prompt.size + 256, np.int32)
        self._buffer[: prompt.size] = prompt
        self._length = self._num_prompt_tokens = prompt.size
        self._token_bytes = token_bytes

    def accept(self, token_id: int) -> None:
        """Append a token."""
        if self._length == self._buffer.size:
            self._buffer = np.concatenate([self._buffer, np.empty_like(self._buffer)])
        self._buffer[self._length] = token_id
        self._length += 1

    def view(self) -> History:
        """Return a read-only view for steps; valid until the next token."""
        token_ids = self._buffer[: self._length]
        token_ids.flags.writeable = False
        return History(token_ids, self._token_bytes, self._num_prompt_tokens)


_BAN = -100.0
_FORCE = 100.0


class LogitBias:
    """Values added to the logits of some tokens; -100 or less bans a token, 100 or more forces it.

    If tokens are forced, only these can be sampled; among several of them, logits plus bias decide.
    """

    def __init__(self, bias: Mapping[int, float], vocab_size: int) -> None:
        """Raises InvalidRequest for ids outside the vocabulary."""
        bad = sorted(token_id for token_id in bias if not 0 <= token_id < vocab_size)
        if bad:
            names = ", ".join(map(str, bad))
            message = f"logit_bias has token ids outside the vocabulary of {vocab_size} tokens: {names}"
            raise InvalidRequest(message, "logit_bias")
        forced = {token_id: value for token_id, value in bias.items() if value >= _FORCE}
        kept = forced or bias
        self._token_ids = np.fromiter(kept.keys(), np.int64, len(kept))
        self._values = np.fromiter(kept.values(), np.float32, len(kept))
        self._values[self._values <= _BAN] = -np.inf
        self._forced = bool(forced)

    def apply(self, row: NDArray[np.float32]) -> None:
        """Change ``row``, (vocab_size,) float32, in place."""
        values = row[self._token_ids] + self._values
        if self._forced:
            row.fill(-np.inf)
        row[self._token_ids] = values


class Penalties:
    """Counts the tokens of one sequence and lowers the logits of tokens that it already contains.

    The repetition penalty divides positive and multiplies negative logits of tokens in the prompt or the generated text
    (Keskar et al., "CTRL", https://arxiv.org/abs/1909.05858, with the sign rule added by Hugging Face). Then ``presence
    + frequency * count`` is subtracted for generated tokens, where ``count`` is the number of times that the token was
    generated (OpenAI's definition).

    Args:
        prompt_token_ids: the prompt.
        num_last: number of tokens at the end of prompt and generated text that count; None is all of them.
    """

    def __init__(
        self,
        repetition: float,
        presence: float,
        frequency: float,
        prompt_token_ids: Sequence[int] | NDArray[np.int32] = (),
        num_last: int | None = None,
    ) -> None:
        self._repetition, self._presence, self._frequency = repetition, presence, frequency
        prompt = np.asarray(prompt_token_ids if repetition != 1.0 else (), np.int64)
        self._num_last = num_last
        if num_last is not None:
            prompt = prompt[max(0, prompt.size - num_last) :]
            self._last = deque(prompt.tolist())
            self._num_last_of_prompt = prompt.size
            self._num_uses = Counter(self._last)
        prompt = np.unique(prompt)
        self._num_seen = prompt.size
        self._token_ids = np.empty(prompt.size + 64, np.int64)
        self._token_ids[: prompt.size] = prompt
        self._counts = np.zeros(self._token_ids.size, np.float32)
        self._places = {token_id: place for place, token_id in enumerate(prompt.tolist())}

    def accept(self, token_id: int) -> None:
        """Count a generated token."""
        place = self._places.get(token_id)
        if place is None:
            place = self._add(token_id)
        self._counts[place] += 1
        if self._num_last is not None:
            self._last.append(token_id)
            self._num_uses[token_id] += 1
            if len(self._last) > self._num_last:
                self._forget(self._last.popleft())

    @property
    def seen(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The tokens to penalise, each once, and how often each was generated."""
        return self._token_ids[: self._num_seen], self._counts[: self._num_seen]

    def apply(self, row: NDArray[np.float32]) -> None:
        """Change ``row``, (vocab_size,) float32, in place."""
        token_ids, counts = self.seen
        if not token_ids.size:
            return
        logits = row[token_ids]
        if self._repetition != 1.0:
            factor = np.float32(self._repetition)
            logits = np.where(logits > 0, logits / factor, logits * factor)
        if self._presence or self._frequency:
            logits -= np.float32(self._presence) * (counts > 0) + np.float32(self._frequency) * counts
        row[token_ids] = logits

    def _forget(self, token_id: int) -> None:
        """Drop the oldest use of a token; its place is taken by the last one if it has no other use."""
        self._num_uses[token_id] -= 1
        place = self._places[token_id]
        if self._num_last_of_prompt:
            self._num_last_of_prompt -= 1
        else:
            self._counts[place] -= 1
        if self._num_uses[token_id]:
            return
        del self._num_uses[token_id], self._places[token_id]
        self._num_seen -= 1
        last = int(self._token_ids[self._num_seen])
        if last != token_id:
            self._token_ids[place], self._counts[place] = last, self._counts[self._num_seen]
            self._places[last] = place

    def _add(self, token_id: int) -> int:
        place = self._num_seen
        if place == self._token_ids.size:
            self._token_ids = np.concatenate([self._token_ids, np.empty_like(self._token_ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._token_ids[place] = token_id
        self._counts[place] = 0
        self._places[token_id] = place
        self._num_seen += 1
        return place


@frozen(eq=False)
class RowPenalty:
    """Penalties as a step, from core or a plugin. At the start of a chain the sampler calls ``change`` directly.

    Attributes:
        name: name of the step in requests.
        change: changes a row of logits, (vocab_size,) float32, in place.
    """

    name: str
    change: Callable[[NDArray[np.float32]], None]

    def apply(self, row: LogitRow, head: Head | None, number: Uniform) -> tuple[LogitRow, Head | None]:
        """See :class:`enginehouse.engine.sampling.candidates.Step`."""
        logits = row.logits / np.float32(row.temperature)  # penalties apply to the logits as scaled so far
        self.change(logits)
        if head is None:
            return LogitRow(logits, float(logits.max())), None
        changed = LogitRow(logits, float(logits[head.token_ids].max()))
        return changed, changed.head_of(head.token_ids)
