"""What `/metrics` reports: the families, what is counted per request, and what is asked of models and engines."""

from __future__ import annotations

from enginehouse.api.metrics.server_metrics import ServerMetrics

__all__ = ["ServerMetrics"]
