"""Contract suite for structured decoders, as a test class.

::

    class TestMyDecoder(StructuredDecoderContract):
        @pytest.fixture(scope="class")
        @classmethod
        def structured_decoder(cls):
            return MyDecoder()

It is bound to a vocabulary in which characters are split over tokens. Texts are in the style of ``json.dumps``, with
one space after colons and commas, since a decoder may allow no other white space. A decoder that enforces a part of a
kind only, such as some regular expressions, sets ``examples`` (``enginehouse_testkit.contract.constraint_examples``)::

    examples = {"regex": ConstraintExample(Constraint(kind="regex", text="[0-9]{2}"), ("12",), ("1", "1a"))}
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np
import pytest

from enginehouse.contract.errors import GenerationFailed, InvalidRequest, RequestError, UnsupportedParameter
from enginehouse.contract.structured import GrammarCompiler, Matcher, StructuredDecoder
from enginehouse.contract.types import Constraint, ConstraintKind
from enginehouse_testkit.contract.constraint_examples import EXAMPLES, MALFORMED, ConstraintExample
from enginehouse_testkit.contract.engine_driver import EngineDriver
from enginehouse_testkit.contract.form import FormContract, loader_problem, problem_of
from enginehouse_testkit.contract.imports import packages_imported_by
from enginehouse_testkit.fake_runner import FakeOptions, FakeRunner
from enginehouse_testkit.fake_tokenizer import FakeTokenizer
from enginehouse_testkit.inline_engine import InlineEngine

__all__ = ["StructuredDecoderContract"]

_TOKENIZER = FakeTokenizer()
_every_kind = pytest.mark.parametrize("kind", EXAMPLES)


class StructuredDecoderContract(FormContract):
    """Tests every externally observable guarantee of :class:`enginehouse.contract.structured.StructuredDecoder`.

    Attributes:
        light_packages: packages that the plugin may import before it is bound; its library is not one of them.
        examples: constraints by kind, instead of those of the suite.
    """

    light_packages: ClassVar[frozenset[str]] = frozenset()
    examples: ClassVar[Mapping[ConstraintKind, ConstraintExample]] = {}

    @pytest.fixture(scope="class")
    @classmethod
    def form(cls, structured_decoder: StructuredDecoder) -> str:
        """Reason for which the loader refuses the structured decoder, or the first example that it does not compile."""
        return loader_problem("structured_decoders", structured_decoder) or problem_of(
            lambda: _problem_of_examples(structured_decoder, {**EXAMPLES, **cls.examples})
        )

    @pytest.fixture(scope="class")
    @classmethod
    def grammars(cls, structured_decoder: StructuredDecoder) -> GrammarCompiler:
        """The decoder, bound."""
        return structured_decoder.bind(_TOKENIZER)

    @pytest.fixture
    def example(self, structured_decoder: StructuredDecoder, kind: Any) -> ConstraintExample:
        """A constraint of a kind that the decoder supports."""
        if kind not in structured_decoder.kinds:
            pytest.skip(f"optional: {kind} is not in the decoder's kinds")
        return self.of_kind(kind)

    def of_kind(self, kind: ConstraintKind) -> ConstraintExample:
        """Return the example of a kind."""
        return self.examples.get(kind, EXAMPLES[kind])

    def test_creating_it_does_not_import_the_library(self, structured_decoder: StructuredDecoder) -> None:
        """The server process creates a decoder but never binds it."""
        heavy = packages_imported_by(structured_decoder, None, "subject.kinds") - self.light_packages

        assert not heavy, f"the plugin imports {', '.join(sorted(heavy))}"

    @_every_kind
    def test_texts_are_distinguished(self, grammars: GrammarCompiler, example: ConstraintExample, kind: str) -> None:
        """Allowed texts are accepted token by token to their end, forbidden ones are not."""
        for text in example.allowed:
            assert _follows(grammars, example.constraint, text), f"{text!r} is refused"
        for text in example.forbidden:
            assert not _follows(grammars, example.constraint, text), f"{text!r} is taken"

    @_every_kind
    def test_every_token_outside_the_mask_is_refused(
        self, grammars: GrammarCompiler, example: ConstraintExample, kind: str
    ) -> None:
        """Every token inside the mask is accepted, at each position of a text.

        Where the text is forced, a mask may omit tokens that would write the same text in smaller pieces.
        """
        token_ids = _TOKENIZER.encode(example.allowed[-1], False)
        for place in range(len(token_ids)):
            inside = _allowed(_after(grammars, example.constraint, token_ids[:place]))
            assert token_ids[place] in inside
            texts = [_TOKENIZER.token_bytes[token_id] for token_id in inside]
            for token_id in range(place % 5, _TOKENIZER.vocab_size, 5):
                trial = _after(grammars, example.constraint, token_ids[:place])
                if token_id in inside:
                    trial.accept(token_id)
                elif token_id not in _TOKENIZER.end_token_ids:
                    piece = _TOKENIZER.token_bytes[token_id]
                    if not any(text.startswith(piece) for text in texts):
                        with pytest.raises(GenerationFailed):
                            trial.accept(token_id)

    @_every_kind
    def test_no_control_token_but_the_end_is_allowed(
        self, grammars: GrammarCompiler, example: ConstraintExample, kind: str
    ) -> None:
        """End tokens are allowed exactly where the text is complete."""
        hidden = _TOKENIZER.control_token_ids - _TOKENIZER.end_token_ids
        token_ids = _TOKENIZER.encode(example.allowed[0], False)
        for place in range(len(token_ids) + 1):
            inside = _allowed(_after(grammars, example.constraint, token_ids[:place]))
            assert not inside & hidden
        assert inside & _TOKENIZER.end_token_ids
        assert not _allowed(_after(grammars, example.constraint, [])) & _TOKENIZER.end_token_ids

    @_every_kind
    def test_forced_tokens_are_allowed(self, grammars: GrammarCompiler, example: ConstraintExample, kind: str) -> None:
        """Querying changes nothing; each forced token is in the mask of its position."""
        for text in example.allowed:
            token_ids = _TOKENIZER.encode(text, False)
            for place in range(len(token_ids) + 1):
                matcher = _after(grammars, example.constraint, token_ids[:place])
                forced = list(matcher.forced_token_ids())
                assert list(matcher.forced_token_ids()) == forced
                assert not (forced and matcher.is_finished())
                for token_id in forced:
                    assert token_id in _allowed(matcher)
                    matcher.accept(token_id)

    @_every_kind
    def test_matchers_do_not_touch_each_other(
        self, grammars: GrammarCompiler, example: ConstraintExample, kind: str
    ) -> None:
        """Two sequences of one grammar are independent."""
        grammar = grammars.compile(example.constraint)
        one, other = grammar.start(), grammar.start()
        for token_id in _TOKENIZER.encode(example.allowed[0], False):
            one.accept(token_id)

        assert _allowed(other) == _allowed(grammar.start())
        assert not other.is_finished()

    @pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in MALFORMED.items() for text in texts])
    def test_malformed_constraints_are_refused(
        self, structured_decoder: StructuredDecoder, grammars: GrammarCompiler, kind: Any, text: str
    ) -> None:
        """The error names the request field."""
        if kind not in structured_decoder.kinds:
            pytest.skip(f"optional: {kind} is not in the decoder's kinds")
        with pytest.raises(InvalidRequest) as refused:
            grammars.compile(Constraint(kind=kind, text=text, param="the_field"))

        assert refused.value.param is not None
        assert refused.value.param.startswith("the_field")

    def test_compiling_works_on_several_threads(
        self, structured_decoder: StructuredDecoder, grammars: GrammarCompiler
    ) -> None:
        """Requests arrive while others are compiled."""
        constraints = [self.of_kind(kind).constraint for kind in structured_decoder.kinds] * 4
        with ThreadPoolExecutor(4) as pool:
            masks = list(pool.map(lambda constraint: _allowed(grammars.compile(constraint).start()), constraints))

        assert masks == [_allowed(grammars.compile(constraint).start()) for constraint in constraints]

    # -- through the engine ------------------------------------------------------------------------

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, structured_decoder: StructuredDecoder) -> Iterator[EngineDriver]:
        """Core's engine over the fake model, with this decoder."""
        with asyncio.Runner() as loop:
            inline = InlineEngine(FakeRunner(FakeOptions(context=512, slots=4)), decoders=[structured_decoder])
            yield EngineDriver(inline, loop)
            loop.run(inline.close())

    @_every_kind
    def test_answers_keep_the_constraint(
        self, engine: EngineDriver, structured_decoder: StructuredDecoder, grammars: GrammarCompiler, kind: Any
    ) -> None:
        """Every answer satisfies the constraint; an unsupported kind is refused."""
        constraint = self.of_kind(kind).constraint
        assert set(engine.engine.info.engine.constraint_kinds) == set(structured_decoder.kinds)
        if kind not in structured_decoder.kinds:
            with pytest.raises(UnsupportedParameter):
                engine.submit(engine.request(constraint=constraint))
            return
        for seed in range(3):
            answer = engine.ask(constraint=constraint, temperature=1.5, seed=seed, max_tokens=80, ignore_eos=False)
            if answer.finished().finish_reason == "stop":
                assert _follows(grammars, constraint, answer.text())


