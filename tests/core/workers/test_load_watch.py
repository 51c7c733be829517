"""A load that does not get on is noticed, and its progress says for how long there has been no news."""

from __future__ import annotations

import asyncio

from enginehouse.workers import health as load_watch
from enginehouse.workers.health import LoadWatch


class Load:
    """What is seen of a load, and why it was given up."""

    def __init__(self, limit_s: float) -> None:
        self.shown: list[tuple[float, str]] = []
        self.given_up: list[str] = []
        self.watch = LoadWatch(limit_s, lambda share, text: self.shown.append((share, text)), self.given_up.append)

    async def until_given_up(self) -> None:
        async with asyncio.timeout(60):
            while not self.given_up:  # noqa: ASYNC110 - tells nobody else
                await asyncio.sleep(0.005)


async def test_load_without_a_word_is_given_up_once() -> None:
    load = Load(0.1)
    await load.until_given_up()
    await asyncio.sleep(0.3)
    load.watch.heard(0.5, "too late")

    assert load.given_up == ["loading made no progress for 0.1 s; there was no report"]
    assert load.shown == []


async def test_news_put_the_end_off() -> None:
    load = Load(1.0)
    for number in range(6):
        load.watch.heard(number / 10, "reading")
        await asyncio.sleep(0.25)
        assert not load.given_up
    await load.until_given_up()

    assert load.given_up == ["loading made no progress for 1 s; the last report was 'reading' at 50%"]


async def test_silence_is_shown(monkeypatch) -> None:
    monkeypatch.setattr(load_watch, "_SHOWN_S", 0.05)
    load = Load(0.0)
    load.watch.heard(0.25, "reading")
    async with asyncio.timeout(60):
        while len(load.shown) < 3:  # noqa: ASYNC110 - tells nobody else
            await asyncio.sleep(0.005)
    load.watch.end()
    num_shown = len(load.shown)
    await asyncio.sleep(0.2)
    load.watch.heard(1.0, "ready")

    assert load.shown[0] == (0.25, "reading")
    assert {text for _, text in load.shown[1:]} == {"reading (no progress for 0 s)"}
    assert len(load.shown) == num_shown, "the load has ended"
    assert not load.given_up
