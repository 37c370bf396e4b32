"""The resources of an actor and the machines that it may run on, in Ray's terms."""

import asyncio
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from asyncrl.errors import ConfigError
from asyncrl.fleet.placement import Demand

Near = Literal["anywhere", "driver", "driver_if_possible"]


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """What one actor takes from the cluster."""

    cpus: float = 1.0
    gpus: float = 0.0
    custom: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    """Ray's custom resources, by name."""
    near: Near = "anywhere"
    """`driver`: on the machine of the driver, where the run's directory is."""
    gang: tuple[Any, int] | None = None
    """A placement group and the number of a bundle in it; see `reserve`."""
    idle_priority: bool = False
    """Run at idle priority: only when no other process wants the CPU."""
    restarts: int = 0
    """How often its process is restarted after it has died, with its initial state; -1: always."""
    repeatable: bool = False
    """Calls that were in progress when it died are made again: right only for an actor without state."""

    def of(self, demand: Demand) -> "Resources":
        """The same actor, with what the placement gives it."""
        return msgspec.structs.replace(self, cpus=demand.cpus, gpus=demand.gpus, custom=demand.custom)


def options(resources: Resources) -> dict[str, Any]:
    """For `ray.remote(...).options`."""
    chosen: dict[str, Any] = {
        "num_cpus": resources.cpus,
        "num_gpus": resources.gpus,
        "max_restarts": resources.restarts,
        "max_task_retries": -1 if resources.repeatable else 0,
    }
    if resources.custom:
        chosen["resources"] = resources.custom
    if resources.gang is not None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group, bundle = resources.gang
        chosen["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, bundle)
    elif resources.near != "anywhere":
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = ray.get_runtime_context().get_node_id()
        chosen["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
            here, soft=resources.near == "driver_if_possible"
        )
    return chosen


async def reserve(each: Resources, members: int, timeout_s: float) -> tuple[Any, list[Resources]]:
    """One placement group for actors that are of use only together, packed onto as few machines as possible: either
    all of them are placed within `timeout_s`, or none. Ray's group, and what each member is spawned with, machine by
    machine."""
    from ray.util import placement_group, placement_group_table

    bundle = {"CPU": each.cpus, "GPU": each.gpus, **each.custom}
    group: Any = placement_group([{name: n for name, n in bundle.items() if n > 0}] * members, strategy="PACK")
    try:
        async with asyncio.timeout(timeout_s):
            await group.ready()
    except TimeoutError:
        release(group)
        raise ConfigError(
            f"the cluster cannot place {members} trainer ranks with {bundle} each within {timeout_s:g} s; "
            "lower trainer.ranks or placement.trainer, or add machines"
        ) from None
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return group, [msgspec.structs.replace(each, gang=(group, bundle)) for bundle in by_machine(nodes)]


def by_machine(nodes: Mapping[int, str]) -> list[int]:
    """Bundles so that neighbours are on one machine, as far as that goes; `nodes` says where each is. Ranks that share
    the most are neighbours."""
    order = list(dict.fromkeys(nodes[bundle] for bundle in sorted(nodes)))
    return sorted(nodes, key=lambda bundle: (order.index(nodes[bundle]), bundle))


def own_address() -> str:
    """Where the other machines of the cluster find this one; loopback in a Ray of our own."""
    from ray.util import get_node_ip_address

    return get_node_ip_address()


def release(group: Any) -> None:
    from ray.util import remove_placement_group

    remove_placement_group(group)
