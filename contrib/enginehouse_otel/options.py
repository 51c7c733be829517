"""``[plugins.otel]``: settings of the export."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from attrs import field, frozen
from attrs.validators import gt

__all__ = ["OtelOptions"]


def _check_installed(_: Any, attribute: Any, value: bool) -> None:
    if value and not _is_installed():
        raise ValueError(f"'{attribute.name}' needs packages; run: pip install 'enginehouse[otel]'")


def _is_installed() -> bool:
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        return False


@frozen(kw_only=True)
class OtelOptions:
    """``[plugins.otel]``: destination of spans and metrics.

    Attributes:
        enabled: send them.
        endpoint: URL of an OTLP/HTTP collector, such as ``http://localhost:4318``; unset uses the variables
            ``OTEL_EXPORTER_OTLP_ENDPOINT`` and so on, else this URL.
        service_name: name of this server in the exported data.
        traces: send a span per generation request.
        metrics: send metrics.
        interval_s: seconds between two exports of metrics; spans are sent within five seconds.
    """

    enabled: bool = field(default=False, validator=_check_installed)
    endpoint: str | None = None
    service_name: str = "enginehouse"
    traces: bool = True
    metrics: bool = True
    interval_s: float = field(default=60.0, validator=gt(0))
