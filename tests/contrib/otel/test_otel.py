"""OpenTelemetry: the names and values of spans and metrics, and a real server that sends them to a collector."""

import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from attrs import evolve

from enginehouse.contract.errors import ConfigError
from enginehouse.contract.server_events import ModelChanged, RequestEnded, ServerStarted, ServerStopped
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_otel import listening
from enginehouse_otel.options import OtelOptions
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ENDED = RequestEnded(
    method="POST",
    path="/v1/chat/completions",
    endpoint="/chat/completions",
    status=200,
    outcome="stop",
    request_id="mine",
    answer_id="chatcmpl-1",
    key="alice",
    model="small",
    asked_model="nick",
    stream=True,
    num_choices=1,
    prompt_tokens=20,
    cached_tokens=8,
    completion_tokens=11,
    queue_s=0.1,
    prefill_s=0.2,
    decode_s=0.5,
    first_token_s=0.3,
    total_s=0.9,
    finish_reasons=("stop",),
    figures={"forced_tokens": 3},
    parameters={"temperature": 0.7, "top_p": 1.0, "max_tokens": None, "seed": 5},
    began_ns=1_700_000_000_000_000_000,
    traceparent=f"00-{TRACE}-{PARENT}-01",
    tracestate="vendor=1",
)


@pytest.fixture(autouse=True)
def need_packages(request: pytest.FixtureRequest) -> None:
    """Tests with the marker ``otel`` need what the extra brings."""
    if request.node.get_closest_marker("otel"):
        pytest.importorskip("opentelemetry.exporter.otlp.proto.http")


# -- what needs no package ----------------------------------------------------------------------------


def test_it_does_nothing_unless_it_is_switched_on() -> None:
    assert listening.take(ServerStarted(version="1"), OtelOptions()) is False


def test_switching_it_on_without_its_packages_is_an_error_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    # The package holds a class under the name of the module, as plugins do.
    monkeypatch.setattr(sys.modules["enginehouse_otel.options"], "find_spec", lambda name: None)
    plugins = PluginsSettings(allow=("otel",), options={"otel": {"enabled": True}})

    with pytest.raises(ConfigError, match=r"enginehouse\[otel\]"):
        PluginRegistry.for_settings(Settings(plugins=plugins))


# -- spans and metrics, in memory ---------------------------------------------------------------------


@pytest.fixture
def memory() -> Iterator[tuple[Any, Any, Any]]:
    """An exporter that keeps spans and metrics: (exporter, finished spans, metric reader)."""
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from enginehouse_otel.exporter import Exporter

    spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
    exporter = Exporter(Resource.create({"service.name": "test"}), SimpleSpanProcessor(spans), reader)
    yield exporter, spans, reader
    exporter.close()


@pytest.mark.otel
def test_a_span_has_the_names_of_the_conventions(memory) -> None:
    exporter, spans, _ = memory
    exporter.export(ENDED)
    (span,) = spans.get_finished_spans()

    assert span.name == "chat small" and span.kind.name == "SERVER" and span.status.status_code.name == "UNSET"
    assert dict(span.attributes) == {
        "http.request.method": "POST",
        "http.route": "/chat/completions",
        "http.response.status_code": 200,
        "url.path": "/v1/chat/completions",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "enginehouse",
        "gen_ai.request.model": "small",
        "gen_ai.request.stream": True,
        "gen_ai.request.temperature": 0.7,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.seed": 5,
        "gen_ai.response.model": "small",
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.response.time_to_first_chunk": 0.3,
        "gen_ai.usage.input_tokens": 20,
        "gen_ai.usage.output_tokens": 11,
        "gen_ai.usage.cache_read.input_tokens": 8,
        "enginehouse.request_id": "mine",
        "enginehouse.key": "alice",
        "enginehouse.outcome": "stop",
        "enginehouse.queue_s": 0.1,
        "enginehouse.prefill_s": 0.2,
        "enginehouse.decode_s": 0.5,
        "enginehouse.forced_tokens": 3,
    }
    assert span.start_time == ENDED.began_ns and span.end_time == ENDED.began_ns + 900_000_000


