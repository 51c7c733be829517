"""Processor time of a token under constraint, beside another checkout: ``python -m bench.constraint_cost OTHER``.

The step engine runs over a runner without a model, so that the time is that of masks, checks, sampling and events only:
beside a model's forward pass a difference is smaller. What counts is the processor time of the whole process for each
token, not wall time, so that neighbours disturb it little. Both checkouts stay loaded and take turns; the ratios are
those of a round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .forms import constants, prose, records
from .statistics import estimate, estimate_ratio

__all__ = ["main"]

_ROOT = Path(__file__).parents[2]
_FORMS: Mapping[str, Callable[[str], Mapping[str, Any]] | None] = {
    "free text": None,
    "records": records,
    "one long string": prose,
    "long constant parts": constants,
}
_VOCAB_SIZE, _NUM_SEQUENCES, _MAX_TOKENS = 49_152, 4, 100


def main() -> None:
    """Print the time per token of this checkout and another one, and their ratio, for each form of answers."""
    parser = argparse.ArgumentParser(description="Processor time of a token under constraint, beside another checkout.")
    parser.add_argument("other", type=Path, help="root of the other checkout")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    times: dict[tuple[Path, str], list[float]] = {}
    with contextlib.ExitStack() as stack:
        subjects = {root: stack.enter_context(_subject(root)) for root in (_ROOT, arguments.other.resolve())}
        for number in range(arguments.rounds):
            for form in _FORMS:
                order = list(subjects) if number % 2 else list(reversed(subjects))
                for root in order:
                    times.setdefault((root, form), []).append(_ask(subjects[root], number, form))
    for form in _FORMS:
        ours, others = (times[root, form] for root in subjects)
        ratio = estimate_ratio(ours, others)
        print(
            f"{form}: {estimate(ours).median:.0f} µs a token, the other {estimate(others).median:.0f} µs, "
            f"ratio {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
        )


@contextlib.contextmanager
def _subject(root: Path) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": f"{root / 'core'}{os.pathsep}{root / 'plugins'}"}
    command = [sys.executable, "-m", "bench.constraint_cost", "--subject"]
    with subprocess.Popen(
        command, cwd=_ROOT / "tests", env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _ask(process: subprocess.Popen[str], number: int, form: str) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{number} {form}\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise RuntimeError(f"A subject ended with code {process.wait()}.")
    return float(answer)


def _answer() -> None:
    """Answer each line ``NUMBER FORM`` of the standard input with the microseconds of a token."""
    from enginehouse.contract.types import (
        ChoiceFinished,
        Constraint,
        EngineRequest,
        EngineSettings,
        SamplingParams,
        StopParams,
    )
    from enginehouse.engine.loop import StepEngine
    from enginehouse_llguidance.decoder import LlguidanceDecoder
    from enginehouse_llguidance.options import LlguidanceOptions
    from enginehouse_testkit.fake_runner import FakeOptions, FakeRunner

    runner = FakeRunner(FakeOptions(vocab_size=_VOCAB_SIZE, context=1024))
    decoders = [LlguidanceDecoder(LlguidanceOptions())]
    engine = StepEngine(runner, EngineSettings(slots=_NUM_SEQUENCES), {}, decoders)

    def decode(number: int, form: str) -> int:
        fields = _FORMS[form]
        constraint = None
        if fields is not None:
            schema = fields(form)["response_format"]["json_schema"]["schema"]
            constraint = Constraint(kind="json_schema", text=json.dumps(schema))
        for index in range(_NUM_SEQUENCES):
            sampling = SamplingParams(temperature=1.0, seed=100 * number + index)
            stopping = StopParams(max_tokens=_MAX_TOKENS, ignore_eos=constraint is None)
            request = EngineRequest(
                request_id=f"{form} {number} {index}", sampling=sampling, stopping=stopping, constraint=constraint
            )
            engine.add(request, [97] * 20)
        num_tokens = 0
        while engine.has_work():
            for _, event in engine.step():
                if isinstance(event, ChoiceFinished):
                    num_tokens += event.usage.completion_tokens
        return num_tokens

    for form in _FORMS:
        decode(-1, form)
    for line in sys.stdin:
        number, _, form = line.strip().partition(" ")
        began = time.process_time()
        num_tokens = decode(int(number), form)
        print(1e6 * (time.process_time() - began) / num_tokens, flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--subject"]:
        _answer()
    else:
        main()
