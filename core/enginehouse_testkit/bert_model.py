"""BERT models for tests of pooling: read from a folder or made small, computed with numpy, written as GGUF.

:meth:`BertModel.pool` is the reference that a backend's vectors are compared with. Tensors have the names that
``transformers`` gives them, without the prefix ``bert.``.

Source: the architecture and its names from https://github.com/huggingface/transformers (``modeling_bert.py``); the
names of a GGUF file and the form of its vocabulary from llama.cpp (``conversion/bert.py``).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from enginehouse_testkit.gguf_writer import TensorType, write_gguf

__all__ = ["BertModel", "Pooling", "read_bert", "tiny_bert", "write_bert_gguf"]

Pooling = Literal["none", "mean", "cls", "last", "rank"]

_POOLING_TYPES = {"none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}
_CONTROL = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
_NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.LayerNorm": "token_embd_norm",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
    "pooler.dense": "cls",
    "classifier": "cls.output",
}
_ALWAYS_F32 = ("token_types", "position_embd")
"""Tables that llama.cpp's converter never stores in fewer bits, besides vectors."""


@frozen(eq=False)
class BertModel:
    """Weights and vocabulary.

    Attributes:
        vocabulary: texts of the tokens in the order of their ids; pieces that continue a word begin with ``##``.
        tensors: float32 by name.
        num_heads: attention heads of each layer.
        norm_epsilon: of the layer norms.
        labels: of the classifier; empty if there is none.
        is_lowercase: the tokenizer changes letters to lower case.
    """

    vocabulary: Sequence[str]
    tensors: Mapping[str, NDArray[np.float32]]
    num_heads: int
    norm_epsilon: float = 1e-12
    labels: tuple[str, ...] = ()
    is_lowercase: bool = True

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len([name for name in self.tensors if name.endswith("intermediate.dense.bias")])

    @property
    def max_tokens(self) -> int:
        """Number of positions."""
        return len(self.tensors["embeddings.position_embeddings.weight"])

    def pool(self, token_ids: Sequence[int], pooling: Pooling) -> NDArray[np.float32]:
        """Return the vector of one text, not normalised; ``rank`` gives the classifier's logits, (num_labels,).

        Args:
            token_ids: with ``[CLS]`` and ``[SEP]``; all have token type 0, as llama.cpp computes them.
            pooling: ``none`` gives one row per token.
        """
        state = self._hidden_states(np.asarray(token_ids))
        if pooling == "mean":
            return np.asarray(state.mean(axis=0))
        if pooling == "rank":
            return self._linear(np.tanh(self._linear(state[0], "pooler.dense")), "classifier")
        return np.asarray({"none": state, "cls": state[0], "last": state[-1]}[pooling])

    def _hidden_states(self, token_ids: NDArray[Any]) -> NDArray[np.float32]:
        """(num_tokens, width) of the last layer."""
        tables = ("word", "position", "token_type")
        rows = (token_ids, np.arange(len(token_ids)), np.zeros(len(token_ids), int))
        parts = zip(tables, rows, strict=True)
        summed = sum(self.tensors[f"embeddings.{table}_embeddings.weight"][row] for table, row in parts)
        state = self._norm(np.asarray(summed), "embeddings.LayerNorm")
        for layer in range(self.num_layers):
            state = self._layer(state, f"encoder.layer.{layer}")
        return state

    def _layer(self, state: NDArray[np.float32], name: str) -> NDArray[np.float32]:
        num_tokens, width = state.shape
        query, key, value = (
            self._linear(state, f"{name}.attention.self.{part}").reshape(num_tokens, self.num_heads, -1).swapaxes(0, 1)
            for part in ("query", "key", "value")
        )
        scores = query @ key.swapaxes(1, 2) / math.sqrt(width / self.num_heads)  # (heads, tokens, tokens)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = (weights / weights.sum(axis=-1, keepdims=True)) @ value
        attended = self._linear(mixed.swapaxes(0, 1).reshape(num_tokens, width), f"{name}.attention.output.dense")
        state = self._norm(state + attended, f"{name}.attention.output.LayerNorm")
        inner = self._linear(state, f"{name}.intermediate.dense")
        inner = inner * 0.5 * (1 + _erf(inner / math.sqrt(2)))
        return self._norm(state + self._linear(inner, f"{name}.output.dense"), f"{name}.output.LayerNorm")

    def _linear(self, state: NDArray[np.float32], name: str) -> NDArray[np.float32]:
        return np.asarray(state @ self.tensors[f"{name}.weight"].T + self.tensors[f"{name}.bias"])

    def _norm(self, state: NDArray[np.float32], name: str) -> NDArray[np.float32]:
        centred = state - state.mean(axis=-1, keepdims=True)
        spread = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + self.norm_epsilon)
        return np.asarray(centred / spread * self.tensors[f"{name}.weight"] + self.tensors[f"{name}.bias"])


