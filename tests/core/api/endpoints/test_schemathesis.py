"""Requests that schemathesis makes of the served OpenAPI document: never a 5xx, always an error object, alive after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import hypothesis
import pytest
import schemathesis
from schemathesis.generation import GenerationMode

from enginehouse.settings.config import LimitsSettings, ModelSettings, PluginsSettings, Settings

from .conftest import DOCUMENT, PLUGINS, Endpoints, serve

SEED = 20_240_607
POSTED = [path for path, item in DOCUMENT["paths"].items() if "post" in item]
ORDERS = [path for path in POSTED if path.startswith("/admin/") or path.endswith("_lora_adapter")]
READING = [path for path in POSTED if path not in ORDERS]
ENDLESS = ["/admin/events"]
PLAIN = [path for path, item in DOCUMENT["paths"].items() if {"get", "delete"} & item.keys() and path not in ENDLESS]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoints]:
    """The fake model with short answers, so that many requests are cheap."""
    source = str(tmp_path_factory.mktemp("small"))
    model = ModelSettings(source=source, backend="fake", isolation="thread", context=256)
    limits = LimitsSettings(max_tokens=6, max_choices=2, max_stop=4, max_messages=8)
    yield from serve(Settings(models={"fake": model}, plugins=PluginsSettings(allow=PLUGINS), limits=limits))


def probe(server: Endpoints, path: str, mode: GenerationMode, num_examples: int, *, posts: bool = True) -> Counter[int]:
    """Send what is made for one address, by POST or by its first other method; returns how often each status came."""
    statuses: Counter[int] = Counter()
    schema = schemathesis.openapi.from_dict(server.client.get("/schema").json())
    operations = [found.ok() for found in schema.get_all_operations() if found.ok().path == path]
    operation = next(one for one in operations if (one.method == "post") is posts)
    base_url = f"{str(server.client.base_url).rstrip('/')}{operation.base_url.rstrip('/')}"

    @hypothesis.seed(SEED)
    @hypothesis.settings(
        max_examples=num_examples,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def send(case: schemathesis.Case) -> None:
        response = case.call(base_url=base_url)
        statuses[response.status_code] += 1

        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["message"] and error["code"]

    send()
    answer = server.answer("/v1/completions", prompt="Still there?", max_tokens=2)
    assert answer["choices"][0]["finish_reason"] in ("stop", "length")
    return statuses


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["fitting", "unfitting"])
@pytest.mark.parametrize("path", READING)
def test_requests_of_every_kind(small: Endpoints, path: str, mode: GenerationMode) -> None:
    statuses = probe(small, path, mode, 20)

    assert (200 if mode is GenerationMode.POSITIVE else 400) in statuses, statuses


@pytest.mark.parametrize("path", ORDERS)
def test_orders_of_every_kind(small: Endpoints, path: str) -> None:
    """To models and requests that do not exist."""
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
        assert 200 not in probe(small, path, mode, 10)


@pytest.mark.parametrize("path", PLAIN)
def test_requests_without_a_body(small: Endpoints, path: str) -> None:
    probe(small, path, GenerationMode.POSITIVE, 5, posts=False)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["fitting", "unfitting"])
@pytest.mark.parametrize("path", READING)
def test_many_requests_of_every_kind(small: Endpoints, path: str, mode: GenerationMode) -> None:
    probe(small, path, mode, 500)
