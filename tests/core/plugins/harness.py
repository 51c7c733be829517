"""A server with the plugin ``flaky_kit``, and what its clients and its author see when it breaks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from attrs import define, field, frozen

from enginehouse_testkit.server import ServerProcess
from enginehouse_testkit.waiting import wait_until

MODELS = """
[models.calm]
source = "."
backend = "fake"
"""
MESSAGES = [{"role": "user", "content": "Hello"}]


@define(eq=False)
class FlakyServer:
    """A running server.

    Attributes:
        deed: the file that tells the plugin where and how to break.
        text: the answer of each model to :data:`MESSAGES`.
    """

    server: ServerProcess
    client: httpx.Client
    deed: Path
    text: str = ""

    def chat(self, model: str = "broken", **fields: Any) -> httpx.Response:
        """Ask a model; the headers are those of a request with details."""
        body = {"model": model, "messages": MESSAGES, "max_tokens": 6, "temperature": 0, **fields}
        return self.client.post("/v1/chat/completions", json=body, headers={"X-Enginehouse-Details": "true"})

    def text_of(self, model: str = "broken", **fields: Any) -> str:
        answer = self.chat(model, **fields)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    def break_at(
        self, place: str, deed: str, ask: Callable[[], httpx.Response], has_broken: Callable[[], None] | None = None
    ) -> httpx.Response:
        """Return the response to a request during which the plugin breaks; one to another model is not affected.

        Args:
            has_broken: waits until the plugin has been called, where that may be after the response.
        """
        self.deed.write_text(f"{place} {deed}")
        try:
            with ThreadPoolExecutor(2) as pool:
                asked, beside = pool.submit(ask), pool.submit(self.text_of, "calm")
                assert beside.result() == self.text, "another request is affected"
                response = asked.result()
            if has_broken is not None:
                has_broken()
        finally:
            self.deed.write_text("")
        assert self.server.process.poll() is None, self.server.output
        return response

    def check_named(self, place: str, deed: str, name: str = "flaky") -> None:
        """The log names plugin, kind, object and method, and the file and line in the plugin.

        It has a line a minute for each place, so it may be that of an earlier deed.
        """
        kind, _, method = place.partition(".")
        owner = rf"the {kind} '{name}' of the plugin 'flaky_kit'"
        line = rf"({owner}(: {method} | failed in {method})|in {method} of {owner})"
        wait_until(lambda: re.search(line, self.server.output), lambda: f"{line} in:\n{self.server.output}")
        if deed != "end":
            assert re.search(r"flaky\.py[\"']?[,:]( line )?\d+", self.server.output), self.server.output

    def check_slow(self, place: Place) -> None:
        """The log warns of a call that took longer than it should, once a minute."""
        kind, _, method = place.name.partition(".")
        owner = f"the {kind} '{place.owner}' of the plugin 'flaky_kit'"
        line = rf"{owner} took \d+ ms \(\d+ ms of processor time\) in {method}, longer than {place.slow_ms} ms"
        wait_until(lambda: re.search(line, self.server.output), lambda: f"{line} in:\n{self.server.output}")

    def check_response(self, response: httpx.Response, place: Place, deed: str, expected: str) -> None:
        """The client learns whose failure it was, or sees nothing of it; the author reads the rest in the log."""
        code = place.code_of(deed)
        if not code:
            assert response.status_code == 200, response.text
            assert response.json()["choices"][0]["message"]["content"] == expected
        else:
            error = response.json().get("error")
            assert error and error["code"] == code, response.text
            kind = place.name.partition(".")[0]
            assert f"he {kind} {place.owner!r} of the plugin 'flaky_kit'" in error["message"]
            assert "a secret" not in response.text
        if deed != "slow":
            self.check_named(place.name, deed, place.owner)
            if deed == "raise" and code and place.is_of_request:
                kind, _, method = place.name.partition(".")
                owner = rf"the {kind} '{place.owner}' of the plugin 'flaky_kit'"
                line = rf"{owner} failed in {method} \(request chatcmpl-\w+\)"
                assert re.search(line, self.server.output), "the traceback names the request"
        elif place.slow_ms:
            self.check_slow(place)

    def check_cell(self, place: Place, deed: str) -> None:
        """Break the plugin during a request with a prompt of its own, and ask again."""
        fields = {**place.fields, "messages": [{"role": "user", "content": f"{place.name} {deed}"}]}
        expected = self.text_of(**fields)
        response = self.break_at(place.name, deed, lambda: self.chat(**fields))

        self.check_response(response, place, deed, expected)
        if deed in ("end", "hang"):
            self.load(str(fields.get("model", "broken")))  # at once, without the pause after several deaths
        if deed in ("end", "hang") and place.is_remembered:  # only other ones may follow
            again = self.chat(**fields).json()["error"]
            assert again["code"] == place.ended and "an equal request" in again["message"]
            fields["messages"] = [{"role": "user", "content": f"after {place.name} {deed}"}]
            assert self.text_of(**fields), "the next request"
        else:
            assert self.text_of(**fields) == expected, "the next request"

    def check_load(self, response: httpx.Response, place: Place, deed: str) -> None:
        """An operator who loads a model learns whose failure it was."""
        if deed == "slow" or place.outcome == "goes on":
            assert response.status_code == 200, response.text
        else:
            assert response.status_code >= 400
            kind = place.name.partition(".")[0]
            assert f"he {kind} {place.owner!r} of the plugin 'flaky_kit'" in response.text
        if deed != "slow":
            self.check_named(place.name, deed, place.owner)

    def load(self, model: str = "broken") -> httpx.Response:
        """Load a model again."""
        self.client.post(f"/admin/models/{model}/unload", json={"force": True})
        return self.client.post(f"/admin/models/{model}/load")


@frozen(kw_only=True)
class Place:
    """A method of a kind of plugin object.

    Attributes:
        name: kind and method, with a dot between them.
        outcome: what the request for which it breaks does: it fails with the plugin's name, or goes on.
        fields: of that request; ``model`` is the model that it asks.
        code: of the error.
        ended: the code when it ends or stops the worker; empty: as for the other deeds.
        is_remembered: after that, an equal request is refused, since it would end the next worker.
        is_of_request: it is called for one request, which the log then names.
        owner: name of the object.
        slow_ms: milliseconds after which the log warns; 0 if it does not.
        deeds: what it does when it breaks.
        quick: those of the default run.
    """

    name: str
    outcome: Literal["fails", "goes on"] = "fails"
    fields: Mapping[str, Any] = field(factory=dict)
    code: str = "plugin_failed"
    ended: str = ""
    is_remembered: bool = False
    is_of_request: bool = True
    owner: str = "flaky"
    slow_ms: int = 0
    deeds: Sequence[str] = ("raise", "type", "exit", "slow")
    quick: Sequence[str] = ("raise", "type")

    def code_of(self, deed: str) -> str:
        """Return the code of the error that the client gets; empty if it gets an answer."""
        if deed in ("end", "hang") and self.ended:
            return self.ended
        return "" if deed == "slow" or self.outcome == "goes on" else self.code


def cells(places: Iterable[Place]) -> list[Any]:
    """Return the parameters of a test: each place with each of its deeds; all but a few are marked as slow."""
    return [
        pytest.param(place, deed, id=f"{place.name} {deed}", marks=() if deed in place.quick else pytest.mark.slow)
        for place in places
        for deed in place.deeds
    ]
