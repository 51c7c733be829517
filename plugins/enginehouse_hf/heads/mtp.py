"""Layers for multi-token prediction in a model's own files, as DeepSeek V3 and GLM 4.5 or Qwen3-Next and Qwen 3.5 store
them.

Such a layer is one more layer of the model. Its input is a projection of a token's embedding and of the model's last
state before that token, each after a norm. For a drafted token that state is the layer's own output: before the norm of
the head in DeepSeek's form, after it in Qwen's, whose layer always has attention. Only the first such layer is used,
again and again, as vLLM and SGLang do.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024, arXiv:2412.19437), section 2.2; names of the tensors and the
norm of the last state as in vLLM (``deepseek_mtp.py``, ``glm4_moe_mtp.py``, ``qwen3_next_mtp.py``). The embedding at
position 0 is not masked.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from enginehouse.contract.errors import ModelLoadError
from enginehouse_hf.attention import AnyStep
from enginehouse_hf.depth import own_modules
from enginehouse_hf.heads.reading import fill, names_in, read_tensors, without_weights
from enginehouse_hf.linears import PreparedLinear
from enginehouse_hf.packed import PackedLinear, quantized_head

__all__ = ["MtpHead", "open_mtp"]

_MARK = "eh_proj.weight"
_AROUND = ("enorm.", "hnorm.", "eh_proj.", "shared_head.")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")

_QWEN_MARK = "mtp.fc.weight"
_QWEN_NAMES = {
    "mtp.fc.": "eh_proj.",
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.norm.": "shared_head.norm.",
    "mtp.layers.0.": "",
}
"""Beginnings of names in Qwen's form, and what they are in DeepSeek's."""


class _Around(nn.Module):
    """The weights around the layer, with their names in DeepSeek's form."""

    def __init__(self, norm: type[nn.Module], size: int, eps: float) -> None:
        super().__init__()
        self.enorm, self.hnorm = norm(size, eps), norm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.shared_head = nn.ModuleDict({"norm": norm(size, eps)})


class MtpHead:
    """Implements :class:`enginehouse_hf.heads.drafting.DraftHead`."""

    identity = "MTP"
    token_ids: Tensor | None = None
    reads: Sequence[int | None] = (None,)

    def __init__(
        self, around: _Around, layer: nn.Module, model: Any, embedding: nn.Module, output: nn.Module, *, norms: bool
    ) -> None:
        """Join the parts; with ``norms`` the states of drafted tokens are those after the norm of the head."""
        self._around, self._embedding, self._output, self._norms = around, embedding, output, norms
        self._body = _body_of_one(model.get_decoder(), layer)

    def features(self, states: Sequence[Tensor]) -> Tensor:
        """Return the model's last states, after its output norm."""
        return states[0]

    def run(self, token_ids: Tensor, features: Tensor, positions: Tensor, step: AnyStep) -> Tensor:
        """Run the layer; its states are the features of drafted tokens."""
        around = self._around
        joined = torch.cat([around.enorm(self._embedding(token_ids)), around.hnorm(features)], -1)
        states: Tensor = self._body(
            inputs_embeds=around.eh_proj(joined)[None],
            position_ids=positions[None],
            use_cache=False,
            enginehouse_step=step,
        ).last_hidden_state[0]
        return around.shared_head["norm"](states) if self._norms else states

    def logits(self, states: Tensor) -> Tensor:
        """Return logits over the model's vocabulary."""
        rows: Tensor = self._output(states if self._norms else self._around.shared_head["norm"](states))
        return rows


def open_mtp(folder: Path, model: Any) -> MtpHead:
    """Read the first MTP layer from the files of a model.

    Raises:
        ModelLoadError: they hold none, or one that does not fit the model.
    """
    files, config, decoder = names_in(folder), model.config.get_text_config(), model.get_decoder()
    number = len(decoder.layers)
    mark = next((name for name in files if name.endswith(f"layers.{number}.{_MARK}")), None)
    is_qwen = mark is None and _QWEN_MARK in files
    if mark is None and not is_qwen:
        raise ModelLoadError(
            f"{folder}: its files hold no layer for multi-token prediction (layers.{number}.{_MARK}, as in DeepSeek V3 "
            f"and GLM 4.5, or {_QWEN_MARK}, as in Qwen3-Next); set 'source' to a draft head for this model"
        )
    names = _QWEN_NAMES if mark is None else {mark.removesuffix(_MARK): ""}
    tensors = read_tensors(files, lambda name: _renamed(name, names))
    own_embedding, own_output = tensors.pop("embed_tokens.weight", None), tensors.pop("shared_head.head.weight", None)
    with without_weights(model.dtype):
        layer = type(decoder.layers[-1])(_longer(config), number)
        around = _Around(type(decoder.norm), config.hidden_size, config.rms_norm_eps)
    what = f"{folder}: its layer {'mtp' if is_qwen else number} for multi-token prediction"
    inner = {name: tensor for name, tensor in tensors.items() if not name.startswith(_AROUND)}
    fill(around, {name: tensor for name, tensor in tensors.items() if name not in inner}, model.device, what)
    fill(layer, _with_joint_experts(inner, layer), model.device, what)
    embedding = _shared(model.get_input_embeddings(), own_embedding, what, "embed_tokens")
    output = _shared(model.get_output_embeddings(), own_output, what, "shared_head.head")
    return MtpHead(around, layer, model, embedding, output, norms=is_qwen)


