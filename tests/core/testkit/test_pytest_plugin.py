"""The entry point of pytest imports nothing of ours; what the suites say about plugins that are wrong."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from enginehouse.plugins.kinds import KINDS
from enginehouse_testkit import pytest_plugin
from enginehouse_testkit.backend_contract import BackendContract
from enginehouse_testkit.engine_contract import EngineContract
from enginehouse_testkit.runner_contract import RunnerContract

_IMPORTS = """
import sys
import enginehouse_testkit.pytest_plugin
print(sorted(name for name in sys.modules if name.startswith("enginehouse")))
"""

_WRONG = """
import numpy as np
import pytest
from attrs import field, frozen

from enginehouse.contract.backend import ModelSource
from enginehouse_testkit.backend_contract import BackendContract, ModelUnderTest
from enginehouse_testkit.engine_contract import EngineContract
from enginehouse_testkit.fake_runner import FakeBackend, FakeOptions, FakeRunner
from enginehouse_testkit.runner_contract import RunnerContract
from enginehouse_testkit.sampler_contract import SamplerContract


class ForgetfulRunner(FakeRunner):
    def truncate(self, sequence, length):
        kept = super().truncate(sequence, length)
        return max(kept - 1, 0)


class ForgetfulBackend(FakeBackend):
    def open(self, source, options, progress):
        progress(1.0, "")
        progress(0.5, "")
        return ForgetfulRunner(options)


class TestForgetful(BackendContract, RunnerContract, EngineContract):
    @pytest.fixture(scope="class")
    @classmethod
    def model(cls):
        options = FakeOptions(context=128, cache_tokens=320, max_batch_tokens=100, max_sequences=8, slots=4)
        return ModelUnderTest(backend=ForgetfulBackend(), source=ModelSource("fake"), options=options)


@frozen
class WrongFields:
    wrong: float = field(default=0.0)


class WrongSampler:
    name, api_version, request_fields, order = "wrong", 1, WrongFields, 45

    def create(self, fields):
        return None if not fields.wrong else lambda candidates: np.zeros(len(candidates.token_ids), np.bool_)


class TestWrongSampler(SamplerContract):
    @pytest.fixture(scope="class")
    @classmethod
    def sampler(cls):
        return WrongSampler()
"""


def test_entry_module_imports_nothing_of_ours() -> None:
    done = subprocess.run([sys.executable, "-c", _IMPORTS], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "['enginehouse_testkit', 'enginehouse_testkit.pytest_plugin']"


def test_assertions_of_every_suite_are_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set[str]()
    monkeypatch.setattr(pytest, "register_assert_rewrite", lambda *some: names.update(some))
    importlib.reload(pytest_plugin)

    suites = {suite.partition(":")[0] for kind in KINDS.values() for suite in kind.suites}
    assert suites | {"enginehouse_testkit.contract", "enginehouse_testkit.depth_contract"} <= names


def test_suites_of_a_class_run_in_the_order_of_its_bases(tmp_path: Path) -> None:
    """The form first; then the suites from the most specific messages to the least."""
    (tmp_path / "test_wrong.py").write_text(_WRONG)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-c", os.devnull, "--rootdir", str(tmp_path)]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=True)
    found = re.findall(r"TestForgetful::(\w+)", done.stdout)
    places = {
        suite.__name__: [place for place, name in enumerate(found) if hasattr(suite, name) and name != "test_form"]
        for suite in (BackendContract, RunnerContract, EngineContract)
    }

    assert found[0] == "test_form"
    assert max(places["BackendContract"]) < min(places["RunnerContract"])
    assert max(places["RunnerContract"]) < min(places["EngineContract"])


def test_suites_fail_on_what_is_wrong(tmp_path: Path) -> None:
    """By the test that is about it; assertions inside the kit explain themselves."""
    (tmp_path / "test_wrong.py").write_text(_WRONG)
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run([*command, "-p", "no:cacheprovider"], capture_output=True, text=True, check=False)
    failed = set(re.findall(r"FAILED \S+::(\w+::\w+)", done.stdout))

    assert {
        "TestForgetful::test_truncate_then_replay",
        "TestForgetful::test_open_reports_progress_and_says_what_it_opened",
        "TestForgetful::test_probing_does_not_import_the_library",  # its class cannot be imported
        "TestWrongSampler::test_fields_say_what_they_mean",
        "TestWrongSampler::test_numbers_out_of_range_are_refused",
        "TestWrongSampler::test_truncations_keep_a_candidate",
        "TestWrongSampler::test_draws_replay",
    } <= failed, done.stdout
    assert "TestForgetful::test_fork_then_replay" not in failed
    assert "wrong has no description" in done.stdout
