"""The contract of poolers: models that turn whole texts into one row each, without generating.

A backend's ``open`` returns a :class:`Pooler` for a model whose task is ``embed``, ``rerank`` or ``classify``, where it
returns a runner or an engine for others. Core tokenizes texts, puts the ids of the layout around them, shortens or
refuses long ones, forms the passes, and turns rows into embeddings of the requested size or into scores. A pooler knows
token ids only: no requests, no queue, no texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from enginehouse.contract.types import ModelInfo

if TYPE_CHECKING:  # that module imports this one
    from enginehouse.contract.backend import Tokenizer

__all__ = ["Pooler", "PoolerCapabilities", "PoolerInput", "TextLayout"]


@frozen(eq=False)
class PoolerInput:
    """One text, or a pair of texts, as the model gets it.

    Attributes:
        token_ids: ``(num_tokens,)`` int32, the ids of the layout included; never empty.
        second_from: index from which the token type is 1; None: all tokens have type 0.
        num_prompt: number of leading tokens that pooling leaves out; not 0 only where ``include_prompt`` is False.
    """

    token_ids: NDArray[np.int32]
    second_from: int | None = None
    num_prompt: int = 0


@frozen
class TextLayout:
    """Token ids around the text, or the two texts, of one input, as the model was trained.

    Attributes:
        before: ids before the first text, such as ``[CLS]``.
        between: ids between the two texts of a pair, such as ``[SEP]``.
        after: ids at the end, such as ``[SEP]``.
        types: token type 1 marks the second text of a pair and the ids after it, as in BERT.
    """

    before: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    types: bool = False

    def num_added(self, *, is_pair: bool) -> int:
        """Return the number of ids that it adds to one text, or to two."""
        return len(self.before) + len(self.after) + (len(self.between) if is_pair else 0)

    def arrange(self, first: Sequence[int], second: Sequence[int] | None = None, *, num_prompt: int = 0) -> PoolerInput:
        """Return the input for the ids of one text, or of two.

        Args:
            num_prompt: number of leading ids of ``first`` that belong to a prompt which pooling leaves out; the ids
                before them are left out with them.
        """
        begin = [*self.before, *first]
        rest = [*self.after] if second is None else [*self.between, *second, *self.after]
        is_typed = second is not None and self.types
        return PoolerInput(
            np.array(begin + rest, np.int32),
            len(begin) + len(self.between) if is_typed else None,
            len(self.before) + num_prompt if num_prompt else 0,
        )


@frozen(kw_only=True)
class PoolerCapabilities:
    """Capabilities of a pooler, read from the model's own files; used by core and shown by ``/v1/models``.

    Attributes:
        max_tokens: longest input in tokens, the ids of the layout included.
        max_batch_tokens: most tokens of one pass; at least ``max_tokens``.
        max_batch_texts: most inputs of one pass.
        dimensions: width of a row: of an embedding, or the number of labels (for ``rerank`` usually 1).
        text: layout of one text.
        pair: layout of two texts; required for the task ``rerank``. Not used by core if the model has a chat template
            named ``rerank``: the texts are then written in place of its ``{query}`` and ``{document}``.
        pass_tokens: most tokens of a usual pass, so that other requests do not wait long for its end; core takes fewer
            if they take longer than a quarter of a second. An input that is longer has a pass of its own. None:
            ``max_batch_tokens``.
        pooling: how a row is made of token states, such as ``mean``, ``cls``, ``last``, ``rank``; core only shows it.
        is_normalized: the rows of a model for ``embed`` have length 1 when they leave the pooler.
        dimension_choices: smaller sizes to which an embedding may be cut (Matryoshka); empty: none.
        prompts: texts that are put before an input, by name, such as ``query``.
        default_prompt: name of the prompt of requests that name none; empty: no prompt.
        include_prompt: pooling includes the tokens of the prompt; False: ``PoolerInput.num_prompt`` counts them.
        labels: names of the columns of a row, for ``classify``.
        activation: the function that turns a row of logits into scores; core applies it.
        batch_invariant: a row is equal to the bit for any other inputs of the pass.
    """

    max_tokens: int
    max_batch_tokens: int
    max_batch_texts: int
    dimensions: int
    text: TextLayout = TextLayout()
    pair: TextLayout | None = None
    pass_tokens: int | None = None
    pooling: str = ""
    is_normalized: bool = True
    dimension_choices: tuple[int, ...] = ()
    prompts: Mapping[str, str] = field(factory=dict)
    default_prompt: str = ""
    include_prompt: bool = True
    labels: tuple[str, ...] = ()
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    batch_invariant: bool = False


@runtime_checkable
class Pooler(Protocol):
    """A loaded model that turns each input into one row of numbers.

    Created, used and closed on one thread; only ``abort`` and ``tokenizer`` may be used from others. A row depends only
    on its own input: not on the other inputs of the pass (exactly if ``batch_invariant``, else up to rounding), and not
    on passes before it.

    Attributes:
        capabilities: limits, layouts, and what the model's files say about its rows.
        tokenizer: tokenizer of the model; one that normalises text may drop or change characters.
        info: its ``task`` is ``embed``, ``rerank`` or ``classify``; ``max_context`` is ``capabilities.max_tokens``.

    Calls:
        pool: once per pass; worker, engine thread; the pass itself, ``step_timeout_s`` at most.
        abort: when every request of a pass was cancelled; worker, reader thread, during ``pool``; microseconds.
        close: once; worker, engine thread; seconds.
    """

    capabilities: PoolerCapabilities
    tokenizer: Tokenizer
    info: ModelInfo

    def pool(self, inputs: Sequence[PoolerInput]) -> NDArray[np.float32]:
        """Compute one pass.

        Args:
            inputs: at least one; not changed. All ids are inside the vocabulary, and the limits of ``capabilities``
                are kept.

        Returns:
            ``(len(inputs), dimensions)`` float32, in the order of ``inputs``: embeddings, or for ``rerank`` and
            ``classify`` the raw logits.

        Raises:
            StepAborted: ``abort()`` was called.
        """

    def abort(self) -> None:
        """Request a running ``pool`` to stop soon; best effort, any thread. Without a running pass it does nothing."""

    def close(self) -> None:
        """Free everything; a second call does nothing. No other method is called afterwards."""
