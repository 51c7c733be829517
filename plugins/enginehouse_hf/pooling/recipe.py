"""Task of a model folder, and the steps from token states to a row.

Read from the folder's JSON files without any library, so that a source can be matched and estimated: ``modules.json``
and the files that it names, as sentence-transformers writes them, else ``config.json`` alone. Called by the backend and
by ``opening.py``. Does not know weights, tensors or tokenizers.

Source: the files that sentence-transformers 6.2 writes, and the older forms that it reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from attrs import field, frozen

from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.regular_files import read_regular_text
from enginehouse.contract.types import Task
from enginehouse_backendkit.folder_files import read_object
from enginehouse_backendkit.folder_task import architecture_of, find_task, num_labels

__all__ = ["Activation", "Dense", "LayerNorm", "Module", "Normalize", "Pooling", "Recipe", "read_recipe"]

Activation = Literal["none", "sigmoid", "softmax"]

_OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Boolean keys of older files, in the order in which their results are concatenated."""

_MODES = tuple(_OLD_MODES.values())
_TRANSFORMER_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_ACTIVATIONS: dict[str, Activation] = {"Sigmoid": "sigmoid", "Identity": "none", "Softmax": "softmax"}
_MAX_SIZE = 2**20
_MAX_BYTES = 2**20


@frozen
class Pooling:
    """Joins the states of the tokens of a text; the results of several ``modes`` are concatenated."""

    modes: tuple[str, ...]
    include_prompt: bool = True


@frozen
class Dense:
    """A linear layer with an activation, the name of a class of ``torch.nn``; its weights are in ``folder``."""

    folder: Path
    in_features: int
    out_features: int
    has_bias: bool
    activation: str
    has_residual: bool


@frozen
class LayerNorm:
    """Layer normalisation with the weights in ``folder``."""

    folder: Path
    dimension: int


@frozen
class Normalize:
    """Scales a row to length 1."""


Module = Pooling | Dense | LayerNorm | Normalize


@frozen(kw_only=True)
class Recipe:
    """A model as its files describe it.

    Attributes:
        task: what the model does; ``generate`` for models that are not for pooling.
        transformer: the folder with ``config.json``, weights and tokenizer.
        config: the contents of ``config.json``.
        modules: the steps after the transformer, for the task ``embed``.
        max_tokens: longest input by ``max_seq_length``; None if the files do not limit it.
        is_lowercased: texts are converted to lower case first.
        prompts: texts that are put before an input, by name.
        default_prompt: name of the prompt that is used if a request names none.
        truncate_dim: size to which every embedding is cut.
        dimension_choices: smaller sizes to which an embedding may be cut.
        labels: names of the columns, for the tasks ``rerank`` and ``classify``.
        activation: function that makes scores of logits.
    """

    task: Task
    transformer: Path
    config: Mapping[str, Any] = field(repr=False)
    modules: tuple[Module, ...] = ()
    max_tokens: int | None = None
    is_lowercased: bool = False
    prompts: Mapping[str, str] = {}
    default_prompt: str = ""
    truncate_dim: int | None = None
    dimension_choices: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    activation: Activation = "none"

    @property
    def pooling(self) -> str:
        """The pooling modes, for people."""
        return "+".join(mode for module in self.modules if isinstance(module, Pooling) for mode in module.modes)

    def is_stored_in(self, dtype: str) -> bool:
        """Return True if ``config.json`` names this type of the weights."""
        return dtype in (self.config.get("dtype"), self.config.get("torch_dtype"))

    @property
    def include_prompt(self) -> bool:
        """False if pooling leaves the tokens of a prompt out."""
        return all(module.include_prompt for module in self.modules if isinstance(module, Pooling))

    @property
    def is_normalized(self) -> bool:
        """True if rows have length 1: the last step, and no cut after it."""
        return bool(self.modules) and isinstance(self.modules[-1], Normalize) and self.truncate_dim is None


