"""EAGLE-3 heads: one Llama layer that reads a token's embedding and the model's states after three of its layers.

The states of the three layers are projected to one feature per token; the layer's attention reads embedding and
feature, each after a norm of its own. For a drafted token the layer's own output is the feature. The head has an output
layer of its own, usually over a part of the vocabulary.

Source: Li et al., "EAGLE-3" (2025, arXiv:2503.01840); names and shapes of the files as SpecForge writes them and vLLM
(``llama_eagle3.py``) and SGLang read them. Drafts are a chain, not a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from enginehouse.contract.errors import ModelLoadError
from enginehouse_backendkit.model_folder import check_model_files, check_weights
from enginehouse_hf.attention import ATTENTION_NAME, AnyStep
from enginehouse_hf.heads.reading import fill, names_in, read_tensors, without_weights

__all__ = ["Eagle3Head", "Eagle3Layer", "open_eagle3"]

_ARCHITECTURES = frozenset({"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"})
_NUM_STATES = 3


class Eagle3Layer(nn.Module):
    """The weights of a head; ``self_attn`` takes embedding and feature side by side."""

    def __init__(self, config: LlamaConfig, feature_size: int, index: int, *, has_embedding: bool) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(feature_size, size, bias=False)
        self.input_layernorm, self.hidden_norm = LlamaRMSNorm(size, eps), LlamaRMSNorm(size, eps)
        self.self_attn = LlamaAttention(config, index)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow: nn.Linear = getattr(self.self_attn, name)
            setattr(self.self_attn, name, nn.Linear(2 * size, narrow.out_features, narrow.bias is not None))
        self.post_attention_layernorm, self.norm = LlamaRMSNorm(size, eps), LlamaRMSNorm(size, eps)
        self.mlp = LlamaMLP(config)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        if has_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, size)


class Eagle3Head:
    """Implements :class:`enginehouse_hf.heads.drafting.DraftHead`."""

    def __init__(
        self,
        layer: Eagle3Layer,
        config: LlamaConfig,
        *,
        reads: Sequence[int],
        embedding: nn.Module,
        token_ids: Tensor | None,
        identity: str,
    ) -> None:
        self.reads: Sequence[int | None] = reads
        self.token_ids = token_ids
        self.identity = identity
        self._layer = layer
        self._embedding = embedding
        self._rotary = LlamaRotaryEmbedding(config).to(layer.fc.weight.device)
        self._keeps_norm = bool(getattr(config, "norm_before_residual", False))

    def features(self, states: Sequence[Tensor]) -> Tensor:
        """Join the states of three layers."""
        joined: Tensor = self._layer.fc(torch.cat(list(states), -1).to(self._layer.fc.weight.dtype))
        return joined

    def run(self, token_ids: Tensor, features: Tensor, positions: Tensor, step: AnyStep) -> Tensor:
        """Run the layer; its states are the features of drafted tokens."""
        layer = self._layer
        normed = layer.hidden_norm(features)
        hidden = torch.cat([layer.input_layernorm(self._embedding(token_ids)), normed], -1)[None]
        attended, _ = layer.self_attn(
            hidden,
            position_embeddings=self._rotary(hidden, positions[None]),
            attention_mask=None,
            enginehouse_step=step,
        )
        states = attended[0] + (normed if self._keeps_norm else features)
        states = states + layer.mlp(layer.post_attention_layernorm(states))
        return states

    def logits(self, states: Tensor) -> Tensor:
        """Return logits over the head's own vocabulary."""
        rows: Tensor = self._layer.lm_head(self._layer.norm(states))
        return rows


