"""Contract suite for backends, as a test class: the registered object, before and after opening a model.

::

    class TestMyBackend(BackendContract):
        @pytest.fixture(scope="class")
        @classmethod
        def model(cls):
            return ModelUnderTest(backend=MyBackend(), source=ModelSource("small"), options=MyOptions(context=64))

Combined with :class:`enginehouse_testkit.runner_contract.RunnerContract` and
:class:`enginehouse_testkit.engine_contract.EngineContract` the same fixture serves all three.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, cast

import attrs
import pytest

from enginehouse.contract.backend import Backend, MemoryEstimate, ModelSource, Runner
from enginehouse.contract.engine import Engine
from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.pooler import Pooler
from enginehouse_testkit.contract.form import FormContract, form_of_rows, loader_problem
from enginehouse_testkit.contract.imports import packages_imported_by
from enginehouse_testkit.contract.opening import ModelUnderTest

__all__ = ["BackendContract", "ModelUnderTest"]


class BackendContract(FormContract):
    """Tests every externally observable guarantee of :class:`enginehouse.contract.backend.Backend`.

    Attributes:
        light_packages: packages that probing may import; a model's library is not one of them.
    """

    light_packages: ClassVar[frozenset[str]] = frozenset()

    @pytest.fixture(scope="class")
    @classmethod
    def form(cls, model: ModelUnderTest) -> str:
        """Reason for which the loader refuses the backend, or, if it opens runners, faults in its rows."""
        problem = loader_problem("backends", model.backend)
        if problem or model.backend.opens != "model":
            return problem
        runner = cast(Runner | Pooler, model.open())
        try:
            if isinstance(runner, Pooler):
                return ""  # PoolerContract tests its rows
            return form_of_rows(runner, getattr(cls, "max_logit_difference", 0.05), getattr(cls, "exact", None))
        finally:
            runner.close()

    @pytest.fixture(scope="class")
    @classmethod
    def make_opened(cls, model: ModelUnderTest) -> Callable[..., Any]:
        """Factory that opens the model with changed options; the test closes it."""
        return model.open

    def test_backend_has_its_own_options(self, model: ModelUnderTest) -> None:
        """Its options class is the one that its models are opened with."""
        assert isinstance(model.backend, Backend)
        assert model.backend.opens in ("model", "engine")
        assert isinstance(model.options, model.backend.options)

    def test_options_have_defaults_and_the_generic_fields(self, model: ModelUnderTest) -> None:
        """All options have defaults; ``context`` and ``slots`` come from the generic settings."""
        names = {attribute.name for attribute in attrs.fields(model.backend.options)}
        model.backend.options()

        if model.backend.opens == "model":
            assert {"context", "slots"} <= names

    def test_probe_finds_the_library(self, model: ModelUnderTest) -> None:
        """The backend is available where its tests run, and lists its devices."""
        probe = model.backend.probe()

        assert probe.available, probe.reason
        assert probe.devices

    def test_probing_does_not_import_the_library(self, model: ModelUnderTest) -> None:
        """Importing the plugin, probing and matching do not import its library: every start pays for imports.

        The backend is rebuilt in a separate process, so its class must be importable.
        """
        imported = packages_imported_by(model.backend, model.source, "subject.probe(); subject.match(source)")
        heavy = imported - self.light_packages

        assert not heavy, f"import of the plugin, probe or match import {', '.join(sorted(heavy))}"

    def test_match_knows_its_own_source(self, model: ModelUnderTest) -> None:
        """The score is greater than 0 and at most 1, with a readable reason."""
        match = model.backend.match(model.source)

        assert 0.0 < match.score <= 1.0
        assert match.reason

    def test_match_refuses_other_sources_without_an_error(self, model: ModelUnderTest, tmp_path: Path) -> None:
        """An empty folder, a file of another type, and a name that is not a file score 0."""
        file = tmp_path / "notes.unknown"
        file.write_bytes(b"\x00\x01 nothing that is a model")
        empty = tmp_path / "empty"
        empty.mkdir()
        missing = tmp_path / "missing"
        for source in (
            ModelSource(str(file), file),
            ModelSource(str(empty), empty),
            ModelSource(str(missing), missing),
            ModelSource("no model has this name"),
        ):
            match = model.backend.match(source)
            assert match.score == 0.0, f"it would open {source.text}"
            assert match.reason

    def test_estimate_counts_memory(self, model: ModelUnderTest) -> None:
        """Weights are part of the total; a longer context costs more if tokens use memory."""
        estimate = model.backend.estimate(model.source, model.options)

        assert isinstance(estimate, MemoryEstimate)
        assert 0 <= estimate.weights_bytes <= estimate.total_bytes
        assert estimate.kv_bytes_per_token >= 0
        if model.backend.opens == "model":
            assert estimate.total_bytes > 0, "total_bytes is 0: count weights, keys and values, and buffers"
            _assert_context_counts(model)

    def test_sources_that_cannot_be_opened_are_load_errors(self, model: ModelUnderTest, tmp_path: Path) -> None:
        """Any exception of the library becomes a ModelLoadError."""
        for path in _bad_sources(model, tmp_path):
            try:
                model.backend.open(ModelSource(str(path), path), model.options, lambda _share, _what: None)
            except ModelLoadError:
                continue
            except Exception as error:  # noqa: BLE001 - the library may raise any exception
                found = f"raised {type(error).__name__}"
            else:
                found = "opened it"
            pytest.fail(f"open of a {path.stem} file {found}; it must raise ModelLoadError", pytrace=False)

    def test_sources_that_cannot_be_estimated_are_load_errors(self, model: ModelUnderTest, tmp_path: Path) -> None:
        """Estimate gives an estimate or raises ModelLoadError, also for files that are missing or damaged."""
        for path in _bad_sources(model, tmp_path):
            try:
                model.backend.estimate(ModelSource(str(path), path), model.options)
            except ModelLoadError:
                continue
            except Exception as error:  # noqa: BLE001 - the backend may raise any exception
                found = f"estimate of a {path.stem} file raised {type(error).__name__}: {error}"
                pytest.fail(f"{found}; it must raise ModelLoadError", pytrace=False)

    def test_open_reports_progress_and_says_what_it_opened(self, model: ModelUnderTest) -> None:
        """Progress increases from 0 to at most 1; the model information names the backend."""
        shares: list[float] = []
        opened = model.backend.open(model.source, model.options, lambda share, _what: shares.append(share))
        try:
            assert shares == sorted(shares)
            assert all(0.0 <= share <= 1.0 for share in shares)
            assert opened.info.backend == model.backend.name
            assert opened.info.vocab_size > 0
            assert opened.info.max_context > 0
            if model.backend.opens == "model":
                assert isinstance(opened, Runner | Pooler)
        finally:
            _close(opened)

    def test_context_and_slots_are_honoured(self, model: ModelUnderTest, make_opened: Callable[..., Any]) -> None:
        """The runner has the context and slots that the settings request; a pooler has the context."""
        if model.backend.opens != "model":
            pytest.skip("optional: the backend opens engines, which plan for themselves (opens)")
        opened = cast(Runner | Pooler, make_opened(context=48, slots=3))
        try:
            assert opened.info.max_context == 48
            if isinstance(opened, Pooler):
                assert opened.capabilities.max_tokens == 48
            else:
                assert opened.capabilities.max_context == 48
                assert opened.capabilities.max_sequences >= 3
        finally:
            opened.close()


def _bad_sources(model: ModelUnderTest, folder: Path) -> tuple[Path, Path]:
    """Return a missing and a damaged source, which are named like the model's."""
    if model.source.path is None:
        pytest.skip("the source is not a file: give the fixture model a source with a path")
    missing = folder / f"missing{model.source.path.suffix}"
    damaged = folder / f"damaged{model.source.path.suffix}"
    if model.source.path.is_dir():
        damaged.mkdir()
        (damaged / "config.json").write_text("{")
    else:
        damaged.write_bytes(b"\x00\xff damaged")
    return missing, damaged


def _assert_context_counts(model: ModelUnderTest) -> None:
    """Assert that a long context costs more than a short one, if tokens use memory; both with default options."""
    estimates = []
    for context in (64, 2**17):
        try:
            estimates.append(model.backend.estimate(model.source, model.backend.options(context=context)))
        except (ModelLoadError, ValueError):  # more than the model supports
            return
    short, long = estimates
    if long.kv_bytes_per_token:
        assert short.total_bytes < long.total_bytes, (
            f"total_bytes is {short.total_bytes} for a context of 64 and {long.total_bytes} for one of {2**17}, but "
            f"kv_bytes_per_token is {long.kv_bytes_per_token}: count the whole context of options"
        )


def _close(opened: Runner | Pooler | Engine) -> None:
    closing = opened.close()
    if closing is not None:
        asyncio.run(_wait(closing))


async def _wait(closing: Any) -> None:
    await closing
