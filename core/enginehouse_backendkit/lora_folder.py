"""Adapters (LoRA) in PEFT's folders: validation of their settings and tensors, for any tensor library. What other
formats share with them, such as refusals that name the file, is here, too.

Called by runners of folders with safetensors. Reads ``adapter_config.json`` itself; a function of the caller reads the
tensors, of which only names and shapes are known here. peft is not needed.

Source: https://huggingface.co/docs/peft/developer_guides/checkpoint for the files; scales from ``LoraLayer`` of peft.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from attrs import frozen

from enginehouse.contract.errors import AdapterRefused, ModelLoadError

__all__ = [
    "LoraHalves",
    "Shaped",
    "check_invocation",
    "check_rank",
    "check_scale",
    "read_invocation_tokens",
    "read_lora_config",
    "read_lora_folder",
    "refusing",
]

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_INVOCATION = "alora_invocation_tokens"
_PREFIX = "base_model.model."
_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])(\.default)?\.weight")
_MAX_CONFIG_BYTES = 1 << 20
_MAX_RANK = 1024
_MAX_SCALE = 1e30
_MAX_INVOCATION_TOKENS = 4096

_OFF: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "use_qalora": (None, False),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "megatron_config": (None,),
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal", "eva"),
}
"""Settings of PEFT with the values that mean plain LoRA; all others change what the weights mean."""


class Shaped(Protocol):
    """A tensor of any library."""

    @property
    def shape(self) -> Sequence[int]:
        """Sizes of its dimensions."""


_Tensor = TypeVar("_Tensor", bound=Shaped)


@frozen(eq=False)
class LoraHalves(Generic[_Tensor]):
    """The weights of one adapter for one layer, which adds ``scale * B (A x)``.

    Attributes:
        a: (rank, inputs).
        b: (outputs, rank).
        scale: the adapter's own strength, alpha / rank as trained.
    """

    a: _Tensor
    b: _Tensor
    scale: float


@frozen
class _Ranks:
    """Rank and alpha of the layers of an adapter."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, Any]
    alpha_pattern: Mapping[str, Any]
    is_rank_stabilised: bool

    def of(self, module: str) -> tuple[int, float]:
        """Return rank and scale of a layer."""
        rank = check_rank(_matched(self.rank_pattern, module, self.rank), f"the rank of {module}")
        alpha = check_scale(_matched(self.alpha_pattern, module, self.alpha), f"lora_alpha of {module}")
        return rank, alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def check_rank(value: object, what: str) -> int:
    """Return a rank. Raises ValueError."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_RANK:
        raise ValueError(f"{what} is {value!r}, 1 to {_MAX_RANK} was expected")
    return value


def check_scale(value: object, what: str) -> float:
    """Return a finite number. Raises ValueError."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < _MAX_SCALE:
        raise ValueError(f"{what} is {value!r}, a number below {_MAX_SCALE:g} was expected")
    return value


