"""What a client says about the prefix cache and hears of it; and that a server finds its prompts after a restart."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from attrs import evolve

from enginehouse.api.http.callers import Caller, may_see_prompts
from enginehouse.settings.auth import KeySettings
from enginehouse.settings.config import AuthSettings, ModelSettings, ServerSettings, Settings
from enginehouse.settings.profiles import PROFILES
from enginehouse_testkit.served import served

ALICE, BOB, BOSS = ({"authorization": f"Bearer {name}"} for name in ("alice", "bob", "boss"))
KEYS = tuple(KeySettings(name=name, key=name) for name in ("alice", "bob"))
SHARING = (
    *(evolve(key, namespace="all") for key in KEYS),
    KeySettings(name="boss", key="boss", scopes=("admin", "infer"), namespace="all"),
)


@contextlib.contextmanager
def connect(
    model: ModelSettings, keys: tuple[KeySettings, ...] = KEYS, *, show_prompts: bool = False
) -> Iterator[httpx.Client]:
    server = ServerSettings(show_prompts=show_prompts)
    settings = Settings(server=server, models={"fake": model}, auth=AuthSettings(keys=keys))
    with served(settings, timeout=30) as client:
        yield client


def fake(isolation: str = "thread", **settings: Any) -> ModelSettings:
    return ModelSettings(source="fake", backend="fake", isolation=isolation, context=1024, **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with connect(fake()) as client:
        yield client


def ask(client: httpx.Client, prompt: str, key: dict[str, str] = ALICE, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}
    headers = {**key, "x-enginehouse-details": "true"}
    answer = client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def difference(answer: dict[str, Any]) -> dict[str, Any] | None:
    return answer["enginehouse"]["prefix_cache"]["first_difference"]


def test_prompt_cache_keys_part_what_is_cached(client: httpx.Client) -> None:
    prompt = "Requests with different cache keys do not meet. " * 4
    ask(client, prompt, prompt_cache_key="one")

    assert cached(ask(client, prompt, prompt_cache_key="one")) > 100
    assert cached(ask(client, prompt, prompt_cache_key="two")) == 0
    assert cached(ask(client, prompt)) <= 1
    assert cached(ask(client, prompt, prompt_cache_key="one", cache_salt="salt")) == 0
    assert cached(ask(client, prompt, BOB, prompt_cache_key="one")) == 0, "a key's cache stays its own"


def test_a_prompt_cache_key_that_is_too_long_is_refused(client: httpx.Client) -> None:
    body = {"prompt": "p", "prompt_cache_key": "k" * 1001}
    answer = client.post("/v1/completions", json=body, headers=ALICE)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt_cache_key"


def test_cache_prompt_false_neither_reuses_nor_keeps(client: httpx.Client) -> None:
    prompt = "Nothing of this shall be kept by anybody, ever. " * 4

    assert cached(ask(client, prompt, cache_prompt=False)) == 0
    assert cached(ask(client, prompt)) <= 1
    assert cached(ask(client, prompt, cache_prompt=False)) == 0
    assert cached(ask(client, prompt, cache_prompt=True)) > 100


def test_choices_of_a_request_that_is_not_cached_share_its_prefill(client: httpx.Client) -> None:
    texts = [choice["text"] for choice in ask(client, "once " * 30, cache_prompt=False, n=2)["choices"]]

    assert texts[0] == texts[1]


def test_why_a_prompt_was_not_cached(client: httpx.Client) -> None:
    """The first token that differs from what is kept."""
    ask(client, "It was on a Monday that the story began, as stories do.", cache_salt="why")
    answer = ask(client, "It was on a Xonday that the story began, as stories do.", cache_salt="why")
    found = difference(answer)

    assert found is not None
    assert found["index"] == cached(answer)
    assert found["got"] == "X"


def shown_to(client: httpx.Client, key: dict[str, str], salt: str) -> dict[str, Any]:
    """What somebody hears whose prompt leaves one of Alice's."""
    ask(client, "It was on a Monday that the story began.", ALICE, cache_salt=salt)
    found = difference(ask(client, "It was on a Xonday that the story began.", key, cache_salt=salt))
    assert found is not None
    return found


