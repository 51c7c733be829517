"""Images through the vision towers of models: the contract of images, and equality with transformers' own path."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginehouse.contract.adapters import AdapterSet
from enginehouse.contract.backend import ModelSource, Outputs, Span
from enginehouse.contract.errors import AdapterRefused, InvalidRequest, ModelLoadError, StateRefused, StepAborted
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
    fixed = {"dtype": "float32", "context": 256, "slots": 4, "threads": 1}
    options = HfOptions(**{"device": "cpu", **fixed, **more, "cache_tokens": 640})
    return ModelUnderTest(backend=HfBackend(), source=ModelSource(str(path), path), options=options)


def open_model(path: Path, **more: Any) -> Any:
    return under_test(path, **more).open()


def changed(folder: Path, into: Path, file: str, **values: Any) -> Path:
    """A copy of a model with other values in one of its JSON files."""
    shutil.copytree(folder, into)
    content = json.loads((into / file).read_text(encoding="utf-8"))
    (into / file).write_text(json.dumps({**content, **values}), encoding="utf-8")
    return into


def feed(runner: Any, sequence: int, items: Sequence[Item], adapter: AdapterSet = ()) -> np.ndarray | None:
    """Append text, a token at a time, and images; return the last row."""
    row = None
    for item in items:
        for part in runner.prepare_image(item) if isinstance(item, DecodedImage) else [[item]]:
            start = runner.length(sequence)
            if isinstance(part, MediaChunk):
                media = MediaInput(part, runner.encode(part), pseudo_tokens(item.digest, part.num_tokens))
                runner.forward([Span(sequence, start, media, "none", adapter=adapter)])
                continue
            for place, token_id in enumerate(part, start):
                span = Span(sequence, place, np.array([token_id], np.int32), adapter=adapter)
                row = runner.forward([span]).host()[0].copy()
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


def answers_together(runner: Any, prompts: Sequence[Sequence[Item]], num_tokens: int) -> list[list[int]]:
    """The same with one pass for the next tokens of all prompts."""
    sequences = [runner.open_sequence() for _ in prompts]
    rows = [feed(runner, sequence, items) for sequence, items in zip(sequences, prompts, strict=True)]
    found = [[int(row.argmax())] for row in rows if row is not None]
    while len(found[0]) < num_tokens:
        spans = [
            Span(sequence, runner.length(sequence), np.array(tokens[-1:], np.int32))
            for sequence, tokens in zip(sequences, found, strict=True)
        ]
        for tokens, row in zip(found, runner.forward(spans).host(), strict=True):
            tokens.append(int(row.argmax()))
    for sequence in sequences:
        runner.free_sequence(sequence)
    return found


def picture_of(image: DecodedImage) -> Any:
    from PIL import Image

    return Image.frombytes("RGB", (image.width, image.height), image.rgb)


def library_inputs(folder: Path, runner: Any, items: Sequence[Item]) -> dict[str, Any]:
    """Arguments of transformers' ``generate`` for a prompt: its image processor's pixels, and placeholders for them."""
    import torch
    from transformers import AutoConfig, AutoImageProcessor

    config, processor = AutoConfig.from_pretrained(folder), AutoImageProcessor.from_pretrained(folder)
    token_ids = list[int]()
    for item in items:
        for part in runner.prepare_image(item) if isinstance(item, DecodedImage) else [[item]]:
            token_ids += [config.image_token_id] * part.num_tokens if isinstance(part, MediaChunk) else part
    pictures = [picture_of(item) for item in items if isinstance(item, DecodedImage)]
    is_nested = config.model_type in ("idefics3", "smolvlm")
    pixels = processor([pictures] if is_nested else pictures, return_tensors="pt") if pictures else {}
    pixels.pop("num_crops", None)
    ids = torch.tensor([token_ids])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **pixels}
    types = {"gemma3": "token_type_ids", "qwen2_5_vl": "mm_token_type_ids"}.get(config.model_type)
    return inputs | ({types: (ids == config.image_token_id).long()} if types else {})


def library_answers(
    folder: Path, runner: Any, prompts: Sequence[Sequence[Item]], device: str = "cpu"
) -> list[list[int]]:
    """The first 16 tokens of transformers' ``generate`` for each prompt."""
    import torch
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.to(device).generation_config.eos_token_id = None
    found = []
    for items in prompts:
        inputs = {name: tensor.to(device) for name, tensor in library_inputs(folder, runner, items).items()}
        whole = model.generate(**inputs, do_sample=False, max_new_tokens=16, pad_token_id=0)
        found.append(whole[0, inputs["input_ids"].shape[1] :].tolist())
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_generate(vision_model: Callable[[str], Path], way: dict[str, Any], family: str) -> None:
    """Alone, and in passes with other prompts, one of them text."""
    folder = vision_model(family)
    runner = open_model(folder, max_batch_tokens=6, **way)  # divides images
    if way["device"] != "cpu":
        layers = "fused layers" if way.get("fused", True) else "transformers layers"
        assert runner.info.metadata["layers"].startswith(layers)
    text = runner.tokenizer.encode("The capital of France", False)
    prompts = [[*text, SMALL, text[0]], [*text, WIDE, *text, TALL, *text], [SMALL, WIDE, text[1]], text]
    expected = library_answers(folder, runner, prompts, way["device"])

    assert [answer(runner, items, 16) for items in prompts] == expected
    assert answers_together(runner, prompts, 16) == expected
    assert len({tuple(tokens) for tokens in expected}) == 4
    runner.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_after_an_image_have_the_rows_of_single_tokens(
    vision_model: Callable[[str], Path], way: dict[str, Any], family: str
) -> None:
    """And so has text that is read at once, before and after it."""
    runner = open_model(vision_model(family), **way)
    items, drafts = [5, 6, 7, WIDE, 8, 9, 10, 11], [12, 13, 14]
    alone = runner.open_sequence()
    feed(runner, alone, items)
    expected = np.concatenate([runner.forward([_text(runner, alone, [one], "all")]).host() for one in drafts])
    sequence, other = runner.open_sequence(), runner.open_sequence()
    runner.forward([_text(runner, sequence, items[:3], "none")])
    feed(runner, sequence, [WIDE])
    runner.forward([_text(runner, sequence, items[4:], "none")])
    spans = [_text(runner, other, [5], "last"), _text(runner, sequence, drafts, "all")]
    found = runner.forward(spans).host()[1:]

    assert np.abs(found - expected).max() < 1e-3
    assert np.abs(np.diff(expected, axis=0)).max() > 0.1
    runner.close()


