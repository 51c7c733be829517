"""The contract of early exit policies, which decide after which layer a token may exit the model.

Early exit changes the generated text. A runner that supports it asks the bound policy after some of its layers about
every token that it decodes; a token that exits gets the logits of that layer, and the layers above compute their keys
and values from its hidden state there. Prompts run through all layers. The exit layer of each token is returned with
its row of logits, so reported values are the actual ones.

A policy is bound to a model in the process that runs it, and called on the engine's thread.
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
        num_layers: number of layers of the whole model.
        exit_layers: numbers of layers after which the policy can be asked, ascending.
    """

    num_layers: int
    exit_layers: tuple[int, ...]


class ExitView(Protocol):
    """Model state after one layer, for each token that has not exited before. Provided by core.

    Arrays are float32, of the runner's own library and in its memory; ``numpy.asarray`` reads those on the CPU without
    a copy. They are read-only, and valid during the call.
    """

    @property
    def layer(self) -> int:
        """Number of layers that have run."""
        ...

    @property
    def hidden(self) -> Any:
        """(num_rows, hidden_size), the hidden states after that layer."""
        ...

    @property
    def previous_hidden(self) -> Any:
        """(num_rows, hidden_size), the hidden states before that layer."""
        ...

    def logits(self) -> Any:
        """(num_rows, vocab_size): the model's own output norm and projection of ``hidden``.

        Costs as much as at the end of a forward pass; a token that exits here need not pay for it twice.
        """
        ...


class BoundExitPolicy(Protocol):
    """A policy bound to one model.

    Attributes:
        layers: numbers of layers after which it is asked, a subset of ``ExitContext.exit_layers``. Every call costs
            time, even if no token exits.

    Calls:
        leaves: for each pass and each of its layers; worker, engine thread; less than a layer saves.
    """

    layers: tuple[int, ...]

    def leaves(self, view: ExitView) -> Any:
        """Return a mask of the tokens that exit now: (num_rows,) bool.

        Any array that numpy reads, or one of the runner's library in its memory: a GPU then computes it while the host
        does something else.
        """
        ...


@runtime_checkable
class ExitPolicy(Protocol):
    """An exit policy for ``register_exit_policies``.

    Attributes:
        name: unique; a model names it in ``exit_policy``.
        options: attrs class of its settings per model, besides its name.

    Calls:
        bind: once per load; worker, engine thread; seconds.
    """

    name: str
    api_version: int
    options: type[Any]

    def bind(self, context: ExitContext, options: Any) -> BoundExitPolicy:
        """Bind the policy to one model; called once while it loads.

        Raises:
            ModelLoadError: the policy does not support this model; the message says why.
        """
        ...


@runtime_checkable
class ExitOutput(ForwardOutput, Protocol):
    """Rows of logits from a runner with an active exit policy.

    Attributes:
        exit_layers: for each row, the number of layers that its token ran through. Reading it may wait for the device:
            core does so when it has read the rows or their tokens, which may be after the next ``forward``.
    """

    exit_layers: Sequence[int]


@runtime_checkable
class LayerAccess(Runner, Protocol):
    """A runner that supports exiting between layers.

    Its ``forward`` asks the policy about spans of one token with ``may_exit``, and then returns :class:`ExitOutput`.
    Positions that exited early count as computed by all layers: later spans build on them.

    Attributes:
        num_layers: number of layers of the whole model.

    Calls:
        use_exit_policy: once per load, and when a policy has failed; worker, engine thread; microseconds.
    """

    num_layers: int

    def use_exit_policy(self, policy: BoundExitPolicy | None) -> None:
        """Use this policy from the next forward pass on; None uses none.

        Raises:
            ModelLoadError: this model does not support early exit; the message says why.
        """
        ...
