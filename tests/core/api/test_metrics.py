"""What /metrics shows: the documented families, right figures, bounded labels; and what counting costs."""

import re
import time
from bisect import bisect
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from attrs import evolve
from prometheus_client.parser import text_string_to_metric_families

from enginehouse.api.http.access import GAP_BUCKETS_S, AccessRecord, TokenLatency
from enginehouse.api.metrics.families import FAMILIES, REPORTED, Values, family
from enginehouse.api.metrics.server_metrics import RequestMetrics
from enginehouse.contract.inspection import BATCH_SIZES, batch_size_bucket
from enginehouse.contract.router import Attempt, RouteQuestion, RoutingDecision
from enginehouse.plugins import PluginRegistry
from enginehouse.serving import ModelManager
from enginehouse.settings.auth import AuthSettings, KeySettings
from enginehouse.settings.config import ModelSettings, PluginsSettings, ServerSettings, Settings
from enginehouse.settings.optimisations import RouterSettings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served
from enginehouse_testkit.server_thread import server_thread
from enginehouse_testkit.waiting import wait_until

WATCH = {"authorization": "Bearer watch"}
KEYS = ("user", KeySettings(name="watcher", key="watch", scopes=("metrics",)))
USER = {"authorization": "Bearer user"}


def chat(**fields) -> dict:
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "ignore_eos": True, **fields}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("metrics")
    ticks = write_script(folder / "ticks.json", [" tick", {"delay_s": 0.01}], loop=True)
    return Settings(
        auth=AuthSettings(keys=KEYS),
        models={
            "fake": ModelSettings(
                source=str(folder),
                backend="fake",
                isolation="thread",
                context=512,
                aliases=("nick",),
                options={"step_delay_s": 0.005},
            ),
            "ticks": ModelSettings(source=ticks, backend="scripted"),
        },
        plugins=PluginsSettings(allow=("llguidance",)),
    )


def connect(settings: Settings) -> Iterator[httpx.Client]:
    with served(settings, timeout=20) as client:
        yield client


@pytest.fixture
def client(settings: Settings) -> Iterator[httpx.Client]:
    yield from connect(settings)


def read(client: httpx.Client) -> dict[tuple[str, frozenset], float]:
    """Every sample by its name and labels."""
    text = client.get("/metrics", headers=WATCH).text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for metric in text_string_to_metric_families(text)
        for sample in metric.samples
    }


def figure(client: httpx.Client, name: str, **labels: str) -> float:
    return read(client).get((f"enginehouse_{name}", frozenset(labels.items())), 0.0)


def wait_for(client: httpx.Client, expected: float, name: str, **labels: str) -> None:
    """A response ends a moment after its last byte, and a worker's figures come behind its tokens."""
    deadline = time.monotonic() + 60
    while (value := figure(client, name, **labels)) != expected:
        assert time.monotonic() < deadline, f"{name}{labels} is {value}, not {expected}"
        time.sleep(0.02)


def wait_above(client: httpx.Client, least: float, name: str, **labels: str) -> None:
    wait_until(lambda: figure(client, name, **labels) > least, name)


# -- the format ---------------------------------------------------------------------------------------


def test_every_family_that_is_shown_is_documented_and_well_formed(client: httpx.Client) -> None:
    client.post("/v1/chat/completions", json=chat(), headers=USER)
    text = client.get("/metrics", headers=WATCH).text
    known = {item.shown_name: item for item in FAMILIES}

    for metric in text_string_to_metric_families(text):
        name = metric.name + ("_total" if metric.type == "counter" else "")
        item = known[name]
        assert (metric.type, metric.documentation) == (item.kind, item.meaning)
        for sample in metric.samples:
            assert set(sample.labels) - {"le"} == set(item.labels)
    assert "_created" not in text


def test_families_are_named_as_prometheus_wants() -> None:
    names = [item.name for item in FAMILIES]

    assert len(set(names)) == len(names)
    for item in FAMILIES:
        assert re.fullmatch(r"enginehouse_[a-z_]+", item.shown_name)
        assert item.meaning.endswith(".") and (item.kind == "histogram") == bool(item.buckets)
        assert list(item.buckets) == sorted(item.buckets)


