"""The suites on wrong plugins: each mistake is found by the tests that are about it, with a message that names it.

``mutants`` holds the plugins; all that are tried run in one process of pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest

HERE = Path(__file__).parent

Found = Mapping[str, Mapping[str, str]]
"""Phrases of messages by mutant and test."""

QUICK: Found = {
    "Good": {},
    "RowsOfDoubles": {"test_form": "host() gave rows of float64, float32 was expected: convert them with .astype"},
    "RowsReadOnly": {"test_form": "rows that cannot be written, but sampling changes them in place: return a copy"},
    "NeverAdvancesSilently": {"test_form": "outputs 'none', length() is 16, 24 was expected: every span grows"},
    "PositionsFromZero": {"test_form": "does forward take the positions of a span from its start"},
    "MaskLooksAhead": {"test_form": "does the mask of attention look ahead?"},
    "NotBatchInvariant": {"test_form": "capabilities.batch_invariant is True"},
    "SpiceOnCoresPlace": {"test_form": "the sampler 'spice' has the order 40 of core's step 'min_p'"},
    "ParserWithoutMarkers": {"test_form": "lacks markers"},
    "ParserGivesText": {"test_form": "push gave str, a sequence of AnswerText or CallStarted or"},
    "EngineDeclaresTooLittle": {"test_form": "lists neither as native nor as refused: temperature; what the"},
    "EngineWithoutEnd": {"test_form": "its stream ended after ChoiceFinished; the last event must be RequestFinished"},
    "DecoderOfOneRegex": {"test_form": "if the decoder enforces a part of this kind only, set the attribute"},
    "CompressorWithoutOrder": {"test_form": "ranges that are not in order"},
}
"""Mistakes that the first test of a suite finds; the others are skipped."""

SLOW: Found = {
    "ForkCopiesNothing": {
        "test_fork_then_replay": "are keys and values copied?",
        "test_fork_outlives_its_source": "a sequence of 16 tokens, continued",
        "test_batch_of_forks_equals_alone": "alone",
    },
    "ForkSharesMemory": {
        "test_fork_then_replay": "do the two share memory?",
        "test_fork_outlives_its_source": "a sequence of 16 tokens, continued",
        "test_batch_of_forks_equals_alone": "alone",
        "test_random_walk_over_all_operations": "after appends, truncations and forks",
    },
    "LastGivesTheFirst": {
        "test_last_is_the_row_of_the_last_token": "outputs 'last' against the last one of outputs 'all'",
        "test_rows_come_in_span_order": "each one alone",
        "test_batched_prefill_equals_alone": "four prompts in one pass",
    },
    "ChecksNothing": {
        "test_invalid_span_changes_nothing": "forward must raise InvalidSpan before it changes anything",
        "test_invalid_span_when_a_sequence_comes_twice": "a batch with two spans of one sequence was run",
        "test_invalid_span_when_the_sequence_was_freed": "a span of a sequence that was freed was run",
        "test_invalid_span_when_the_batch_is_too_large": "one more than max_batch_tokens",
        "test_invalid_span_when_the_context_is_exceeded": "token 97 of a sequence",
        "test_cache_full_changes_nothing": "CacheFull",
        "test_open_raises_when_all_handles_are_taken": "CacheFull",  # spans of unknown handles were run
    },
    "WrongLengthsAfterAbort": {"test_abort_interrupts_passes": "StepAborted.lengths is {0: 1}, but length() gives"},
    "RemembersAborts": {
        "test_abort_without_a_pass_does_no_harm": "forward must clear the flag when it raises",
        "test_abort_leaves_honest_lengths": "the forward pass was aborted",
    },
    "IgnoresAborts": {"test_abort_interrupts_passes": "capabilities.abort is True, but abort() from another thread"},
    "TooLargeCache": {"test_capabilities_are_plausible": "cache_tokens is 1536, but 8 sequences (max_sequences)"},
    "CountsNoContext": {
        "test_estimate_counts_memory": "kv_bytes_per_token is 64: count the whole context",
        "test_sources_that_cannot_be_estimated_are_load_errors": "raised FileNotFoundError",
    },
    "TooPeaked": {
        "test_seeds_replay": "the model draws the same token always: lower the scale",
        "test_top_k_keeps_k_tokens": "the model draws the same token always: lower the scale",
    },
    "IgnoresSpecial": {"test_encode_forms_control_tokens_only_with_special": "gave the control tokens [256]"},
    "RaisesRawErrors": {
        "test_sources_that_cannot_be_opened_are_load_errors": "raised FileNotFoundError; it must raise ModelLoadError"
    },
    "ImportsItsLibrary": {"test_probing_does_not_import_the_library": "import of the plugin, probe or match import"},
    "SpiceKeepsNothing": {
        "test_truncations_keep_a_candidate": "at least one must be True",
        "test_draws_replay": "left no token to draw",
        "test_it_acts": "left no token to draw",
        "test_choices_have_states_of_their_own": "left no token to draw",
        "test_text_is_the_same_under_preemption_and_in_chunks": "left no token to draw",
    },
    "SpiceChangesItsArguments": {"test_arguments_are_not_changed": "the step changed candidates.logits: copy it first"},
    "SpiceRemembers": {
        "test_the_same_question_gets_the_same_answer": "the second call with the same arguments gave another result",
        "test_text_is_the_same_under_preemption_and_in_chunks": "assert",
    },
    "ParserShowsItsMarker": {
        "test_markers_are_never_shown": "the marker '<tool_call>' is shown: the text is",
        "test_answers_say_what_they_say_however_cut": "pushed in pieces",
    },
    "ParserStreamsNothing": {"test_arguments_stream": "give a text while it arrives"},
    "CompressorCutsLines": {
        "test_lines_that_are_kept_lose_nothing_that_matters": "became",
        "test_compressing_again_takes_nothing_more": "assert",
    },
}

MAY_FAIL = {"WrongLengthsAfterAbort": {"test_abort_leaves_honest_lengths"}}
"""Tests that find a mistake only if another thread is quick enough."""


def _run(folder: Path, chosen: str) -> Found:
    """Run the suites of the chosen mutants; returns the messages of failures by mutant and test."""
    report = folder / "report.xml"
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", str(HERE / "mutants.py"), "-q", "-c", os.devnull, "--rootdir", str(HERE)]
    command += ["-p", "no:cacheprovider", "-k", chosen, f"--junitxml={report}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: dict[str, dict[str, str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        mutant = case.attrib["classname"].rpartition(".")[2].removeprefix("Test")
        failed = found.setdefault(mutant, {})
        for problem in (*case.findall("failure"), *case.findall("error")):
            failed.setdefault(case.attrib["name"].partition("[")[0], f"{problem.get('message')}\n{problem.text}")
    return found


def _check(mutant: str, failed: Mapping[str, str], expected: Mapping[str, str]) -> None:
    assert set(failed) - MAY_FAIL.get(mutant, set()) == set(expected), f"{mutant}: {failed}"
    for test, phrase in expected.items():
        assert phrase in failed[test], f"{mutant}, {test}: {failed[test]}"


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The good backend, and the mistakes that the tests of form find."""
    return _run(tmp_path_factory.mktemp("quick"), " or ".join(f"Test{name}" for name in QUICK))


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """All others."""
    return _run(tmp_path_factory.mktemp("slow"), " or ".join(f"Test{name}" for name in SLOW))


@pytest.mark.parametrize("mutant", QUICK)
def test_a_wrong_form_fails_once(quick: Found, mutant: str) -> None:
    """One failure that says what is wrong; the other tests are skipped."""
    _check(mutant, quick[mutant], QUICK[mutant])


@pytest.mark.slow
@pytest.mark.parametrize("mutant", SLOW)
def test_a_mistake_is_found_by_the_tests_about_it(slow: Found, mutant: str) -> None:
    _check(mutant, slow[mutant], SLOW[mutant])