def _renamed(name: str, beginnings: Mapping[str, str]) -> str | None:
    """Return the name of a tensor of the layer in DeepSeek's form, without the number; None for others."""
    begin = next((begin for begin in beginnings if name.startswith(begin)), None)
    return None if begin is None else beginnings[begin] + name.removeprefix(begin)


def _longer(config: Any) -> Any:
    """Return the configuration of a model with one more layer, which has attention."""
    if getattr(config, "layer_types", None) is None:
        return config
    longer = copy.deepcopy(config)
    longer.layer_types = [*config.layer_types, "full_attention"]
    return longer


def _body_of_one(decoder: Any, layer: nn.Module) -> Any:
    """Return the decoder with this layer alone, without its output norm: it makes the arguments of its layers."""
    body = own_modules(decoder)
    body.layers = nn.ModuleList([layer])
    body.norm = nn.Identity()
    if getattr(body.config, "layer_types", None) is not None:
        body.config = copy.deepcopy(body.config)
        body.config.layer_types = ["full_attention"]
    return body


def _with_joint_experts(tensors: Mapping[str, Tensor], layer: nn.Module) -> dict[str, Tensor]:
    """Join the matrices of experts, which files hold one by one, if the model's own layers have them together."""
    experts: dict[str, dict[int, Tensor]] = {"gate": {}, "up": {}, "down": {}}
    others: dict[str, Tensor] = {}
    is_joint = "mlp.experts.gate_up_proj" in layer.state_dict()
    for name, tensor in tensors.items():
        found = _EXPERT.fullmatch(name) if is_joint else None
        if found is None:
            others[name] = tensor
        else:
            experts[found[2]][int(found[1])] = tensor
    numbers = sorted(experts["gate"])
    if not numbers or any(sorted(of_kind) != numbers for of_kind in experts.values()):
        return dict(tensors)
    gates, ups, downs = ([experts[kind][number] for number in numbers] for kind in ("gate", "up", "down"))
    others["mlp.experts.gate_up_proj"] = torch.stack(
        [torch.cat([gate, up]) for gate, up in zip(gates, ups, strict=True)]
    )
    others["mlp.experts.down_proj"] = torch.stack(downs)
    return others


def _shared(module: Any, own: Tensor | None, what: str, name: str) -> nn.Module:
    """Return a module of the model, or a copy with the layer's own weights if its files hold others."""
    found: nn.Module = module
    if own is None:
        return found
    if isinstance(module, PackedLinear):
        return _shared_packed(module, own, what, name)
    # A copy: weights in the order of oneDNN's kernels cannot be compared.
    plain: Any = module.plain() if isinstance(module, PreparedLinear) else module
    weight: Tensor = plain.weight
    _check_shape(own, weight.shape, what, name)
    own = own.to(weight.device, weight.dtype)
    if not torch.equal(own, weight):
        found = own_modules(plain)
        found._parameters = {**plain._parameters, "weight": nn.Parameter(own, requires_grad=False)}
    return found


def _shared_packed(module: PackedLinear, own: Tensor, what: str, name: str) -> nn.Module:
    """The same for quantised weights: the layer's own are quantised, too, and are compared so."""
    packed = module.packed
    _check_shape(own, (packed.num_rows, packed.width), what, name)
    quantised = quantized_head(own.to(packed.codes.device))
    is_same = quantised.form == packed.form and torch.equal(quantised.codes, packed.codes)
    return module if is_same else PackedLinear(quantised)


def _check_shape(own: Tensor, shape: Sequence[int], what: str, name: str) -> None:
    if tuple(own.shape) != tuple(shape):
        raise ModelLoadError(f"{what}: {name} is {list(own.shape)}, but for this model it must be {list(shape)}")
