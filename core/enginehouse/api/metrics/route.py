"""``GET /metrics``: all figures in the text format of Prometheus, or as OpenMetrics where that is asked for."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response, get
from litestar.handlers import HTTPRouteHandler

from enginehouse.api.metrics.server_metrics import ServerMetrics

__all__ = ["metrics_route"]


def metrics_route(metrics: ServerMetrics) -> HTTPRouteHandler:
    """The route."""

    @get("/metrics")
    async def show_metrics(request: Request[Any, Any, Any]) -> Response[bytes]:
        """Show all figures."""
        body, content_type = metrics.encode(request.headers.get("accept", ""))
        return Response(body, media_type=content_type)

    return show_metrics
