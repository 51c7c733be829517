"""Properties of a loaded pooling model: its task, its rows, and the ids around its texts.

The file states them: its classifier's labels, flags of the vocabulary, and a chat template named ``rerank``. Used when
such a model is opened; does not compute anything.

Source: llama.cpp (llama.h, llama-graph.cpp, and ``format_prompt_rerank`` of its server for pairs).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.pooler import TextLayout
from enginehouse.contract.types import PoolTask
from enginehouse_llamacpp.library import Bindings
from enginehouse_llamacpp.pooling_type import PoolingType
from enginehouse_llamacpp.tokenizer import LlamaCppTokenizer

__all__ = ["Head", "read_head", "read_pair_layout", "read_text_layout"]

_SOFTMAX_ARCHITECTURES = {"qwen3", "qwen3vl"}
"""llama.cpp computes the softmax over the labels of these models itself."""

_ACTIVATIONS: Mapping[PoolTask, Literal["none", "sigmoid", "softmax"]] = {
    "embed": "none",
    "rerank": "sigmoid",
    "classify": "softmax",
}
_PLACES = re.compile(r"\{query\}|\{document\}")


@frozen(kw_only=True)
class Head:
    """Rows of a pooling model.

    Attributes:
        task: what the model does: a classifier of one label, or of yes and no, is a reranker.
        width: numbers per text in llama.cpp's output.
        labels: of a model for ``classify``.
        gives_probabilities: llama.cpp gives probabilities of the labels instead of logits.
    """

    task: PoolTask
    width: int
    labels: tuple[str, ...] = ()
    gives_probabilities: bool = False

    @property
    def dimensions(self) -> int:
        """Numbers per text in a pooler's row; a reranker has one logit."""
        return 1 if self.task == "rerank" else self.width

    @property
    def activation(self) -> Literal["none", "sigmoid", "softmax"]:
        """Function that turns a row into scores."""
        return _ACTIVATIONS[self.task]

    def rows(self, given: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the rows of a pooler from llama.cpp's, (num_texts, width) to (num_texts, dimensions).

        Probabilities become logits again: their logarithms, of which softmax gives the probabilities; for yes and no
        the difference, of which the sigmoid gives the probability of yes.
        """
        if not self.gives_probabilities:
            return given
        logits: NDArray[np.float32] = np.log(np.maximum(given, np.finfo(np.float32).tiny))
        return logits[:, :1] - logits[:, 1:] if self.task == "rerank" else logits


def read_head(bindings: Bindings, model: int, pooling: PoolingType, architecture: str) -> Head:
    """Read the head of a loaded model.

    Raises:
        ModelLoadError: llama.cpp gives constant scores for this model.
    """
    if pooling is not PoolingType.RANK:
        return Head(task="embed", width=bindings.llama_model_n_embd_out(model))
    width = bindings.llama_model_n_cls_out(model)
    has_softmax = architecture in _SOFTMAX_ARCHITECTURES
    if width == 1:
        if has_softmax:
            raise ModelLoadError(f"a {architecture} model with one label: llama.cpp's score of it is always 1")
        return Head(task="rerank", width=1)
    labels = tuple(_label(bindings, model, index) for index in range(width))
    if has_softmax and labels == ("yes", "no"):
        return Head(task="rerank", width=width, gives_probabilities=True)
    return Head(task="classify", width=width, labels=labels, gives_probabilities=has_softmax)


def _label(bindings: Bindings, model: int, index: int) -> str:
    text: bytes | None = bindings.llama_model_cls_label(model, index)
    return text.decode(errors="replace") if text else f"LABEL_{index}"


def read_text_layout(bindings: Bindings, vocab: int) -> TextLayout:
    """Return the ids that llama.cpp puts around one text.

    Raises:
        ModelLoadError: a WordPiece vocabulary has no ``[CLS]`` or ``[SEP]``.
    """
    if bindings.llama_vocab_type(vocab) == bindings.LLAMA_VOCAB_TYPE_WPM:
        begin, end = bindings.llama_vocab_bos(vocab), bindings.llama_vocab_sep(vocab)
        if min(begin, end) < 0:
            raise ModelLoadError("the vocabulary has no token [CLS] or [SEP], which a BERT model needs around a text")
        return TextLayout((begin,), after=(end,))
    begins = _if(bindings.llama_vocab_get_add_bos, bindings.llama_vocab_bos, vocab)
    return TextLayout(begins, after=_if(bindings.llama_vocab_get_add_eos, bindings.llama_vocab_eos, vocab))


def read_pair_layout(bindings: Bindings, tokenizer: LlamaCppTokenizer, text: TextLayout, template: str) -> TextLayout:
    """Return the ids around a query and a document.

    Args:
        text: layout of one text.
        template: the file's template ``rerank``; "" if it has none. Core writes texts into it as a whole, so that words
            beside its own text have the same tokens; its parts here are for callers that join ids.

    Raises:
        ModelLoadError: the template does not contain ``{query}`` and then ``{document}``, once each.
    """
    if template:
        if _PLACES.findall(template) != ["{query}", "{document}"]:
            raise ModelLoadError("the template 'rerank' must contain {query} and then {document}, once each")
        before, between, after = (tuple(tokenizer.encode(part, True)) for part in _PLACES.split(template))
        return TextLayout(before, between, after)
    vocab = tokenizer.vocab
    ends = _if(bindings.llama_vocab_get_add_eos, _end_of_text(bindings), vocab)
    separates = _if(bindings.llama_vocab_get_add_sep, bindings.llama_vocab_sep, vocab)
    return TextLayout(text.before, ends + separates, text.after)


def _end_of_text(bindings: Bindings) -> Callable[[int], int]:
    def read(vocab: int) -> int:
        end = int(bindings.llama_vocab_eos(vocab))
        return end if end >= 0 else int(bindings.llama_vocab_sep(vocab))

    return read


def _if(is_added: Callable[[int], bool], read: Callable[[int], int], vocab: int) -> tuple[int, ...]:
    token_id = read(vocab)
    return (token_id,) if is_added(vocab) and token_id >= 0 else ()