def read_bert(folder: Path) -> BertModel:
    """Read a sentence-transformers or transformers folder with one safetensors file and a WordPiece tokenizer."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    numbered = tokenizer["model"]["vocab"]
    tensors = {
        name.removeprefix("bert."): tensor for name, tensor in _read_safetensors(folder / "model.safetensors").items()
    }
    labels = config.get("id2label", {}) if "classifier.weight" in tensors else {}
    return BertModel(
        sorted(numbered, key=numbered.__getitem__),
        tensors,
        config["num_attention_heads"],
        config["layer_norm_eps"],
        tuple(labels[number] for number in sorted(labels, key=int)),
        bool((tokenizer.get("normalizer") or {}).get("lowercase", True)),
    )


def tiny_bert(labels: Sequence[str] = (), width: int = 32, max_tokens: int = 128, seed: int = 1) -> BertModel:
    """Make a model with random weights, two layers, and a vocabulary of ASCII characters and a few words.

    Args:
        labels: of a classifier on the first token; empty: none.
        width: multiple of 32.
        max_tokens: number of positions.
        seed: of the weights.
    """
    letters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    words = ["the", "cat", "dog", "sat", "on", "mat", "moon", "##gs", "##ing"]
    vocabulary = [*sorted(_CONTROL), *letters, *(f"##{letter}" for letter in letters if letter.isalnum()), *words]
    rng = np.random.default_rng(seed)
    inner = 2 * width
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings": (len(vocabulary), width),
        "embeddings.position_embeddings": (max_tokens, width),
        "embeddings.token_type_embeddings": (2, width),
        "embeddings.LayerNorm": (width,),
    }
    for layer in (0, 1):
        square = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
        kinds: dict[str, tuple[int, ...]] = dict.fromkeys(square, (width, width))
        kinds |= {"attention.output.LayerNorm": (width,), "intermediate.dense": (inner, width)}
        kinds |= {"output.dense": (width, inner), "output.LayerNorm": (width,)}
        shapes |= {f"encoder.layer.{layer}.{kind}": shape for kind, shape in kinds.items()}
    if labels:
        shapes |= {"pooler.dense": (width, width), "classifier": (len(labels), width)}
    tensors: dict[str, NDArray[np.float32]] = {}
    for name, shape in shapes.items():
        scale = 1 if len(shape) == 1 else 2 / math.sqrt(shape[-1])
        tensors[f"{name}.weight"] = (scale * rng.standard_normal(shape)).astype(np.float32)
        if not name.endswith("_embeddings"):
            tensors[f"{name}.bias"] = (0.1 * rng.standard_normal(shape[0])).astype(np.float32)
    return BertModel(vocabulary, tensors, 4, labels=tuple(labels))


def write_bert_gguf(
    path: Path, model: BertModel, pooling: Pooling | None, weights: TensorType = "f32", **more: Any
) -> Path:
    """Write a model as a GGUF file for llama.cpp and return the path.

    Args:
        path: overwritten if it exists.
        model: the model.
        pooling: the file's pooling type; None leaves the key out, ``rank`` needs a classifier.
        weights: type of the matrices; vectors and small tables stay float32.
        more: further keys, with ``__`` for a dot.
    """
    kept = {name: data for name, data in model.tensors.items() if model.labels or not name.startswith("pooler.")}
    tensors = {_gguf_name(name): data for name, data in kept.items() if _gguf_name(name)}
    is_matrix = {name: data.ndim == 2 and not name.startswith(_ALWAYS_F32) for name, data in tensors.items()}
    width = model.tensors["embeddings.LayerNorm.weight"].shape[0]
    sizes = {
        "block_count": model.num_layers,
        "context_length": model.max_tokens,
        "embedding_length": width,
        "feed_forward_length": len(model.tensors["encoder.layer.0.intermediate.dense.bias"]),
        "attention.head_count": model.num_heads,
        "attention.layer_norm_epsilon": model.norm_epsilon,
        "attention.causal": False,
    }
    if pooling is not None:
        sizes["pooling_type"] = _POOLING_TYPES[pooling]
    if model.labels:
        sizes["classifier.output_labels"] = list(model.labels)
    numbers = {token: number for number, token in enumerate(model.vocabulary)}
    special = {"bos": "[CLS]", "eos": "[SEP]", "seperator": "[SEP]", "unknown": "[UNK]"}
    special |= {"padding": "[PAD]", "mask": "[MASK]"}
    values = {
        "general.architecture": "bert",
        "general.name": "BERT",
        **{f"bert.{key}": item for key, item in sizes.items()},
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [_gguf_token(token) for token in model.vocabulary],
        "tokenizer.ggml.token_type": np.array([3 if t in _CONTROL else 1 for t in model.vocabulary], np.int32),
        "tokenizer.ggml.token_type_count": len(model.tensors["embeddings.token_type_embeddings.weight"]),
        "tokenizer.ggml.normalizer.lowercase": model.is_lowercase,
        **{f"tokenizer.ggml.{kind}_token_id": numbers[token] for kind, token in special.items()},
        **{f"tokenizer.ggml.add_{kind}_token": kind != "sep" for kind in ("bos", "eos", "sep")},
        **{key.replace("__", "."): item for key, item in more.items()},
    }
    return write_gguf(path, values, tensors, {name: weights for name, is_it in is_matrix.items() if is_it})


def _erf(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the error function, exact to 1.5e-7.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26.
    """
    fraction = 1 / (1 + 0.3275911 * np.abs(numbers))
    series = np.polynomial.polynomial.polyval(
        fraction, [0, 0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429]
    )
    return np.asarray(np.sign(numbers) * (1 - series * np.exp(-(numbers**2))), np.float32)


