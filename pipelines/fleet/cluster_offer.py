"""What the cluster of a run has, whether that is enough, and how it is told what is wanted of it."""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec

from actors.runtime.spawn import cluster
from asyncrl.config import Run
from asyncrl.errors import ConfigError
from asyncrl.fleet.placement import CPU, GPU, HERE, Offer, arriving, demands, in_words, needed, spans_machines
from asyncrl.system.devices import gpu_count

BOOTSTRAP = Path("~/ray_bootstrap_config.yaml")
"""Where `ray up` leaves the cluster's file on its head node."""


def look(run: Run) -> Offer:
    """What the run would find; attaches to a cluster for a moment if it is not one of its own."""
    if run.cluster in HERE:
        return here(run)
    with cluster(run.cluster, cpus=0):
        return offered()


def here(run: Run) -> Offer:
    """This machine. Its own Ray is told of as many CPUs as the run asks for: they are shared, not counted."""
    cards = float(gpu_count())
    bare = Offer(nodes=({CPU: 0.0, GPU: cards},), attached=False)
    cpus = needed(demands(run, bare, engines=most_engines(run)).values()).get(CPU, 0.0)
    return bare._replace(nodes=({CPU: max(cpus, float(os.cpu_count() or 1)), GPU: cards},))


def offered() -> Offer:
    """Of the Ray that this process is connected to."""
    import ray

    nodes = [node["Resources"] for node in cast("list[dict[str, Any]]", ray.nodes()) if node["Alive"]]
    return Offer(nodes=tuple(nodes), could_have=_could_have(_added(nodes)))


def _could_have(has: Mapping[str, float]) -> Mapping[str, float] | None:
    """What the autoscaler may bring the cluster to: as it says itself, or as the file says that `ray up` left."""
    from ray._private.state import state

    told = cast("dict[str, float] | None", state.get_max_resources_from_cluster_config())
    if told is None and BOOTSTRAP.expanduser().is_file():
        told = from_file(msgspec.yaml.decode(BOOTSTRAP.expanduser().read_bytes()))
    return None if not told else {name: max(told.get(name, 0.0), has.get(name, 0.0)) for name in {*told, *has}}


def from_file(config: Mapping[str, Any]) -> dict[str, float]:
    """The most that a cluster file allows, each resource by itself."""
    total: dict[str, float] = {}
    most = config.get("max_workers", 2)
    for kind, node in config.get("available_node_types", {}).items():
        count = 1 if kind == config.get("head_node_type") else min(node.get("max_workers", 0), most)
        for name, amount in node.get("resources", {}).items():
            total[name] = total.get(name, 0.0) + count * amount
    return total


def most_engines(run: Run) -> int:
    return max(run.rollout.replicas, run.elastic.max)


def awaited(run: Run, offer: Offer) -> str:
    """What has to come before everything runs, in words; empty where nothing has."""
    return in_words(arriving(demands(run, offer).values(), offer))


def settled(run: Run, offer: Offer) -> Run:
    """The run with what the cluster decides: between machines weights travel by file, and between cards of one machine
    through its memory, unless the run says how."""
    wanted = demands(run, offer)
    apart = any(wanted[role].gpus >= 1 for role in ("trainer", "rollout") if role in wanted)
    if run.weights.transport != "auto" or not (apart or spans_machines(offer)):
        return run
    transport = "file" if spans_machines(offer) else "shared_memory"
    return msgspec.structs.replace(run, weights=msgspec.structs.replace(run.weights, transport=transport))


@asynccontextmanager
async def in_time(run: Run, offer: Offer) -> AsyncGenerator[None, None]:
    """A block in which actors are placed; ConfigError if what the cluster lacks does not come within the time given."""
    coming = awaited(run, offer)
    try:
        async with asyncio.timeout(run.placement.wait_s if coming and run.placement.wait_s else None):
            yield
    except TimeoutError:
        raise ConfigError(
            f"cluster={run.cluster} did not bring {coming} more within placement.wait_s={run.placement.wait_s:g} s"
        ) from None


def expecting(run: Run, offer: Offer) -> Callable[[int], None]:
    """Tells the autoscaler how many engines there should be; 0 takes every wish back. Ray keeps a wish until another
    one replaces it, also after the driver has ended."""

    def expect(engines: int) -> None:
        if not offer.attached or "ray" not in sys.modules:
            return
        from ray.autoscaler.sdk import request_resources

        wanted = demands(run, offer, engines=engines).values() if engines else ()
        request_resources(bundles=[dict(each.bundle) for each in wanted if each.bundle for _ in range(each.processes)])

    return expect


def _added(nodes: list[dict[str, float]]) -> dict[str, float]:
    return Offer(nodes=tuple(nodes)).total
