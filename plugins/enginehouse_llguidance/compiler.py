"""Compiles constraints to grammars for one vocabulary: checked, bounded, cached. Errors name the request field."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import numpy as np
from attrs import evolve
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from enginehouse.contract.backend import Tokenizer
from enginehouse.contract.composition import read_composition
from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.types import Constraint
from enginehouse_llguidance.compiled import LlguidanceGrammar
from enginehouse_llguidance.composed import Follower, SearchedText, Value, part_of
from enginehouse_llguidance.compositions import grammar_of_composition
from enginehouse_llguidance.grammars import GrammarProblem, lark_of_gbnf, read_lark
from enginehouse_llguidance.kept import KeptGrammars
from enginehouse_llguidance.options import LlguidanceOptions
from enginehouse_llguidance.patterns import AutomatonError, Pattern, PatternError, escape_text, translate_pattern
from enginehouse_llguidance.schemas import (
    Loosening,
    PreparedSchema,
    SchemaProblem,
    TooManySubschemas,
    prepare_schema,
    read_schema,
)
from enginehouse_llguidance.schemas.pruning import without_definition
from enginehouse_llguidance.schemas.validation import NO_RULES
from enginehouse_llguidance.tokens import TokenTexts
from enginehouse_llguidance.trial import check_has_value

__all__ = ["LlguidanceCompiler"]

# Style of json.dumps: one space after colons and commas, none elsewhere. Models write it by themselves, it leaves the
# fewest choices of tokens, and prevents a model from writing white space forever.
_JSON_STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',  # each character is written in only one way, so that a name is matched once
}
_ESCAPED_STYLE = {**_JSON_STYLE, "json_allowed_escapes": 'nrbtf\\"u'}  # "u" is for control characters only
_MAX_LOCATED_PARTS = 200
_LEXER_FUEL = 300_000  # an expression that needs more takes over a second to start; 20,000 choices need far less
_STEP_FUEL = 2_000_000  # a token after which 100,000 remainders are distinguished needs over 1,000,000: 0.1 s
_MAX_ROW = 4000  # items after a token, which take 7 ms; nested alternatives exceed 2000, the library's own limit
_UNSATISFIABLE = "Unsatisfiable schema"
_WORDS_THAT_LOOSEN = ("too large", "too big", _UNSATISFIABLE)  # in the library's messages
"""No value satisfies a grammar that allows fewer than its schema, but some may satisfy the schema."""

_UNSATISFIED = re.compile(r"Unsatisfiable schema:[\s\S]*? while processing json-schema:///#/\$defs/(\w+)")
_MAX_PRUNED = 50  # definitions that no value satisfies; each costs a compilation
_WIDE = "more may follow a token than is allowed"
_MANY_NAMES = 500  # of an object; 1000 that may be absent exceed a row
_MAX_FORCED_ROUNDS = 4  # one round yields up to about 20,000 tokens


class _Refused(ValueError):
    """The library refuses a grammar.

    Attributes:
        definition: name of a definition that no value satisfies, if that is the reason.
        pointer: of the part of a schema, if it is known.
    """

    def __init__(self, message: str, definition: str | None = None, pointer: str | None = None) -> None:
        super().__init__(message)
        self.definition, self.pointer = definition, pointer


class _TooWide(_Refused):
    """Its beginning cannot be followed: more may come next than a row holds."""


class _Started(NamedTuple):
    """A schema and its grammar.

    Attributes:
        problem: why the exact grammar was refused, if values are checked instead.
    """

    prepared: PreparedSchema
    grammar: LlguidanceGrammar
    problem: SchemaProblem | None


class LlguidanceCompiler:
    """Implements :class:`enginehouse.contract.structured.GrammarCompiler`.

    Args:
        vocabulary: the vocabulary of ``tokenizer``.
        tokenizer: the model's tokenizer.
    """

    def __init__(self, vocabulary: LLTokenizer, tokenizer: Tokenizer, options: LlguidanceOptions) -> None:
        self._vocabulary = vocabulary
        self._control_tokens = tokenizer.special_tokens
        self._text_tokens = _text_tokens(tokenizer)
        self._tokens = TokenTexts(tokenizer.token_bytes, tokenizer.control_token_ids, tokenizer.end_token_ids)
        self._options = options
        self._limits = LLParserLimits(
            max_items_in_row=_MAX_ROW,
            initial_lexer_fuel=_LEXER_FUEL,
            step_lexer_fuel=_STEP_FUEL,
            verbose_errors=False,
        )
        self._kept = KeptGrammars(options.max_cached, options.max_cached_bytes)

    def compile(self, constraint: Constraint) -> LlguidanceGrammar:
        """Compile a constraint, or return it from the cache."""
        key = (constraint.kind, constraint.text)
        if (known := self._kept.get(key)) is not None:
            return known
        size = len(constraint.text.encode("utf-8", "surrogatepass"))
        if size > self._options.max_bytes:
            message = f"{size} bytes are more than the {self._options.max_bytes} that are allowed"
            raise InvalidRequest(f"{constraint.param}: {message}", constraint.param)
        try:
            compiled = self._compile(constraint)
        except InvalidRequest:
            self._kept.compiled_in_vain(key)
            raise
        self._kept.put(key, compiled)
        return compiled

    def _compile(self, constraint: Constraint) -> LlguidanceGrammar:
        try:
            if constraint.kind == "json_schema":
                return self._schema(constraint.text)
            # The negation of a user's grammar also contains control tokens.
            allowed = self._text_tokens if constraint.kind in ("lark", "gbnf") else None
            grammar = self._grammar_of(constraint)
            if constraint.kind == "composition":
                return self._start(grammar, tokens=self._tokens, follower=self._follower(constraint))
            if constraint.kind == "json_object":
                return self._start(grammar, tokens=self._tokens, value=Value(NO_RULES))
            if constraint.kind == "regex" and self._pattern(constraint.text).is_searched:
                return self._searched(grammar, SearchedText(constraint.text))
            return self._start(grammar, allowed)
        except (AutomatonError, SchemaProblem, PatternError, GrammarProblem, _Refused) as error:
            raise InvalidRequest(f"{constraint.param}: {error}", constraint.param) from error

    def _schema(self, text: str) -> LlguidanceGrammar:
        started = self._started(text)
        if started.prepared.rules is not None:
            try:
                check_has_value(started.grammar, self._tokens, frozenset(self._vocabulary.eos_tokens))
            except SchemaProblem as error:
                if started.problem is not None and _UNSATISFIABLE in started.problem.reason:
                    raise started.problem from error
                raise
        return started.grammar

    def _started(self, text: str) -> _Started:
        """Prepare a schema and build its grammar: a loose one if the exact one is too large, or allows nothing."""
        schema = read_schema(text)
        loosened: frozenset[Loosening] = frozenset()
        problem: SchemaProblem | None = None
        while True:
            kind: Loosening | None
            try:
                prepared = prepare_schema(schema, self._options, loosened)
                return _Started(*self._start_schema(prepared), problem)
            except TooManySubschemas as error:
                problem, kind = problem or error, "derived"
            except SchemaProblem as error:
                raise problem or error from error
            except _Refused as error:
                problem, kind = problem or self._located(prepared, error), _loosening_for(str(error))
            if kind is None or kind in loosened:
                raise problem
            loosened |= {kind}

    def _check_large(self, prepared: PreparedSchema) -> None:
        """Refuse a schema that has a value with more names than can be followed: reached later, it ends the answer."""
        for pointer, part in prepared.parts:
            if isinstance(part, dict) and len(part.get("properties", ())) > _MANY_NAMES:
                try:
                    self._start(_grammar_of_schema({**part, "type": "object"}))
                except _TooWide as error:
                    raise _TooWide(str(error), pointer=pointer) from error
                except _Refused:
                    pass  # by itself, as it has other constants or types: no object is written there

    def _start_schema(self, prepared: PreparedSchema) -> tuple[PreparedSchema, LlguidanceGrammar]:
        """Build the grammar; return it with the schema, without definitions that no value satisfies."""
        value = Value(prepared.rules or NO_RULES)
        follower = Follower((value,)) if prepared.rules is not None else None
        for _ in range(_MAX_PRUNED):
            try:
                grammar = self._start(
                    _grammar_of_prepared(prepared), None, self._tokens, follower=follower, value=value
                )
                break
            except _Refused as error:
                if error.definition is None:
                    raise
                prepared = evolve(prepared, schema=without_definition(prepared.schema, error.definition))
        else:
            raise _Refused(f"more than {_MAX_PRUNED} definitions are satisfied by no value")
        self._check_large(prepared)
        return prepared, grammar

    def _located(self, prepared: PreparedSchema, error: _Refused) -> SchemaProblem:
        """Return the refusal of a schema, at the innermost part that is refused by itself, if one is."""
        if error.pointer is not None:
            return SchemaProblem(error.pointer, str(error))
        for pointer, part in prepared.parts[:_MAX_LOCATED_PARTS]:
            try:
                self._start(_grammar_of_schema(part))
            except _Refused:
                return SchemaProblem(pointer, str(error))
        return SchemaProblem("", str(error))

    def _grammar_of(self, constraint: Constraint) -> str:
        """Convert a constraint to the library's form."""
        text = constraint.text
        match constraint.kind:
            case "json_object":
                grammar = _grammar_of_schema({"type": "object"})
            case "json_schema":
                grammar = _grammar_of_prepared(self._started(text).prepared)
            case "regex":
                grammar = _grammar_of_expressions(self._pattern(text))
            case "choice":
                grammar = LLMatcher.grammar_from_regex(self._choice(text))
            case "lark" | "gbnf":
                lark = read_lark(text) if constraint.kind == "lark" else lark_of_gbnf(text)
                grammar = LLMatcher.grammar_from_lark(lark)
            case "composition":
                grammar = grammar_of_composition(read_composition(text), self._control_tokens, self._grammar_of_part)
        return grammar

    def _pattern(self, text: str) -> Pattern:
        return translate_pattern(text, search=False, max_depth=self._options.max_depth)

    def _searched(self, grammar: str, text: SearchedText) -> LlguidanceGrammar:
        found = self._start(grammar, tokens=self._tokens, follower=Follower((text,)), value=text)
        check_has_value(found, self._tokens, frozenset(self._vocabulary.eos_tokens))
        return found

    def _grammar_of_part(self, constraint: Constraint) -> str:
        """Return the grammar of a part, after compiling it by itself so that errors name its own request field."""
        self.compile(constraint)
        try:
            return self._grammar_of(constraint)
        except SchemaProblem as error:
            raise InvalidRequest(f"{constraint.param}: {error}", constraint.param) from error

    def _follower(self, constraint: Constraint) -> Follower | None:
        """Return what enforces the rules of a composition's parts; None if there are none."""
        values: list[Value | SearchedText] = []

        def value_of(part: Constraint) -> Value | SearchedText | None:
            value = self.compile(part).value
            values.extend([value] if value is not None else [])
            return value

        parts = part_of(read_composition(constraint.text), value_of)
        return (
            Follower(parts)
            if any(isinstance(one, SearchedText) or one.rules is not NO_RULES for one in values)
            else None
        )

    def _choice(self, text: str) -> str:
        choices = json.loads(text)
        if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
            raise _Refused("must be a list of at least one string")
        if len(choices) > self._options.max_choices:
            raise _Refused(f"more than {self._options.max_choices} choices are not supported")
        return "|".join(map(escape_text, dict.fromkeys(choices)))

    def _start(
        self,
        grammar: str,
        allowed: NDArray[np.int32] | None = None,
        tokens: TokenTexts | None = None,
        *,
        follower: Follower | None = None,
        value: Value | SearchedText | None = None,
    ) -> LlguidanceGrammar:
        """Build a grammar and check that its first token can be chosen; ``allowed`` limits its text tokens."""
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=self._limits)
        bitmask = np.zeros((self._vocabulary.vocab_size + 31) // 32, np.int32)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(bitmask.ctypes.data, bitmask.nbytes)
        if matcher.is_error() and not matcher.get_error().startswith("NoExtension"):
            unsatisfied = _UNSATISFIED.match(matcher.get_error())
            raise _Refused(_first_line(matcher.get_error()), unsatisfied and unsatisfied[1])
        if not bitmask.any() or (matcher.is_stopped() and not matcher.is_accepting()):
            raise _Refused("no text satisfies this constraint")
        _check_forced(matcher)
        return LlguidanceGrammar(matcher, self._vocabulary, allowed, tokens, follower=follower, value=value)


def _loosening_for(message: str) -> Loosening | None:
    """Return what to leave out of a grammar that the library refuses because of its size."""
    if "Unable to determine if regex is empty" in message:
        return "texts"
    if "are not disjoint" in message:
        return "names"
    if "min/maxProperties only supported" in message:
        return "counts"
    if _WIDE in message:
        return "properties"
    return "derived" if any(word in message for word in _WORDS_THAT_LOOSEN) else None


def _check_forced(matcher: LLMatcher) -> None:
    """Refuse a grammar that forces an endless text, or whose forced beginning is too long to be followed."""
    probe = matcher.deep_copy()
    for _ in range(_MAX_FORCED_ROUNDS):
        if probe.is_stopped() or not (forced := probe.compute_ff_tokens()):
            break
        probe.consume_tokens(forced)
    if probe.is_error():
        reason = _first_line(probe.get_error())
        if "Current row" in reason:
            raise _TooWide(f"{_WIDE}; ask for fewer optional members ({reason})")
        raise _Refused(f"its text is endless, or too long where it leaves no choice: {reason}")


def _text_tokens(tokenizer: Tokenizer) -> NDArray[np.int32]:
    """Bitmask of all tokens except control tokens."""
    bits = np.zeros((tokenizer.vocab_size + 31) // 32 * 32, np.uint8)
    bits[: tokenizer.vocab_size] = 1
    bits[list(tokenizer.control_token_ids | tokenizer.end_token_ids)] = 0
    return np.packbits(bits, bitorder="little").view(np.int32)


def _grammar_of_expressions(pattern: Pattern) -> str:
    if not pattern.is_exact and not pattern.is_searched:
        raise _Refused("what the expression asserts is too large; bound its repetitions or leave out assertions")
    expressions = (pattern.regex, *pattern.conditions)
    if len(expressions) == 1:
        return LLMatcher.grammar_from_regex(pattern.regex)
    text = " & ".join(f"/(?:{one})/" for one in expressions)  # slashes are escaped in them
    return json.dumps({"grammars": [{"lark_grammar": f"start: TEXT\nTEXT: {text}\n"}]})


def _grammar_of_prepared(prepared: PreparedSchema) -> str:
    return _grammar_of_schema(prepared.schema, _ESCAPED_STYLE if prepared.needs_escapes else _JSON_STYLE)


def _grammar_of_schema(schema: Any, style: dict[str, Any] = _JSON_STYLE) -> str:
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), None, style)  # type: ignore[arg-type]


def _first_line(error: str) -> str:
    """Return the library's message without the grammar that it quotes."""
    line = error.split("\n", 1)[0].strip().removesuffix(":")
    return line if len(line) <= 300 else f"{line[:300]}..."