def _text(runner: Any, sequence: int, token_ids: list[int], outputs: Outputs) -> Span:
    return Span(sequence, runner.length(sequence), np.array(token_ids, np.int32), outputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_images_in_16_bits_are_near_those_in_32(vision_model: Callable[[str], Path], family: str) -> None:
    """The usual type on a GPU, with other kernels for long spans than in 32 bits."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    rows = []
    for dtype in ("float32", "bfloat16"):
        runner = open_model(vision_model(family), device="cuda:0", dtype=dtype)
        rows.append(feed(runner, runner.open_sequence(), [5, 6, SMALL, 7, 8, WIDE, 9]))
        runner.close()

    assert np.corrcoef(rows)[0, 1] > 0.98


def test_greedy_text_of_a_real_model_is_that_of_generate() -> None:
    """A vision model from outside, with images of several sizes: docs/hf.md, Images."""
    path = os.environ.get("ENGINEHOUSE_HF_VISION_MODEL")
    if path is None:
        pytest.skip("ENGINEHOUSE_HF_VISION_MODEL is not set to the folder of a model that reads images")
    from PIL import Image, ImageDraw

    drawn = []
    for width, height in ((256, 256), (640, 200)):
        picture = Image.new("RGB", (width, height), (240, 240, 240))
        ImageDraw.Draw(picture).ellipse((40, 40, 160, 160), fill=(220, 20, 20))
        drawn.append(DecodedImage(f"{width}", width, height, picture.tobytes()))
    options = HfOptions(device="cpu", dtype="float32", slots=2)
    runner = HfBackend().open(ModelSource(path, Path(path)), options, lambda _share, _what: None)
    text = runner.tokenizer.encode("The picture shows", False)
    prompts = [[drawn[0], *text], [*text, drawn[1], *text], [*drawn, *text]]

    assert [answer(runner, items, 16) for items in prompts] == library_answers(Path(path), runner, prompts)
    runner.close()


@pytest.mark.parametrize(
    ("family", "settings", "num_chunks"),
    [("idefics3", {}, 5), ("idefics3", {"do_image_splitting": False}, 1), ("llava", {}, 1), ("gemma3", {}, 1)],
)
def test_an_image_has_the_tokens_of_the_librarys_processor(
    vision_model: Callable[[str], Path], tmp_path: Path, family: str, settings: dict[str, Any], num_chunks: int
) -> None:
    import transformers
    from transformers import AutoImageProcessor, AutoTokenizer

    folder = changed(vision_model(family), tmp_path / "model", "preprocessor_config.json", **settings)
    runner = open_model(folder)
    image_processor, tokenizer = AutoImageProcessor.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    if family == "gemma3":
        tokenizer.boi_token, tokenizer.eoi_token = "<|vision_start|>", "<|vision_end|>"
        tokenizer.image_token, tokenizer.boi_token_id = "<image>", 0
        tokenizer.image_token_id = tokenizer.convert_tokens_to_ids("<image>")
        processor = transformers.Gemma3Processor(image_processor, tokenizer, image_seq_length=16)
    elif family == "llava":
        processor = transformers.LlavaProcessor(image_processor, tokenizer, 8, "default", num_additional_image_tokens=1)
    else:
        processor = transformers.Idefics3Processor(image_processor, tokenizer, image_seq_len=4)
    mark = "<|vision_start|>" if family == "gemma3" else "<image>"
    expected = processor(text=mark, images=[picture_of(SMALL)], add_special_tokens=False)["input_ids"][0]
    parts = runner.prepare_image(SMALL)
    image_id = tokenizer.convert_tokens_to_ids("<image>")
    found = [
        token_id
        for part in parts
        for token_id in ([image_id] * part.num_tokens if isinstance(part, MediaChunk) else part)
    ]

    assert found == expected
    assert sum(isinstance(part, MediaChunk) for part in parts) == num_chunks
    runner.close()


@pytest.mark.parametrize(("family", "most"), [("idefics3", 40), ("qwen2_5_vl", 6), ("gemma3", 20), ("llava", 16)])
def test_low_detail_gives_fewer_tokens(vision_model: Callable[[str], Path], family: str, most: int) -> None:
    """At most as many as asked for; models whose images always have the same number ignore it."""
    runner = open_model(vision_model(family))

    def num_tokens(image: DecodedImage) -> int:
        return sum(
            part.num_tokens if isinstance(part, MediaChunk) else len(part) for part in runner.prepare_image(image)
        )

    small = DecodedImage(SMALL.digest, SMALL.width, SMALL.height, SMALL.rgb, max_tokens=most)
    if family in ("idefics3", "qwen2_5_vl"):
        assert num_tokens(small) <= most < num_tokens(SMALL)
        assert feed(runner, runner.open_sequence(), [small, 7]) is not None
    else:
        assert num_tokens(small) == num_tokens(SMALL)
    runner.close()


def test_models_whose_images_would_be_wrong_take_text_only(vision_model: Callable[[str], Path], tmp_path: Path) -> None:
    """The reason is in the model's metadata."""
    idefics3 = vision_model("idefics3")
    without = Path(shutil.copytree(idefics3, tmp_path / "without"))
    (without / "preprocessor_config.json").unlink()
    tile = {"max_image_size": {"longest_edge": 48}}
    unmarked = Path(shutil.copytree(idefics3, tmp_path / "unmarked"))
    tokenizer = unmarked / "tokenizer.json"
    tokenizer.write_text(
        tokenizer.read_text(encoding="utf-8").replace("<fake_token_around_image>", "<another>"), encoding="utf-8"
    )
    cases = {
        "the folder has no preprocessor_config.json": without,
        "an image gave [": changed(idefics3, tmp_path / "tile", "preprocessor_config.json", **tile),
        "lacks the control token <fake_token_around_image>": unmarked,
        "cannot make its image processor": changed(
            idefics3, tmp_path / "unknown", "preprocessor_config.json", image_processor_type="Unknown"
        ),
    }
    for reason, folder in cases.items():
        runner = open_model(folder)
        assert runner.capabilities.media == ()
        assert reason in runner.info.metadata["images"]
        assert len(answer(runner, [5, 6, 7], 2)) == 2
        runner.close()


def test_models_with_recurrent_layers_take_images_on_the_cpu_only(vision_model: Callable[[str], Path]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    from enginehouse_hf.facts import ModelFacts, StateForm
    from enginehouse_hf.images.opening import find_support
    from enginehouse_hf.tokenizer import ModelFiles, load_text

    files = ModelFiles(vision_model("llava"))
    support = find_support(files, HfOptions(device="cpu"))
    facts = ModelFacts((), {}, 8, 8, states=(StateForm((0, "conv", 0), (1, 2), torch.float32),))
    with torch.device("meta"):
        elsewhere = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(files.folder))
    reader, metadata = support.open(files, elsewhere, load_text(files, elsewhere, 8), facts)

    assert reader is None
    assert "recurrent; hf reads its images on the CPU only" in metadata["images"]


def test_models_of_images_are_refused_with_other_options(vision_model: Callable[[str], Path]) -> None:
    """Gemma 3 has a class for text, and takes it only."""
    path = vision_model("llava")
    for options in (HfOptions(device="mps"), HfOptions(device="cpu", device_map="cpu")):
        named = f'device = "{options.device}"' if options.device_map is None else f'device_map = "{options.device_map}"'
        with pytest.raises(ModelLoadError, match=f"llava only on the CPU, or on one NVIDIA GPU.*not with {named}"):
            HfBackend().open(ModelSource(str(path), path), options, lambda _share, _what: None)
    runner = open_model(vision_model("gemma3"), device_map="cpu")
    assert runner.capabilities.media == ()
    assert runner.info.metadata["images"].startswith("none: hf reads images only on the CPU, or on one")
    assert len(answer(runner, [5, 6, 7], 2)) == 2
    runner.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_thin_images(vision_model: Callable[[str], Path], family: str) -> None:
    """A side of 200 times the other is read; more is refused before the library enlarges it."""
    runner = open_model(vision_model(family))
    assert feed(runner, runner.open_sequence(), [random_image(4, 1, 200), 7]) is not None
    with pytest.raises(InvalidRequest, match="over 200 times"):
        runner.prepare_image(random_image(4, 100_000, 1))
    runner.close()


def test_saved_sequences_depend_on_the_image_processor(vision_model: Callable[[str], Path], tmp_path: Path) -> None:
    folder = vision_model("qwen2_5_vl")
    runner = open_model(folder)
    other = open_model(changed(folder, tmp_path / "other", "preprocessor_config.json", image_mean=[0.1, 0.2, 0.3]))
    sequence = runner.open_sequence()
    feed(runner, sequence, [5, WIDE, 6])
    data = runner.save(sequence)
    loaded = runner.load(data)

    assert np.array_equal(feed(runner, loaded, [7, 8]), feed(runner, sequence, [7, 8]))
    with pytest.raises(StateRefused):
        other.load(data)
    with pytest.raises(StateRefused):
        runner.load(data[:-4])
    runner.close()
    other.close()


def test_an_aborted_image_leaves_nothing(vision_model: Callable[[str], Path]) -> None:
    """Aborted between two of the passes that it is divided into."""
    import torch

    runner = open_model(vision_model("llava"), max_batch_tokens=6)

    class Aborting(torch.Tensor):
        def __getitem__(self, part: Any) -> Any:
            if part.start:
                runner.abort()
            return torch.Tensor.__getitem__(self.as_subclass(torch.Tensor), part)

    sequence = runner.open_sequence()
    feed(runner, sequence, [5])
    (chunk,), free_tokens = runner.prepare_image(SMALL), runner.free_tokens()
    embedding = runner.encode(chunk).as_subclass(Aborting)
    with pytest.raises(StepAborted) as caught:
        media = MediaInput(chunk, embedding, pseudo_tokens("any", chunk.num_tokens))
        runner.forward([Span(sequence, 1, media, "none")])
    assert caught.value.lengths == {sequence: 1}
    assert (runner.length(sequence), runner.free_tokens()) == (1, free_tokens)
    row = feed(runner, sequence, [SMALL, 7])

    assert np.array_equal(row, feed(runner, runner.open_sequence(), [5, SMALL, 7]))
    runner.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_an_aborted_encoding_ends(vision_model: Callable[[str], Path], family: str) -> None:
    """In the first layer of its vision tower; it is computed anew afterwards."""
    from torch.nn.modules.module import register_module_forward_pre_hook

    runner = open_model(vision_model(family))
    chunks = [part for part in runner.prepare_image(SMALL) if isinstance(part, MediaChunk)]
    expected = runner.encode(chunks[-1])
    aborting = register_module_forward_pre_hook(lambda _module, _inputs: runner.abort())
    with pytest.raises(StepAborted) as caught:
        runner.encode(chunks[-1])
    aborting.remove()

    assert caught.value.lengths == {}
    assert bool((runner.encode(chunks[-1]) == expected).all())
    runner.close()


def test_adapters_change_text_and_not_embeddings(vision_model: Callable[[str], Path], tmp_path: Path) -> None:
    """An embedding is kept for requests with any adapter, so adapters of the vision tower are refused."""
    from safetensors.numpy import save_file

    runner = open_model(vision_model("llava"), max_batch_tokens=6)

    def adapter(module: str, num_inputs: int, num_outputs: int) -> Path:
        folder = tmp_path / module
        folder.mkdir()
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "bias": "none"}
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        random = np.random.default_rng(0)
        halves = {"A": (2, num_inputs), "B": (num_outputs, 2)}
        save_file(
            {
                f"base_model.model.{module}.lora_{half}.weight": random.standard_normal(shape).astype(np.float32)
                for half, shape in halves.items()
            },
            folder / "adapter_model.safetensors",
        )
        return folder

    with pytest.raises(AdapterRefused, match="not a linear layer"):
        runner.load_adapter(adapter("model.multi_modal_projector.linear_2", 64, 64))
    loaded = runner.load_adapter(adapter("model.language_model.layers.0.self_attn.q_proj", 64, 64))
    rows = []
    for adapters in ((), ((loaded, 0.0),), ((loaded, 1.0),)):
        sequence = runner.open_sequence()
        (chunk,) = runner.prepare_image(SMALL)
        media = MediaInput(chunk, runner.encode(chunk), pseudo_tokens("any", chunk.num_tokens))
        runner.forward([Span(sequence, 0, media, "none", adapter=adapters)])
        rows.append(runner.forward([Span(sequence, 16, np.array([7], np.int32))]).host()[0].copy())

    assert np.array_equal(rows[0], rows[1])
    assert np.abs(rows[2] - rows[0]).max() > 0.01
    runner.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_with_an_adapter_and_images_are_those_of_merged_weights(
    vision_model: Callable[[str], Path], tmp_path: Path, way: dict[str, Any], family: str
) -> None:
    """Text before, between and after two images; the base model gives the same before and after."""
    import torch
    from safetensors.numpy import save_file
    from transformers import AutoModelForImageTextToText

    folder, random, tensors = vision_model(family), np.random.default_rng(0), dict[str, np.ndarray]()
    runner = open_model(folder, max_batch_tokens=6, **way)
    if runner.capabilities.adapters == "none":
        pytest.skip("hf has no adapters on a GPU: docs/adapters.md")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    texts = set(model.get_decoder().modules())
    for name, module in model.named_modules():
        if module in texts and name.endswith(("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")):
            num_outputs, num_inputs = module.weight.shape
            a, b = (random.standard_normal(size).astype(np.float32) / 8 for size in ((4, num_inputs), (num_outputs, 4)))
            tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
            module.weight.data += torch.from_numpy(np.float32(0.5 * 8 / 4) * (b @ a))
    merged = Path(shutil.copytree(folder, tmp_path / "merged", ignore=shutil.ignore_patterns("*.safetensors*")))
    model.save_pretrained(merged)
    (tmp_path / "adapter").mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    oracle = open_model(merged, **way)
    handle, items = runner.load_adapter(tmp_path / "adapter"), [5, 6, SMALL, 7, 8, WIDE, 9]
    before = feed(runner, runner.open_sequence(), items)
    found = feed(runner, runner.open_sequence(), items, ((handle, 0.5),))
    again = feed(runner, runner.open_sequence(), items)
    expected = feed(oracle, oracle.open_sequence(), items)
    assert before is not None and found is not None and expected is not None

    assert np.abs(found - expected).max() < 1e-3
    assert np.abs(found - before).max() > 0.1
    assert np.array_equal(before, again)
    runner.close()
    oracle.close()


class _Images(MediaContract):
    family: str
    max_logit_difference = 1e-3
    num_image_steps = 60

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, vision_model: Callable[[str], Path], way: dict[str, Any]) -> ModelUnderTest:
        return under_test(vision_model(cls.family), **way)


class TestIdefics3Images(_Images):
    family = "idefics3"


class TestLlavaImages(_Images):
    family = "llava"


class TestGemma3Images(_Images):
    family = "gemma3"


class TestQwenImages(_Images):
    family = "qwen2_5_vl"
