"""Choice of the backend that opens a model, with the reason.

Calls only the cheap backend methods ``probe`` and ``match``; loads nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen

from enginehouse.contract.backend import Backend, ModelSource
from enginehouse.contract.errors import EnginehouseError, ModelLoadError
from enginehouse.plugins import PluginRegistry

__all__ = ["BackendChoice", "Verdict", "check_backend", "choose_backend", "judge_all", "suits"]

_NO_ACCELERATORS = ("cpu", "remote")


@frozen
class BackendChoice:
    """The backend that opens a model; ``reason`` is shown to users."""

    backend: Backend
    reason: str


@frozen
class Verdict:
    """Result of matching one backend with a source.

    Attributes:
        score: 0 means that the backend cannot open it.
        accelerator: a device of this backend other than a CPU; "" if there is none.
    """

    backend: Backend
    score: float
    reason: str
    accelerator: str = ""

    @property
    def rank(self) -> tuple[float, bool]:
        """Sort key, higher is better: the score, then the presence of an accelerator."""
        return self.score, bool(self.accelerator)


def check_backend(wanted: str | None, registry: PluginRegistry) -> None:
    """Check that the backend that the settings name exists.

    Raises:
        ModelLoadError: it does not; says whether its plugin is excluded or has an error.
    """
    if wanted is not None and wanted not in registry.backends:
        known = ", ".join(sorted(registry.backends)) or "none"
        raise ModelLoadError(f"{registry.missing('backend', wanted, registry.backends)}; installed backends: {known}")


def choose_backend(
    source: ModelSource, wanted: str | None, backends: Mapping[str, Backend], *, probe: bool = True
) -> BackendChoice:
    """Choose the wanted backend, or the available one with the best score for the source.

    Among equal scores, the first by name with an accelerator on this machine wins, else the first by name.

    Args:
        source: the model.
        wanted: name of the backend in the settings, or None.
        backends: all backends by name.
        probe: check whether a backend can run here; False if the model runs in another environment.

    Raises:
        ModelLoadError: the wanted backend is unknown or cannot run here, or no backend matches; gives the reason for
            each.
    """
    if wanted is not None:
        return _wanted(wanted, backends, probe)
    verdicts = judge_all(source, backends, probe=probe)
    if not verdicts or verdicts[0].score <= 0:
        by_name = sorted(verdicts, key=lambda verdict: verdict.backend.name)
        reasons = "; ".join(f"{verdict.backend.name}: {verdict.reason}" for verdict in by_name)
        raise ModelLoadError(f"no backend can open {source.text!r} ({reasons or 'no backend is installed'})")
    best = verdicts[0]
    return BackendChoice(best.backend, best.reason + _tie(verdicts))


def judge_all(source: ModelSource, backends: Mapping[str, Backend], *, probe: bool = True) -> list[Verdict]:
    """Return the verdict of every backend on a source, best first."""
    verdicts = [_judge(source, backends[name], probe) for name in sorted(backends)]
    return sorted(verdicts, key=lambda verdict: verdict.rank, reverse=True)


def _tie(verdicts: Sequence[Verdict]) -> str:
    """Return the reason for the choice among backends with equal scores."""
    best = verdicts[0]
    equals = [verdict for verdict in verdicts[1:] if verdict.score == best.score]
    if not equals:
        return ""
    names = ", ".join(verdict.backend.name for verdict in equals)
    if best.accelerator and not equals[0].accelerator:
        return f"; before {names} as it has {best.accelerator}"
    return f"; before {names} by name"


def suits(source: ModelSource, backend: Backend, *, probe: bool = True) -> bool:
    """True if this backend can open the source."""
    return _judge(source, backend, probe).score > 0


def _wanted(name: str, backends: Mapping[str, Backend], probe: bool) -> BackendChoice:
    backend = backends.get(name)
    if backend is None:
        known = ", ".join(sorted(backends)) or "none"
        raise ModelLoadError(f"there is no backend {name!r}; installed backends: {known}")
    if probe:
        found = backend.probe()
        if not found.available:
            raise ModelLoadError(f"the backend {name!r} cannot run here: {found.reason}")
    return BackendChoice(backend, "named in the settings")


def _judge(source: ModelSource, backend: Backend, probe: bool) -> Verdict:
    """Return one backend's verdict; a backend that fails here gets score 0 and does not affect the others."""
    accelerator = ""
    try:
        if probe:
            found = backend.probe()
            if not found.available:
                return Verdict(backend, 0.0, found.reason)
            accelerator = next((device for device in found.devices if device not in _NO_ACCELERATORS), "")
        match = backend.match(source)
    except EnginehouseError as error:  # one broken backend must not hide the others
        return Verdict(backend, 0.0, error.message)
    return Verdict(backend, match.score, match.reason, accelerator)
