"""The replicas of each application, as Ray Serve's router in this process hears of them. Does not import Ray.

A module of its own: Ray Serve creates routers from a copy of their class, whose module has other globals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

__all__ = ["note", "unwatch", "watch"]

_watchers: dict[str, Callable[[Mapping[str, str]], None]] = {}
_last: dict[str, dict[str, str]] = {}


def note(app: str, replicas: dict[str, str]) -> None:
    """Take note of the replicas of an application, ids to nodes."""
    _last[app] = replicas
    if (on_replicas := _watchers.get(app)) is not None:
        on_replicas(replicas)


def watch(app: str, on_replicas: Callable[[Mapping[str, str]], None]) -> None:
    """Call a function with the replicas, now and whenever they change; on any thread."""
    _watchers[app] = on_replicas
    on_replicas(_last.get(app, {}))


def unwatch(app: str) -> None:
    """End :func:`watch`; the replicas are still noted, since Ray Serve tells only of changes."""
    _watchers.pop(app, None)