def read_recipe(folder: Path, task: Task | None = None, pooling: str | None = None) -> Recipe:
    """Read the files of a model.

    Args:
        folder: contains ``modules.json`` or ``config.json``.
        task: the task of the model, for any content of its files.
        pooling: the pooling modes instead of those of the files, joined by ``+``.

    Raises:
        ModelLoadError: a file is damaged, or describes a model that this backend would compute wrongly.
    """
    settings = _optional(folder / "config_sentence_transformers.json")
    entries = _read_modules(folder) if (folder / "modules.json").is_file() else []
    transformer = entries[0][1] if entries else folder
    config = read_object(transformer / "config.json")
    found = task or find_task(folder, config)
    if found == "generate":
        return Recipe(task=found, transformer=transformer, config=config)
    text = next((_optional(transformer / name) for name in _TRANSFORMER_FILES if (transformer / name).is_file()), {})
    _check_transformer(transformer, text)
    common: dict[str, Any] = {
        "task": found,
        "transformer": transformer,
        "config": config,
        "max_tokens": _size(transformer, text, "max_seq_length", optional=True),
        "is_lowercased": text.get("do_lower_case") is True,
        **_prompts(folder, settings),
    }
    if found != "embed":
        if len(entries) > 1:
            raise ModelLoadError(f"{folder / 'modules.json'}: a {entries[1][0]} after a classifier is not supported")
        labels = _labels(transformer, config)
        return Recipe(**common, labels=labels, activation=_activation(folder, settings, config, found, len(labels)))
    modules = tuple(module for kind, path in entries[1:] if (module := _module(kind, path)) is not None)
    if not any(isinstance(module, Pooling) for module in modules):
        if entries and pooling is None:
            raise ModelLoadError(f"{folder / 'modules.json'} names no Pooling; set pooling, for example to mean")
        modules = (Pooling(_modes(folder, pooling or _default_pooling(config))), *modules)
    elif pooling is not None:
        modes = _modes(folder, pooling)
        modules = tuple(Pooling(modes) if isinstance(module, Pooling) else module for module in modules)
    return Recipe(
        **common,
        modules=modules,
        truncate_dim=_size(folder, settings, "truncate_dim", optional=True),
        dimension_choices=_dimensions(transformer, config),
    )


def _default_pooling(config: Mapping[str, Any]) -> str:
    """Return the mode that sentence-transformers uses for a model without ``modules.json``."""
    is_causal = architecture_of(config).endswith("ForCausalLM") and config.get("is_causal", True)
    return "lasttoken" if is_causal else "mean"


