"""Recurrent layers of a transformers model: gated delta nets, Mamba, short convolutions.

Such a layer carries a state per sequence, of a fixed size, instead of keys and values: the last inputs of a convolution
and the state of the recurrence. :class:`Mixers` replaces the ``forward`` of these modules, so that the packed row of a
step is divided into its sequences there, each with its own state; sequences that append the same number of tokens
are computed together. Everything around the modules sees all tokens of the step at once. On a GPU ``cuda/mixers.py``
takes over the modules once more, with states in pools.

Whether a module continues a state over several tokens at once is found by running it (:func:`_continues`): some of
transformers' modules begin at an empty state then, and are run token by token.

transformers takes kernels of other packages (flash-linear-attention, causal-conv1d, mamba-ssm) where these are
installed. Its own functions in torch are used instead everywhere: for them numbers were compared.

A state is never changed in place once a pass has ended: forks and checkpoints share it. Tokens whose draft may be
rejected are computed one by one in these modules, which keeps the state after each of them.

Source: the calls of ``Cache`` that mixers make in transformers 5.24 (``get_conv_state``, ``update_conv_state``,
``get_recurrent_state``, ``update_recurrent_state``), and in 5.17 (``layers`` with the states by number).
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn.functional import pad

from enginehouse_hf.attention import ForwardAborted, Segment, Step, UnsupportedAttention
from enginehouse_hf.facts import StateForm, StateKey

__all__ = ["LayerCache", "Mixer", "Mixers", "SequenceState", "recurrent_layers"]

SequenceState = Mapping[StateKey, Tensor]
"""The state of one sequence in all layers; each tensor is (1, ...)."""

_CACHE_NAMES = ("cache", "cache_params", "past_key_values")
"""What versions of transformers call the argument for the state."""

_ARGUMENTS = frozenset({"hidden_states", "attention_mask", "seq_idx", "kwargs"})
"""What a module may take; ``seq_idx``, for several sequences in one row, is not given."""

_MIN_CHUNK_TOKENS = 16

_MOST_DIFFERENCE = 1e-3
"""Relative difference of outputs and states that rounding can explain in float32."""


class _OneLayer:
    """Implements what a mixer reads of the entries of ``Cache.layers`` in transformers 5.17."""

    record_past = False

    def __init__(self, states: Mapping[tuple[str, int], Tensor]) -> None:
        self._states = states

    def __getitem__(self, layer_idx: int) -> _OneLayer:
        return self

    @property
    def conv_states(self) -> dict[int, Tensor]:
        """The last inputs of the convolutions, by number."""
        return {number: state for (kind, number), state in self._states.items() if kind == "conv"}

    @property
    def recurrent_states(self) -> dict[int, Tensor]:
        """The states of the recurrences, by number."""
        return {number: state for (kind, number), state in self._states.items() if kind == "recurrent"}


class LayerCache:
    """Implements what a mixer calls of transformers' ``Cache``, for the sequences of one call.

    Attributes:
        states: by key; each (N, ...). Its tensors may be changed in place: they belong to this call.
    """

    def __init__(self, states: dict[tuple[str, int], Tensor]) -> None:
        self.states = states

    @property
    def layers(self) -> _OneLayer:
        """The states as transformers 5.17 reads them: of whichever layer asks."""
        return _OneLayer(self.states)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the last inputs of the convolution, (N, channels, kernel size), or None at the beginning."""
        return self.states.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the state of the recurrence, or None at the beginning."""
        return self.states.get(("recurrent", state_idx))

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return True after the beginning."""
        return bool(self.states)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: states are not taken back inside of a layer."""
        return False

    def update_conv_state(
        self, new: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Append inputs, (N, channels, T); return them with those kept before them, at least the kernel size."""
        before = self.states.get(("conv", state_idx))
        size = conv_kernel_size or (new if before is None else before).shape[-1]
        whole = pad(new, (max(0, size - new.shape[-1]), 0)) if before is None else torch.cat([before, new], -1)
        self.states["conv", state_idx] = whole[..., -size:]
        return whole

    def update_recurrent_state(self, new: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Replace the state of the recurrence."""
        self.states["recurrent", state_idx] = new
        return new


@frozen(eq=False)
class Mixer:
    """One recurrent module: its own ``forward``, how that calls its cache, and whether it continues states.

    Attributes:
        chunk_size: tokens of a chunk of its scan; None if it does not say. It pads its input to a multiple of them.
    """

    module: nn.Module
    layer: int
    forward: Callable[..., Tensor]
    cache_name: str
    continues: bool
    chunk_size: int | None

    def run(self, hidden: Tensor, cache: LayerCache) -> Tensor:
        """Append tokens, (N, T, hidden_size), to N states; returns (N, T, hidden_size)."""
        if self.chunk_size is not None:  # a few tokens would be padded to 256: five times the time
            fitting = max(_MIN_CHUNK_TOKENS, 1 << (hidden.shape[1] - 1).bit_length())
            self.module.chunk_size = min(self.chunk_size, fitting)
        if self.continues or hidden.shape[1] == 1 or not cache.states:
            return self.forward(hidden, **{self.cache_name: cache})
        return torch.cat([self.forward(one, **{self.cache_name: cache}) for one in hidden.split(1, 1)], 1)


def recurrent_layers(model: nn.Module) -> frozenset[int]:
    """Return the layers that have a recurrent module. Raises UnsupportedAttention as :class:`Mixers`."""
    return frozenset(int(module.layer_idx) for _, module, _ in _find(model))


class Mixers:
    """The recurrent modules of a model, and the states of all sequences.

    Args:
        model: a transformers model; the modules are changed for as long as it lives.

    Attributes:
        names: of the modules.
        all: the modules, in their order.

    Raises:
        UnsupportedAttention: a recurrent module is called in an unknown way or cannot continue a state.
    """

    def __init__(self, model: nn.Module) -> None:
        self._states: dict[int, SequenceState] = {}
        self._between: dict[int, dict[int, SequenceState]] = {}
        self._new: dict[int, dict[StateKey, Tensor]] = {}
        self._new_between: dict[int, dict[int, dict[StateKey, Tensor]]] = {}
        self._step: Step | None = None
        self._singly: frozenset[int] = frozenset()
        self.names: frozenset[str] = frozenset()
        self.all: list[Mixer] = []
        continues: dict[type[nn.Module], bool] = {}
        with torch.inference_mode():
            for name, module, cache_name in _find(model):
                _use_torch(type(module))
                if type(module) not in continues:
                    continues[type(module)] = _continues(module, cache_name, model.config.get_text_config().hidden_size)
                chunk_size = getattr(module, "chunk_size", None)
                mixer = Mixer(module, module.layer_idx, module.forward, cache_name, continues[type(module)], chunk_size)
                module.forward = self._replacement(mixer)
                self.all.append(mixer)
                self.names |= {name}

    def state(self, slot: int) -> SequenceState:
        """Return the state of a sequence; empty at its beginning."""
        return self._states.get(slot, {})

    def state_at(self, slot: int, length: int) -> SequenceState | None:
        """Return the state of a sequence at a length within its last pass; None if that has not kept it."""
        return self._between.get(slot, {}).get(length)

    def put(self, slot: int, state: SequenceState) -> None:
        """Set the state of a sequence."""
        self._between.pop(slot, None)
        if state:
            self._states[slot] = state
        else:
            self._states.pop(slot, None)

    def forms(self, slot: int) -> tuple[StateForm, ...]:
        """Return the parts of the state of a sequence; those of the widest type first."""
        parts = [StateForm(key, tuple(part.shape), part.dtype) for key, part in self.state(slot).items()]
        return tuple(sorted(parts, key=lambda form: (-form.dtype.itemsize, form.key)))

    def begin(self, step: Step, singly: frozenset[int] = frozenset()) -> None:
        """Prepare a pass over the segments of a step, which may continue an uncommitted one.

        Args:
            singly: slots whose tokens are appended one by one, so that :meth:`state_at` has the states between them.
        """
        self._step, self._singly = step, singly

    def commit(self) -> None:
        """Keep the states that the passes since the last call have left."""
        for slot in self._new:
            self._between.pop(slot, None)
        self._states |= self._new
        self._between |= self._new_between
        self.discard()

    def discard(self) -> None:
        """Drop the states that passes have left since the last :meth:`commit`."""
        self._new, self._new_between, self._step = {}, {}, None

    def _replacement(self, mixer: Mixer) -> Callable[..., Tensor]:
        def forward(hidden_states: Tensor, *_: Any, attention_mask: Tensor | None = None, **__: Any) -> Tensor:
            if attention_mask is not None:
                raise UnsupportedAttention("a mask of the model's own")
            assert self._step is not None, "begin was called"
            return self._run(mixer, hidden_states, self._step)

        return forward

    def _run(self, mixer: Mixer, hidden: Tensor, step: Step) -> Tensor:
        """Run one module over the packed row, (1, T, hidden_size)."""
        if step.aborted.is_set():
            raise ForwardAborted
        groups: dict[tuple[int, bool, bool], list[Segment]] = {}
        for segment in step.segments:
            key = segment.end - segment.begin, segment.start > 0, segment.slot in self._singly
            groups.setdefault(key, []).append(segment)
        output = torch.empty_like(hidden)
        for (size, is_later, is_singly), segments in groups.items():
            cache = LayerCache(self._joined(mixer.layer, segments) if is_later else {})
            rows = torch.stack([hidden[0, segment.begin : segment.end] for segment in segments])
            mixed = self._append_singly(mixer, rows, cache, segments) if is_singly else mixer.run(rows, cache)
            for place, segment in enumerate(segments):
                output[0, segment.begin : segment.begin + size] = mixed[place]
                new = self._new.setdefault(segment.slot, {})
                for name, states in cache.states.items():
                    new[mixer.layer, *name] = _owned(states[place : place + 1])
        return output

    def _append_singly(self, mixer: Mixer, rows: Tensor, cache: LayerCache, segments: Sequence[Segment]) -> Tensor:
        """Append tokens one by one, (N, T, hidden_size), and keep copies of the states after all but the last."""
        mixed = []
        for number, row in enumerate(rows.split(1, 1), 1):
            mixed.append(mixer.run(row, cache))
            if number == rows.shape[1]:
                break
            for place, segment in enumerate(segments):
                between = self._new_between.setdefault(segment.slot, {}).setdefault(segment.start + number, {})
                for name, states in cache.states.items():
                    between[mixer.layer, *name] = states[place : place + 1].clone()
        return torch.cat(mixed, 1)

    def _joined(self, layer: int, segments: Sequence[Segment]) -> dict[tuple[str, int], Tensor]:
        """Return a copy of the states of some sequences in a layer, (N, ...) each."""
        own = [self._new.get(segment.slot, {}) for segment in segments]
        kept = [self.state(segment.slot) for segment in segments]
        keys = [key for key in {**kept[0], **own[0]} if key[0] == layer]
        return {
            key[1:]: torch.cat([new[key] if key in new else old[key] for new, old in zip(own, kept, strict=True)])
            for key in keys
        }


def _owned(part: Tensor) -> Tensor:
    """Return a contiguous tensor that keeps no other memory: those of a batch, or of each chunk of a scan."""
    is_alone = part.is_contiguous() and part.untyped_storage().nbytes() == part.nbytes
    return part if is_alone else part.clone(memory_format=torch.contiguous_format)


def _find(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield name, module and name of the cache argument of each recurrent module.

    It has the number of its layer, takes a cache, and contains a convolution over the tokens.
    """
    found: dict[str, tuple[nn.Module, str]] = {}
    for name, module in model.named_modules():
        if not hasattr(module, "layer_idx") or not any(isinstance(part, nn.Conv1d) for part in module.modules()):
            continue
        arguments = inspect.signature(module.forward).parameters
        cache_name = next((one for one in _CACHE_NAMES if one in arguments), None)
        if cache_name is not None:
            found[name] = module, cache_name
    for name, (module, cache_name) in found.items():
        if any(other.startswith(f"{name}.") for other in found):
            continue  # the layer around it
        if unknown := set(inspect.signature(module.forward).parameters) - _ARGUMENTS - {cache_name}:
            raise UnsupportedAttention(f"{type(module).__name__}, which takes {', '.join(sorted(unknown))}")
        yield name, module, cache_name


def _use_torch(kind: type[nn.Module]) -> None:
    """Use transformers' own functions in torch in a class of modules, in place of those of other packages.

    Source: ``use_kernel_func_from_hub_with_fallback`` of transformers, which wraps the functions.
    """
    namespace = vars(sys.modules[kind.__module__])
    for function in vars(kind).values():
        code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
        for name in () if code is None else code.co_names:
            chosen = namespace.get(name)
            if inspect.isfunction(chosen) and chosen.__module__ == kind.__module__ and hasattr(chosen, "__wrapped__"):
                namespace[name] = inspect.unwrap(chosen)


def _continues(module: nn.Module, cache_name: str, hidden_size: int) -> bool:
    """Return True if a module gives the same for 7 tokens at once and for 4, then 3; False if for 4, then 1, 1 and 1.

    Raises:
        UnsupportedAttention: neither is the case.
    """
    device = next(module.parameters()).device
    module = copy.deepcopy(module).float()
    hidden = torch.randn(1, 7, hidden_size, generator=torch.Generator().manual_seed(0)).to(device)
    whole, final = _split(module, cache_name, hidden, (7,))
    for sizes in ((4, 3), (4, 1, 1, 1)):
        parts, states = _split(module, cache_name, hidden, sizes)
        same = [_difference(parts, whole), *(_difference(states[key], final[key]) for key in final)]
        if set(states) == set(final) and max(same) <= _MOST_DIFFERENCE:
            return len(sizes) == 2
    raise UnsupportedAttention(f"{type(module).__name__}, which gives other numbers when a text is split")


def _split(
    module: nn.Module, cache_name: str, hidden: Tensor, sizes: tuple[int, ...]
) -> tuple[Tensor, dict[tuple[str, int], Tensor]]:
    """Return the outputs of a module for parts of these sizes, and its states after the last one."""
    cache = LayerCache({})
    parts = [module(part, **{cache_name: cache}) for part in hidden.split(list(sizes), 1)]
    return torch.cat(parts, 1), cache.states


def _difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-9))
