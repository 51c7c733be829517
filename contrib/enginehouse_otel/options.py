"""``[plugins.otel]``: whether and where to."""

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
    """``[plugins.otel]``: where spans and metrics are sent.

    Attributes:
        enabled: send them.
        endpoint: address of an OTLP/HTTP collector, such as ``http://localhost:4318``; unset leaves it to the variables
            ``OTEL_EXPORTER_OTLP_ENDPOINT`` and so on, else it is that address.
        service_name: how this server is called there.
        traces: send a span per generating request.
        metrics: send metrics.
        interval_s: seconds between two sendings of metrics; spans are sent within five seconds.
    """

    enabled: bool = field(default=False, validator=_check_installed)
    endpoint: str | None = None
    service_name: str = "enginehouse"
    traces: bool = True
    metrics: bool = True
    interval_s: float = field(default=60.0, validator=gt(0))