def _problem_of_examples(decoder: StructuredDecoder, examples: Mapping[ConstraintKind, ConstraintExample]) -> str:
    """Return which example the decoder does not compile, as a sentence; "" if none."""
    compiler = decoder.bind(_TOKENIZER)
    for kind in sorted(decoder.kinds):
        constraint = examples[kind].constraint
        try:
            compiler.compile(constraint)
        except RequestError as refused:
            return (
                f"compile refuses the suite's example of {kind}, {constraint.text!r}: {refused.message}; if the "
                "decoder enforces a part of this kind only, set the attribute `examples` of the suite"
            )
    return ""


def _after(grammars: GrammarCompiler, constraint: Constraint, token_ids: list[int]) -> Matcher:
    matcher = grammars.compile(constraint).start()
    for token_id in token_ids:
        matcher.accept(token_id)
    return matcher


def _allowed(matcher: Matcher) -> set[int]:
    """Return the ids in the mask."""
    bitmask = np.full((_TOKENIZER.vocab_size + 31) // 32, -1, np.int32)
    matcher.fill_bitmask(bitmask)
    return set(np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little")).tolist())


def _follows(grammars: GrammarCompiler, constraint: Constraint, text: str) -> bool:
    """Return True if a text is allowed token by token, and may end."""
    matcher = grammars.compile(constraint).start()
    for token_id in _TOKENIZER.encode(text, False):
        if token_id not in _allowed(matcher):
            return False
        matcher.accept(token_id)
    return bool(_allowed(matcher) & _TOKENIZER.end_token_ids)
