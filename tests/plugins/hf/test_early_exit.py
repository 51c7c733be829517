"""Early exit of a real model over HTTP: the figures are those of the engine, and strict thresholds change nothing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from enginehouse.settings.config import ModelSettings, ServerSettings, Settings
from enginehouse.settings.features import ExitPolicySettings
from enginehouse_testkit.server_thread import server_thread

pytestmark = [pytest.mark.hf, pytest.mark.slow, pytest.mark.timeout(600)]

_BODY = {
    "messages": [{"role": "user", "content": "Name three rivers."}],
    "max_tokens": 32,
    "temperature": 0,
    "ignore_eos": True,
}


def _answer(client: httpx.Client, model: str) -> tuple[str, dict[str, Any], httpx.Headers]:
    answer = client.post("/v1/chat/completions", json={**_BODY, "model": model}, headers={"X-Enginehouse-Details": "1"})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["choices"][0]["message"]["content"], found["enginehouse"]["optimizations"], answer.headers


def test_tokens_of_smollm2_leave_early(smollm2_folder: Path) -> None:
    """All of them, none of them, and with plain decoding beside them; several at once say the same as alone."""

    def model(policy: ExitPolicySettings | None) -> ModelSettings:
        options = {"device": "cpu", "threads": 1}
        return ModelSettings(
            source=str(smollm2_folder), backend="hf", context=128, slots=4, exit_policy=policy, options=options
        )

    def asked(name: str, threshold: float) -> ExitPolicySettings:
        return ExitPolicySettings(name=name, options={"threshold": threshold, "min_layer": 26, "every": 30})

    models = {"plain": model(None), "all": model(asked("margin", 0.0)), "none": model(asked("saturation", 1.0))}
    settings = Settings(models=models, server=ServerSettings(port=0, profile="octomil"))
    with server_thread(settings) as server, httpx.Client(base_url=server.url, timeout=300) as client:
        while client.get("/health").json()["status"] == "loading":
            time.sleep(0.2)
        plain, left, stayed = (_answer(client, name) for name in models)

    # The first token belongs to the prompt; the others left behind layer 26 of 30.
    assert (left[1]["early_exit_tokens"], left[1]["skipped_layers"]) == (31, 31 * 4)
    assert left[2]["x-octomil-early-exit-tokens"] == "31"
    assert left[0] != plain[0]
    assert (stayed[0], stayed[1]["early_exit_tokens"]) == (plain[0], 0)
    assert "x-octomil-early-exit-tokens" not in stayed[2]