def _gguf_token(token: str) -> str:
    """Return llama.cpp's form: ``▁`` begins a word, and a piece that continues one has no mark."""
    if token in _CONTROL:
        return token
    return token[2:] if token.startswith("##") and len(token) > 2 else f"▁{token}"


def _gguf_name(name: str) -> str:
    """Return llama.cpp's name of a tensor; "" if it has none, such as the head that predicts masked tokens."""
    stem, _, kind = name.rpartition(".")
    prefix = ""
    if stem.startswith("encoder.layer."):
        number, _, stem = stem.removeprefix("encoder.layer.").partition(".")
        prefix = f"blk.{number}."
    return f"{prefix}{_NAMES[stem]}.{kind}" if stem in _NAMES else ""


def _read_safetensors(path: Path) -> dict[str, NDArray[np.float32]]:
    """Read the floating-point tensors. Source: https://github.com/huggingface/safetensors, "Format"."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    tensors = {}
    for name, info in header.items():
        if name != "__metadata__" and info["dtype"] in _DTYPES:
            begin, end = info["data_offsets"]
            numbers = np.frombuffer(data[8 + length + begin : 8 + length + end], _DTYPES[info["dtype"]])
            tensors[name] = numbers.reshape(info["shape"]).astype(np.float32)
    return tensors
