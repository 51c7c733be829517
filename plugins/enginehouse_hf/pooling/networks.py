"""Ways to run a transformers model on a pass, and the choice between them.

A model whose layers take our attention runs on the packed row. Others (with relative biases, or attention of their
own) run on one rectangle per run of texts of equal length: no padding either, but smaller batches. The choice is made
by numbers: a few tokens are computed text by text in the model's own way first. Classification heads get the states of
a packed row run by run.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.pooler import PoolerInput
from enginehouse_hf.linears import prepare_linears, restore
from enginehouse_hf.pooling.attention import PACKED_ATTENTION
from enginehouse_hf.pooling.bert import fuse_layers
from enginehouse_hf.pooling.packing import PackedTexts, pack

__all__ = ["Network", "choose_network", "is_reentrant", "position_offset", "takes_types"]

_log = logging.getLogger(__name__)

_SAMPLE_LENGTHS = (9, 5, 5, 12, 2)
_MAX_TRIED_WINDOW = 300
_MAX_ERROR = {torch.float32: 1e-3}
_MAX_ERROR_16_BITS = 0.05


class Network(Protocol):
    """A model with or without a head; several threads may run it at once. ``name`` is shown in the model's metadata."""

    name: str

    def run(self, texts: PackedTexts) -> Tensor:
        """(T, hidden_size) states of all tokens, or (n, num_labels) logits of a classifier."""
        ...


class _PackedStates:
    """States of all tokens of a packed row."""

    name = "packed"

    def __init__(self, body: Any, offset: int) -> None:
        self._body, self._offset = body, offset

    def run(self, texts: PackedTexts) -> Tensor:
        """(T, hidden_size)."""
        types = {} if texts.types is None else {"token_type_ids": texts.types[None]}
        output = self._body(
            input_ids=texts.token_ids[None],
            position_ids=(texts.positions + self._offset)[None],
            enginehouse_texts=texts,
            **types,
        )
        states: Tensor = output.last_hidden_state[0]
        return states


class _PackedLogits:
    """Logits of a classifier: its body on the packed row, then its head run by run."""

    name = "packed"

    def __init__(self, model: Any, offset: int) -> None:
        body = getattr(model, model.base_model_prefix)
        self._states, self._model = _PackedStates(body, offset), model
        self._stand_in = _StandIn(body)
        self._most = _most_texts(model)
        setattr(model, model.base_model_prefix, self._stand_in)

    def run(self, texts: PackedTexts) -> Tensor:
        """(n, num_labels)."""
        states = self._states.run(texts)
        parts = []
        for run in texts.runs(self._most):
            shape = run.count, run.length
            self._stand_in.given.states = states[run.columns].unflatten(0, shape)
            parts.append(self._model(input_ids=texts.token_ids[run.columns].unflatten(0, shape)).logits)
        self._stand_in.given.states = None
        return torch.cat(parts)

    def undo(self) -> None:
        """Give the model its body back."""
        setattr(self._model, self._model.base_model_prefix, self._stand_in.body[0])


class _StandIn(nn.Module):
    """Takes the place of the body below a head: returns the calling thread's states, computed before."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = (body,)  # not a child, so that the model's parameters are not counted twice
        self.config = body.config
        self.given = threading.local()

    def forward(self, *_arguments: Any, **_named: Any) -> BaseModelOutputWithPoolingAndCrossAttentions:
        """Return the states, (n, L, hidden_size), and what the body's own pooler makes of them."""
        states: Tensor = self.given.states
        pooler = getattr(self.body[0], "pooler", None)
        pooled = None if pooler is None else pooler(states)
        return BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=states, pooler_output=pooled)


class _StatesOfEqualLengths:
    """States by the model's own attention, one run of texts of equal length after the other."""

    name = "texts of equal length"

    def __init__(self, body: Any) -> None:
        self._body = body

    def run(self, texts: PackedTexts) -> Tensor:
        """(T, hidden_size)."""
        return torch.cat([output.last_hidden_state.flatten(0, 1) for output in _run_by_run(self._body, texts, None)])


class _LogitsOfEqualLengths:
    """Logits by the model's own attention, one run of texts of equal length after the other."""

    name = "texts of equal length"

    def __init__(self, model: Any) -> None:
        self._model, self._most = model, _most_texts(model)

    def run(self, texts: PackedTexts) -> Tensor:
        """(n, num_labels)."""
        return torch.cat([output.logits for output in _run_by_run(self._model, texts, self._most)])


def _run_by_run(model: Any, texts: PackedTexts, most: int | None) -> Iterator[Any]:
    for run in texts.runs(most):
        texts.check()
        shape = run.count, run.length
        types = {} if texts.types is None else {"token_type_ids": texts.types[run.columns].unflatten(0, shape)}
        yield model(input_ids=texts.token_ids[run.columns].unflatten(0, shape), **types)


def _most_texts(model: Any) -> int | None:
    """Return how many texts a head takes at once: without a padding token, decoders' heads take one."""
    return 1 if model.config.get_text_config().pad_token_id is None else None


