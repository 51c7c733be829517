"""Files of projectors: which one belongs to a model, and those that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from enginehouse.contract.backend import ModelSource
from enginehouse.contract.errors import EngineDead, ModelLoadError
from enginehouse.contract.media import DecodedImage, MediaChunk
from enginehouse.contract.types import EngineSettings
from enginehouse.settings.config import PluginsSettings
from enginehouse.workers.client import WorkerEngine
from enginehouse.workers.messages import Load
from enginehouse_llamacpp.backend import LlamaCppBackend
from enginehouse_llamacpp.options import LlamaCppOptions
from enginehouse_llamacpp.projector_files import find_projector
from enginehouse_llamacpp.runner import LlamaCppRunner
from enginehouse_testkit.gguf_writer import write_gguf

from .gguf import tiny_tensors, tiny_values
from .vision_models import GEMMA3, IDEFICS3, QWEN2VL, write_projector, write_text_model

pytestmark = pytest.mark.llamacpp

FOLDERS: dict[str, tuple[list[str], str, str | None]] = {
    "llama-server": (["tiny-Q4_K_M.gguf", "mmproj-F16.gguf"], "tiny-Q4_K_M.gguf", "mmproj-F16.gguf"),
    "ggml-org": (["tiny-it-Q8_0.gguf", "mmproj-tiny-it-Q8_0.gguf"], "tiny-it-Q8_0.gguf", "mmproj-tiny-it-Q8_0.gguf"),
    "another order": (["tiny.Q4_0.gguf", "tiny.mmproj-f16.gguf"], "tiny.Q4_0.gguf", "tiny.mmproj-f16.gguf"),
    "several quantisations": (
        ["tiny-Q4_0.gguf", "tiny-Q8_0.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf"],
        "tiny-Q8_0.gguf",
        "mmproj-F16.gguf",
    ),
    "one of two models": (["a-Q4_0.gguf", "b-Q4_0.gguf", "mmproj-b-f16.gguf"], "b-Q4_0.gguf", "mmproj-b-f16.gguf"),
    "the other of two models": (["a-Q4_0.gguf", "b-Q4_0.gguf", "mmproj-b-f16.gguf"], "a-Q4_0.gguf", None),
    "of any model": (["a-Q4_0.gguf", "b-Q4_0.gguf", "mmproj-F16.gguf"], "a-Q4_0.gguf", None),
    "prefixes of publishers": (
        ["tiny-UD-Q4_K_XL.gguf", "tiny-Q4_0.gguf", "tiny.i1-Q4_K_M.gguf", "mmproj-BF16.gguf"],
        "tiny-UD-Q4_K_XL.gguf",
        "mmproj-BF16.gguf",
    ),
    "in parts": (
        ["tiny-00001-of-00002.gguf", "tiny-00002-of-00002.gguf", "mmproj-model-f16.gguf"],
        "tiny-00001-of-00002.gguf",
        "mmproj-model-f16.gguf",
    ),
    "none": (["tiny-Q4_0.gguf", "imatrix.gguf", "mmproj.txt"], "tiny-Q4_0.gguf", None),
}


@pytest.mark.parametrize(("names", "model", "expected"), FOLDERS.values(), ids=FOLDERS)
def test_a_projector_is_found_beside_its_model(
    tmp_path: Path, names: list[str], model: str, expected: str | None
) -> None:
    for name in names:
        (tmp_path / name).touch()

    assert find_projector(tmp_path / model, None) == (expected and tmp_path / expected)


def test_the_setting_decides(tmp_path: Path) -> None:
    """A path relative to the model's folder, or none; several projectors of one model need it."""
    model = tmp_path / "tiny-Q4_0.gguf"
    for name in (model.name, "mmproj-one-F16.gguf", "mmproj-two-F16.gguf"):
        (tmp_path / name).touch()

    assert find_projector(model, "mmproj-two-F16.gguf") == tmp_path / "mmproj-two-F16.gguf"
    assert find_projector(model, str(tmp_path / "mmproj-one-F16.gguf")) == tmp_path / "mmproj-one-F16.gguf"
    assert find_projector(model, "") is None
    with pytest.raises(ModelLoadError, match=r"mmproj-one-F16\.gguf, mmproj-two-F16\.gguf.*set mmproj"):
        find_projector(model, None)
    with pytest.raises(ModelLoadError, match=r"mmproj: .*missing\.gguf: no such file"):
        find_projector(model, "missing.gguf")


