"""The plugin keeps the contracts, and a server uses it."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from enginehouse.contract.backend import ModelSource
from enginehouse_minimal.backend import MinimalBackend, MinimalOptions
from enginehouse_minimal.router import LengthRouter
from enginehouse_minimal.sampler import CutoffSampler
from enginehouse_testkit.backend_contract import BackendContract, ModelUnderTest
from enginehouse_testkit.engine_contract import EngineContract
from enginehouse_testkit.router_contract import RouterContract
from enginehouse_testkit.runner_contract import RunnerContract
from enginehouse_testkit.sampler_contract import SamplerContract
from enginehouse_testkit.server import started_server

TEXT = Path(__file__).parents[1] / "README.md"


class TestBackend(BackendContract, RunnerContract, EngineContract):
    exact = True

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls) -> ModelUnderTest:
        options = MinimalOptions(context=128, slots=4)
        return ModelUnderTest(backend=MinimalBackend(), source=ModelSource(str(TEXT), TEXT), options=options)


class TestSampler(SamplerContract):
    active = ({"minimal_cutoff": 0.05}, {"minimal_cutoff": 0.3, "temperature": 2.0})

    @pytest.fixture(scope="class")
    @classmethod
    def sampler(cls) -> CutoffSampler:
        return CutoffSampler()


class TestRouter(RouterContract):
    @pytest.fixture(scope="class")
    @classmethod
    def router(cls) -> LengthRouter:
        return LengthRouter()


def test_a_server_draws_with_it() -> None:
    """Only one byte is likely enough: the text is greedy, though the temperature is not."""
    with started_server(TEXT, "--backend", "minimal") as server:
        sent = {"model": "README", "prompt": "the ", "max_tokens": 8, "ignore_eos": True}
        texts = [
            post(f"{server.url}/v1/completions", {**sent, "minimal_cutoff": 0.99}),
            post(f"{server.url}/v1/completions", {**sent, "temperature": 0}),
        ]

    assert texts[0] == texts[1]


def post(url: str, body: dict[str, object]) -> str:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["text"]
