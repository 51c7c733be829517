"""The store: chains, bounds, deletes, namespaces, and a file that survives."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from enginehouse.contract.errors import ConfigError
from enginehouse_responses.options import ResponsesOptions
from enginehouse_responses.store import ResponseStore


def _response(name: str, previous: str | None = None, status: str = "completed") -> dict[str, Any]:
    return {"id": name, "previous_response_id": previous, "status": status, "output": [{"id": f"msg_{name}"}]}


def _modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}


def _fill(store: ResponseStore, *names: str) -> None:
    """Responses that continue each other."""
    previous = None
    for name in names:
        store.put("us", _response(name, previous), [{"id": f"in_{name}"}])
        previous = name


async def _ids(store: ResponseStore, name: str) -> list[str] | None:
    chain = await store.chain("us", name)
    return None if chain is None else [one.response["id"] for one in chain]


@pytest.fixture(params=["memory", "file"])
def options(request: pytest.FixtureRequest, tmp_path: Path) -> ResponsesOptions:
    return ResponsesOptions(store=True, file=tmp_path / "responses.db" if request.param == "file" else None)


async def test_a_chain_is_walked_to_its_beginning(options: ResponsesOptions) -> None:
    store = ResponseStore(options)
    _fill(store, "a", "b", "c", "d")

    assert await _ids(store, "d") == ["a", "b", "c", "d"]
    found = await store.get("us", "b")
    assert found is not None and found.input == [{"id": "in_b"}] and found.output == [{"id": "msg_b"}]


async def test_other_namespaces_have_nothing(options: ResponsesOptions) -> None:
    store = ResponseStore(options)
    _fill(store, "a")

    assert await store.get("others", "a") is None and await store.chain("others", "a") is None
    assert not await store.delete("others", "a") and await store.get("us", "a") is not None


async def test_later_responses_stay_usable_when_a_middle_one_is_deleted(options: ResponsesOptions) -> None:
    store = ResponseStore(options)
    _fill(store, "a", "b", "c")

    assert await store.delete("us", "b") and not await store.delete("us", "b")
    assert await store.get("us", "b") is None and await store.chain("us", "b") is None
    assert await _ids(store, "c") == ["a", "b", "c"]
    assert await store.delete("us", "c")
    assert await _ids(store, "a") == ["a"]
    assert await store.delete("us", "a") and await store.get("us", "a") is None


async def test_a_response_deleted_while_it_is_made_stays_deleted(options: ResponsesOptions) -> None:
    store = ResponseStore(options)
    store.put("us", _response("a", status="in_progress"), [])
    assert await store.delete("us", "a")
    store.put("us", _response("a"), [])

    assert await store.get("us", "a") is None


async def test_what_was_used_longest_ago_goes_first() -> None:
    moment = iter(range(1000))
    store = ResponseStore(ResponsesOptions(store=True, max_responses=3), lambda: float(next(moment)))
    for name in ("a", "b", "c"):
        store.put("us", _response(name), [])
    assert await store.get("us", "a") is not None
    store.put("us", _response("d"), [])

    assert [name for name in "abcd" if await store.get("us", name)] == ["a", "c", "d"]


async def test_bytes_and_age_are_bounded() -> None:
    time = [0.0]
    store = ResponseStore(ResponsesOptions(store=True, max_bytes=500, max_age_s=10), lambda: time[0])
    store.put("us", _response("large"), [{"text": "x" * 600}])
    assert await store.get("us", "large") is None
    for name in "abcdef":
        store.put("us", _response(name), [])
    kept = [name for name in "abcdef" if await store.get("us", name)]
    assert 0 < len(kept) < 6 and kept == list("abcdef")[-len(kept) :]

    time[0] = 11.0
    assert await store.get("us", "f") is None


async def test_a_file_survives_and_is_private(tmp_path: Path) -> None:
    options = ResponsesOptions(file=tmp_path / "responses.db")
    first = ResponseStore(options)
    _fill(first, "a", "b")
    first.put("us", _response("open", status="in_progress"), [])
    first.close()
    second = ResponseStore(options)

    assert await _ids(second, "b") == ["a", "b"]
    found = await second.get("us", "open")
    assert found is not None and found.response["status"] == "failed"
    assert found.response["error"]["code"] == "server_error"
    assert _modes(tmp_path) == {0o600}


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "responses.db"
    file.write_text("not a database at all, but long enough to have a header" * 10)

    with pytest.raises(ConfigError, match=r"plugins\.responses\.file"):
        ResponseStore(ResponsesOptions(file=file)).open()
