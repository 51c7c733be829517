"""Images through the vision towers of models: the contract of images, and equality with transformers' own path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginehouse.contract.backend import ModelSource, Span
from enginehouse.contract.media import DecodedImage, MediaChunk, MediaInput, pseudo_tokens
from enginehouse_hf.backend import HfBackend, HfOptions
from enginehouse_testkit.contract.opening import ModelUnderTest
from enginehouse_testkit.media_contract import MediaContract, random_image

pytest.importorskip("PIL")
pytestmark = pytest.mark.hf

FAMILIES = ("idefics3", "smolvlm", "llava", "gemma3", "qwen2_5_vl")
Item = int | DecodedImage
SMALL, WIDE, TALL = random_image(1), random_image(2, 64, 32), random_image(3, 40, 96)


def under_test(path: Path, **more: Any) -> ModelUnderTest:
    options = HfOptions(device="cpu", dtype="float32", context=256, slots=4, threads=1, cache_tokens=640, **more)
    return ModelUnderTest(backend=HfBackend(), source=ModelSource(str(path), path), options=options)


def open_model(path: Path, **more: Any) -> Any:
    return under_test(path, **more).open() if hasattr(ModelUnderTest, "open") else HfBackend().open(
        ModelSource(str(path), path), under_test(path, **more).options, lambda share, what: None
    )


def feed(runner: Any, sequence: int, items: Sequence[Item]) -> np.ndarray | None:
    """Append text, a token at a time, and images; return the last row."""
    row = None
    for item in items:
        for part in runner.prepare_image(item) if isinstance(item, DecodedImage) else [[item]]:
            start = runner.length(sequence)
            if isinstance(part, MediaChunk):
                media = MediaInput(part, runner.encode(part), pseudo_tokens(item.digest, part.num_tokens))
                runner.forward([Span(sequence, start, media, "none")])
            else:
                row = runner.forward([Span(sequence, start, np.array(part, np.int32), "last")]).host()[0].copy()
    return row


def answer(runner: Any, items: Sequence[Item], num_tokens: int) -> list[int]:
    sequence = runner.open_sequence()
    row, found = feed(runner, sequence, items), list[int]()
    while len(found) < num_tokens:
        assert row is not None
        found.append(int(row.argmax()))
        row = feed(runner, sequence, found[-1:])
    runner.free_sequence(sequence)
    return found


def library_inputs(folder: Path, runner: Any, items: Sequence[Item]) -> dict[str, Any]:
    """Arguments of transformers' ``generate`` for a prompt: its image processor's pixels, and placeholders for them."""
    import torch
    from PIL import Image
    from transformers import AutoConfig, AutoImageProcessor

    config, processor = AutoConfig.from_pretrained(folder), AutoImageProcessor.from_pretrained(folder)
    token_ids = list[int]()
    for item in items:
        for part in runner.prepare_image(item) if isinstance(item, DecodedImage) else [[item]]:
            token_ids += [config.image_token_id] * part.num_tokens if isinstance(part, MediaChunk) else part
    images = [item for item in items if isinstance(item, DecodedImage)]
    pictures = [Image.frombytes("RGB", (image.width, image.height), image.rgb) for image in images]
    pixels = processor([pictures] if "idefics3" in config.model_type or "smol" in config.model_type else pictures,
                       return_tensors="pt")
    pixels.pop("num_crops", None)
    ids = torch.tensor([token_ids])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **pixels}
    types = {"gemma3": "token_type_ids", "qwen2_5_vl": "mm_token_type_ids"}.get(config.model_type)
    return inputs | ({types: (ids == config.image_token_id).long()} if types else {})


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_generate(vision_model: Callable[[str], Path], family: str) -> None:
    import torch
    from transformers import AutoModelForImageTextToText

    folder = vision_model(family)
    runner = open_model(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    text = runner.tokenizer.encode("The capital of France", False)
    found = []
    for items in ([*text, SMALL, text[0]], [*text, WIDE, *text, TALL, *text], [SMALL, WIDE, text[1]]):
        inputs = library_inputs(folder, runner, items)
        whole = model.generate(**inputs, do_sample=False, max_new_tokens=16, pad_token_id=0)
        expected = whole[0, inputs["input_ids"].shape[1] :].tolist()
        found.append(answer(runner, items, 16))
        assert found[-1] == expected
    assert len({tuple(tokens) for tokens in found}) == 3
    runner.close()


class _Images(MediaContract):
    family: str
    max_logit_difference = 1e-3
    num_image_steps = 100

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, vision_model: Callable[[str], Path]) -> ModelUnderTest:
        return under_test(vision_model(cls.family))


class TestIdefics3Images(_Images):
    family = "idefics3"


class TestLlavaImages(_Images):
    family = "llava"


class TestGemma3Images(_Images):
    family = "gemma3"


class TestQwenImages(_Images):
    family = "qwen2_5_vl"
