"""The contract of drafter plugins: guesses of what a model writes next, which core verifies.

Core computes the proposed tokens behind the last one in one forward pass, draws at each position exactly as it would
without them, and keeps those that agree. What is drawn depends on the seed, the position and the logits only, so a
drafter changes how soon a text is there, never which one. How many tokens are worth computing is core's choice as well
(``engine/draft_length.py``): a drafter only proposes.

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
    "LayerBackend",
    "LayerDrafter",
]

NUM_GRADES = 8
"""How many levels of confidence drafts have: grades are 0, the least sure, to 7."""


@frozen(eq=False)
class DraftContext:
    """The model that a drafter is bound to.

    Attributes:
        runner: of the model. A drafter may open sequences of its own in it; those of others it must leave alone.
        slots: sequences that decode at once.
        open_second: opens the model that the drafter's ``source`` names in the settings, or what a
            :class:`LayerDrafter` has chosen, on this thread; the drafter closes it. None where there is neither.
    """

    runner: Runner
    slots: int
    open_second: Callable[[], Runner] | None = None


@frozen(eq=False)
class DraftTask:
    """One sequence for which tokens are wanted.

    Attributes:
        session: what :meth:`BoundDrafter.open` gave for it.
        token_ids: (num_tokens,) int32, prompt and answer so far; not to be changed, valid during the call. From one
            call to the next it only grows, by any number of tokens.
        sequence: its handle in the model's runner, which holds all tokens but the last. A drafter that appends to it
            must truncate it to what it was before it returns.
        max_tokens: more are of no use; at least 1.
    """

    session: Any
    token_ids: NDArray[np.int32]
    sequence: int
    max_tokens: int


@frozen(eq=False)
class Draft:
    """What a sequence may go on with.

    Attributes:
        token_ids: at least one, the next one first.
        grade: how sure the drafter is, 0 to ``NUM_GRADES - 1``. Core learns for each grade how often its tokens agree,
            so only that equal grades mean equally sure matters.
    """

    token_ids: Sequence[int]
    grade: int = 0


class BoundDrafter(Protocol):
    """A drafter at work for one model.

    Attributes:
        is_free: proposing costs next to nothing. Core then compares drafts with what is written even while it does not
            use them, and so knows when they begin to pay.
        prior: share of its tokens that agree, as far as anybody can tell beforehand; in (0, 1).
    """

    is_free: bool
    prior: float

    def open(self, prompt: NDArray[np.int32], prediction: Sequence[int]) -> Any | None:
        """Begin a sequence.

        Args:
            prompt: (num_prompt_tokens,) int32.
            prediction: tokens that the client expects as the answer; often none.

        Returns:
            The session that tasks then name; None when there will be nothing to propose.
        """
        ...

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Draft | None]:
        """One draft for each task, in order; None where there is none now."""
        ...

    def close(self, session: Any) -> None:
        """The sequence has ended."""
        ...

    def shutdown(self) -> None:
        """The model is closed."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """What ``register_drafters`` hands over.

    Attributes:
        name: unique; models name it in ``drafters``.
        options: attrs class of what a model may set for it, beside its name.
    """

    name: str
    api_version: int
    options: type[Any]

    def bind(self, context: DraftContext, options: Any) -> BoundDrafter:
        """The drafter for one model; called once while it loads, may take as long as a second model needs.

        Raises:
            ModelLoadError: it cannot draft for this model; the message says why.
        """
        ...


@runtime_checkable
class LayerDrafter(Drafter, Protocol):
    """A drafter that writes ahead with the first layers of the model itself.

    Where the backend is a :class:`LayerBackend`, ``DraftContext.open_second`` opens these layers, with the settings of
    the model; elsewhere the runner may offer to leave a forward pass after them.
    """

    def choose_layers(self, options: Any, num_layers: int) -> int:
        """How many of a model's ``num_layers`` layers draft; core refuses what is not at least one of them, or all."""
        ...


@runtime_checkable
class LayerBackend(Backend, Protocol):
    """A backend that opens the first layers of a model as a model of their own: what drafters write ahead with.

    For runners that cannot leave a forward pass after some layers (``RunnerCapabilities.exit_layers``). ``options`` has
    the field ``num_layers: int | None = None``; ``estimate`` and ``open`` honour it, and None is all layers.
    """

    def count_layers(self, source: ModelSource) -> int:
        """How many layers the model has, found without the backend's library.

        Raises:
            ModelLoadError: the source cannot be read, or its first layers are no model of their own; says why.
        """
        ...