def test_openmetrics_where_it_is_asked_for(client: httpx.Client) -> None:
    accept = "application/openmetrics-text; version=1.0.0"
    answer = client.get("/metrics", headers=WATCH | {"accept": accept})

    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")
    assert client.get("/metrics", headers=WATCH).headers["content-type"].startswith("text/plain")


def test_metrics_need_their_scope(client: httpx.Client) -> None:
    assert client.get("/metrics").status_code == 401
    assert client.get("/metrics", headers=USER).status_code == 403


def test_what_nobody_fills_is_not_shown(client: httpx.Client) -> None:
    text = client.get("/metrics", headers=WATCH).text

    for name in REPORTED:
        assert f"enginehouse_{name}" not in text


# -- requests -----------------------------------------------------------------------------------------


def test_answers_are_counted(client: httpx.Client) -> None:
    for fields in ({}, {"stream": True}, {"model": "nick", "n": 2}):
        assert client.post("/v1/chat/completions", json=chat(**fields), headers=USER).status_code == 200
    of_fake = {"model": "fake"}
    done = {"endpoint": "/chat/completions", "status": "200", "outcome": "length"}

    wait_for(client, 3, "requests_total", **of_fake, **done)
    assert figure(client, "completion_tokens_total", **of_fake) == 20
    assert figure(client, "prompt_tokens_total", **of_fake) == 3 * figure(
        client, "request_prompt_tokens_sum", **of_fake
    ) / figure(client, "request_prompt_tokens_count", **of_fake)
    for name in ("time_to_first_token_seconds", "queue_seconds", "prefill_seconds", "request_completion_tokens"):
        assert figure(client, f"{name}_count", **of_fake) == 3
    assert figure(client, "request_seconds_count", **of_fake, endpoint="/chat/completions") == 3
    assert figure(client, "inter_token_seconds_count", **of_fake) > 0
    cached = [figure(client, "prefix_cache_requests_total", **of_fake, result=result) for result in ("hit", "miss")]
    assert sum(cached) == 3 and cached[0] >= 1
    assert figure(client, "cached_prompt_tokens_total", **of_fake) > 0


def test_labels_hold_nothing_that_clients_choose(client: httpx.Client) -> None:
    for n in range(5):
        client.post("/v1/chat/completions", json=chat(model=f"invented-{n}"), headers=USER)
        client.get(f"/nowhere/{n}", headers=USER)
        client.post("/v1/chat/completions", content=b"{", headers=USER | {"content-type": "application/json"})
    wait_for(
        client,
        5,
        "requests_total",
        model="other",
        endpoint="/chat/completions",
        status="404",
        outcome="model_not_found",
    )
    wait_for(client, 5, "requests_total", model="", endpoint="other", status="404", outcome="not_found")
    wait_for(client, 5, "requests_total", model="", endpoint="/chat/completions", status="400", outcome="invalid_value")

    text = client.get("/metrics", headers=WATCH).text
    assert "invented" not in text and "nowhere" not in text and "user" not in text
    assert figure(client, "refusals_total", endpoint="/chat/completions", code="model_not_found") == 5


def test_clients_that_leave_are_counted(client: httpx.Client) -> None:
    body = chat(model="ticks", stream=True, max_tokens=1000)
    with client.stream("POST", "/v1/chat/completions", json=body, headers=USER) as answer:
        lines = answer.iter_lines()
        while "tick" not in next(lines):
            pass
        assert figure(client, "open_requests", model="ticks") == 1

    wait_for(client, 1, "disconnects_total", model="ticks")
    assert figure(client, "completion_tokens_total", model="ticks") >= 1, "what was made was made"
    assert figure(client, "prompt_tokens_total", model="ticks") > 0
    assert figure(client, "request_completion_tokens_count", model="ticks") == 0
    wait_for(client, 0, "open_requests", model="ticks")