@pytest.mark.otel
def test_a_span_belongs_to_the_clients_trace(memory) -> None:
    exporter, spans, _ = memory
    for traceparent in (ENDED.traceparent, None, "nonsense", f"00-{'0' * 32}-{PARENT}-01"):
        exporter.export(evolve(ENDED, traceparent=traceparent))
    first, *others = spans.get_finished_spans()

    assert format(first.context.trace_id, "032x") == TRACE and format(first.parent.span_id, "016x") == PARENT
    assert first.context.trace_state["vendor"] == "1"
    assert [span.parent for span in others] == [None, None, None]


@pytest.mark.otel
@pytest.mark.parametrize(
    ("changes", "error", "code"),
    [
        ({"outcome": "length"}, None, "UNSET"),
        ({"outcome": "engine_dead", "finish_reasons": ()}, "engine_dead", "ERROR"),
        ({"outcome": "model_not_ready", "status": 503, "finish_reasons": ()}, "model_not_ready", "ERROR"),
        ({"outcome": "invalid_value", "status": 400, "finish_reasons": ()}, "invalid_value", "UNSET"),
        ({"outcome": "cancelled", "finish_reasons": ()}, "cancelled", "UNSET"),
    ],
)
def test_errors_of_the_server_are_errors_of_the_span(memory, changes: dict, error: str | None, code: str) -> None:
    exporter, spans, _ = memory
    exporter.export(evolve(ENDED, **changes))
    (span,) = spans.get_finished_spans()

    assert span.attributes.get("error.type") == error and span.status.status_code.name == code


@pytest.mark.otel
def test_metrics_of_servers_by_the_conventions(memory) -> None:
    exporter, _, reader = memory
    exporter.export(ENDED)
    exporter.export(evolve(ENDED, status=400, outcome="invalid_value", finish_reasons=(), model=None))
    exporter.export(evolve(ENDED, endpoint="/metrics"))
    (scope,) = reader.get_metrics_data().resource_metrics[0].scope_metrics
    points = {
        metric.name: {point.attributes.get("error.type"): point for point in metric.data.data_points}
        for metric in scope.metrics
    }

    assert {name: set(found) for name, found in points.items()} == {
        "gen_ai.server.request.duration": {None, "invalid_value"},
        "gen_ai.server.time_to_first_token": {None},
        "gen_ai.server.time_per_output_token": {None},
    }
    assert points["gen_ai.server.request.duration"][None].sum == pytest.approx(0.9)
    assert points["gen_ai.server.time_per_output_token"][None].sum == pytest.approx(0.05)
    assert {metric.unit for metric in scope.metrics} == {"s"}
    assert "nick" not in str(points), "what a client merely asked for is no attribute of a metric"


# -- a real server and a stand-in of a collector ------------------------------------------------------