def open_eagle3(folder: Path, model: Any, vocab_size: int) -> Eagle3Head:
    """Read a head for a model from a folder with ``config.json`` and safetensors.

    Args:
        model: the transformers model.
        vocab_size: width of its rows of logits.

    Raises:
        ModelLoadError: the folder holds something else, or a head that does not fit the model.
    """
    check_model_files(folder)
    check_weights(folder)
    config = _read_config(folder, vocab_size)
    what = f"the head {folder}"
    tensors = read_tensors(names_in(folder), _renamed)
    offsets = tensors.pop("d2t", None)
    token_ids = None if offsets is None else torch.arange(len(offsets)) + offsets
    if config.draft_vocab_size != (vocab_size if token_ids is None else len(token_ids)):
        raise ModelLoadError(f"{what}: its draft_vocab_size {config.draft_vocab_size} does not fit its tensor d2t")
    if token_ids is not None and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
        raise ModelLoadError(f"{what}: its tensor d2t names tokens beyond the {vocab_size} of the model")
    size, has_embedding = int(model.config.get_text_config().hidden_size), "embed_tokens.weight" in tensors
    if not has_embedding and config.hidden_size != size:
        raise ModelLoadError(
            f"{what}: its hidden_size {config.hidden_size} is not that of the model, {size}, whose embeddings it uses"
        )
    layers = model.get_decoder().layers
    with without_weights(model.dtype):
        layer = Eagle3Layer(config, _NUM_STATES * size, len(layers), has_embedding=has_embedding)
    fill(layer, tensors, model.device, what)
    embedding = layer.embed_tokens if has_embedding else model.get_input_embeddings()
    reads = _state_layers(config, len(layers), what)
    ids = None if token_ids is None else token_ids.to(model.device)
    return Eagle3Head(layer, config, reads=reads, embedding=embedding, token_ids=ids, identity=_identity(folder))


def _read_config(folder: Path, vocab_size: int) -> Any:
    """Return the settings of a head. Raises ModelLoadError if it is of another kind or has another vocabulary."""
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise ModelLoadError(f"{folder}: a draft head is a folder with config.json and safetensors")
    config = AutoConfig.from_pretrained(folder)
    names = getattr(config, "architectures", None) or ()
    if not _ARCHITECTURES.intersection(names) or not isinstance(config, LlamaConfig):
        given = ", ".join(names) or "none"
        raise ModelLoadError(
            f"{folder}: its architectures are {given}; hf reads EAGLE-3 heads ({', '.join(sorted(_ARCHITECTURES))})"
        )
    if config.num_hidden_layers != 1:
        raise ModelLoadError(
            f"{folder}: its num_hidden_layers is {config.num_hidden_layers}; hf reads heads of 1 layer"
        )
    if config.vocab_size != vocab_size:
        raise ModelLoadError(f"{folder}: its vocab_size {config.vocab_size} is not that of the model, {vocab_size}")
    if getattr(config, "draft_vocab_size", None) is None:
        config.draft_vocab_size = config.vocab_size
    config._attn_implementation = ATTENTION_NAME
    return config


def _renamed(name: str) -> str | None:
    """Return the name of a tensor in :class:`Eagle3Layer`, or None if it is not needed."""
    short = name.removeprefix("model.")
    if short == "t2d" or short.endswith("rotary_emb.inv_freq"):
        return None
    return short.removeprefix("midlayer.").removeprefix("layers.0.")


def _state_layers(config: Any, num_layers: int, what: str) -> Sequence[int]:
    """Return the three layers, counted from 0, whose output states the head reads.

    The settings count as SpecForge and SGLang do. vLLM's own key of the same name outside of ``eagle_config`` counts
    from 1, but files exist that count from 0 there, so it is refused.
    """
    settings = getattr(config, "eagle_config", None) or {}
    chosen = settings.get("eagle_aux_hidden_state_layer_ids")
    if settings.get("use_aux_hidden_state") is False:
        raise ModelLoadError(f"{what}: eagle_config.use_aux_hidden_state is false; hf reads heads of three layers")
    if getattr(config, "eagle_aux_hidden_state_layer_ids", None) is not None:
        raise ModelLoadError(
            f"{what}: move eagle_aux_hidden_state_layer_ids into eagle_config, and count its layers from 0: it is not "
            "known how they are counted here"
        )
    if chosen is None:
        chosen = [1, num_layers // 2 - 1, num_layers - 4]
    if len(chosen) != _NUM_STATES or not all(0 <= index < num_layers for index in chosen):
        raise ModelLoadError(
            f"{what}: it reads the layers {list(chosen)} (eagle_config.eagle_aux_hidden_state_layer_ids), but the "
            f"model has the layers 0 to {num_layers - 1}, and three are needed"
        )
    return list(chosen)


def _identity(folder: Path) -> str:
    """Return what tells the files of one head from those of another."""
    facts = [(file.name, file.stat()) for file in sorted(folder.glob("*.safetensors"))]
    return "EAGLE-3 " + " ".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in facts)
