"""Which files of a repository a model needs."""

from __future__ import annotations

from typing import Any

import pytest

from enginehouse.contract.errors import DownloadError
from enginehouse_hub.listing import HubFile, Listing, needed_files, read_listing
from enginehouse_hub.reference import parse_reference

from .conftest import GGUF, SAFETENSORS

DIGEST = "ab" * 32


def needed(text: str, *paths: str, code: bool = False) -> set[str]:
    reference = parse_reference(text)
    assert reference is not None
    listing = Listing("c0", tuple(HubFile(path, 1, DIGEST, "sha256") for path in paths))
    return {file.path for file in needed_files(reference, listing, code=code)}


def test_safetensors_come_with_tokenizer_and_settings_and_nothing_else() -> None:
    assert needed("o/n", *SAFETENSORS) == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors",
    }


def test_code_comes_only_when_asked_for() -> None:
    assert needed("o/n", *SAFETENSORS, code=True) - needed("o/n", *SAFETENSORS) == {"modeling_own.py"}


def test_all_shards_come_with_their_index() -> None:
    shards = {f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)}
    others = ("model.fp16.safetensors", "adapter_model.safetensors", "consolidated-00001-of-00002.safetensors")
    chosen = needed("o/n", "config.json", "model.safetensors.index.json", *shards, *others)

    assert chosen == {"config.json", "model.safetensors.index.json", *shards}


def test_weights_of_any_name_are_taken_where_none_has_the_usual_one() -> None:
    assert needed("o/n", "config.json", "weights.00.safetensors") == {"config.json", "weights.00.safetensors"}


def test_one_quantisation_comes_with_all_its_parts() -> None:
    assert needed("o/n:q4_k_m", *GGUF) == {"m-Q4_K_M.gguf", "mmproj-m-F16.gguf"}
    assert needed("o/n:F16", *GGUF) == {"F16/m-F16-00001-of-00002.gguf", "F16/m-F16-00002-of-00002.gguf"}
    assert needed("o/n", "README.md", "config.json", "m-Q8_0.gguf", "imatrix.gguf") == {"m-Q8_0.gguf"}
    assert needed("o/n:UD-Q4_K_XL", "m-UD-Q4_K_XL.gguf", "m-Q4_K_M.gguf") == {"m-UD-Q4_K_XL.gguf"}


def test_a_projector_of_images_comes_with_its_model() -> None:
    projectors = ("mmproj-F16.gguf", "mmproj-F32.gguf")
    assert needed("o/n", "m-Q8_0.gguf", "mmproj-m-F16.gguf") == {"m-Q8_0.gguf", "mmproj-m-F16.gguf"}
    assert needed("o/n:Q4_0", "m-Q8_0.gguf", "m-Q4_0.gguf", *projectors) == {"m-Q4_0.gguf", "mmproj-F16.gguf"}
    assert needed("o/n:Q4_0", "m-Q4_0.gguf", "other-Q8_0.gguf", *projectors) == {"m-Q4_0.gguf"}
    assert needed("o/n", "m-Q4_0.gguf", "mmproj-one.gguf", "mmproj-two.gguf") == {"m-Q4_0.gguf"}


@pytest.mark.parametrize(
    ("text", "paths", "message"),
    [
        ("o/n", list(GGUF), r"o/n' holds several models; name one, as in o/n:Q4_K_M. There are: F16, Q4_K_M, Q8_0"),
        ("o/n:Q2_K", list(GGUF), "no GGUF file there is Q2_K; there are: F16, Q4_K_M, Q8_0"),
        ("o/n:F16", ["m-F16-00001-of-00002.gguf"], "lacks a part of its model: m-F16-00002-of-00002.gguf"),
        ("o/n:F16", list(SAFETENSORS), "holds no GGUF files of which to pick F16"),
        ("o/n", ["config.json", "pytorch_model.bin"], r"pickles only \(pytorch_model.bin\), which run code"),
        ("o/n", ["README.md"], "holds neither safetensors nor GGUF files"),
        ("o/n", ["model.safetensors"], "no language model: there are weights, but no config.json"),
    ],
)
def test_what_cannot_be_served_is_an_error_that_says_why(text: str, paths: list[str], message: str) -> None:
    with pytest.raises(DownloadError, match=message):
        needed(text, *paths)


def sibling(**changes: Any) -> dict[str, Any]:
    return {"rfilename": "config.json", "size": 3, "blobId": "c0" * 20, **changes}


def test_listing_reads_both_kinds_of_digests() -> None:
    lfs = {"sha256": DIGEST, "size": 9, "pointerSize": 130}
    listing = read_listing({"sha": "c0" * 20, "siblings": [sibling(), sibling(rfilename="a/m.gguf", lfs=lfs)]}, "hub")

    assert listing.files[0] == HubFile("config.json", 3, "c0" * 20, "git")
    assert listing.files[1] == HubFile("a/m.gguf", 9, DIGEST, "sha256")


@pytest.mark.parametrize(
    "change",
    [
        {"rfilename": "../../.ssh/config"},
        {"rfilename": "/etc/passwd"},
        {"rfilename": "a\\..\\b"},
        {"rfilename": "a//b"},
        {"rfilename": ""},
        {"rfilename": 7},
        {"blobId": "../../x"},
        {"size": -1},
        {"size": "3"},
        {"size": True},
        {"lfs": {"sha256": "x", "size": 1}},
    ],
)
def test_hub_is_not_trusted_with_paths_digests_and_sizes(change: dict[str, Any]) -> None:
    with pytest.raises(DownloadError, match="does not describe a repository"):
        read_listing({"sha": "c0" * 20, "siblings": [sibling(**change)]}, "hub")


@pytest.mark.parametrize("data", [[], {}, {"sha": "main", "siblings": []}, {"sha": "c0" * 20}, "text", None])
def test_what_is_no_listing_is_an_error(data: Any) -> None:
    with pytest.raises(DownloadError, match="does not describe a repository"):
        read_listing(data, "hub")
