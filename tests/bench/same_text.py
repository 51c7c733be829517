"""How often greedy text is the same with optimisations: ``python -m bench.same_text MODEL 'KEY = VALUE' ...``.

From the folder ``tests``; MODEL is a file or folder, what follows are settings of it, lines of TOML. Forty prompts
are answered plainly, then with the prefix cache, with each drafter, one by one and eight at once. Where rounding
depends on the batch, texts part where two tokens are nearly equally probable: the table says how far apart they were.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import httpx
from attrs import define, field, frozen

from core.behaviours.workloads import PROMPTS, WAYS, Prompt, one_model_in_all_ways
from enginehouse_testkit.server import started_server

__all__ = ["main"]

_MAX_TOKENS = 64
_LOAD_S = 600.0


@frozen
class _Answer:
    """An answer; where log-probabilities can be had, its tokens, and for each the most probable ones with theirs."""

    text: str
    tokens: list[str]
    tops: list[dict[str, float]]
    num_drafted: int
    num_right: int


@define
class _Way:
    """What one way to serve has shown, beside the plain one.

    Attributes:
        num_other: answers that are another text.
        places: the first tokens that differ, where they are known.
        gaps: how much more probable the plain answer's token is there than the other one, by their logarithms.
    """

    name: str
    answers: list[_Answer]
    seconds: float
    num_other: int = 0
    places: list[int] = field(factory=list)
    gaps: list[float] = field(factory=list)

    def compare(self, wanted: _Answer, found: _Answer) -> None:
        """Note where two answers part, and how near they were to it."""
        self.num_other += 1
        for place, (one, other) in enumerate(zip(wanted.tokens, found.tokens, strict=False)):
            if one != other:
                tops = wanted.tops[place]
                self.places.append(place)
                self.gaps.append(tops[one] - tops.get(other, min(tops.values())))
                return

    def row(self) -> str:
        """Of the table."""
        num_drafted = sum(answer.num_drafted for answer in self.answers)
        num_right = sum(answer.num_right for answer in self.answers)
        first = f"{min(self.places)}, {median(self.places):g}" if self.places else ""
        gap = f"{median(self.gaps):.3f}, {max(self.gaps):.3f}" if self.gaps else ""
        num_same = len(self.answers) - self.num_other
        return f"| {self.name} | {num_same} of {len(self.answers)} | {num_drafted}, {num_right} | {first} | {gap} |"


def main() -> None:
    """Serve the model in all ways and print a table."""
    model, settings = Path(sys.argv[1]), "".join(f"{line}\n" for line in sys.argv[2:])
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "enginehouse.toml"
        config.write_text(one_model_in_all_ways(model, settings), "utf-8")
        with (
            started_server("--config", config, ready_timeout_s=_LOAD_S) as server,
            httpx.Client(base_url=str(server.url), timeout=_LOAD_S) as client,
        ):
            print("| way | same text | drafted, right | first difference: least, median | gap in nats: median, most |")
            print("|---|---|---|---|---|")
            for way in _ways(client):
                print(way.row(), f"{way.seconds:.0f} s", flush=True)


def _ways(client: httpx.Client) -> Iterator[_Way]:
    plain = _ask_all(client, "plain", 1)
    for model in list(WAYS)[1:]:
        for what, at_once in (("one by one", 1), ("from a warm cache, 8 at once", 8)):
            began = time.monotonic()
            way = _Way(f"{model}, {what}", _ask_all(client, model, at_once), time.monotonic() - began)
            for wanted, found in zip(plain, way.answers, strict=True):
                if wanted.text != found.text:
                    way.compare(wanted, found)
            yield way


def _ask_all(client: httpx.Client, model: str, at_once: int) -> list[_Answer]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda prompt: _ask(client, model, prompt), PROMPTS))


def _ask(client: httpx.Client, model: str, prompt: Prompt) -> _Answer:
    body = prompt.body(model, _MAX_TOKENS)
    if "prediction" not in body:  # the API has no log-probabilities beside it
        body |= {"logprobs": True, "top_logprobs": 5}
    answer = client.post("/v1/chat/completions", json=body, headers={"X-Enginehouse-Details": "true"})
    answer.raise_for_status()
    data = answer.json()
    choice, saved = data["choices"][0], data["enginehouse"]["optimizations"]
    entries = choice["logprobs"]["content"] if choice.get("logprobs") else []
    tops = [{top["token"]: top["logprob"] for top in (*entry["top_logprobs"], entry)} for entry in entries]
    return _Answer(
        choice["message"]["content"],
        [entry["token"] for entry in entries],
        tops,
        saved["drafted_tokens"],
        saved["accepted_draft_tokens"],
    )


if __name__ == "__main__":
    main()
