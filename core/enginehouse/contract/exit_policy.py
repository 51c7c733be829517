"""The contract of early exit: policies that say when a model's next token is sure enough to leave its layers early.

Early exit changes what a model writes. A runner that can be left between layers asks the bound policy behind some of
them about every token that it decodes; a token that leaves gets the logits of that layer, and the layers above take
their keys and values from its state there. Prompts run through all layers. The layer that a token left at comes back
with its row of logits, so what is reported is what happened.

A policy is bound to a model in the process that runs it, and asked on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from attrs import frozen

from enginehouse.contract.backend import ForwardOutput, Runner

__all__ = ["BoundExitPolicy", "ExitContext", "ExitOutput", "ExitPolicy", "ExitView", "LayerAccess"]


@frozen
class ExitContext:
    """The model that a policy is bound to.

    Attributes:
        num_layers: of the whole model.
        exit_layers: numbers of layers behind which the policy can be asked, rising.
    """

    num_layers: int
    exit_layers: tuple[int, ...]


class ExitView(Protocol):
    """What a policy may read behind one layer, for each token that has not left before.

    Arrays are float32, of the runner's own library and where its memory is; ``numpy.asarray`` reads those on the CPU
    without a copy. They are not to be changed, and valid during the call.
    """

    @property
    def layer(self) -> int:
        """How many layers have run."""
        ...

    @property
    def hidden(self) -> Any:
        """(num_rows, hidden_size), the states behind that layer."""
        ...

    @property
    def previous_hidden(self) -> Any:
        """(num_rows, hidden_size), the states before it."""
        ...

    def logits(self) -> Any:
        """(num_rows, vocab_size): the model's own output norm and projection of ``hidden``.

        Costs as much as at the end of a forward pass; a token that leaves here need not pay it a second time.
        """
        ...


class BoundExitPolicy(Protocol):
    """A policy at work for one model.

    Attributes:
        layers: numbers of layers behind which it is asked, some of ``ExitContext.exit_layers``. Every question costs
            time, also where the answer is no.
    """

    layers: tuple[int, ...]

    def leaves(self, view: ExitView) -> Any:
        """Which tokens leave now: (num_rows,) bool, any array that numpy reads."""
        ...


@runtime_checkable
class ExitPolicy(Protocol):
    """What ``register_exit_policies`` hands over.

    Attributes:
        name: unique; a model names it in ``exit_policy``.
        options: attrs class of what a model may set for it, beside its name.
    """

    name: str
    api_version: int
    options: type[Any]

    def bind(self, context: ExitContext, options: Any) -> BoundExitPolicy:
        """The policy for one model; called once while it loads.

        Raises:
            ModelLoadError: it cannot decide for this model; the message says why.
        """
        ...


@runtime_checkable
class ExitOutput(ForwardOutput, Protocol):
    """Rows of a runner that a policy is at work in.

    Attributes:
        exit_layers: for each row, how many layers its token ran through.
    """

    exit_layers: Sequence[int]


@runtime_checkable
class LayerAccess(Runner, Protocol):
    """A runner that can be left between layers.

    Its ``forward`` asks the policy about spans of one token with ``may_exit``, and returns :class:`ExitOutput` then.
    Positions that left early count as computed by all layers: later spans build on them.

    Attributes:
        num_layers: of the whole model.
    """

    num_layers: int

    def use_exit_policy(self, policy: BoundExitPolicy | None) -> None:
        """Ask this policy from the next forward pass on; None asks none.

        Raises:
            ModelLoadError: this model's layers cannot be left; the message says why.
        """
        ...
