"""Metrics of `/metrics`: the families, counters per request, and values read from models and engines."""

from __future__ import annotations

from enginehouse.api.metrics.server_metrics import ServerMetrics

__all__ = ["ServerMetrics"]
