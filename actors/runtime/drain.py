"""Notices that a node of the cluster will be taken away: a spot instance is reclaimed, a pool is scaled down."""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
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


async def drain_notice(
    actors: Mapping[str, object],
    find: Callable[[Mapping[str, object]], Mapping[str, str]] | None = None,
    draining: Callable[[], Mapping[str, int]] | None = None,
) -> DrainNotice:
    """The first that concerns one of these actors, or the driver; waits until there is one. Who does not answer will be
    asked again, Ray as well: both may be busy for longer than a probe waits. `find` gives the nodes of actors,
    `draining` those that go; by default Ray is asked."""
    find, draining = find or _places, draining or _draining_nodes
    nodes: dict[str, str] = {}
    while True:
        missing = {name: actor for name, actor in {"driver": None, **actors}.items() if name not in nodes}
        going: Mapping[str, int] = {}
        with suppress(Exception):  # of Ray, which has a class for everything that may be late
            nodes |= await asyncio.to_thread(find, missing) if missing else {}
        with suppress(Exception):
            going = await asyncio.to_thread(draining)
        for node, deadline_ms in going.items():
            if there := tuple(name for name in ("driver", *actors) if nodes.get(name) == node):
                return DrainNotice(node, there, deadline_ms / 1000 - time.time() if deadline_ms else None)
        await asyncio.sleep(LOOK_S)


def _places(actors: Mapping[str, object]) -> dict[str, str]:
    """The nodes of those that answer in time."""
    found = probe(actors, _own_node, ANSWER_S)
    return {name: node for name, node in found.items() if isinstance(node, str)}


def _own_node(_: object) -> str:
    import ray

    return ray.get_runtime_context().get_node_id()


def _draining_nodes() -> dict[str, int]:
    """Nodes and the millisecond in which each is gone, 0 if that is not known. Ray has no public name for this; its own
    Train asks in the same way."""
    from ray._private import state

    return state.state.get_draining_nodes()
