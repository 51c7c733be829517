"""A server with a pooling model of each task, of which the tests know every row, and a chat model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_testkit.served import served

PROMPTS = {"query": "query: ", "passage": "passage: "}
CONTEXT = 64
"""Longest input in tokens, two or four of which are special ones."""


def pooler(task: str, **options: Any) -> ModelSettings:
    """Return the settings of a fake pooling model."""
    return ModelSettings(
        source="fake-pooler",
        backend="fake-pooler",
        isolation="thread",
        context=CONTEXT,
        options={"task": task, **options},
    )


@pytest.fixture(scope="package")
def client() -> Iterator[httpx.Client]:
    models = {
        "embedder": pooler("embed", dimension_choices=[8, 16], prompts=PROMPTS),
        "plain": pooler("embed", is_normalized=False),
        "reranker": pooler("rerank"),
        "classifier": pooler("classify"),
        "fake": ModelSettings(source="fake", backend="fake", isolation="thread"),
    }
    settings = Settings(models=models, plugins=PluginsSettings(allow=("ollama", "pooling")))
    with served(settings) as client:
        yield client
