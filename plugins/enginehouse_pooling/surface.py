"""The surface ``pooling``: embeddings, rerank, score and classify in the forms of several servers."""

from __future__ import annotations

from collections.abc import Sequence

from enginehouse.contract.hookspecs import API_VERSION
from enginehouse.contract.surface import ErrorAnswer, Reply, Route
from enginehouse_pooling.embeddings import embedding_routes
from enginehouse_pooling.rerank import rerank_routes
from enginehouse_pooling.scores import score_routes

__all__ = ["PoolingSurface"]


class PoolingSurface:
    """Addresses of pooling models. Errors have OpenAI's form at all of them."""

    name = "pooling"
    api_version = API_VERSION
    request_id_header = None
    takes_any_type = False

    def __init__(self) -> None:
        self.routes: Sequence[Route] = (*embedding_routes(), *rerank_routes(), *score_routes())

    def error(self, error: ErrorAnswer) -> Reply:
        """Return OpenAI's error object."""
        described = {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}
        return Reply({"error": described})
