"""Draft heads on a running server: their settings and figures."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from enginehouse.settings.config import ModelSettings, PluginsSettings, ServerSettings, Settings
from enginehouse.settings.features import DrafterSettings
from enginehouse_testkit.server_thread import server_thread

pytestmark = [pytest.mark.hf, pytest.mark.timeout(300)]


def model(folder: Path, *drafters: Any) -> ModelSettings:
    return ModelSettings(
        source=str(folder),
        backend="hf",
        context=128,
        slots=2,
        drafters=tuple(map(DrafterSettings.read, drafters)),
        options={"device": "cpu", "threads": 1},
    )


def test_heads_are_configured_and_counted_like_other_drafters(
    headed_model: Callable[..., Path], eagle3: Callable[..., Path]
) -> None:
    llama, glm, hybrid = (headed_model(kind, is_chain=True) for kind in ("llama", "glm4_moe", "qwen3_5_text"))
    head = {"name": "head", "min_probability": 0.0}
    models = {
        "eagle3": model(llama, {**head, "source": str(eagle3(is_chain=llama))}),
        "mtp": model(glm, head),
        "hybrid": model(hybrid, "prompt-lookup", head),
    }
    settings = Settings(
        models=models, server=ServerSettings(port=0), plugins=PluginsSettings(allow=("hf", "speculate"))
    )
    with server_thread(settings) as server, httpx.Client(base_url=server.url, timeout=120) as client:
        deadline = time.monotonic() + 120
        while any(card["state"] not in ("ready", "failed") for card in cards(client).values()):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        found = {name: drafts_of(client, name) for name in models}
        metrics = client.get("/metrics").text

    for name, (drafted, accepted) in found.items():
        assert drafted == accepted > 0
        assert f'enginehouse_drafted_tokens_total{{drafter="head",model="{name}"}} {drafted}' in metrics


def cards(client: httpx.Client) -> dict[str, dict[str, Any]]:
    return {card["id"]: card for card in client.get("/v1/models").json()["data"]}


def drafts_of(client: httpx.Client, name: str) -> tuple[int, int]:
    """Drafted and accepted tokens of an answer."""
    body = {"model": name, "prompt": [11, 52, 93], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    answer = client.post("/v1/completions", json=body, headers={"X-Enginehouse-Details": "1"})
    assert answer.status_code == 200, answer.text
    counts = answer.json()["enginehouse"]["drafters"]["head"]
    return counts["drafted_tokens"], counts["accepted_draft_tokens"]