def test_keys_are_distinguished_only_where_the_settings_say_so(settings: Settings) -> None:
    for by_key in (False, True):
        for client in connect(evolve(settings, server=ServerSettings(key_metrics=by_key))):
            client.post("/v1/chat/completions", json=chat(), headers=USER)
            wait_for(client, float(by_key), "key_requests_total", key="key-1")
            assert figure(client, "key_tokens_total", key="key-1", kind="completion") == 5 * by_key


def test_callers_without_number_are_no_labels_without_number(settings: Settings) -> None:
    """A plugin that knows callers by their tokens may name any number of them."""
    values = Values()
    requests = RequestMetrics(values, ModelManager(settings, PluginRegistry.for_settings(settings)))
    for number in range(3000):
        requests.count(AccessRecord(method="GET", path="/v1/models", key=f"caller-{number}"), by_key=True)
    requests.count(AccessRecord(method="GET", path="/v1/models", key="caller-0"), by_key=True)
    assert values.get("key_requests", "caller-0") == 2
    assert values.get("key_requests", "other") == 2000


@pytest.mark.llguidance
def test_optimisations_report_by_name(client: httpx.Client) -> None:
    """Tokens that a constraint forces are the first of them."""
    fields = {"model": "fake", "guided_regex": "always the same words[ab]"}
    assert client.post("/v1/chat/completions", json=chat(**fields, max_tokens=60), headers=USER).status_code == 200

    deadline = time.monotonic() + 60
    while not figure(client, "forced_tokens_total", model="fake"):
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Fixed:
    """A router that names a model that has failed, which is passed over, and then the fake one."""

    name, api_version = "fixed", 1

    def route(self, question: RouteQuestion) -> RoutingDecision:
        return RoutingDecision(attempts=(Attempt("broken"), Attempt("fake")), reason="as told")


def test_routing_is_counted(settings: Settings, tmp_path: Path) -> None:
    broken = ModelSettings(source=str(tmp_path / "nothing"), backend="fake")
    models = {"broken": broken, "fake": settings.models["fake"]}
    routed = evolve(settings, auth=AuthSettings(), models=models, router=RouterSettings(strategy="fixed"))
    registry = evolve(PluginRegistry.for_settings(routed), routers={"fixed": Fixed()})
    with server_thread(routed, registry) as running, httpx.Client(base_url=running.url, timeout=20) as client:
        while client.get("/health").json()["models"]["fake"]["state"] != "ready":
            time.sleep(0.01)
        assert client.post("/v1/chat/completions", json=chat(model="auto")).status_code == 200

        wait_for(client, 1, "routed_requests_total", model="fake")
        assert figure(client, "routing_attempts_total", model="fake") == 1
        assert figure(client, "discarded_tokens_total", model="fake") == 0


# -- models and engines -------------------------------------------------------------------------------


def test_models_and_their_engines(client: httpx.Client) -> None:
    client.post("/v1/chat/completions", json=chat(n=3), headers=USER)
    of_fake = {"model": "fake"}

    def is_at_rest() -> bool:
        shown = read(client)  # the first report of an engine says that nothing runs, either
        kept, running = (f"enginehouse_{name}" for name in ("prefix_cache_tokens", "running_sequences"))
        return shown[kept, frozenset(of_fake.items())] > 0 == shown[running, frozenset(of_fake.items())]

    wait_until(is_at_rest, "the report at the end of the request")
    assert figure(client, "models", **of_fake, state="ready") == 1
    assert figure(client, "models", **of_fake, state="failed") == 0
    assert figure(client, "worker_restarts_total", **of_fake) == 0
    assert figure(client, "slots", **of_fake) == 8
    total, free = (figure(client, f"kv_cache_{name}", **of_fake) for name in ("tokens", "free_tokens"))
    assert total == 512 * 8 and 0 < free < total
    assert figure(client, "batch_sequences_count", **of_fake) >= 5
    assert figure(client, "batch_sequences_sum", **of_fake) >= 3 * 4
    assert figure(client, "server_memory_bytes") > 2**20
    assert (figure(client, "worker_memory_bytes", **of_fake)) == 0, "this worker is a thread"
    assert figure(client, "slots", model="ticks") == 0, "this engine shows nothing"


