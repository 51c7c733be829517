"""Pooler over a transformers model: the inputs of a pass side by side in one forward pass, or in one per thread.

Handles inputs and rows. Does not know files (see ``opening.py``), requests or texts.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from enginehouse.contract.backend import Tokenizer
from enginehouse.contract.errors import EngineError, StepAborted
from enginehouse.contract.pooler import PoolerCapabilities, PoolerInput
from enginehouse.contract.types import ModelInfo
from enginehouse_hf.pooling.modules import RowSteps
from enginehouse_hf.pooling.networks import Network
from enginehouse_hf.pooling.packing import PassAborted, pack
from enginehouse_hf.pooling.threads import Part, PassThreads

__all__ = ["HfPooler"]


class HfPooler:
    """Implements :class:`enginehouse.contract.pooler.Pooler`.

    Args:
        steps: None for a classifier.
        threads: compute parts of passes; None computes each pass as a whole, on a GPU.
    """

    def __init__(
        self,
        network: Network,
        steps: RowSteps | None,
        *,
        capabilities: PoolerCapabilities,
        tokenizer: Tokenizer,
        info: ModelInfo,
        device: torch.device,
        threads: PassThreads | None = None,
    ) -> None:
        self.capabilities, self.tokenizer, self.info = capabilities, tokenizer, info
        self._network: Network | None = network
        self._steps, self._device, self._threads = steps, device, threads
        self._aborted = threading.Event()

    def pool(self, inputs: Sequence[PoolerInput]) -> NDArray[np.float32]:
        """Compute one pass."""
        self._aborted.clear()
        rows = np.empty((len(inputs), self.capabilities.dimensions), np.float32)

        def compute(part: Part) -> None:
            rows[part] = self._compute([inputs[index] for index in part])

        try:
            if self._threads is None:
                compute(np.arange(len(inputs)))
            else:
                self._threads.run(compute, [len(one.token_ids) for one in inputs])
        except PassAborted:
            raise StepAborted({}) from None
        except RuntimeError as error:  # torch's base error, which includes out of memory
            raise EngineError(f"hf: the forward pass failed: {error}") from error
        return rows

    def _compute(self, inputs: Sequence[PoolerInput]) -> NDArray[np.float32]:
        """Return the rows of some inputs, in their order. Several threads call it at once."""
        assert self._network is not None, "the pooler is closed"
        texts = pack(inputs, self._device, self._aborted)
        with torch.inference_mode():
            result = self._network.run(texts)
            if self._steps is not None:
                result = self._steps.run(result, texts)
            ordered = result.to("cpu", torch.float32).numpy()
        rows: NDArray[np.float32] = np.empty_like(ordered)
        rows[texts.order] = ordered
        return rows

    def abort(self) -> None:
        """Stop a running pass before its next layer."""
        self._aborted.set()

    def close(self) -> None:
        """Release the weights. Idempotent."""
        if self._threads is not None:
            self._threads.close()
        self._network = self._steps = None
