"""pytest's entry point into the test kit: failures inside contract suites explain themselves like those in tests.

pytest imports this at the start of every run in an environment where Enginehouse is installed, so it imports
nothing of ours: what is imported here is imported before pytest can rewrite its assertions.
"""

from __future__ import annotations

import pytest

__all__: list[str] = []

_SUITES = (
    "authenticator_contract",
    "backend_contract",
    "contract",
    "engine_contract",
    "reasoning_parser_contract",
    "router_contract",
    "runner_contract",
    "sampler_contract",
    "structured_decoder_contract",
    "tool_parser_contract",
)

pytest.register_assert_rewrite(*(f"enginehouse_testkit.{name}" for name in _SUITES))
