"""The load generator: so many clients, each sending its next request when its last one is answered.

Speaks the OpenAI chat API to whatever serves it. Prompts are unique within a salt, so that nothing but a
shared beginning can be reused; the same salt gives every server the same work.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

import aiohttp
import msgspec
from attrs import define, field, frozen

__all__ = ["Load", "LoadFailed", "LoadResult", "drive", "find_model", "request_body"]

# fmt: off
_WORDS = (
    "river", "stone", "cloud", "engine", "paper", "window", "garden", "music", "travel", "silver", "bridge",
    "planet", "coffee", "winter", "orange", "market", "village", "doctor", "science", "ocean",
)
# fmt: on
_NUM_TOPIC_WORDS = 40
_NUM_SHARED_WORDS = 300


def _nothing(name: str) -> Mapping[str, object]:
    return {}


class LoadFailed(Exception):
    """A server refused a request or ended a stream without its end."""


@frozen
class Load:
    """What is asked of a server.

    Attributes:
        clients: requests under way at once.
        num_requests: in total.
        max_tokens: of each answer, about 90 prompt tokens before it.
        shared: all prompts begin with the same 300 words.
        limit_s: the run is cut off then; the tokens that have arrived count, at least one.
        fields: from the name of a request, which no other one has, to further fields of its body.
    """

    clients: int
    num_requests: int
    max_tokens: int = 64
    shared: bool = False
    limit_s: float = 120.0
    fields: Callable[[str], Mapping[str, object]] = _nothing


@frozen
class LoadResult:
    """What a run gave. Times in seconds; ``ttft`` is time to first token, ``itl`` the gap between two texts.

    ``num_tokens`` is taken from the server's usage; where it reports none, or a request was cut off, each text
    counts as one.
    """

    num_tokens: int
    num_prompt_tokens: int
    wall_s: float
    ttft_median_s: float
    ttft_max_s: float
    itl_median_s: float
    itl_99_s: float

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over all clients, per second."""
        return self.num_tokens / self.wall_s


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: _Delta = _Delta()


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    usage: _Usage | None = None


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


@define
class _Answer:
    started_s: float
    text_times_s: list[float] = field(factory=list)
    usage: _Usage = field(factory=_Usage)

    @property
    def num_tokens(self) -> int:
        return self.usage.completion_tokens or len(self.text_times_s)


def drive(url: str, load: Load, salt: str) -> LoadResult:
    """Run ``load`` against the server at ``url``.

    Raises:
        LoadFailed: an answer was refused or broken.
    """
    return asyncio.run(_drive(url, load, salt))


async def _drive(url: str, load: Load, salt: str) -> LoadResult:
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    answers: list[_Answer] = []
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        model = await find_model(session, url)
        bodies = iter([request_body(model, load, salt, number) for number in range(load.num_requests)])

        async def client() -> None:
            for body in bodies:
                await _ask(session, url, body, answers)

        started_s = time.perf_counter()
        try:
            async with asyncio.timeout(load.limit_s):
                await asyncio.gather(*(client() for _ in range(load.clients)))
        except TimeoutError:
            pass
        wall_s = time.perf_counter() - started_s
    return _summarise(answers, wall_s)


async def find_model(session: aiohttp.ClientSession, url: str) -> str:
    """The first model that a server lists."""
    async with session.get(f"{url}/v1/models") as response:
        return msgspec.json.decode(await response.read(), type=_Models).data[0].id


def request_body(model: str, load: Load, salt: str, number: int) -> bytes:
    """The request of that number; another number or salt makes another prompt of the same length."""
    name = f"{salt} {number}"
    words = random.Random(name)
    topic = " ".join(words.choices(_WORDS, k=_NUM_TOPIC_WORDS))
    system = "You are a helpful assistant."
    if load.shared:
        system = "You are a careful assistant. " + " ".join(random.Random(1).choices(_WORDS, k=_NUM_SHARED_WORDS))
    user = f"Request {number} {words.random()}. Write a long story about {topic}."
    return msgspec.json.encode(
        {
            "model": model,
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
            "max_tokens": load.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **load.fields(name),
        }
    )


async def _ask(session: aiohttp.ClientSession, url: str, body: bytes, answers: list[_Answer]) -> None:
    """Send one request and note when its texts arrive."""
    answer = _Answer(time.perf_counter())
    answers.append(answer)
    headers = {"Content-Type": "application/json"}
    async with session.post(f"{url}/v1/chat/completions", data=body, headers=headers) as response:
        if response.status != 200:
            raise LoadFailed(f"{response.status}: {await response.text()}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                _note(answer, msgspec.json.decode(line[6:], type=_Chunk))
            elif line.startswith(b"data: [DONE]"):
                return
            elif line.startswith(b"error") or line.startswith(b"event: error"):
                raise LoadFailed(line.decode())
    raise LoadFailed("A stream ended without [DONE].")


def _note(answer: _Answer, chunk: _Chunk) -> None:
    if chunk.usage is not None:
        answer.usage = chunk.usage
    if any(choice.delta.content for choice in chunk.choices):
        answer.text_times_s.append(time.perf_counter())


def _summarise(answers: list[_Answer], wall_s: float) -> LoadResult:
    firsts = [answer.text_times_s[0] - answer.started_s for answer in answers if answer.text_times_s]
    if not firsts:  # cut off before anything arrived: the least that can be said against the server
        firsts = [wall_s]
    gaps = sorted(_gaps(answers)) or [wall_s]
    return LoadResult(
        num_tokens=max(1, sum(answer.num_tokens for answer in answers)),
        num_prompt_tokens=max(answer.usage.prompt_tokens for answer in answers),
        wall_s=wall_s,
        ttft_median_s=statistics.median(firsts),
        ttft_max_s=max(firsts),
        itl_median_s=statistics.median(gaps),
        itl_99_s=gaps[int(0.99 * (len(gaps) - 1))],
    )


def _gaps(answers: list[_Answer]) -> Iterator[float]:
    for answer in answers:
        for before, after in pairwise(answer.text_times_s):
            yield after - before
