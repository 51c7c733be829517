"""Settings of the fake backend, and its configurable faults."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from attrs import field, frozen, validators

__all__ = ["FakeFaults", "FakeOptions"]

_optional_positive = validators.optional(validators.ge(1))


@frozen(kw_only=True)
class FakeFaults:
    """Injected faults, by forward pass (1 is the first) or by a token among those computed; None: never.

    Attributes:
        raise_at_step: ``forward`` raises a RuntimeError, as a broken library would.
        nan_at_step: the first row of that pass contains NaN.
        hang_at_step: ``forward`` never returns and ignores ``abort``.
        abort_at_step: the process dies as by a failed assertion in C (SIGABRT).
        raise_at_token: like ``raise_at_step``; ``hang_at_token`` and ``abort_at_token`` likewise.
        nan_at_token: the last row of the sequence that contains the token is NaN.
        raise_at_encode: like ``raise_at_step``, when the image of that number is encoded; ``abort_at_encode`` likewise.
        abort_at_text: the process dies as above while it tokenizes a text that contains this one.
        latch: a file. While it exists no fault occurs; a fault creates it first, and so occurs once.
        refuse_to_open: text of the ModelLoadError that opening raises.
    """

    raise_at_step: int | None = None
    nan_at_step: int | None = None
    hang_at_step: int | None = None
    abort_at_step: int | None = None
    raise_at_token: int | None = None
    nan_at_token: int | None = None
    hang_at_token: int | None = None
    abort_at_token: int | None = None
    raise_at_encode: int | None = None
    abort_at_encode: int | None = None
    abort_at_text: str | None = None
    latch: str | None = None
    refuse_to_open: str | None = None

    def happen(self, step: int, inputs: Iterable[Sequence[int]]) -> None:
        """Raise, end the process or hang, if a fault is due at this pass over the token ids of ``inputs``."""
        computed = list(inputs)
        if self._is_due(step, computed, self.raise_at_step, self.raise_at_token):
            raise RuntimeError(f"the fake runner fails on purpose at step {step}")
        if self._is_due(step, computed, self.abort_at_step, self.abort_at_token):
            os.abort()
        if self._is_due(step, computed, self.hang_at_step, self.hang_at_token):
            threading.Event().wait()  # forever; abort() has no effect

    def happen_at_encode(self, number: int) -> None:
        """Raise or end the process, if a fault is due when an image is encoded."""
        if self._is_due(number, [], self.raise_at_encode, None):
            raise RuntimeError(f"the fake runner fails on purpose at image {number}")
        if self._is_due(number, [], self.abort_at_encode, None):
            os.abort()

    def _is_due(self, step: int, inputs: list[Sequence[int]], at_step: int | None, at_token: int | None) -> bool:
        if step != at_step and not any(at_token in token_ids for token_ids in inputs):
            return False
        if self.latch is None:
            return True
        try:
            os.close(os.open(self.latch, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


@frozen(kw_only=True)
class FakeOptions:
    """Settings of the fake backend.

    Attributes:
        context: maximum sequence length in tokens; None is 4096.
        slots: number of sequences that decode at once.
        max_sequences: number of handles open at once; None is four per slot.
        max_batch_tokens: maximum number of tokens in one forward pass.
        cache_tokens: KV positions in total; None is ``context`` per slot.
        vocab_size: None is the smallest possible (about 290).
        window: number of tokens that attention reaches back (sliding window; ``truncate`` is ``bounded``); None is all.
        num_checkpoints: the model carries a state that cannot be cut, and the runner keeps this many copies of it
            (``truncate`` is ``checkpoint``); 0: it does not. Excludes ``window``.
        window_slack: positions kept beyond the window, so that this many tokens can be removed again.
        fork: as in :class:`RunnerCapabilities`.
        mixed_batch: as in :class:`RunnerCapabilities`.
        states: sequences can be saved and loaded.
        num_layers: number of layers, of which a pass may run any smaller number; 0: it always runs all.
        draft_head: the runner drafts with a draft head; needs ``truncate`` of any length.
        device_sampling: the runner samples tokens itself, like one on a GPU.
        end_logit: raises (or lowers) the probability that an answer ends.
        step_delay_s: duration of each forward pass, and of encoding a chunk.
        open_delay_s: duration of loading.
        recommends: request fields that the model's own files recommend.
        infill_tokens: control tokens that mark prefix, suffix and middle of a text with a gap; empty: no infill.
        mixing: ``adapters`` of :class:`RunnerCapabilities`; see ``fake_adapters`` for their files.
        image_tokens: tokens of an image, see ``fake_media``; 0: the model takes none.
        audio_tokens: tokens of each second of a recording; 0: the model takes none.
        merged: adapters whose effect the model always has: file and scale of each.
        faults: injected faults.
    """

    context: int | None = field(default=None, validator=_optional_positive)
    slots: int = field(default=8, validator=validators.ge(1))
    max_sequences: int | None = field(default=None, validator=_optional_positive)
    max_batch_tokens: int = field(default=512, validator=validators.ge(1))
    cache_tokens: int | None = field(default=None, validator=_optional_positive)
    vocab_size: int | None = field(default=None, validator=_optional_positive)
    window: int | None = field(default=None, validator=_optional_positive)
    num_checkpoints: int = field(default=0, validator=validators.ge(0))
    window_slack: int = field(default=8, validator=validators.ge(0))
    fork: Literal["share", "copy", "none"] = "share"
    mixed_batch: bool = True
    states: bool = True
    num_layers: int = field(default=0, validator=validators.ge(0))
    draft_head: bool = False
    device_sampling: bool = False
    end_logit: float = -2.5
    step_delay_s: float = field(default=0.0, validator=validators.ge(0.0))
    open_delay_s: float = field(default=0.0, validator=validators.ge(0.0))
    recommends: dict[str, Any] = field(factory=dict)
    infill_tokens: tuple[str, ...] = ()
    mixing: Literal["none", "per_pass", "mixed"] = "none"
    image_tokens: int = field(default=0, validator=validators.ge(0))
    audio_tokens: int = field(default=0, validator=validators.ge(0))
    merged: dict[str, float] = field(factory=dict)
    faults: FakeFaults = FakeFaults()
