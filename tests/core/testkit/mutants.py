"""Wrong plugins, each with one mistake, and the suites that must find it; ``test_mutants`` runs this module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import msgspec
import numpy as np
import pytest
from attrs import evolve, field, frozen
from heavy_gpt import HeavyBackend  # these two are on the path of the run
from numpy_gpt import CountsNoContext, GptBackend, GptOptions, GptRunner, RaisesRawErrors, Rows

from enginehouse.contract.backend import ModelSource, Span
from enginehouse.contract.compressor import Compressor
from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.fields import FIELDS
from enginehouse.contract.parsers import AnswerText, CallArguments, CallFinished, CallStarted
from enginehouse.contract.types import RequestFinished
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import PluginsSettings
from enginehouse_testkit.backend_contract import BackendContract, ModelUnderTest
from enginehouse_testkit.compressor_contract import CompressorContract
from enginehouse_testkit.engine_contract import EngineContract
from enginehouse_testkit.fake_runner import FakeOptions, FakeRunner
from enginehouse_testkit.inline_engine import InlineEngine
from enginehouse_testkit.runner_contract import RunnerContract
from enginehouse_testkit.sampler_contract import SamplerContract
from enginehouse_testkit.structured_decoder_contract import StructuredDecoderContract
from enginehouse_testkit.tool_parser_contract import ToolParserContract

ENGINE_FIELDS = [name for name, row in FIELDS.items() if row.by == "engine"]
REGISTRY = PluginRegistry.load(PluginsSettings(allow=("parsers", "compress")))


class ForkCopiesNothing(GptRunner):
    def fork(self, source: int, length: int) -> tuple[int, int]:
        return self.table.fork(source, length)


class ForkSharesMemory(GptRunner):
    def __init__(self, options: GptOptions) -> None:
        super().__init__(options)
        self.shared: dict[int, int] = {}
        self.free_sequence = self.free

    def slot(self, sequence: int) -> int:
        return self.shared.get(sequence, sequence)

    def free(self, sequence: int) -> None:
        self.shared.pop(sequence, None)
        self.table.free(sequence)

    def fork(self, source: int, length: int) -> tuple[int, int]:
        copy, kept = self.table.fork(source, length)
        self.shared[copy] = self.slot(source)
        return copy, kept


class PositionsFromZero(GptRunner):
    def places(self, span: Span, num_tokens: int) -> Any:
        return np.arange(num_tokens)


class MaskLooksAhead(GptRunner):
    def sees(self, span: Span, num_tokens: int) -> Any:
        end = span.start + num_tokens
        return np.arange(end) <= np.arange(span.start, end)[:, None] + 1


class LastGivesTheFirst(GptRunner):
    asked = {**GptRunner.asked, "last": slice(0, 1)}


class ChecksNothing(GptRunner):
    def check(self, spans: Sequence[Span]) -> None:
        pass


class WrongLengthsAfterAbort(GptRunner):
    def lengths(self, spans: Sequence[Span]) -> dict[int, int]:
        return {span.sequence: span.start + 1 for span in spans}


class RemembersAborts(GptRunner):
    def look_for_abort(self, spans: Sequence[Span]) -> None:
        was_set = self.aborted.is_set()
        try:
            super().look_for_abort(spans)
        finally:
            if was_set:
                self.aborted.set()


class IgnoresAborts(GptRunner):
    def abort(self) -> None:
        pass


class NeverAdvancesSilently(GptRunner):
    def advance(self, span: Span) -> None:
        if span.outputs != "none":
            super().advance(span)


class RowsOfDoubles(GptRunner):
    def output(self, rows: Any, num_spans: int) -> Any:
        return Rows(rows.astype(np.float64))


class RowsReadOnly(GptRunner):
    def output(self, rows: Any, num_spans: int) -> Any:
        rows.setflags(write=False)
        return Rows(rows)


class TooLargeCache(GptRunner):
    def __init__(self, options: GptOptions) -> None:
        super().__init__(options)
        self.capabilities = evolve(self.capabilities, cache_tokens=4 * self.capabilities.cache_tokens)
        self.free_tokens = lambda: self.table.free_tokens() + self.capabilities.cache_tokens * 3 // 4


class NotBatchInvariant(GptRunner):
    def __init__(self, options: GptOptions) -> None:
        super().__init__(options)
        self.capabilities = evolve(self.capabilities, batch_invariant=True)

    def output(self, rows: Any, num_spans: int) -> Any:
        return Rows(rows + np.float32(1e-3 * num_spans))


class TooPeaked(GptRunner):
    def output(self, rows: Any, num_spans: int) -> Any:
        return Rows(rows * np.float32(100))


class IgnoresSpecial(GptRunner):
    def __init__(self, options: GptOptions) -> None:
        super().__init__(options)
        encode = self.tokenizer.encode
        self.tokenizer.encode = lambda text, special: encode(text, True)


class _GptSuite:
    """The fixture of a backend: a file of one word."""

    backend: GptBackend
    max_logit_difference = 1e-3

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tmp_path_factory: pytest.TempPathFactory) -> ModelUnderTest:
        path = tmp_path_factory.mktemp("model") / "small.gpt"
        path.write_bytes(b"gpt")
        return ModelUnderTest(backend=cls.backend, source=ModelSource(str(path), path), options=GptOptions())


class TestGood(_GptSuite, BackendContract, RunnerContract, EngineContract):
    backend = GptBackend()


def _of_runner(runner: type[GptRunner], *suites: type[Any]) -> type[Any]:
    """A test class of a backend with this runner."""
    backend = GptBackend()
    backend.runner = runner
    return type(f"Test{runner.__name__}", (_GptSuite, *(suites or (RunnerContract,))), {"backend": backend})


class TestCountsNoContext(_GptSuite, BackendContract):
    backend = CountsNoContext()


class TestRaisesRawErrors(_GptSuite, BackendContract):
    backend = RaisesRawErrors()


class TestImportsItsLibrary(_GptSuite, BackendContract):
    backend = HeavyBackend()


@frozen
class SpiceFields:
    spice: int = field(
        default=0, validator=attrs.validators.in_(range(20)), metadata={"description": "Tokens that are kept."}
    )


class Spice:
    """A sampler that keeps the best tokens."""

    name, api_version, request_fields, order = "spice", 1, SpiceFields, 45

    def create(self, fields: SpiceFields) -> Any:
        return (lambda candidates: self.kept(candidates, fields.spice)) if fields.spice else None

    def kept(self, candidates: Any, number: int) -> Any:
        return np.arange(len(candidates.token_ids)) < number


class SpiceOnCoresPlace(Spice):
    order = 40


class SpiceKeepsNothing(Spice):
    def kept(self, candidates: Any, number: int) -> Any:
        return candidates.logits > candidates.logits.max()


class SpiceChangesItsArguments(Spice):
    def kept(self, candidates: Any, number: int) -> Any:
        candidates.logits[:] = candidates.logits[::-1]
        return super().kept(candidates, number)


class SpiceRemembers(Spice):
    calls = 0

    def kept(self, candidates: Any, number: int) -> Any:
        self.calls += 1
        return super().kept(candidates, number + self.calls % 2)


def _of_sampler(sampler: Any) -> type[Any]:
    fixture = pytest.fixture(scope="class")(classmethod(lambda cls: sampler))
    return type(f"Test{type(sampler).__name__}", (SamplerContract,), {"sampler": fixture})


class Changed:
    """An object with some of its attributes replaced."""

    def __init__(self, inner: Any, without: Sequence[str] = (), **changes: Any) -> None:
        self.__dict__.update(inner=inner, without=without, **changes)

    def __getattr__(self, name: str) -> Any:
        if name in self.without:
            raise AttributeError(name)
        return getattr(self.inner, name)


def _parser(without: Sequence[str] = (), change: Any = None) -> Any:
    """The parser ``hermes``, with parts of its sessions changed."""
    inner = REGISTRY.tool_parsers["hermes"]

    def open_session(bound: Any, tools: Any) -> Any:
        session = bound.open(tools)
        if change is None:
            return session
        changed = change()
        return Changed(
            session,
            push=lambda text: changed(session.push(text)),
            flush=lambda is_cut: changed(session.flush(is_cut)),
        )

    def bind(model: Any) -> Any:
        bound = inner.bind(model)
        return Changed(bound, without, open=lambda tools: open_session(bound, tools))

    return Changed(inner, bind=bind)


def shows_the_marker() -> Any:
    def changed(parts: Sequence[Any]) -> Iterator[Any]:
        for part in parts:
            if isinstance(part, CallStarted):
                yield AnswerText("<tool_call>")
            yield part

    return lambda parts: list(changed(parts))


def streams_nothing() -> Any:
    held: list[str] = []

    def changed(parts: Sequence[Any]) -> Iterator[Any]:
        for part in parts:
            if isinstance(part, CallArguments):
                held.append(part.text)
                continue
            if isinstance(part, CallFinished) and held:
                yield CallArguments("".join(held))
                held.clear()
            yield part

    return lambda parts: list(changed(parts))


class WrappedEngine:
    """Core's engine, declared and read as if it were an author's own."""

    def __init__(self, inner: InlineEngine, native: Sequence[str]) -> None:
        self.inner = inner
        capabilities = msgspec.structs.replace(inner.info.engine, native=tuple(native))
        self.info = msgspec.structs.replace(inner.info, engine=capabilities)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class EndlessEngine(WrappedEngine):
    """Its streams lack their last event."""

    async def submit(self, request: Any) -> Any:
        return EndlessStream(await self.inner.submit(request))


class EndlessStream:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def __aiter__(self) -> Any:
        async for batch in self.inner:
            if rest := [event for event in batch if not isinstance(event, RequestFinished)]:
                yield rest


def _of_engine(name: str, make: Any, native: Sequence[str]) -> type[Any]:
    def open_engine() -> Any:
        return make(InlineEngine(FakeRunner(FakeOptions(context=512, slots=4))), native)

    fixture = pytest.fixture(scope="class")(classmethod(lambda cls: open_engine))
    return type(f"Test{name}", (EngineContract,), {"make_engine": fixture})


class KnowsOneRegex:
    """Enforces a part of its kind of constraint."""

    name, api_version, kinds = "one", 1, frozenset({"regex"})

    def bind(self, tokenizer: Any) -> Any:
        return self

    def compile(self, constraint: Any) -> Any:
        raise InvalidRequest("regex: only [0-9] is known", "regex")


def _of_parser(name: str, parser: Any) -> type[Any]:
    fixture = pytest.fixture(scope="class")(classmethod(lambda cls: parser))
    answers = (('<tool_call>\n{"name": "say", "arguments": {"text": "hello"}}\n</tool_call>', "", _SAID),)
    return type(f"Test{name}", (ToolParserContract,), {"tool_parser": fixture, "answers": answers})


_SAID = [("say", '{"text": "hello"}')]


def _compressor(change: Any) -> Compressor:
    inner = REGISTRY.compressors["lossless"]
    return Changed(inner, compress=lambda task, tools: [change(list(kept)) for kept in inner.compress(task, tools)])


def _of_compressor(name: str, compressor: Any) -> type[Any]:
    fixture = pytest.fixture(scope="class")(classmethod(lambda cls: compressor))
    return type(f"Test{name}", (CompressorContract,), {"compressor": fixture})


for _runner in (
    ForkCopiesNothing,
    ForkSharesMemory,
    PositionsFromZero,
    MaskLooksAhead,
    LastGivesTheFirst,
    ChecksNothing,
    WrongLengthsAfterAbort,
    RemembersAborts,
    IgnoresAborts,
    NeverAdvancesSilently,
    RowsReadOnly,
    TooLargeCache,
    NotBatchInvariant,
    IgnoresSpecial,
):
    globals()[f"Test{_runner.__name__}"] = _of_runner(_runner)
TestTooPeaked = _of_runner(TooPeaked, EngineContract)
TestRowsOfDoubles = _of_runner(RowsOfDoubles, BackendContract, RunnerContract, EngineContract)
for _sampler in (SpiceOnCoresPlace(), SpiceKeepsNothing(), SpiceChangesItsArguments(), SpiceRemembers()):
    globals()[f"Test{type(_sampler).__name__}"] = _of_sampler(_sampler)
TestParserWithoutMarkers = _of_parser("ParserWithoutMarkers", _parser(without=("markers",)))
TestParserGivesText = _of_parser("ParserGivesText", _parser(change=lambda: lambda parts: "text"))
TestParserShowsItsMarker = _of_parser("ParserShowsItsMarker", _parser(change=shows_the_marker))
TestParserStreamsNothing = _of_parser("ParserStreamsNothing", _parser(change=streams_nothing))
TestEngineDeclaresTooLittle = _of_engine("EngineDeclaresTooLittle", WrappedEngine, ENGINE_FIELDS[1:])
TestEngineWithoutEnd = _of_engine("EngineWithoutEnd", EndlessEngine, ENGINE_FIELDS)
TestDecoderOfOneRegex = type(
    "TestDecoderOfOneRegex",
    (StructuredDecoderContract,),
    {"structured_decoder": pytest.fixture(scope="class")(classmethod(lambda cls: KnowsOneRegex()))},
)
TestCompressorCutsLines = _of_compressor(
    "CompressorCutsLines", _compressor(lambda kept: [(start, max(start, end - 9)) for start, end in kept])
)
TestCompressorWithoutOrder = _of_compressor("CompressorWithoutOrder", _compressor(lambda kept: kept[::-1]))
