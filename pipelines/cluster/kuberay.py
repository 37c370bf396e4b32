"""Rules for KubeRay manifests (RayCluster and RayJob of ray.io/v1, KubeRay 1.5.1 or newer).

Structure and our own rules only: whether a cluster takes them, `kubectl apply --dry-run=server` knows.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from asyncrl.fleet.placement import ROLLOUT_SLOT, TRAINER_SLOT

KINDS = ("RayCluster", "RayJob")
SHORTEST_IDLE_S = 60


def problems(manifest: dict[str, Any]) -> Iterator[str]:
    """The field, the value and the way out of each."""
    kind, spec = manifest.get("kind"), manifest.get("spec", {})
    if manifest.get("apiVersion") != "ray.io/v1" or kind not in KINDS:
        yield f"apiVersion={manifest.get('apiVersion')}, kind={kind}: use ray.io/v1 and one of {', '.join(KINDS)}"
        return
    prefix = "spec"
    if kind == "RayJob":
        yield from _job(spec)
        prefix, spec = "spec.rayClusterSpec", spec.get("rayClusterSpec", {})
    for group in ("headGroupSpec", "workerGroupSpecs"):
        if not spec.get(group):
            yield f"{prefix}.{group} is missing"
            return
    for rule in (_access, _autoscaler, _groups):
        yield from (f"{prefix}.{problem}" for problem in rule(spec, kind))


def _job(spec: dict[str, Any]) -> Iterator[str]:
    entry = spec.get("entrypoint", "")
    if "asyncrl run" not in entry or "cluster=auto" not in entry:
        yield f"spec.entrypoint={entry!r}: begin with `asyncrl run cluster=auto`, which joins this cluster"
    if not spec.get("shutdownAfterJobFinishes"):
        yield "spec.shutdownAfterJobFinishes: set it to true, or the nodes stay after the run"


def _access(spec: dict[str, Any], kind: str) -> Iterator[str]:
    mode = spec.get("authOptions", {}).get("mode")
    if mode != "token":
        yield f"authOptions.mode={mode}: this Ray obeys everybody who reaches it; use `mode: token`"
    head = spec["headGroupSpec"]
    host = head.get("rayStartParams", {}).get("dashboard-host")
    if kind == "RayCluster" and host != "127.0.0.1":
        yield (
            f"headGroupSpec.rayStartParams.dashboard-host={host}: KubeRay opens it to the cluster's network; use "
            "'127.0.0.1', and `kubectl port-forward` to look at it"
        )
    if kind == "RayJob" and host is not None:
        yield f"headGroupSpec.rayStartParams.dashboard-host={host}: KubeRay asks it for the job's state; leave it out"
    if (service := head.get("serviceType", "ClusterIP")) != "ClusterIP":
        yield f"headGroupSpec.serviceType={service}: reachable from outside; use ClusterIP"


def _autoscaler(spec: dict[str, Any], kind: str) -> Iterator[str]:
    if not spec.get("rayVersion"):
        yield "rayVersion is missing: the image's Ray, such as 2.60.0"
    if spec.get("enableInTreeAutoscaling") is not True:
        yield f"enableInTreeAutoscaling={spec.get('enableInTreeAutoscaling')}: set it to true, engines come and go"
    options = spec.get("autoscalerOptions", {})
    if options.get("version") != "v2":
        yield f"autoscalerOptions.version={options.get('version')}: use v2"
    if options.get("idleTimeoutSeconds", 0) < SHORTEST_IDLE_S:
        yield (
            f"autoscalerOptions.idleTimeoutSeconds={options.get('idleTimeoutSeconds')}: pods would end before actors "
            f"reach them; use {SHORTEST_IDLE_S} or more"
        )


def _groups(spec: dict[str, Any], kind: str) -> Iterator[str]:
    offered: set[str] = set()
    named = {"headGroupSpec": spec["headGroupSpec"]} | {
        f"workerGroupSpecs[{index}]": group for index, group in enumerate(spec["workerGroupSpecs"])
    }
    for field, group in named.items():
        yield from _pods(field, group)
        text = group.get("rayStartParams", {}).get("resources")
        if text is not None:
            try:
                offered |= set(msgspec.json.decode(msgspec.json.decode(text, type=str), type=dict[str, float]))
            except msgspec.DecodeError:
                yield f'{field}.rayStartParams.resources={text}: write it as \'"{{\\"{ROLLOUT_SLOT}\\": 1}}"\''
    for slot in (TRAINER_SLOT, ROLLOUT_SLOT):
        if slot not in offered:
            yield f"workerGroupSpecs.*.rayStartParams.resources: no group offers {slot}, which actors ask for"
    for field, group in list(named.items())[1:]:
        least, now, most = (group.get(key) for key in ("minReplicas", "replicas", "maxReplicas"))
        if None in (least, now, most) or not 0 <= least <= now <= most or most < 1:
            yield f"{field}: minReplicas={least}, replicas={now}, maxReplicas={most}: give all three, in this order"
        policy = group.get("template", {}).get("spec", {}).get("restartPolicy")
        if policy != "Never":
            yield f"{field}.template.spec.restartPolicy={policy}: use Never; the autoscaler makes a new pod"


def _pods(field: str, group: dict[str, Any]) -> Iterator[str]:
    containers = group.get("template", {}).get("spec", {}).get("containers", [])
    if not containers:
        yield f"{field}.template.spec.containers is missing"
    for index, container in enumerate(containers):
        for need in ("cpu", "memory"):
            if need not in container.get("resources", {}).get("limits", {}):
                at = f"{field}.template.spec.containers[{index}]"
                yield f"{at}.resources.limits.{need} is missing: it is what Ray offers to actors"
