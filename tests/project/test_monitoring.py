"""The dashboard and the alert rules of docs/deploy ask for metrics, labels and values that a server has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any, get_args

import httpx
import promql_parser
import pytest

from enginehouse.api.metrics import FAMILIES
from enginehouse.contract.calls import ModelState
from enginehouse_testkit.server import started_server

from .repository import ROOT

DEPLOY = ROOT / "docs" / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
# Labels that Prometheus adds, and the bound of a histogram's bucket.
ADDED_LABELS = {"instance", "job", "le"}
# What has no sample before something goes wrong, or before it is used.
LATER = {
    "enginehouse_refusals_total",
    "enginehouse_worker_restarts_total",
    "enginehouse_replays_total",
    "enginehouse_client_memory_refusals_total",
    "enginehouse_plugin_failures_total",
    "enginehouse_drafted_tokens_total",
    "enginehouse_accepted_draft_tokens_total",
    "enginehouse_pooled_texts_total",
    "enginehouse_cached_texts_total",
}


def rules() -> list[dict[str, Any]]:
    """The alert rules."""
    yaml = pytest.importorskip("yaml")
    (group,) = yaml.safe_load((DEPLOY / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    return list(group["rules"])


def expressions() -> list[str]:
    """Every expression, with the dashboard's variables replaced."""
    shown = [target["expr"] for panel in PANELS for target in panel["targets"]]
    shown = [one.replace("$__rate_interval", "5m").replace("$model", ".*") for one in shown]
    return [*shown, *(rule["expr"] for rule in rules())]


def parts(expression: str, kind: type) -> list[Any]:
    """Nodes of this kind in a parsed expression."""
    found: list[Any] = []
    promql_parser.walk(promql_parser.parse(expression), found.append)
    inner = [node.vector_selector for node in found if isinstance(node, promql_parser.MatrixSelector)]
    return [node for node in [*found, *inner] if isinstance(node, kind)]


@pytest.fixture(scope="module")
def sample_names() -> Iterator[set[str]]:
    """Names of all samples of a server that has answered a request."""
    with started_server("fake", "--backend", "fake") as server, httpx.Client(base_url=str(server.url)) as client:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        lines = client.get("/metrics").text.splitlines()
        yield {re.split(r"[ {]", line)[0] for line in lines}


def test_metrics_exist(sample_names: set[str]) -> None:
    families = {family.shown_name: set(family.labels) for family in FAMILIES}
    for expression in expressions():
        for selector in parts(expression, promql_parser.VectorSelector):
            if selector.name == "up":
                continue
            family = re.sub(r"_(bucket|sum|count)$", "", selector.name)
            assert selector.name in sample_names | LATER
            asked = {matcher.name for matcher in selector.matchers.matchers}
            assert asked <= families[family] | ADDED_LABELS, expression


def test_groups_have_labels_that_exist() -> None:
    known = {label for family in FAMILIES for label in family.labels} | ADDED_LABELS
    for expression in expressions():
        for aggregate in parts(expression, promql_parser.AggregateExpr):
            if aggregate.modifier is not None:
                assert set(aggregate.modifier.labels) <= known, expression


def test_states_exist() -> None:
    asked = {
        state
        for rule in rules()
        for named in re.findall(r'state=~"([^"]*)"', rule["expr"])
        for state in named.split("|")
    }

    assert asked and asked <= set(get_args(ModelState))


def test_texts_name_labels_of_their_expression() -> None:
    for rule in rules():
        named = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        (name, *_) = [one.name for one in parts(rule["expr"], promql_parser.VectorSelector)]
        family = next((one for one in FAMILIES if re.fullmatch(f"{one.shown_name}(_bucket)?", name)), None)
        assert named <= ADDED_LABELS | set(family.labels if family else ()), rule["alert"]


def test_panels_do_not_overlap() -> None:
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]

    assert len(cells) == len(set(cells))
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus")
def test_promtool_accepts_the_rules() -> None:
    checked = subprocess.run(
        ["promtool", "check", "rules", DEPLOY / "alerts.yaml"], capture_output=True, text=True, check=False
    )

    assert checked.returncode == 0, checked.stdout + checked.stderr
