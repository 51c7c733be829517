"""Creates spans and metrics of finished requests, and sends them with OpenTelemetry's SDK.

Uses separate SDK providers: no process-wide provider is set, so it cannot conflict with those of a surrounding
application.
"""

from __future__ import annotations

from attrs import frozen
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import Histogram
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from enginehouse.contract.server_events import RequestEnded
from enginehouse_otel.attributes import OPERATIONS, error_type, metric_attributes, span_attributes, span_name
from enginehouse_otel.bounded_session import bounded_session
from enginehouse_otel.options import OtelOptions

__all__ = ["Exporter"]

_SCOPE = "enginehouse"
_DURATION_S = tuple(0.01 * 2**power for power in range(14))
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)

_propagator = TraceContextTextMapPropagator()


class Exporter:
    """Exports the requests of one server.

    Args:
        processor: receives spans; None disables them.
        reader: receives metrics; None disables them.
    """

    def __init__(self, resource: Resource, processor: SpanProcessor | None, reader: MetricReader | None) -> None:
        self._tracing = TracerProvider(resource=resource, shutdown_on_exit=False) if processor is not None else None
        if self._tracing is not None and processor is not None:
            self._tracing.add_span_processor(processor)
        readers = [reader] if reader is not None else []
        self._metering = MeterProvider(readers, resource=resource, shutdown_on_exit=False)
        self._metrics = _Metrics.of(self._metering)

    @classmethod
    def of(cls, options: OtelOptions, version: str) -> Exporter:
        """Create an exporter that sends to a collector by OTLP over HTTP."""
        resource = Resource.create({"service.name": options.service_name, "service.version": version})
        base = options.endpoint.rstrip("/") if options.endpoint is not None else None
        processor = reader = None
        if options.traces:
            processor = BatchSpanProcessor(
                OTLPSpanExporter(f"{base}/v1/traces" if base else None, session=bounded_session())
            )
        if options.metrics:
            exporter = OTLPMetricExporter(f"{base}/v1/metrics" if base else None, session=bounded_session())
            reader = PeriodicExportingMetricReader(exporter, export_interval_millis=1000 * options.interval_s)
        return cls(resource, processor, reader)

    def export(self, event: RequestEnded) -> None:
        """Create the span and the metrics of a generation request; other requests are ignored."""
        if event.endpoint in OPERATIONS:
            self._trace(event)
            self._metrics.record(event)

    def close(self) -> None:
        """Send pending data and stop."""
        if self._tracing is not None:
            self._tracing.shutdown()
        self._metering.shutdown()

    def _trace(self, event: RequestEnded) -> None:
        """Create one span, in the trace given by the client's headers."""
        if self._tracing is None:
            return
        headers = {"traceparent": event.traceparent or "", "tracestate": event.tracestate or ""}
        span = self._tracing.get_tracer(_SCOPE).start_span(
            span_name(event),
            context=_propagator.extract(headers),
            kind=SpanKind.SERVER,
            attributes=span_attributes(event),
            start_time=event.began_ns,
        )
        # By convention, client errors are not errors of a server span.
        if event.status >= 500 or (event.status < 400 and error_type(event) not in (None, "cancelled")):
            span.set_status(Status(StatusCode.ERROR, event.outcome))
        span.end(event.began_ns + int(1e9 * event.total_s))


@frozen(eq=False)
class _Metrics:
    """The instruments that the conventions define for model servers."""

    duration: Histogram
    first_token: Histogram
    per_token: Histogram

    @classmethod
    def of(cls, provider: MeterProvider) -> _Metrics:
        meter = provider.get_meter(_SCOPE)

        def histogram(name: str, buckets: tuple[float, ...]) -> Histogram:
            return meter.create_histogram(f"gen_ai.server.{name}", "s", explicit_bucket_boundaries_advisory=buckets)

        return cls(
            duration=histogram("request.duration", _DURATION_S),
            first_token=histogram("time_to_first_token", _FIRST_TOKEN_S),
            per_token=histogram("time_per_output_token", _PER_TOKEN_S),
        )

    def record(self, event: RequestEnded) -> None:
        """Record one request; token times only for answered requests."""
        attributes = metric_attributes(event)
        self.duration.record(event.total_s, attributes)
        if error_type(event) is not None:
            return
        if event.first_token_s is not None:
            self.first_token.record(event.first_token_s, attributes)
        num_behind_first = event.usage.get("completion_tokens", 0) - (event.num_choices or 1)
        decode_s = event.usage.get("decode_s")
        if decode_s is not None and num_behind_first > 0:
            self.per_token.record(decode_s * (event.num_choices or 1) / num_behind_first, attributes)