def _read_modules(folder: Path) -> list[tuple[str, Path]]:
    """Return the kind and the folder of each module of ``modules.json``; the first is the transformer."""
    file = folder / "modules.json"
    try:
        entries = json.loads(read_regular_text(file, _MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
    modules: list[tuple[str, Path]] = []
    for entry in entries if isinstance(entries, list) else [None]:
        if not (isinstance(entry, dict) and isinstance(entry.get("type"), str) and isinstance(entry.get("path"), str)):
            raise ModelLoadError(f"{file} is not a list of objects with type and path")
        path = folder / entry["path"]
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ModelLoadError(f"{file}: the path {entry['path']!r} is outside the model's folder")
        modules.append((entry["type"].rpartition(".")[2], path))
    if not modules or modules[0][0] != "Transformer":
        first = modules[0][0] if modules else "nothing"
        raise ModelLoadError(f"{file}: its first module is {first}; only Transformer is supported there")
    return modules


def _module(kind: str, path: Path) -> Module | None:
    """Return one of the steps after the transformer; None if it changes nothing."""
    config = _optional(path / "config.json")
    match kind:
        case "Pooling":
            return Pooling(_pooling_modes(path, config), config.get("include_prompt", True) is not False)
        case "Dense":
            _check_names(path, config)
            return Dense(
                folder=path,
                in_features=_size(path, config, "in_features") or 0,
                out_features=_size(path, config, "out_features") or 0,
                has_bias=config.get("bias", True) is not False,
                activation=_dense_activation(path, config),
                has_residual=config.get("use_residual", False) is True,
            )
        case "LayerNorm":
            return LayerNorm(path, _size(path, config, "dimension") or 0)
        case "Normalize":
            _check_names(path, config)
            return Normalize()
        case "Dropout":
            return None
    raise ModelLoadError(f"{path}: modules of the type {kind[:40]} are not supported")


def _pooling_modes(path: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    stated = config.get("pooling_mode")
    if stated is None:
        old = tuple(mode for key, mode in _OLD_MODES.items() if config.get(key))
        return old or ("mean",)
    return _modes(path, "+".join(map(str, stated)) if isinstance(stated, list) else str(stated))


def _modes(path: Path, text: str) -> tuple[str, ...]:
    modes = tuple(text.split("+"))
    for mode in modes:
        if mode not in _MODES:
            raise ModelLoadError(f"{path}: the pooling mode {mode[:40]!r} is unknown; there are {', '.join(_MODES)}")
    return modes


def _dense_activation(path: Path, config: Mapping[str, Any]) -> str:
    stated = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    if not isinstance(stated, str) or not stated.startswith("torch.nn."):
        raise ModelLoadError(f"{path}: the activation {str(stated)[:60]!r} is not a class of torch.nn")
    return stated.rpartition(".")[2]


def _check_names(path: Path, config: Mapping[str, Any]) -> None:
    for key in ("module_input_name", "module_output_name"):
        name = config.get(key)
        if name not in {None, "sentence_embedding"}:
            raise ModelLoadError(f"{path}: {key} = {str(name)[:40]!r} is not supported; only sentence_embedding is")


def _check_transformer(path: Path, text: Mapping[str, Any]) -> None:
    """Refuse transformers that take something else than a text, or give something else than states of tokens."""
    task = text.get("transformer_task", "feature-extraction")
    if task not in {"feature-extraction", "sequence-classification"}:
        raise ModelLoadError(f"{path}: the transformer_task {str(task)[:40]!r} is not supported")
    modalities = text.get("modality_config")
    if modalities is None:
        return
    how = modalities.get("text") if isinstance(modalities, dict) else None
    if not isinstance(how, dict) or how.get("method") != "forward" or "message" in modalities:
        raise ModelLoadError(f"{path}: its modality_config does not pass texts to the model as they are")


def _prompts(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    prompts = settings.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise ModelLoadError(f"{folder}: its prompts are not texts by name")
    default = settings.get("default_prompt_name") or ""
    if default and default not in prompts:
        raise ModelLoadError(f"{folder}: its default_prompt_name is {str(default)[:40]!r}, which is not in its prompts")
    return {"prompts": {name: text or "" for name, text in prompts.items()}, "default_prompt": default}


def _dimensions(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    stated = config.get("matryoshka_dimensions") or []
    if not isinstance(stated, list) or not all(isinstance(size, int) and 0 < size <= _MAX_SIZE for size in stated):
        raise ModelLoadError(f"{folder}: its matryoshka_dimensions are not sizes")
    return tuple(sorted(stated))


def _labels(folder: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the labels in the order of the columns; a single label needs none."""
    number, names = num_labels(folder, config), config.get("id2label")
    names = names if isinstance(names, dict) else {}
    return tuple(str(names.get(str(index), f"LABEL_{index}")) for index in range(number))


def _activation(
    folder: Path, settings: Mapping[str, Any], config: Mapping[str, Any], task: Task, num_labels: int
) -> Activation:
    """Return the activation as CrossEncoder reads it; for the task ``classify`` as transformers' pipeline does.

    A classifier whose files state the identity gives logits there, too, and is read as one that states nothing.
    """
    nested = config.get("sentence_transformers")
    stated = settings.get("activation_fn") or (nested.get("activation_fn") if isinstance(nested, dict) else None)
    stated = stated or config.get("sbert_ce_default_activation_function")
    name = str(stated).rpartition(".")[2] if stated else ""
    if stated and (name not in _ACTIVATIONS or not str(stated).startswith("torch.")):
        raise ModelLoadError(f"{folder}: the activation {str(stated)[:60]!r} is not supported")
    if name and (task == "rerank" or name != "Identity"):
        return _ACTIVATIONS[name]
    if num_labels == 1:
        return "sigmoid" if task == "rerank" else "none"
    if task == "rerank" or config.get("problem_type") == "regression":
        return "none"
    return "sigmoid" if config.get("problem_type") == "multi_label_classification" else "softmax"


def _optional(file: Path) -> dict[str, Any]:
    return read_object(file) if file.is_file() else {}


def _size(path: Path, config: Mapping[str, Any], key: str, *, optional: bool = False) -> int | None:
    value = config.get(key)
    if value is None and optional:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MAX_SIZE:
        raise ModelLoadError(f"{path}: {key} is {str(value)[:40]!r}, which is not a size")
    return value
