"""Which backend opens a model, and why.

Only the cheap methods ``probe`` and ``match`` of the backends are called; nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from enginehouse.backend import Backend, ModelSource
from enginehouse.errors import ModelLoadError

__all__ = ["BackendChoice", "choose_backend", "suits"]


@frozen
class BackendChoice:
    """The backend that opens a model; ``reason`` is shown to users."""

    backend: Backend
    reason: str


@frozen
class _Verdict:
    """What one backend says about a source. ``score`` 0 is "cannot"."""

    backend: Backend
    score: float
    reason: str


def choose_backend(
    source: ModelSource, wanted: str | None, backends: Mapping[str, Backend], *, probe: bool = True
) -> BackendChoice:
    """Pick the wanted backend, or the available one that suits the source best (ties: first by name).

    Args:
        source: the model.
        wanted: name of the backend that the settings ask for, or None.
        backends: all backends by name.
        probe: ask whether a backend can run here; False when the model runs in another environment.

    Raises:
        ModelLoadError: the wanted backend is unknown or cannot run here, or none suits; says why for each.
    """
    if wanted is not None:
        return _wanted(wanted, backends, probe)
    verdicts = [_judge(source, backends[name], probe) for name in sorted(backends)]
    best = max(verdicts, key=lambda verdict: verdict.score, default=None)
    if best is None or best.score <= 0:
        reasons = "; ".join(f"{verdict.backend.name}: {verdict.reason}" for verdict in verdicts)
        raise ModelLoadError(f"no backend can open {source.text!r} ({reasons or 'no backend is installed'})")
    return BackendChoice(best.backend, best.reason)


def suits(source: ModelSource, backend: Backend, *, probe: bool = True) -> bool:
    """Whether this backend can open the source."""
    return _judge(source, backend, probe).score > 0


def _wanted(name: str, backends: Mapping[str, Backend], probe: bool) -> BackendChoice:
    backend = backends.get(name)
    if backend is None:
        known = ", ".join(sorted(backends)) or "none"
        raise ModelLoadError(f"there is no backend {name!r}; installed backends: {known}")
    if probe and not (found := backend.probe()).available:
        raise ModelLoadError(f"the backend {name!r} cannot run here: {found.reason}")
    return BackendChoice(backend, "named in the settings")


def _judge(source: ModelSource, backend: Backend, probe: bool) -> _Verdict:
    """One backend's verdict; a backend that fails here is out of the race and stops nothing."""
    try:
        if probe and not (found := backend.probe()).available:
            return _Verdict(backend, 0.0, found.reason)
        match = backend.match(source)
    except Exception as error:  # noqa: BLE001 - plugin border: one broken backend must not hide the others
        return _Verdict(backend, 0.0, f"failed while looking at it: {type(error).__name__}: {error}")
    return _Verdict(backend, match.score, match.reason)
