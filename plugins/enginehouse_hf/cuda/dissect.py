"""Takes a loaded transformers model apart into the parts of ``structure.py``.

The tables below name the modules that transformers uses for a part. The kind of a part is found by running its module
on a few numbers, not by its class. A model with a weight outside of the known parts is refused. The loader compares the
logits of the whole with those of transformers' own layers, so that a part that only looks known is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from enginehouse_hf.cuda.kinds import (
    NEAR,
    NotFusable,
    difference,
    find_activation,
    find_gating,
    find_normalises,
    find_rotary,
    first_of,
    normed,
)
from enginehouse_hf.cuda.mixers import PooledMixers
from enginehouse_hf.cuda.structure import (
    Attention,
    Experts,
    Gated,
    Layer,
    Linear,
    Modules,
    Norm,
    Projection,
    Recurrent,
    Rotary,
    Structure,
)
from enginehouse_hf.depth import own_modules
from enginehouse_hf.layer_access import with_forward
from enginehouse_hf.packed import Packed, PackedExperts, PackedLinear, joined, rows_from, unpacked
from enginehouse_hf.recurrent import Mixer

__all__ = ["dissect"]

_NORMS: dict[frozenset[str], tuple[str | None, str | None, str | None, str | None]] = {
    frozenset({"input_layernorm", "post_attention_layernorm"}): (
        "input_layernorm", None, "post_attention_layernorm", None,
    ),
    frozenset({"input_layernorm", "pre_ff_layernorm"}): ("input_layernorm", None, "pre_ff_layernorm", None),
    frozenset({"operator_norm", "ffn_norm"}): ("operator_norm", None, "ffn_norm", None),
    frozenset({"post_attention_layernorm", "post_feedforward_layernorm"}): (
        None, "post_attention_layernorm", None, "post_feedforward_layernorm",
    ),
    frozenset(
        {"input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"}
    ): (
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    ),
    frozenset({"input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"}): (
        "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm",
    ),
}  # fmt: skip
"""Norms of a layer: before and after the attention, before and after the feed-forward part, by the names present."""

_HEAD_NORMS = (("q_norm", "k_norm"), ("query_layernorm", "key_layernorm"), ("q_layernorm", "k_layernorm"))
_LAST_NORMS = ("norm", "final_layernorm", "embedding_norm")
_FEED_FORWARD = ("mlp", "block_sparse_moe", "feed_forward")
_GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_ROUTERS = ("gate", "router")
_EXPERT_WEIGHTS = {"gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"}
_SHARED = (("shared_expert", "shared_expert_gate"), ("shared_experts", None), ("shared_mlp", None))

_TABLE_CHUNK = 4096
"""Positions per pass while rotary tables are read."""


def dissect(model: Any, max_context: int, mixers: PooledMixers | None = None) -> Structure:
    """Return the parts of a loaded model, which share its weights.

    Joint projections are built in place: the model's own become views of them, so that no weight is in memory twice.

    Args:
        model: a causal model that uses our attention, on one device.
        max_context: length of the rotary tables.
        mixers: its recurrent modules, if it has some.

    Raises:
        NotFusable: the model has an unknown part.
    """
    try:
        with torch.inference_mode():
            return _Dissection(model, max_context, mixers).run()
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:  # what other modules may raise
        raise NotFusable(f"{type(model).__name__} is built in another way: {error}") from error


@frozen(eq=False)
class _Attended:
    """Arguments of a layer for its attention: query (1, H, T, D) and key, and how it is to be computed."""

    query: Tensor
    key: Tensor
    scaling: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


@define(eq=False)
class _Seen:
    """Inputs and calls of the layers of the model with a few tokens; implements ``AnyStep``."""

    attended: dict[int, _Attended] = field(factory=dict)
    inputs: dict[int, Tensor] = field(factory=dict)

    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor, **scores: Any) -> Tensor:
        """Record the arguments; the result is zero."""
        self.attended[index] = _Attended(query, key, **scores)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def append(self, index: int, key: Tensor, value: Tensor) -> None:
        """Do nothing."""


class _Dissection:
    """One model while it is taken apart; ``known`` holds its modules that belong to a part."""

    def __init__(self, model: Any, max_context: int, mixers: PooledMixers | None) -> None:
        self._model, self._body, self._mixers = model, model.get_decoder(), mixers
        self._max_context = max_context
        self._known: set[int] = set()
        self._names = {id(module): name for name, module in model.named_modules()}
        self._modules: dict[Projection, Modules] = {}
        self._turning: Tensor | None = None
        self._rotaries: dict[tuple[int, bool, int], Rotary] = {}

    def run(self) -> Structure:
        model, body = self._model, self._body
        num_tokens = min(8, self._max_context)
        token_ids = torch.arange(num_tokens, device=body.embed_tokens.weight.device) + 1
        seen = self._observe(token_ids)
        tables, (_, embedded) = self._tables(token_ids), self._given(token_ids, _from(0, token_ids))
        self._turning = self._find_turning(token_ids[:1])
        layers = [self._layer(layer, index, seen, tables[index]) for index, layer in enumerate(body.layers)]
        weight = self._know(body.embed_tokens).weight.detach()
        config = model.config.get_text_config()
        structure = Structure(
            embeddings=weight,
            embedding_scale=_scale(embedded, embedding(token_ids, weight), body, config),
            layers=layers,
            norm=self._norm(first_of(body, _LAST_NORMS)),
            head=self._linear(model.lm_head),
            modules={part: self._modules[part] for layer in layers for part in _projections(layer)},
            divisor=float(getattr(config, "logits_scaling", None) or 1.0),
            softcap=getattr(config, "final_logit_softcapping", None),
        )
        for name, module in body.named_modules():
            if any(True for _ in module.parameters(recurse=False)) and id(module) not in self._known:
                raise NotFusable(f"{name}, a {type(module).__name__}, is not a known part")
        return structure

    # -- what the model does ---------------------------------------------------------------------------

    def _observe(self, token_ids: Tensor) -> _Seen:
        """Run a few tokens, and record the input of every attention and its queries and keys."""
        seen = _Seen()

        def note(index: int, _module: Any, args: Sequence[Any], named: dict[str, Any]) -> None:
            seen.inputs[index] = (named["hidden_states"] if "hidden_states" in named else args[0])[0]

        hooks = [
            layer.self_attn.register_forward_pre_hook(partial(note, index), with_kwargs=True)
            for index, layer in enumerate(self._body.layers)
            if self._recurrent(layer) is None
        ]
        if self._mixers is not None:
            self._mixers.begin_alone(len(token_ids))
        try:
            positions = torch.arange(len(token_ids), device=token_ids.device)[None]
            self._body(input_ids=token_ids[None], position_ids=positions, use_cache=False, enginehouse_step=seen)
        finally:
            for hook in hooks:
                hook.remove()
        return seen

    def _given(self, token_ids: Tensor, positions: Tensor) -> tuple[list[tuple[Tensor, Tensor] | None], Tensor]:
        """Return the rotary tables that each layer is given at ``positions``, (T,) or (3, T), and the first's input."""
        given: list[tuple[Tensor, Tensor] | None] = [None] * len(self._body.layers)
        states: list[Tensor] = []

        def note(index: int, hidden: Tensor, *_: Any, **named: Any) -> Tensor:
            given[index] = named.get("position_embeddings")
            states.append(hidden[0])
            return hidden

        body = own_modules(self._body)
        body.layers = nn.ModuleList(
            with_forward(layer, partial(note, index)) for index, layer in enumerate(self._body.layers)
        )
        body(input_ids=token_ids[None], position_ids=positions.unsqueeze(-2), use_cache=False, enginehouse_step=_Seen())
        return given, states[0]

    def _tables(self, token_ids: Tensor) -> list[tuple[Tensor, Tensor] | None]:
        """Return the rotary tables of each layer, (max_context, D); layers that are given the same ones share them."""
        given, _ = self._given(token_ids[:1], _from(0, token_ids[:1]))
        firsts: dict[int, int] = {}
        owners = [None if pair is None else firsts.setdefault(id(pair[0]), i) for i, pair in enumerate(given)]
        parts: dict[int, list[tuple[Tensor, Tensor]]] = {owner: [] for owner in firsts.values()}
        for begin in range(0, self._max_context, _TABLE_CHUNK):
            num_tokens = min(_TABLE_CHUNK, self._max_context - begin)
            same = token_ids[:1].expand(num_tokens)
            given, _ = self._given(same, _from(begin, same))
            for owner, tables in parts.items():
                pair = given[owner]
                assert pair is not None
                tables.append((pair[0][0], pair[1][0]))
        whole = {
            owner: (torch.cat([cos for cos, _ in tables]), torch.cat([sin for _, sin in tables]))
            for owner, tables in parts.items()
        }
        return [None if owner is None else whole[owner] for owner in owners]

    def _find_turning(self, token_id: Tensor) -> Tensor | None:
        """Return by which of time, row and column each number of the rotary tables is turned, (D,); None is not so."""
        if not (getattr(self._model.config.get_text_config(), "rope_parameters", None) or {}).get("mrope_section"):
            return None
        turning = None
        for axis in range(3):
            positions = torch.zeros(3, 1, dtype=torch.int64, device=token_id.device)
            positions[axis] = 1
            (_, sin), *_ = (pair for pair in self._given(token_id, positions)[0] if pair is not None)
            turning = sin.new_full(sin.shape[-1:], -1, dtype=torch.int64) if turning is None else turning
            turning[sin[0, 0] != 0.0] = axis
        return turning

    # -- parts -----------------------------------------------------------------------------------------

    def _layer(self, layer: Any, index: int, seen: _Seen, tables: tuple[Tensor, Tensor] | None) -> Layer:
        names = frozenset(name for name, module in layer.named_children() if _is_norm(module))
        if names not in _NORMS:
            raise NotFusable(f"layer {index} has the norms {', '.join(sorted(names)) or 'none'}")
        before_attention, after_attention, before_mlp, after_mlp = (
            None if name is None else self._norm(getattr(layer, name)) for name in _NORMS[names]
        )
        mixer = self._recurrent(layer)
        attention: Attention | Recurrent
        if mixer is None:
            attention = self._attention(layer.self_attn, seen.attended[index], seen.inputs[index], tables)
        else:
            attention = Recurrent(mixer.layer)
            for module in mixer.module.modules():
                self._know(module)
        return Layer(
            before_attention=before_attention,
            attention=attention,
            after_attention=after_attention,
            before_mlp=before_mlp,
            mlp=self._feed_forward(first_of(layer, _FEED_FORWARD)),
            after_mlp=after_mlp,
            factor=float(getattr(layer, "residual_multiplier", 1.0)),
        )

    def _recurrent(self, layer: Any) -> Mixer | None:
        """Return the recurrent module that a layer has in place of attention."""
        mixers = [] if self._mixers is None else self._mixers.all
        found = [mixer for mixer in mixers if any(mixer.module is child for child in layer.children())]
        if found and hasattr(layer, "self_attn"):
            raise NotFusable("a layer has both attention and a recurrent module")
        return found[0] if found else None

    def _attention(
        self, module: Any, attended: _Attended, inputs: Tensor, tables: tuple[Tensor, Tensor] | None
    ) -> Attention:
        qkv = self._joined(module, ("q_proj", "k_proj", "v_proj"), "qkv_proj")
        head_dim = attended.key.shape[3]
        found = next((names for names in _HEAD_NORMS if hasattr(module, names[0])), None)
        norms = (
            None if found is None else (self._norm(getattr(module, found[0])), self._norm(getattr(module, found[1])))
        )
        num_query, num_kv = attended.query.shape[1], attended.key.shape[1]
        is_gated = _num_rows(qkv) == 2 * (num_query + num_kv) * head_dim
        num_before = 2 * num_query if is_gated else num_query
        if _num_rows(qkv) != (num_before + 2 * num_kv) * head_dim or head_dim < 16:
            raise NotFusable(f"projections of {_num_rows(qkv)} rows for heads of {head_dim} dimensions")
        key = _apply(qkv, inputs)[:, num_before * head_dim : (num_before + num_kv) * head_dim]
        if norms is not None:
            width = norms[1].weight.shape[0]
            key = normed(key.unflatten(1, (-1, width)), norms[1]).flatten(1)
        key = key.view(-1, num_kv, head_dim)
        return Attention(
            qkv=qkv,
            norms=norms,
            rotary=self._rotary(tables, key, attended.key[0].transpose(0, 1)),
            output=self._linear(first_of(module, ("o_proj", "dense", "out_proj"))),
            head_dim=head_dim,
            scale=attended.scaling,
            window=attended.window,
            softcap=attended.softcap,
            sinks=self._sinks(module, attended.sinks),
            is_gated=is_gated,
        )

    def _rotary(self, tables: tuple[Tensor, Tensor] | None, key: Tensor, expected: Tensor) -> Rotary | None:
        """Return the rotary positions of a layer; layers that are given the same tables share the result."""
        rotary = find_rotary(tables, key, expected)
        if rotary is None:
            return None
        kind = id(tables), rotary.interleaved, rotary.cos.shape[1]
        if kind not in self._rotaries:
            self._rotaries[kind] = self._with_axes(rotary)
        return self._rotaries[kind]

    def _with_axes(self, rotary: Rotary) -> Rotary:
        turning, num_pairs = self._turning, rotary.cos.shape[1]
        if turning is None:
            return rotary
        if (turning < 0).any() or not torch.equal(turning, turning[:num_pairs].repeat(len(turning) // num_pairs)):
            raise NotFusable("positions in images (M-RoPE) are encoded in an unknown way")
        return evolve(rotary, axes=turning[:num_pairs])

    def _sinks(self, module: Any, sinks: Tensor | None) -> Tensor | None:
        """Return the sinks of an attention, which are its only weights outside of its projections and norms."""
        if sinks is None:
            return None
        own = [parameter.detach() for parameter in module.parameters(recurse=False)]
        if len(own) != 1 or not torch.equal(own[0], sinks):
            raise NotFusable("attention sinks are not the only weight beside the projections")
        self._know(module)
        return own[0]

    def _feed_forward(self, module: Any) -> Gated | Experts:
        if not hasattr(module, "experts"):
            return self._gated(module)
        experts, router = self._know(module.experts), self._know(first_of(module, _ROUTERS))
        if not {name for name, _ in router.named_parameters()} <= {"weight", "bias"}:
            raise NotFusable(f"experts with a {type(router).__name__}")
        bias = getattr(router, "bias", None)
        num_experts, hidden_size = router.weight.shape
        gate_up, down = self._expert_weights(experts)
        width = _num_rows(gate_up) // (2 * num_experts)
        shapes = (_num_rows(gate_up), _width(gate_up)), (_num_rows(down), _width(down))
        expected = (num_experts * 2 * width, hidden_size), (num_experts * hidden_size, width)
        if shapes != expected or hidden_size % 16 or width % 16:
            raise NotFusable(f"{num_experts} experts with weights of {shapes[0]} and {shapes[1]}")
        activation, alternates = find_gating(experts)
        shared, shared_gate = None, None
        found = next(((part, gate) for part, gate in _SHARED if hasattr(module, part)), None)
        if found is not None:
            shared = self._gated(getattr(module, found[0]))
            if found[1] is not None:
                gate = self._linear(getattr(module, found[1]))
                shared_gate = unpacked(gate, router.weight.dtype) if isinstance(gate, Packed) else gate.weight
        return Experts(
            router=Linear(router.weight.detach(), None if bias is None else bias.detach()),
            num_chosen=int(router.top_k),
            normalises=find_normalises(router, hidden_size),
            gate_up=gate_up,
            down=down,
            activation=activation,
            alternates=alternates,
            shared=shared,
            shared_gate=shared_gate,
        )

    def _expert_weights(self, experts: Any) -> tuple[Projection, Projection]:
        """The weights of all experts as two matrices; the module's own become views of them, so that it still works."""
        if isinstance(experts, PackedExperts):
            return experts.gate_up, experts.down
        names = {name for name, _ in experts.named_parameters()}
        if not {"gate_up_proj", "down_proj"} <= names <= _EXPERT_WEIGHTS:
            raise NotFusable(f"experts with the weights {', '.join(sorted(names))}")
        parts = []
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(experts, name).detach()
            if getattr(experts, "is_transposed", False):
                weight = weight.transpose(1, 2).contiguous()
                setattr(experts, name, nn.Parameter(weight.transpose(1, 2), requires_grad=False))
            bias = getattr(experts, f"{name}_bias", None)
            parts.append(Linear(weight.flatten(0, 1), None if bias is None else bias.detach().flatten()))
        return parts[0], parts[1]

    def _gated(self, module: Any) -> Gated:
        names = next((names for names in _GATED if hasattr(module, names[0])), _GATED[0])
        gate_up = self._joined(module, names[:2], "gate_up_proj")
        if gate_up.bias is not None:
            raise NotFusable("the joint projection of gate and up has a bias")
        return Gated(gate_up, self._linear(getattr(module, names[2])), find_activation(module))

    def _norm(self, module: Any) -> Norm:
        """Return the kind of RMS norm that does what the module does."""
        self._know(module)
        weight = module.weight.detach()
        eps = float(first_of(module, ("variance_epsilon", "eps")))
        sample = torch.linspace(-2.0, 3.0, 3 * len(weight), device=weight.device).view(3, -1).to(weight.dtype)
        expected = module(sample)
        kinds = [Norm(weight, eps, True), Norm(weight, eps, False), Norm(weight.float() + 1.0, eps, False)]
        best = min(kinds, key=lambda norm: difference(normed(sample, norm), expected))
        if not difference(normed(sample, best), expected) < NEAR:
            raise NotFusable(f"{type(module).__name__} is not an RMS norm")
        return best

    def _joined(self, module: Any, names: Sequence[str], joint: str) -> Projection:
        """Join projections; those of the modules become views of the result, so that they still work."""
        if hasattr(module, joint):
            return self._linear(getattr(module, joint))
        modules = [self._know(getattr(module, name)) for name in names]
        if all(isinstance(one, PackedLinear) for one in modules):
            whole = joined([one.packed for one in modules])
            self._modules[whole] = tuple((self._names[id(one)], one.packed.num_rows) for one in modules)
            begin = 0
            for one in modules:
                end = begin + one.packed.num_rows
                one.packed, begin = rows_from(whole, begin, end), end
            return whole
        parts = [self._plain(one) for one in modules]
        biases = [part.bias for part in parts if part.bias is not None]
        if len(biases) not in (0, len(parts)):
            raise NotFusable(f"only some of {', '.join(names)} have a bias")
        weight = torch.cat([part.weight for part in parts])
        for one, own in zip(modules, weight.split([len(part.weight) for part in parts]), strict=True):
            one.weight = nn.Parameter(own, requires_grad=False)
        whole = Linear(weight, torch.cat(biases) if biases else None)
        self._modules[whole] = tuple((self._names[id(one)], len(one.weight)) for one in modules)
        return whole

    def _linear(self, module: Any) -> Projection:
        part = module.packed if isinstance(module, PackedLinear) else self._plain(module)
        self._modules[part] = ((self._names[id(module)], _num_rows(part)),)
        return part

    def _plain(self, module: Any) -> Linear:
        self._know(module)
        if type(module) is not nn.Linear:
            raise NotFusable(f"a projection is a {type(module).__name__}")
        return Linear(module.weight.detach(), None if module.bias is None else module.bias.detach())

    def _know(self, module: Any) -> Any:
        self._known.add(id(module))
        return module


def _from(begin: int, token_ids: Tensor) -> Tensor:
    """Positions of tokens from ``begin`` on."""
    return torch.arange(begin, begin + len(token_ids), device=token_ids.device)


def _projections(layer: Layer) -> list[Projection]:
    """Return those of a layer that see the tokens of a step in order."""
    attention, mlp = layer.attention, layer.mlp
    first = () if isinstance(attention, Recurrent) else (attention.qkv, attention.output)
    return [*first, *((mlp.gate_up, mlp.down) if isinstance(mlp, Gated) else ())]


def _num_rows(part: Projection) -> int:
    return part.num_rows if isinstance(part, Packed) else part.weight.shape[0]


def _width(part: Projection) -> int:
    return part.width if isinstance(part, Packed) else part.weight.shape[1]


def _apply(part: Projection, x: Tensor) -> Tensor:
    return PackedLinear(part)(x) if isinstance(part, Packed) else linear(x, part.weight, part.bias)


def _is_norm(module: Any) -> bool:
    return "norm" in type(module).__name__.lower()


def _scale(embedded: Tensor, plain: Tensor, body: Any, config: Any) -> float:
    """Return the factor between embeddings and the input of the first layer."""
    named = (getattr(body.embed_tokens, "embed_scale", None), getattr(config, "embedding_multiplier", None))
    exact = [float(value) for value in named if value is not None]
    for scale in (1.0, *exact, *(float(torch.tensor(value).to(plain.dtype)) for value in exact)):
        if torch.equal(plain * scale, embedded):
            return scale
    raise NotFusable("embeddings are changed in an unknown way")
