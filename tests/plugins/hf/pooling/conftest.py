"""Tiny random encoders, decoders and classifiers in folders, as transformers and sentence-transformers write them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

_SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "initializer_range": 0.3,  # so that mistakes show
}
_DECODER: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2, "head_dim": 16}
_CONFIGS: dict[str, dict[str, Any]] = {
    "bert": _SIZES,
    "xlm-roberta": _SIZES,
    "modernbert": {**_SIZES, "local_attention": 8, "global_attn_every_n_layers": 3},
    "mobilebert": {**_SIZES, "embedding_size": 16},
    "mpnet": _SIZES,
    "deberta-v2": {
        **_SIZES,
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
    },
    "distilbert": {"dim": 48, "hidden_dim": 64, "n_layers": 3, "n_heads": 4, "max_position_embeddings": 96},
    "t5": {"d_model": 48, "d_ff": 64, "d_kv": 12, "num_layers": 3, "num_heads": 4},
    "qwen3": _DECODER,
    "gemma3_text": {**_DECODER, "sliding_window": 8, "use_bidirectional_attention": True, "query_pre_attn_scalar": 16},
}
_TEXT = """the of and river model server text about mountains is was many who lives where zwei drei
日 本 語 🙂 ! ? . :"""


@pytest.fixture(scope="session")
def random_encoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function from a model type, and a number of labels for a classifier, to a folder with a tiny random model."""
    folders: dict[tuple[str, int], Path] = {}

    def make(kind: str, num_labels: int = 0) -> Path:
        if (kind, num_labels) not in folders:
            folder = tmp_path_factory.mktemp(kind) / f"{kind}-{num_labels}"
            _write(kind, num_labels, folder)
            folders[kind, num_labels] = folder
        return folders[kind, num_labels]

    return make


def _write(kind: str, num_labels: int, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

    tokenizer = _tokenizer(kind)
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": 2, "eos_token_id": 3}
    labels = {"num_labels": num_labels} if num_labels else {}
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), **_CONFIGS[kind], **ids, **labels)
    is_decoder = kind in {"qwen3", "gemma3_text"}
    maker = AutoModelForSequenceClassification if num_labels else AutoModelForCausalLM if is_decoder else AutoModel
    torch.manual_seed(0)
    model = maker.from_config(config, dtype=torch.float32)
    for module in model.modules():  # biases and norms are made as zeros and ones, which hide mistakes
        if getattr(module, "bias", None) is not None:
            torch.nn.init.normal_(module.bias, std=0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer(kind: str) -> Any:
    """Words, and single letters for all others; the layout of BERT, of RoBERTa, or an end token only."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [chr(code) for code in range(97, 123)]
    vocab = [*names, *_TEXT.split(), *(letter for letter in letters), *(f"##{letter}" for letter in letters)]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(dict.fromkeys(vocab))}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    if kind in {"qwen3", "gemma3_text", "t5"}:
        template = {"single": "$A [SEP]", "pair": "$A $B [SEP]"}
    elif kind in {"xlm-roberta", "mpnet"}:
        template = {"single": "[CLS] $A [SEP]", "pair": "[CLS] $A [SEP] [SEP] $B [SEP]"}
    else:
        template = {"single": "[CLS] $A [SEP]", "pair": "[CLS] $A [SEP] $B:1 [SEP]:1"}
    tokenizer.post_processor = processors.TemplateProcessing(**template, special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    has_types = kind in {"bert", "deberta-v2", "mobilebert"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=64,
        model_input_names=["input_ids", *(["token_type_ids"] if has_types else []), "attention_mask"],
    )


@pytest.fixture
def open_pooler() -> Iterator[Callable[..., Any]]:
    """A function from a folder and settings to a pooler on the CPU."""
    from enginehouse.contract.backend import ModelSource
    from enginehouse_hf.backend import HfBackend, HfOptions

    opened: list[Any] = []

    def open_one(folder: Path, **settings: Any) -> Any:
        options = HfOptions(**{"device": "cpu", "threads": 1, **settings})
        opened.append(HfBackend().open(ModelSource(str(folder), folder), options, lambda _share, _what: None))
        return opened[-1]

    yield open_one
    for pooler in opened:
        pooler.close()


@pytest.fixture(scope="session")
def arranged() -> Callable[..., list[Any]]:
    """A function from a pooler and texts, or pairs of texts, to inputs; texts are cut at the end."""

    def arrange(pooler: Any, texts: Sequence[str | tuple[str, str]], num_prompt: int = 0) -> list[Any]:
        limits, encode = pooler.capabilities, pooler.tokenizer.encode
        inputs = []
        for text in texts:
            if isinstance(text, str):
                room = limits.max_tokens - limits.text.num_added(is_pair=False)
                inputs.append(limits.text.arrange(encode(text, False)[:room], num_prompt=num_prompt))
            else:
                inputs.append(limits.pair.arrange(*(encode(part, False) for part in text)))
        return inputs

    return arrange


@pytest.fixture(scope="session")
def short_texts() -> list[str]:
    """Texts of 0 to about 60 tokens of the tiny vocabulary, several of equal length."""
    return [
        "",
        "the river",
        "river the",
        "many mountains",
        "who lives where ?",
        "日本語 🙂 zwei drei!",
        "  the   server was about text  ",
        " ".join(["the model of the river and the mountains"] * 7),
        "where",
        "unknown: ❄ ¥",
        " ".join(["many"] * 90),
    ]
