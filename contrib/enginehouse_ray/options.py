"""Settings: of the plugin, ``[plugins.ray]``, and of a model with ``backend = "ray"``. Does not import Ray."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge, gt

__all__ = ["Autoscale", "RayModelOptions", "RayOptions"]


@frozen(kw_only=True)
class RayOptions:
    """Settings of the plugin.

    Attributes:
        address: the Ray cluster: ``auto`` is the one that runs on this machine, ``local`` a new one of this machine
            alone, which ends with the server; else ``HOST:PORT``.
    """

    address: str = "auto"


@frozen(kw_only=True)
class Autoscale:
    """Number of replicas by demand.

    Attributes:
        min: fewest replicas; with 0, the first request after a pause waits for one to be loaded.
        max: most replicas.
        target: requests per replica, running and waiting ones, above which one is added.
        down_after_s: seconds for which fewer would have been enough before one is taken away.
    """

    min: int = field(default=1, validator=ge(0))
    max: int = field(default=1, validator=ge(1))
    target: float = field(default=8.0, validator=gt(0))
    down_after_s: float = field(default=60.0, validator=ge(0))

    def __attrs_post_init__(self) -> None:
        """Check that the bounds are in order."""
        if self.max < self.min:
            raise ValueError(f"max = {self.max} is less than min = {self.min}")


@frozen(kw_only=True)
class RayModelOptions:
    """Settings of a model, besides those of its inner backend.

    Attributes:
        inner: backend that opens the model in the replicas; None for the one that suits it best.
        replicas: number of replicas.
        autoscale: replaces ``replicas``.
        cpus: processors that Ray reserves per replica.
        gpus: GPUs that it reserves; the replica sees only these, numbered from 0.
        resources: further resources of the cluster that it reserves, such as ``{ big = 1 }``.
    """

    inner: str | None = None
    replicas: int = field(default=1, validator=ge(1))
    autoscale: Autoscale | None = None
    cpus: float = field(default=1.0, validator=ge(0))
    gpus: float = field(default=0.0, validator=ge(0))
    resources: dict[str, float] = field(factory=dict)

    @property
    def num_at_start(self) -> int:
        """Number of replicas at first: one at least, since the first says what the model is."""
        return self.replicas if self.autoscale is None else max(1, self.autoscale.min)
