"""The contract of drafter plugins, which propose tokens for core to verify (speculative decoding).

Core computes the proposed tokens in one forward pass after the last token, draws at each position exactly as it would
without them, and keeps those that match. A draw depends only on seed, position and logits, so a drafter changes the
speed, never the text. The draft length is core's choice as well (``engine/draft_length.py``): a drafter only proposes.

A drafter is bound to a model in the process that runs it, and used on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from enginehouse.contract.backend import Backend, ModelSource, Runner

__all__ = [
    "NUM_GRADES",
    "BoundDrafter",
    "Draft",
    "DraftContext",
    "DraftTask",
    "Drafter",
    "HeadDrafter",
    "HeadKeeper",
    "LayerBackend",
    "LayerDrafter",
]

NUM_GRADES = 8
"""Number of confidence levels of drafts: grades are 0 (least confident) to 7."""


@frozen(eq=False)
class DraftContext:
    """The model that a drafter is bound to.

    Attributes:
        runner: the model's runner. A drafter may open sequences of its own in it and must not change any others.
        slots: sequences that decode concurrently.
        open_second: opens, on this thread, the model of the drafter's ``source`` setting or the layers that a
            :class:`LayerDrafter` has chosen; the drafter closes it. None if there is neither.
        head_source: for a :class:`HeadDrafter`, its ``source`` setting; None if it is not set.
    """

    runner: Runner
    slots: int
    open_second: Callable[[], Runner] | None = None
    head_source: ModelSource | None = None


@frozen(eq=False)
class DraftTask:
    """A request for draft tokens for one sequence.

    Attributes:
        session: the result of :meth:`BoundDrafter.open` for this sequence.
        token_ids: (num_tokens,) int32, prompt and answer so far, 0 in place of images; read-only, valid during the
            call. It only grows from one call to the next, by any number of tokens.
        sequence: its handle in the model's runner, which holds all tokens but the last. A drafter that appends to it
            must truncate it to its previous length before returning.
        max_tokens: maximum number of useful tokens; at least 1.
    """

    session: Any
    token_ids: NDArray[np.int32]
    sequence: int
    max_tokens: int


@frozen(eq=False)
class Draft:
    """Proposed continuation of a sequence.

    Attributes:
        token_ids: at least one, in order.
        grade: confidence of the drafter, 0 to ``NUM_GRADES - 1``. Core measures the acceptance rate of each grade, so
            the only requirement is that equal grades mean equal confidence.
    """

    token_ids: Sequence[int]
    grade: int = 0


class BoundDrafter(Protocol):
    """A drafter bound to one model.

    Attributes:
        is_free: proposing costs almost nothing. Core then compares drafts with the generated text even while it does
            not use them, to detect when they begin to pay.
        prior: expected share of accepted tokens before anything is measured, between 0 and 1.

    Calls:
        open: for each sequence, when its prompt is computed; worker, engine thread; under a millisecond.
        propose: once per step with drafts; worker, engine thread; less than the step saves, as all sequences
            wait.
        close: at the end of each sequence; worker, engine thread; microseconds.
        shutdown: once, when the model is closed; worker, engine thread; seconds.
    """

    is_free: bool
    prior: float

    def open(self, prompt: NDArray[np.int32], prediction: Sequence[int]) -> Any | None:
        """Begin a sequence.

        Args:
            prompt: (num_prompt_tokens,) int32.
            prediction: tokens that the client expects as the answer; often empty.

        Returns:
            The session that tasks refer to; None if there will be nothing to propose.
        """
        ...

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Draft | None]:
        """Return one draft for each task, in order; None if there is none now."""
        ...

    def close(self, session: Any) -> None:
        """End a session: its sequence has ended."""
        ...

    def shutdown(self) -> None:
        """Release all resources: the model is being closed."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """A drafter for ``register_drafters``.

    Attributes:
        name: unique; models name it in ``drafters``.
        options: attrs class of its settings per model, besides its name.

    Calls:
        bind: once per load; worker, engine thread; as long as a second model needs.
    """

    name: str
    api_version: int
    options: type[Any]

    def bind(self, context: DraftContext, options: Any) -> BoundDrafter:
        """Bind the drafter to one model; called once while it loads, and may take as long as a second model needs.

        Raises:
            ModelLoadError: the drafter does not support this model; the message says why.
        """
        ...


@runtime_checkable
class LayerDrafter(Drafter, Protocol):
    """A drafter that uses the first layers of the model itself (self-speculation).

    If the backend is a :class:`LayerBackend`, ``DraftContext.open_second`` opens these layers, with the settings of the
    model; otherwise the runner may support exiting a forward pass after them.

    Calls:
        choose_layers: for each plan of a model; server, planning thread; microseconds.
    """

    def choose_layers(self, options: Any, num_layers: int) -> int:
        """Choose the number of draft layers; core refuses values below 1 and values of ``num_layers`` or more."""
        ...


@runtime_checkable
class LayerBackend(Backend, Protocol):
    """A backend that can open the first layers of a model as a model of their own, for drafting.

    For runners that cannot exit a forward pass early (``RunnerCapabilities.exit_layers``). ``options`` has the field
    ``num_layers: int | None = None``; ``estimate`` and ``open`` honour it, and None is all layers.

    Calls:
        count_layers: for each plan of a model with such a drafter; server, planning thread; a second.
    """

    def count_layers(self, source: ModelSource) -> int:
        """Return the model's number of layers, determined without the backend's library.

        Raises:
            ModelLoadError: the source cannot be read, or its first layers do not form a model of their own; says why.
        """
        ...


@runtime_checkable
class HeadDrafter(Drafter, Protocol):
    """A drafter that uses a draft head of the model: a layer that predicts further tokens from its hidden states.

    Its ``source`` setting names the files of the head instead of a second model; the model's own backend reads them.
    Without one it is the head in the model's own files.

    Attributes:
        takes_head: True; it distinguishes such a drafter from one with a second model.
    """

    takes_head: bool


@runtime_checkable
class HeadKeeper(Runner, Protocol):
    """A runner that drafts with a draft head of its model.

    The head reads the hidden states of the runner's own passes, so these never leave the process. From
    :meth:`open_head` on the runner keeps what the head needs of each position beside its keys and values: sequences
    that were forked, truncated or loaded are drafted for as if they had been computed at once. ``state_format`` then
    names the head as well. A runner with ``checkpoint`` truncation also keeps any length within the last pass of a
    sequence, if that gave logits for all tokens, and these are at most one more than ``max_tokens``.

    Calls:
        open_head: once per load, before the first sequence; worker, engine thread; seconds.
    """

    def open_head(self, source: ModelSource | None, *, max_tokens: int, min_probability: float) -> BoundDrafter:
        """Load a draft head for this model and return the drafter that uses it.

        It drafts greedily, and leaves the runner's sequences as they are.

        Args:
            source: the files of the head; None is the one in the model's own files.
            max_tokens: longest draft.
            min_probability: a draft ends before a token that the head considers less probable than this.

        Raises:
            ModelLoadError: there is no head, or it does not fit the model; the message names what differs.
        """
        ...
