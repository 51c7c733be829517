"""Rows of a pooler: kept ones of earlier requests, and their way to embeddings and scores.

The cache is used on the engine thread only. Does not know tokens or passes.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from enginehouse.contract.pooler import PoolerCapabilities
from enginehouse.contract.types import PoolingResult, ScoreKind
from enginehouse.engine.pooling.inputs import PoolInputs

Rows = NDArray[np.float32]

_ENTRY_BYTES = 200
"""Memory of an entry besides its row, measured for CPython 3.11."""


class RowCache:
    """Rows by the hash of their input, most recently used last; shared only inside one namespace.

    Args:
        max_bytes: memory for rows and keys; 0 keeps none.
    """

    def __init__(self, max_bytes: int, dimensions: int) -> None:
        self._max_rows = max_bytes // (4 * dimensions + _ENTRY_BYTES)
        self._rows: OrderedDict[bytes, Rows] = OrderedDict()
        self.num_hits = 0

    @property
    def is_on(self) -> bool:
        """True if rows are kept."""
        return self._max_rows > 0

    def find(self, namespace: str, key: bytes) -> Rows | None:
        """Return the row of an input, or None."""
        if not self.is_on:
            return None
        digest = _digest(namespace, key)
        row = self._rows.get(digest)
        if row is not None:
            self._rows.move_to_end(digest)
            self.num_hits += 1
        return row

    def keep(self, namespace: str, key: bytes, row: Rows) -> None:
        """Keep a copy of a row, in place of the least recently used one if there is no room."""
        digest = _digest(namespace, key)
        self._rows[digest] = row.copy()
        self._rows.move_to_end(digest)
        while len(self._rows) > self._max_rows:
            self._rows.popitem(last=False)


def _digest(namespace: str, key: bytes) -> bytes:
    name = namespace.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(len(name).to_bytes(8, "little") + name + key, digest_size=16).digest()


def result_of(made: PoolInputs, rows: Rows, capabilities: PoolerCapabilities) -> PoolingResult:
    """Return the result of a request.

    Args:
        rows: of the request's different inputs, ``(num_inputs, dimensions)``; changed in place.
    """
    request, labels = made.request, capabilities.labels
    if request.task == "embed":
        kind: ScoreKind = "embedding"
        values = rows
        if request.dimensions is not None and request.dimensions < rows.shape[1]:
            values = rows[:, : request.dimensions].copy()
        if request.normalize and (values is not rows or not capabilities.is_normalized):
            _normalize(values)
        values = values[made.places]
    elif made.places.ndim == 2:
        kind, labels = "cosine", ()
        if not capabilities.is_normalized:
            _normalize(rows)
        first, second = rows[made.places[:, 0]], rows[made.places[:, 1]]
        values = np.einsum("ij,ij->i", first, second)[:, None].clip(-1.0, 1.0)
    else:
        kind = "logit"
        if capabilities.activation != "none" and not request.raw_scores:
            kind = capabilities.activation
            rows = _sigmoid(rows) if kind == "sigmoid" else _softmax(rows)
        values = rows[made.places]
    written = np.ascontiguousarray(values, "<f4")
    return PoolingResult(
        written.tobytes(),
        written.shape[1],
        made.num_tokens,
        made.num_truncated,
        kind,
        labels,
        prompt=made.prompt,
    )


def _normalize(rows: Rows) -> None:
    """Scale each row to length 1, in place; a row of zeros stays."""
    lengths = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
    rows /= np.maximum(lengths, 1e-12)[:, None].astype(np.float32)


def _sigmoid(rows: Rows) -> Rows:
    """Return 1 / (1 + exp(-x)), without overflow."""
    small = np.exp(-np.abs(rows))
    scores: Rows = (np.where(rows >= 0, np.float32(1.0), small) / (np.float32(1.0) + small)).astype(np.float32)
    return scores


def _softmax(rows: Rows) -> Rows:
    weights = np.exp(rows - rows.max(axis=1, keepdims=True))
    scores: Rows = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
    return scores
