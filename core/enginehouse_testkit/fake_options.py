"""Settings of the fake backend, and the failures that it can be told to have."""

from __future__ import annotations

from typing import Any, Literal

from attrs import field, frozen, validators

__all__ = ["FakeFaults", "FakeOptions"]

_optional_positive = validators.optional(validators.ge(1))


@frozen(kw_only=True)
class FakeFaults:
    """What goes wrong, at which forward pass (1 is the first) or with which token among those computed; None: never.

    Attributes:
        raise_at_step: ``forward`` raises a RuntimeError, as a broken library would.
        nan_at_step: the first row of that pass holds NaN.
        hang_at_step: ``forward`` never returns and ignores ``abort``.
        abort_at_step: the process dies as by a failed assertion in C (SIGABRT).
        raise_at_token: as ``raise_at_step``, and so the following ones.
        nan_at_token: the last row of the sequence that holds the token is NaN.
        abort_at_text: the process dies as above while it tokenizes a text that holds this one.
        latch: a file. While it is there nothing goes wrong; what goes wrong makes it first, and so happens once.
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
    abort_at_text: str | None = None
    latch: str | None = None
    refuse_to_open: str | None = None


@frozen(kw_only=True)
class FakeOptions:
    """Settings of the fake backend.

    Attributes:
        context: longest sequence in tokens; None is 4096.
        slots: sequences that decode at once.
        max_sequences: handles open at once; None is four for each slot.
        max_batch_tokens: tokens in one forward pass.
        cache_tokens: KV positions in total; None is ``context`` for each slot.
        vocab_size: None is the smallest possible (about 290).
        window: attention reaches this many tokens back (sliding window; ``truncate`` is ``bounded``); None is all.
        window_slack: positions kept beyond the window, so that this many tokens can be taken back.
        fork: as in :class:`RunnerCapabilities`.
        mixed_batch: as in :class:`RunnerCapabilities`.
        states: sequences can be saved and loaded.
        num_layers: a pass may run any smaller number of so many layers; 0: it always runs all.
        device_sampling: the runner draws tokens itself, like one on a GPU.
        end_logit: raises (or lowers) the chance that an answer ends.
        step_delay_s: time that each forward pass takes.
        open_delay_s: time that loading takes.
        recommends: request fields that the model's own files recommend.
        infill_tokens: control tokens that mark prefix, suffix and middle of a text with a gap; empty: it fills none.
        faults: failures on purpose.
    """

    context: int | None = field(default=None, validator=_optional_positive)
    slots: int = field(default=8, validator=validators.ge(1))
    max_sequences: int | None = field(default=None, validator=_optional_positive)
    max_batch_tokens: int = field(default=512, validator=validators.ge(1))
    cache_tokens: int | None = field(default=None, validator=_optional_positive)
    vocab_size: int | None = field(default=None, validator=_optional_positive)
    window: int | None = field(default=None, validator=_optional_positive)
    window_slack: int = field(default=8, validator=validators.ge(0))
    fork: Literal["share", "copy", "none"] = "share"
    mixed_batch: bool = True
    states: bool = True
    num_layers: int = field(default=0, validator=validators.ge(0))
    device_sampling: bool = False
    end_logit: float = -2.5
    step_delay_s: float = field(default=0.0, validator=validators.ge(0.0))
    open_delay_s: float = field(default=0.0, validator=validators.ge(0.0))
    recommends: dict[str, Any] = field(factory=dict)
    infill_tokens: tuple[str, ...] = ()
    faults: FakeFaults = FakeFaults()