def test_what_others_wrote_is_shown_to_nobody_by_default() -> None:
    """Callers of one namespace meet in the cache; who guesses at a prompt learns how far it is right, and no more."""
    with connect(fake(), SHARING) as client:
        shown = [shown_to(client, key, salt) for key, salt in ((ALICE, "1"), (BOB, "2"), (BOSS, "3"))]
    with connect(fake(), ()) as client:
        shown.append(shown_to(client, {}, "4"))

    assert [found.keys() for found in shown] == [{"index", "got"}] * 4


def test_what_others_wrote_is_shown_where_the_operator_shows_prompts() -> None:
    """To administrators, as the prompts themselves are."""
    with connect(fake(), SHARING, show_prompts=True) as client:
        to_bob, to_boss = shown_to(client, BOB, "1"), shown_to(client, BOSS, "2")
        goes_on = difference(ask(client, "It was on a Monday that the story began." + "!" * 20, BOSS, cache_salt="2"))
    with connect(fake(), (), show_prompts=True) as client:
        to_everyone = shown_to(client, {}, "3")

    assert to_bob.keys() == {"index", "got"}
    assert to_boss["expected"] == to_everyone["expected"] == "M"
    assert goes_on is not None and "expected" in goes_on


@pytest.mark.parametrize("show_prompts", [True, False])
def test_without_keys_what_others_wrote_stays_on_the_machine(show_prompts: bool) -> None:
    """As ``/admin`` does; the servers above are asked from their own machine."""
    server = ServerSettings(show_prompts=show_prompts)
    nobody = Caller(profile=PROFILES["openai"])

    assert not may_see_prompts(nobody, server, is_local=False)
    assert may_see_prompts(nobody, server, is_local=True) == show_prompts


def test_a_prompt_that_goes_on_where_a_kept_one_ends(client: httpx.Client) -> None:
    first = ask(client, "A conversation grows", cache_salt="grows", max_tokens=1)
    found = difference(ask(client, "A conversation grows" + "!" * 20, cache_salt="grows"))

    assert found is not None
    assert found["index"] == first["usage"]["prompt_tokens"]
    assert found["got"] == "!"


def test_the_same_prompt_differs_nowhere(client: httpx.Client) -> None:
    ask(client, "Twice the same prompt, to the letter.", cache_salt="same")

    assert difference(ask(client, "Twice the same prompt, to the letter.", cache_salt="same")) is None


def test_nothing_of_another_namespace_is_shown(client: httpx.Client) -> None:
    ask(client, "The password of Alice is swordfish", ALICE, cache_salt="own")

    assert difference(ask(client, "The password of Alice is x", BOB, cache_salt="own")) is None
    assert difference(ask(client, "The password of Alice is x", ALICE, cache_salt="guess")) is None
    assert difference(ask(client, "The password of Alice is x", ALICE, cache_salt="own")) is not None


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_server_finds_its_prompts_after_a_restart(isolation: str, tmp_path: Path) -> None:
    """What one key has computed is loaded for that key only, and the answers are the same."""
    prompt = "A long document that many questions are asked about. " * 8
    model = fake(isolation, prefix_cache_dir=str(tmp_path / "cache"), options={"step_delay_s": 0.05})
    with connect(model) as client:
        before = ask(client, prompt)
    with connect(model) as client:
        other = ask(client, prompt, BOB)
        after = ask(client, prompt)

    assert after["enginehouse"]["prefix_cache"]["loaded_tokens"] > 300
    assert cached(other) == other["enginehouse"]["prefix_cache"]["loaded_tokens"] == 0
    assert after["choices"][0]["text"] == before["choices"][0]["text"] == other["choices"][0]["text"]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["fake"]


def test_an_idle_server_saves_without_being_stopped(tmp_path: Path) -> None:
    """So that a crash costs nothing that was computed more than a second before it."""
    with connect(fake(prefix_cache_dir=str(tmp_path))) as client:
        ask(client, "This should be on the disk soon. " * 8)
        deadline = time.monotonic() + 60
        while not list((tmp_path / "fake").glob("*.state")):
            assert time.monotonic() < deadline, "nothing was saved"
            time.sleep(0.05)


def test_a_second_server_leaves_the_folder_to_the_first(tmp_path: Path) -> None:
    prompt = "Two servers, one folder. " * 10
    model = fake(prefix_cache_dir=str(tmp_path))
    with connect(model) as first, connect(model) as second:
        texts = [ask(client, prompt)["choices"][0]["text"] for client in (first, second)]

    assert texts[0] == texts[1]
