"""Names of hub models."""

from __future__ import annotations

import re

import pytest

from enginehouse_hub.reference import HubReference, parse_reference


@pytest.mark.parametrize(
    ("text", "quantization", "revision"),
    [
        ("owner/name", None, "main"),
        ("owner/name:Q4_K_M", "Q4_K_M", "main"),
        ("owner/name:ud-q4_k_xl", "ud-q4_k_xl", "main"),
        ("owner/name:BF16", "BF16", "main"),
        ("owner/name:v1.0", None, "v1.0"),
        ("owner/name@v1.0", None, "v1.0"),
        ("owner/name@refs/pr/3", None, "refs/pr/3"),
        ("owner/name:Q8_0@4c0ffee", "Q8_0", "4c0ffee"),
        ("Owner-1/Na.me_2", None, "main"),
    ],
)
def test_reference_says_model_quantisation_and_revision(text: str, quantization: str | None, revision: str) -> None:
    found = parse_reference(text)
    model_id = re.split("[:@]", text)[0]

    assert found == HubReference(model_id=model_id, quantization=quantization, revision=revision)
    assert parse_reference(str(found)) == found


@pytest.mark.parametrize(
    "text",
    ["name", "a/b/c", "owner/name:", "owner/name@", "owner/name:v1@v2", "../name", "owner/..", "owner/na me",
     "owner/name@../../x", "owner/name@/x", "https://host/owner/name", "owner/name:a/b", "öwner/name"],
)  # fmt: skip
def test_other_texts_are_no_references(text: str) -> None:
    assert parse_reference(text) is None
