"""Ray Serve's router for our replicas: a call goes to the replica that its first argument names.

Which replica gets a request is decided before, in the server (``placement``). Runs in the server's process; it also
tells the server which replicas there are. No state of its own, and nothing that waits.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from enginehouse_ray import watching

__all__ = ["ReplicaRouter"]


class ReplicaRouter(RequestRouter):  # type: ignore[misc]
    """Created by Ray Serve, one per handle. Not a FIFOMixin, which gives a replica to the call that waits longest."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Note the replicas, which changed."""
        super().update_replicas(replicas)
        found = {replica.replica_id.unique_id: replica.node_id for replica in replicas}
        watching.note(self._deployment_id.app_name, found)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the named replica alone; any for a call that names none."""
        arguments: tuple[Any, ...] = () if pending_request is None else tuple(pending_request.args)
        named = arguments[0] if arguments else ""
        found = [one for one in candidate_replicas if not named or one.replica_id.unique_id == named]
        if not found and pending_request is not None:
            pending_request.routing_context.should_backoff = True
        return [found]