def _matched(patterns: Mapping[str, Any], module: str, usual: Any) -> Any:
    """Return the value of the first pattern that matches the end of a module's name, as PEFT does."""
    for pattern, value in patterns.items():
        if len(pattern) <= 200 and re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return usual


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Raise AdapterRefused, with the name of the file or folder, for what is wrong with it."""
    try:
        yield
    except ModelLoadError as error:
        raise AdapterRefused(f"{path.name}: {error.message.removeprefix(f'{path}: ')}", "adapters") from error
    except OSError as error:
        raise AdapterRefused(f"{path.name}: cannot be read: {error.strerror}", "adapters") from error
    except (ValueError, RecursionError, re.error, struct.error) as error:
        raise AdapterRefused(f"{path.name}: {error}", "adapters") from error


def read_lora_folder(
    folder: Path,
    layers: Mapping[str, tuple[int, int]],
    load: Callable[[Path], Mapping[str, _Tensor]],
    problem_of: Callable[[_Tensor], str],
) -> dict[str, LoraHalves[_Tensor]]:
    """Return the halves of each layer that an adapter changes, by the name of the layer.

    Args:
        folder: with ``adapter_config.json`` and ``adapter_model.safetensors``.
        layers: outputs and inputs of the layers of the model that can be adapted, by name.
        load: reads a safetensors file. Raises ValueError if it is damaged.
        problem_of: what is wrong with the numbers of a tensor of the right shape; "" if nothing.

    Raises:
        AdapterRefused: names the folder, and what is wrong.
    """
    with refusing(folder):
        config = read_lora_config(folder)
        ranks = _read_ranks(config)
        check_invocation(config.get(_INVOCATION) or [], _INVOCATION)
        if not (folder / _WEIGHTS).is_file():
            raise ValueError(f"{_WEIGHTS} is missing; pickled weights are not read")
        return _pair(load(folder / _WEIGHTS), ranks, layers, problem_of)


def read_lora_config(folder: Path) -> dict[str, Any]:
    """Return ``adapter_config.json``. Raises ValueError or OSError."""
    path = folder / _CONFIG
    if not path.is_file() or path.stat().st_size > _MAX_CONFIG_BYTES:
        raise ValueError(f"{_CONFIG} is missing or has more than {_MAX_CONFIG_BYTES} bytes")
    config = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError(f"{_CONFIG} is not an object")
    return config


def read_invocation_tokens(folder: Path) -> tuple[int, ...]:
    """Return the tokens that activate an adapter (PEFT's activated LoRA); () for others.

    Raises:
        AdapterRefused: names the folder, and what is wrong.
    """
    with refusing(folder):
        return check_invocation(read_lora_config(folder).get(_INVOCATION) or [], _INVOCATION)


def check_invocation(value: object, what: str) -> tuple[int, ...]:
    """Return token ids. Raises ValueError."""
    if not isinstance(value, list) or len(value) > _MAX_INVOCATION_TOKENS:
        raise ValueError(f"{what} is not a list of at most {_MAX_INVOCATION_TOKENS} token ids")
    for token_id in value:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < 1 << 31:
            raise ValueError(f"{what} has {token_id!r}, a token id was expected")
    return tuple(value)


def _read_ranks(config: Mapping[str, Any]) -> _Ranks:
    if config.get("peft_type") != "LORA":
        raise ValueError(f"peft_type in {_CONFIG} is not LORA")
    for name, allowed in _OFF.items():
        if not any(config.get(name) == value and type(config.get(name)) is type(value) for value in allowed):
            raise ValueError(f"{name} = {config[name]!r} is not supported; only plain LoRA is")
    patterns = [config.get(name) or {} for name in ("rank_pattern", "alpha_pattern")]
    if not all(isinstance(pattern, dict) for pattern in patterns):
        raise ValueError("rank_pattern and alpha_pattern must be objects")
    is_stabilised = config.get("use_rslora") is True
    return _Ranks(config.get("r", 8), config.get("lora_alpha", 8), patterns[0], patterns[1], is_stabilised)


def _pair(
    tensors: Mapping[str, _Tensor],
    ranks: _Ranks,
    layers: Mapping[str, tuple[int, int]],
    problem_of: Callable[[_Tensor], str],
) -> dict[str, LoraHalves[_Tensor]]:
    found: dict[str, dict[str, _Tensor]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name.removeprefix(_PREFIX))
        if match is None:
            raise ValueError(f"the tensor {name!r} is not of plain LoRA")
        if match["module"] not in layers:
            raise ValueError(f"{match['module']!r} is not a linear layer of this model that can be adapted")
        found.setdefault(match["module"], {})[match["half"]] = tensor
    if not found:
        raise ValueError(f"{_WEIGHTS} has no tensors")
    made = {}
    for module, halves in found.items():
        rank, scale = ranks.of(module)
        num_outputs, num_inputs = layers[module]
        if set(halves) != {"A", "B"}:
            raise ValueError(f"{module} has only one of lora_A and lora_B")
        wanted = ((rank, num_inputs), (num_outputs, rank))
        shapes = tuple(halves["A"].shape), tuple(halves["B"].shape)
        if shapes != wanted:
            raise ValueError(f"{module}: the shapes are {shapes}, {wanted} was expected")
        for half, tensor in halves.items():
            if problem := problem_of(tensor):
                raise ValueError(f"lora_{half} of {module} has {problem}")
        made[module] = LoraHalves(halves["A"], halves["B"], scale)
    return made