def open_tiny(path: Path, **options: object) -> LlamaCppRunner:
    sizes: dict[str, Any] = {"context": 64, "threads": 1, "slots": 1, "max_sequences": 2, **options}
    opened = LlamaCppBackend().open(ModelSource("tiny", path), LlamaCppOptions(**sizes), lambda share, what: None)
    assert isinstance(opened, LlamaCppRunner)
    return opened


def _cut(path: Path) -> None:
    write_projector(path, IDEFICS3)
    path.write_bytes(path.read_bytes()[:-64])


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "another width": (lambda path: write_projector(path, IDEFICS3, width=64), r"n_embd = 36.*n_embd = 64"),
    "a model": (lambda path: write_gguf(path, tiny_values(), tiny_tensors()), "not a projector"),
    "text": (lambda path: path.write_text("not GGUF"), "magic"),
    "cut": (_cut, "it ends in the tensor"),
    "unknown kind": (lambda path: write_projector(path, IDEFICS3, **{"clip.projector_type": "new"}), "new"),
    "depends on the text": (
        lambda path: write_projector(path, IDEFICS3, **{"clip.projector_type": "hunyuanvl"}),
        "hunyuanvl are not supported",
    ),
    "no patches": (lambda path: write_projector(path, IDEFICS3, **{"clip.vision.patch_size": 0}), "patch_size is 0"),
    "no heads": (
        lambda path: write_projector(path, IDEFICS3, **{"clip.vision.attention.head_count": 0}),
        "head_count is 0",
    ),
    "another width of the tower": (
        lambda path: write_projector(path, IDEFICS3, **{"clip.vision.embedding_length": 16}),
        r"position_embd\.weight has the shape 32 x 16, not 16 x",
    ),
    "other patches": (
        lambda path: write_projector(path, IDEFICS3, **{"clip.vision.patch_size": 32}),
        r"patch_embd\.weight has the shape 16 x 16 x 3 x 32, not 32 x 32 x",
    ),
    "too few positions": (
        lambda path: write_projector(path, IDEFICS3, **{"clip.vision.image_size": 128}),
        r"position_embd\.weight has the shape 32 x 16, not 32 x 64",
    ),
    "no scale": (
        lambda path: write_projector(path, IDEFICS3, **{"clip.vision.projector.scale_factor": 0}),
        "scale_factor is 0",
    ),
}


@pytest.mark.parametrize(("make", "problem"), REFUSED.values(), ids=REFUSED)
def test_projectors_that_do_not_fit_are_refused(tmp_path: Path, make: Callable[[Path], object], problem: str) -> None:
    """With the name of the file; without it, the model is served as one of text."""
    path, projector = write_text_model(tmp_path / "tiny.gguf", IDEFICS3), tmp_path / "mmproj.gguf"
    make(projector)
    with pytest.raises(ModelLoadError, match=problem) as caught:
        open_tiny(path)
    runner = open_tiny(path, mmproj="")
    runner.close()

    assert str(projector) in caught.value.message
    assert runner.capabilities.media == ()


async def test_a_projector_that_ends_the_worker_is_named(tmp_path: Path) -> None:
    """Not every damage is found before llama.cpp reads the file."""
    path = write_text_model(tmp_path / "tiny.gguf", IDEFICS3)
    layer = np.zeros((36, 3 * 32), np.float32)
    write_projector(tmp_path / "mmproj-damaged.gguf", IDEFICS3, tensors={"mm.model.fc.weight": layer})
    load = Load(
        "llamacpp", "tiny", str(path), {"context": 256, "threads": 1}, "models.m", EngineSettings(), PluginsSettings()
    )
    with pytest.raises(EngineDead, match=r"last report was 'loading the projector mmproj-damaged\.gguf"):
        await WorkerEngine.open(load, isolation="process", python=None, on_progress=lambda share, text: None)


def test_a_projector_of_other_media_is_ignored(tmp_path: Path) -> None:
    """The model is served as one of text; the setting that names it is refused."""
    path = write_text_model(tmp_path / "tiny.gguf", IDEFICS3)
    write_projector(tmp_path / "mmproj.gguf", IDEFICS3, **{"clip.has_vision_encoder": False})
    runner = open_tiny(path)
    runner.close()

    assert runner.capabilities.media == ()
    with pytest.raises(ModelLoadError, match=r"mmproj\.gguf: this projector takes neither images nor recordings"):
        open_tiny(path, mmproj="mmproj.gguf")