def test_a_worker_process_reports_its_memory_and_counts_survive_it(tmp_path) -> None:
    model = ModelSettings(source=str(tmp_path), backend="fake", context=512, options={"faults": {"abort_at_step": 12}})
    settings = Settings(models={"m": model}, plugins=PluginsSettings(allow=()))
    for client in connect(settings):
        steps = 0.0
        for _ in range(4):
            client.post("/v1/chat/completions", json=chat(max_tokens=5))
            now = figure(client, "batch_sequences_count", model="m")
            assert now >= steps, "a counter does not go back"
            steps = now
        deadline = time.monotonic() + 60
        while not figure(client, "worker_restarts_total", model="m"):
            client.post("/v1/chat/completions", json=chat(max_tokens=5))
            assert time.monotonic() < deadline
        wait_for(client, 1, "models", model="m", state="ready")
        wait_above(client, 2**20, "worker_memory_bytes", model="m")  # the new worker has reported
        assert figure(client, "batch_sequences_count", model="m") >= steps


def test_counts_of_engines_that_ended_between_two_scrapes_are_kept(tmp_path) -> None:
    """Two workers die of the request; neither of them, nor the third, is seen by a scrape before."""
    options = {"faults": {"abort_at_token": 65}}
    model = ModelSettings(source=str(tmp_path), backend="fake", context=512, options=options)
    settings = Settings(models={"m": model}, plugins=PluginsSettings(allow=()))
    for client in connect(settings):
        client.post("/v1/chat/completions", json=chat(max_tokens=5))
        client.post("/v1/completions", json={"model": "m", "prompt": "A", "max_tokens": 5})
        wait_for(client, 2, "worker_restarts_total", model="m")
        wait_for(client, 1, "models", model="m", state="ready")
        assert figure(client, "plugin_failures_total", plugin="fake", kind="backend") == 2


# -- pieces -------------------------------------------------------------------------------------------


def test_batches_are_counted_in_the_bucket_of_their_size() -> None:
    for size in range(1, 600):
        bucket = batch_size_bucket(size)
        assert bucket == next((n for n, bound in enumerate(BATCH_SIZES) if size <= bound), len(BATCH_SIZES))


def test_histograms_cumulate() -> None:
    values = Values()
    for value in (0.004, 0.005, 0.006, 1000.0):
        values.observe("queue_seconds", "m", value=value)
    (metric,) = values.collect()
    by_bound = {sample.labels.get("le"): sample.value for sample in metric.samples if sample.name.endswith("_bucket")}

    assert by_bound["0.005"] == 2 and by_bound["0.01"] == 3 and by_bound["60.0"] == 3 and by_bound["+Inf"] == 4
    assert family("queue_seconds").buckets[0] == 0.005


def test_the_pace_counts_gaps() -> None:
    pace = TokenLatency(time.perf_counter())
    pace.mark()
    assert pace.first_s is not None and pace.first_s < 60 and sum(pace.gaps()[0]) == 0
    time.sleep(0.012)
    pace.mark()
    pace.mark()

    counts, total_s = pace.gaps()
    num_longer = sum(counts[bisect(GAP_BUCKETS_S, 0.01) :])
    assert sum(counts) == 2 and num_longer >= 1 and len(counts) == len(GAP_BUCKETS_S) + 1
    assert total_s >= 0.012
    assert TokenLatency(0.0).gaps() == ([0] * (len(GAP_BUCKETS_S) + 1), 0.0) and TokenLatency(0.0).first_s is None


def test_counting_costs_little_per_text_and_request() -> None:
    """A text costs an event loop some 20 microseconds in all; of these, counting may have a few percent."""
    pace, record = TokenLatency(time.perf_counter()), AccessRecord(method="POST", path="/v1/chat/completions")
    began = time.thread_time()
    for _ in range(20_000):
        pace.mark()
    per_text_s = (time.thread_time() - began) / 20_000

    assert record.pace.first_s is None
    assert per_text_s < 5e-6, "loaded machines are slow, but not this slow"