def takes_types(model: Any) -> bool:
    """Return True if the model has token types."""
    body = getattr(model, model.base_model_prefix, model)
    names = inspect.signature(body.forward).parameters
    return "token_type_ids" in names and (getattr(model.config, "type_vocab_size", None) or 0) > 1


def is_reentrant(model: Any) -> bool:
    """Return True if several threads may run a model at once.

    Code from a model's folder may keep state, and rotary embeddings of some types are changed by each pass.
    """
    if not type(model).__module__.startswith("transformers."):
        return False
    types = [str(getattr(module, "rope_type", "")) for module in model.modules()]
    return not any("dynamic" in one or "longrope" in one for one in types)


def position_offset(model: Any) -> int:
    """Return the number of the first position: models like RoBERTa begin after the id of their padding token."""
    for module in model.modules():
        padding = getattr(module, "padding_idx", None)
        if isinstance(padding, int) and isinstance(getattr(module, "position_embeddings", None), nn.Embedding):
            return padding + 1
    return 0


def choose_network(model: Any, *, has_head: bool, vocab_size: int, has_types: bool, max_tokens: int) -> Network:
    """Return the fastest way that is right for a model, which is changed: its attention, and its linear layers.

    Args:
        has_types: the second half of each tried text has token type 1.
        max_tokens: longest text.

    Raises:
        ModelLoadError: numbers overflow in the type of the weights.
        RuntimeError, ValueError, ...: the model cannot run at all.
    """
    lengths = [min(length, max_tokens) for length in _sample_lengths(model.config.get_text_config())]
    sample = _sample(model, lengths, vocab_size, has_types=has_types)
    plain: Network = _LogitsOfEqualLengths(model) if has_head else _StatesOfEqualLengths(model)
    own_attention, body = model.config._attn_implementation, getattr(model, model.base_model_prefix, model)
    with torch.inference_mode():
        expected = plain.run(sample)
        if not bool(expected.isfinite().all()):
            kind = str(expected.dtype).removeprefix("torch.")
            raise ModelLoadError(f"this model gives numbers that are not finite in {kind}; set another dtype")
        packed = _pack_model(model, sample, expected, has_head=has_head)
        if packed is None:
            model.set_attn_implementation(own_attention)
        network = packed or plain
        if model.device.type == "cpu":
            for prepare in ([fuse_layers] if packed else []) + [prepare_linears]:
                replaced = prepare(body)
                if replaced and (problem := _problem(network, sample, expected)):
                    _log.warning("hf: oneDNN's layers are not used (%s): %s", prepare.__name__, problem)
                    restore(replaced)
    return network


def _pack_model(model: Any, sample: PackedTexts, expected: Tensor, *, has_head: bool) -> Network | None:
    """Return the packed network of a model if it gives the expected numbers."""
    if not model.is_backend_compatible():
        return None
    model.set_attn_implementation(PACKED_ATTENTION)
    if model.config._attn_implementation != PACKED_ATTENTION:
        return None  # its attention is written into the model
    offset = position_offset(model)
    network = _PackedLogits(model, offset) if has_head else _PackedStates(model, offset)
    problem = _problem(network, sample, expected)
    if not problem:
        return network
    _log.info("hf: texts are not packed into one row: %s", problem)
    if isinstance(network, _PackedLogits):
        network.undo()
    return None


def _problem(network: Network, sample: PackedTexts, expected: Tensor) -> str:
    """Return why the network is not right for the sample; empty if it is."""
    try:
        found = network.run(sample)
    except Exception as error:  # noqa: BLE001 - models fail in their own ways at what they do not support
        return f"{type(error).__name__}: {error}"
    if found.shape != expected.shape:
        return f"the shape is {tuple(found.shape)}, not {tuple(expected.shape)}"
    error = float((found.float() - expected.float()).abs().max() / expected.float().abs().max().clamp(min=1e-6))
    allowed = _MAX_ERROR.get(expected.dtype, _MAX_ERROR_16_BITS)
    return "" if error <= allowed else f"numbers differ by {error:.2g} of the largest"


def _sample_lengths(config: Any) -> tuple[int, ...]:
    """Return the lengths of texts to try; one is longer than the windows of the layers, unless these are large."""
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    longest = max((2 * size + 5 for size in windows if isinstance(size, int) and size <= _MAX_TRIED_WINDOW), default=0)
    return (*_SAMPLE_LENGTHS, longest) if longest else _SAMPLE_LENGTHS


def _sample(model: Any, lengths: Sequence[int], vocab_size: int, *, has_types: bool) -> PackedTexts:
    """Return texts of tokens that are neither the first nor the last ones of the vocabulary."""
    generator = np.random.default_rng(5)
    low, high = vocab_size // 8, max(vocab_size // 8 + 1, vocab_size * 7 // 8)
    inputs = [
        PoolerInput(generator.integers(low, high, length).astype(np.int32), length // 2 if has_types else None)
        for length in lengths
    ]
    return pack(inputs, model.device, threading.Event())