class Collector(ThreadingHTTPServer):
    """Takes what is sent by OTLP over HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.received: list[tuple[str, bytes]] = []
        self.status = 200
        self.thread = threading.Thread(target=self.serve_forever)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.received.append((self.path, body))
        self.send_response(self.server.status)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    server.thread.start()
    yield server
    server.shutdown()
    server.server_close()
    server.thread.join()


def serve(folder: Path, endpoint: str, **options: object) -> Settings:
    source = write_script(folder / "hello.json", ["Hel", "lo", "!"])
    return Settings(
        models={"m": ModelSettings(source=source, backend="scripted", aliases=("nick",))},
        plugins=PluginsSettings(
            allow=("otel",), options={"otel": {"enabled": True, "endpoint": endpoint, "interval_s": 600.0, **options}}
        ),
    )


def ask(settings: Settings, **headers: str) -> httpx.Response:
    body = {"model": "nick", "messages": [{"role": "user", "content": "a secret"}], "max_tokens": 3}
    with served(settings, timeout=20) as client:
        return client.post("/v1/chat/completions", json=body, headers=headers)


@pytest.mark.otel
def test_a_server_sends_spans_and_metrics_to_its_collector(collector: Collector, tmp_path: Path) -> None:
    trace = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    metrics = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
    answer = ask(serve(tmp_path, collector.url + "/"), traceparent=f"00-{TRACE}-{PARENT}-01")
    sent = dict(collector.received)

    assert answer.status_code == 200
    assert set(sent) == {"/v1/traces", "/v1/metrics"}
    spans = trace.ExportTraceServiceRequest.FromString(sent["/v1/traces"]).resource_spans[0]
    (span,) = spans.scope_spans[0].spans
    names = {attribute.key: attribute.value for attribute in span.attributes}
    assert span.trace_id.hex() == TRACE and span.parent_span_id.hex() == PARENT
    assert span.name == "chat m" and names["gen_ai.response.id"].string_value == answer.json()["id"]
    assert names["gen_ai.usage.output_tokens"].int_value == 3
    service = {attribute.key: attribute.value.string_value for attribute in spans.resource.attributes}
    assert service["service.name"] == "enginehouse" and service["service.version"]
    found = metrics.ExportMetricsServiceRequest.FromString(sent["/v1/metrics"]).resource_metrics[0]
    assert "gen_ai.server.request.duration" in {metric.name for metric in found.scope_metrics[0].metrics}
    assert all(b"a secret" not in body and b"Hello" not in body for _, body in collector.received)


@pytest.mark.otel
@pytest.mark.parametrize(
    ("options", "paths"), [({"traces": False}, {"/v1/metrics"}), ({"metrics": False}, {"/v1/traces"})]
)
def test_each_can_be_switched_off(collector: Collector, tmp_path: Path, options: dict, paths: set) -> None:
    ask(serve(tmp_path, collector.url, **options))

    assert {path for path, _ in collector.received} == paths


@pytest.mark.otel
def test_a_collector_that_refuses_or_is_gone_disturbs_no_request(collector: Collector, tmp_path: Path) -> None:
    collector.status = 400
    assert ask(serve(tmp_path, collector.url)).status_code == 200
    assert ask(serve(tmp_path, "http://127.0.0.1:9")).status_code == 200


@pytest.mark.otel
def test_events_that_are_no_requests_make_no_spans(memory, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, spans, _ = memory
    monkeypatch.setattr(type(exporter), "of", lambda *_: exporter)
    options = OtelOptions(enabled=True)
    for event in (ServerStarted(version="1"), ModelChanged(model="m", kind="ready"), ServerStopped()):
        assert listening.take(event, options) is True

    assert spans.get_finished_spans() == ()


@pytest.mark.otel
@pytest.mark.timeout(60)
@pytest.mark.parametrize("status", [b"200 OK", b"400 Bad"])
def test_a_collector_is_read_within_bounds(status: bytes) -> None:
    """An answer without an end, or one that unpacks to much more than it has."""
    num_bytes = 0

    def serve(listener: socket.socket) -> None:
        nonlocal num_bytes
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(10)
            connection.recv(65536)
            try:
                connection.sendall(b"HTTP/1.1 " + status + b"\r\ncontent-encoding: gzip\r\n\r\n")
                while True:
                    num_bytes += connection.send(b"x" * 65536)
            except OSError:
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        from enginehouse_otel.bounded_session import bounded_session

        with bounded_session() as session:
            answer = session.post(f"http://127.0.0.1:{listener.getsockname()[1]}/v1/traces", data=b"x", timeout=10)
        thread.join(20)

    assert answer.status_code == int(status[:3]) and len(answer.content) <= 65536
    assert num_bytes < 16 * 2**20
