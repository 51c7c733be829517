"""Token ids of one sequence, for the sampling steps that look back.

Kept by the sampler, and only where a step asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from enginehouse.contract.sampler import History

__all__ = ["TokenHistory"]


class TokenHistory:
    """Prompt and answer so far.

    Args:
        prompt_token_ids: what it starts with.
        token_bytes: bytes of each id of the vocabulary.
    """

    def __init__(self, prompt_token_ids: Sequence[int] | NDArray[np.int32], token_bytes: Sequence[bytes]) -> None:
        prompt = np.asarray(prompt_token_ids, np.int32)
        self._buffer = np.empty(prompt.size + 256, np.int32)
        self._buffer[: prompt.size] = prompt
        self._length = self._num_prompt_tokens = prompt.size
        self._token_bytes = token_bytes

    def accept(self, token_id: int) -> None:
        """The sequence grew."""
        if self._length == self._buffer.size:
            self._buffer = np.concatenate([self._buffer, np.empty_like(self._buffer)])
        self._buffer[self._length] = token_id
        self._length += 1

    def view(self) -> History:
        """What steps see; valid until the next token."""
        token_ids = self._buffer[: self._length]
        token_ids.flags.writeable = False
        return History(token_ids, self._token_bytes, self._num_prompt_tokens)
