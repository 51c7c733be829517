"""The decoder keeps the contract of structured decoders."""

from __future__ import annotations

import pytest

from enginehouse.contract.structured import StructuredDecoder
from enginehouse_llguidance.decoder import LlguidanceDecoder
from enginehouse_llguidance.options import LlguidanceOptions
from enginehouse_testkit.structured_decoder_contract import StructuredDecoderContract


class TestLlguidance(StructuredDecoderContract):
    @pytest.fixture(scope="class")
    @classmethod
    def structured_decoder(cls) -> StructuredDecoder:
        return LlguidanceDecoder(LlguidanceOptions())