def test_marks_that_the_vocabulary_lacks_are_refused(tmp_path: Path) -> None:
    """The width fits by chance; llama.cpp itself would fail at the first image."""
    path = write_gguf(tmp_path / "tiny.gguf", tiny_values(), tiny_tensors())
    write_projector(tmp_path / "mmproj.gguf", IDEFICS3, width=32)
    with pytest.raises(ModelLoadError, match=r"mmproj\.gguf marks media with tokens .* belongs to another model"):
        open_tiny(path)


def test_an_image_that_must_be_computed_at_once_fits_or_is_refused(tmp_path: Path) -> None:
    """llama.cpp would end the process at the first image."""
    path = write_text_model(tmp_path / "tiny.gguf", GEMMA3)
    write_projector(tmp_path / "mmproj.gguf", GEMMA3)
    with pytest.raises(ModelLoadError, match=r"the image has 16 tokens.*only 8 fit: set n_batch.*at least 16"):
        open_tiny(path, n_ubatch=8)
    open_tiny(path, n_ubatch=16).close()


def test_token_limits_of_an_image_of_any_size(tmp_path: Path) -> None:
    """``image_max_tokens`` shrinks an image; the sequences saved with another limit are not loaded."""
    path = write_text_model(tmp_path / "tiny.gguf", QWEN2VL)
    write_projector(tmp_path / "mmproj.gguf", QWEN2VL)
    image, counts, formats = DecodedImage("", 160, 160, bytes(160 * 160 * 3)), [], set()
    for limit in (None, 16):
        runner = open_tiny(path, image_max_tokens=limit)
        counts.append(sum(part.num_tokens for part in runner.prepare_image(image) if isinstance(part, MediaChunk)))
        formats.add(runner.state_format)
        runner.close()

    assert counts == [100, 16]
    assert len(formats) == 2
    with pytest.raises(ValueError, match="image_max_tokens: 8 is less than image_min_tokens, 16"):
        LlamaCppOptions(image_min_tokens=16, image_max_tokens=8)


def test_a_budget_of_tokens_shrinks_an_image(tmp_path: Path) -> None:
    """As ``detail: low`` sets it: to fewer tokens where they depend on the size, and not at all elsewhere."""
    counts = {}
    for kind in (QWEN2VL, GEMMA3):
        path = write_text_model(tmp_path / f"{kind.projector}.gguf", kind)
        projector = write_projector(tmp_path / f"mmproj-{kind.projector}.gguf", kind)
        runner = open_tiny(path, mmproj=projector.name)
        image = DecodedImage("", 200, 120, np.random.default_rng(1).bytes(200 * 120 * 3))
        counts[kind] = [
            sum(part.num_tokens for part in runner.prepare_image(asked) if isinstance(part, MediaChunk))
            for asked in (image, structs.replace(image, max_tokens=40), structs.replace(image, max_tokens=10))
        ]
        runner.close()

    usual, forty, ten = counts[QWEN2VL]
    assert usual == 13 * 8 and 20 <= forty <= 40 and 8 <= ten <= 10
    assert counts[GEMMA3] == [16, 16, 16]


def test_the_estimate_counts_the_projector(tmp_path: Path) -> None:
    path = write_text_model(tmp_path / "tiny.gguf", IDEFICS3)
    projector = write_projector(tmp_path / "mmproj.gguf", IDEFICS3)
    backend, source = LlamaCppBackend(), ModelSource("tiny", path)
    without = backend.estimate(source, LlamaCppOptions(context=64, mmproj=""))
    estimate = backend.estimate(source, LlamaCppOptions(context=64))

    assert estimate.weights_bytes - without.weights_bytes == projector.stat().st_size
    assert estimate.total_bytes - without.total_bytes > projector.stat().st_size
    assert np.isclose(estimate.kv_bytes_per_token, without.kv_bytes_per_token)


def test_drafts_of_the_first_layers_have_no_projector(tmp_path: Path) -> None:
    path = write_text_model(tmp_path / "tiny.gguf", IDEFICS3)
    write_projector(tmp_path / "mmproj.gguf", IDEFICS3)
    runner = open_tiny(path, num_layers=1)
    runner.close()

    assert runner.capabilities.media == ()
