"""The form of an object, tested before its behaviour: what the loader checks, and what its methods give.

An object of a wrong form fails in all tests of a suite, each time with another message. So the form is tested first;
if it is wrong, ``test_form`` fails with one sentence, and the other tests are skipped.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints

import numpy as np
import pytest

from enginehouse.contract.backend import Runner, Span
from enginehouse.contract.errors import PluginError
from enginehouse.plugins.kinds import KINDS
from enginehouse.plugins.registration import Registration, missing_members
from enginehouse.plugins.results import Expectation
from enginehouse_backendkit.slot_table import num_tokens as num_tokens_of

__all__ = ["FormContract", "form_of_rows", "loader_problem", "members_problem", "problem_of", "result_problem"]


@pytest.mark.timeout(300)
class FormContract:
    """Base of contract suites: the first test, the condition of the others, and a time limit for each."""

    @pytest.fixture(scope="class")
    @classmethod
    def form(cls) -> str:
        """Fault in the form of the object, as one sentence; "" if there is none. Suites override it."""
        return ""

    @pytest.fixture(autouse=True)
    def after_form(self, request: pytest.FixtureRequest, form: str) -> None:
        """Skip all tests but the first if the form is wrong."""
        if form and request.node.originalname != "test_form":
            pytest.skip("the form is wrong: see test_form")

    def test_form(self, form: str) -> None:
        """The loader accepts the object, and its methods give values of the promised types."""
        if form:
            pytest.fail(form, pytrace=False)


def problem_of(check: Callable[[], str]) -> str:
    """Return the result of a check; if the object raises an exception, its traceback."""
    try:
        return check()
    except PluginError as error:
        return error.message
    except (Exception, SystemExit):  # noqa: BLE001 - the object may raise any exception
        return f"an exception while the form was checked:\n{traceback.format_exc()}"


def loader_problem(kind: str, candidate: Any) -> str:
    """Return why the loader refuses an object; "" if it does not.

    Args:
        kind: name of its kind in the table of kinds.
    """

    def check() -> str:
        Registration().register(KINDS[kind], "kit", candidate)
        return ""

    return problem_of(check)


def members_problem(what: str, protocol: Any, found: Any) -> str:
    """Return which members of a protocol an object lacks, as a sentence; "" if none."""
    missing = missing_members(protocol, found)
    return f"{what} gave {type(found).__name__}, which lacks {', '.join(missing)}" if missing else ""


def result_problem(method: Callable[..., Any], found: Any) -> str:
    """Return what is wrong with the type of a result, in the words of the server; "" if it is right.

    Args:
        method: the method as its protocol declares it, such as ``ToolSession.push``.
    """
    annotation = get_type_hints(method)["return"]
    wrong = Expectation(annotation, method.__name__ == "match" and annotation is float).check(found)
    return f"{method.__name__} {wrong}" if wrong else ""


def form_of_rows(runner: Runner, allowed: float, exact: bool | None = None) -> str:
    """Return what is wrong with the rows of logits of a runner, and with the lengths of its sequences.

    Includes the rule that all other tests rest on: a row depends on the tokens before it, however they were fed.

    Args:
        allowed: largest difference of two logits that should be equal.
        exact: they must be equal; None: if the runner is ``batch_invariant``.
    """

    def check() -> str:
        token_ids = np.array([*runner.tokenizer.encode("The capital of France", False)][:8], np.int32)
        sequence = runner.open_sequence()
        try:
            for outputs in ("all", "last", "none"):
                span = Span(sequence, runner.length(sequence), token_ids, outputs)
                if problem := next(_problems_of_pass(runner, span), ""):
                    return problem
        finally:
            runner.free_sequence(sequence)
        is_exact = runner.capabilities.batch_invariant if exact is None else exact
        return _problem_of_values(runner, token_ids, 0.0 if is_exact else allowed)

    return problem_of(check)


def _problems_of_pass(runner: Runner, span: Span) -> Iterator[str]:
    """Yield the first problem of a pass with one span; the checks after it would fail for the same reason."""
    num_tokens, vocab_size = num_tokens_of(span), runner.tokenizer.vocab_size
    num_rows = {"all": num_tokens, "last": 1, "none": 0}[span.outputs]
    asked = f"after a span of {num_tokens} tokens with outputs {span.outputs!r}"
    output: Any = runner.forward([span])
    if not (hasattr(output, "host") and hasattr(output, "num_rows")):
        yield f"forward gave {type(output).__name__}, an object with num_rows and host() was expected"
    rows = output.host()
    if not isinstance(rows, np.ndarray):
        yield f"host() gave {type(rows).__name__}, a numpy array of float32 was expected"
    if rows.dtype != np.float32:
        yield f"host() gave rows of {rows.dtype}, float32 was expected: convert them with .astype(np.float32)"
    if rows.shape != (num_rows, vocab_size):
        yield f"{asked}, host() gave rows of shape {rows.shape}, ({num_rows}, {vocab_size}) was expected"
    if output.num_rows != num_rows:
        yield f"{asked}, num_rows is {output.num_rows}, {num_rows} was expected"
    if not rows.flags.writeable:
        yield "host() gave rows that cannot be written, but sampling changes them in place: return a copy"
    if np.isnan(rows).any() or not np.isfinite(rows.max(axis=1)).all():
        yield f"{asked}, host() gave rows with NaN or +inf, or with nothing but -inf"
    if (length := runner.length(span.sequence)) != span.start + num_tokens:
        expected = span.start + num_tokens
        yield f"{asked}, length() is {length}, {expected} was expected: every span grows its sequence"


def _problem_of_values(runner: Runner, token_ids: Any, allowed: float) -> str:
    """Return whether rows see later tokens, or depend on the chunks in which tokens came."""

    def fed(tokens: Any, chunk_tokens: int) -> Any:
        sequence, rows = runner.open_sequence(), []
        try:
            for start in range(0, len(tokens), chunk_tokens):
                rows.append(
                    runner.forward([Span(sequence, start, tokens[start : start + chunk_tokens], "all")]).host().copy()
                )
        finally:
            runner.free_sequence(sequence)
        return np.concatenate(rows)

    rows = fed(token_ids, token_ids.size)
    other = fed(np.append(token_ids[:-1], token_ids[0]).astype(np.int32), token_ids.size)
    if not _are_close(rows[:-1], other[:-1], allowed):
        return "the rows before the last token changed with that token: does the mask of attention look ahead?"
    if not _are_close(rows, fed(token_ids, 3), allowed):
        advice = "does forward take the positions of a span from its start, and attend to what the sequence holds?"
        if allowed == 0.0:
            advice = (
                "capabilities.batch_invariant is True, or the suite is exact, so that they must be equal to the bit; "
                "if rounding depends on the batch, set batch_invariant=False, and exact = False in the test class"
            )
        return f"a prompt in chunks of 3 tokens gave other rows than in one pass: {advice}"
    return ""


def _are_close(rows: Any, others: Any, allowed: float) -> bool:
    unequal = rows != others
    return not unequal.any() or bool(np.abs(rows[unequal].astype(np.float64) - others[unequal]).max() <= allowed)
