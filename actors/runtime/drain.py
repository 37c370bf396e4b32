"""Notices that a node of the cluster will be taken away: a spot instance is reclaimed, a pool is scaled down."""

import asyncio
import time
from collections.abc import Mapping
from typing import NamedTuple

from actors.runtime.health_probe import probe

LOOK_S = 2.0
ANSWER_S = 10.0


class DrainNotice(NamedTuple):
    node: str
    actors: tuple[str, ...]
    """Those that are there."""
    seconds: float | None
    """Left until it is gone; None: it was not said."""


async def drain_notice(actors: Mapping[str, object]) -> DrainNotice:
    """The first that concerns one of these actors, or the driver; waits until there is one."""
    found = await asyncio.to_thread(probe, actors, _own_node, ANSWER_S)
    nodes = {"driver": _own_node(None), **{name: node for name, node in found.items() if isinstance(node, str)}}
    while True:
        for node, deadline_ms in (await asyncio.to_thread(_draining_nodes)).items():
            if there := tuple(name for name, place in nodes.items() if place == node):
                return DrainNotice(node, there, deadline_ms / 1000 - time.time() if deadline_ms else None)
        await asyncio.sleep(LOOK_S)


def _own_node(_: object) -> str:
    import ray

    return ray.get_runtime_context().get_node_id()


def _draining_nodes() -> dict[str, int]:
    """Nodes and the millisecond in which each is gone, 0 if that is not known. Ray has no public name for this; its own
    Train asks in the same way."""
    from ray._private import state

    return state.state.get_draining_nodes()
