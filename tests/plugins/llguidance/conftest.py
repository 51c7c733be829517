"""Nothing here is collected without the ``llguidance`` extra."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from enginehouse.contract.structured import GrammarCompiler
from enginehouse_llguidance.decoder import LlguidanceDecoder
from enginehouse_llguidance.options import LlguidanceOptions
from enginehouse_testkit.fake_tokenizer import FakeTokenizer

collect_ignore_glob = [] if find_spec("llguidance") else ["test_*.py", "differential/*"]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Everything in this folder needs the library."""
    item.add_marker("llguidance")


@pytest.fixture(scope="session")
def tokenizer() -> FakeTokenizer:
    """A small vocabulary with tokens that hold parts of characters."""
    return FakeTokenizer()


@pytest.fixture(scope="session")
def compiler(tokenizer: FakeTokenizer) -> GrammarCompiler:
    """The decoder, bound to it."""
    return LlguidanceDecoder(LlguidanceOptions()).bind(tokenizer)
