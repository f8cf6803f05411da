"""What Ray provides to its workers. Ray is never imported here, because its workers have imported it already."""

import importlib
import socket
import sys
from typing import Any, NamedTuple

__all__ = ["RayGroup", "find_group", "is_actor"]


class RayGroup(NamedTuple):
    """The workers of a Ray Train run: the rank of this worker, from 0, and their number."""

    rank: int
    size: int

    def coordinator_address(self) -> str:
        """Returns `"host:port"` on the node of worker 0, the same in all workers; all of them must call it."""
        address = None
        if self.rank == 0:
            with socket.socket() as free:
                free.bind(("", 0))
                address = f"{sys.modules['ray'].util.get_node_ip_address()}:{free.getsockname()[1]}"
        return str(importlib.import_module("ray.train.collective").broadcast_from_rank_zero(address))


def find_group() -> RayGroup | None:
    """Returns the group of workers that this process belongs to; `None` outside of Ray Train."""
    train: Any = sys.modules.get("ray.train")
    if train is None:
        return None
    try:
        context = train.get_context()
    except (RuntimeError, DeprecationWarning):  # The driver, or a trial of Ray Tune.
        return None
    return RayGroup(context.get_world_rank(), context.get_world_size())


def is_actor() -> bool:
    """Returns whether this process is an actor of Ray, which starts, monitors and ends it."""
    ray: Any = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
