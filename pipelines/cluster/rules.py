"""Checks of a cluster file: Ray's schema, and our own rules on who is let in, what nodes offer and what it may cost.

`ray up` files are checked with Ray's defaults filled in, which leave the dashboard open to everybody on AWS and GCP.
KubeRay manifests have rules of their own.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec

from asyncrl.config.errors import did_you_mean
from asyncrl.errors import ConfigError
from asyncrl.fleet.placement import ROLLOUT_SLOT, TRAINER_SLOT
from pipelines.cluster import kuberay

MOUNTED_AT = ".ray/auth_token"
"""Where Ray looks for the token."""
STARTS = ("head_start_ray_commands", "worker_start_ray_commands")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
WORKER_PORTS = range(10002, 20000)
EVERYBODY = ("0.0.0.0/0", "::/0")
UNFILLED = re.compile(r"CHANGE_ME|\b192\.0\.2\.\d+\b")
"""Placeholders of our templates; 192.0.2.* are addresses for examples, which no machine has."""


def check(path: Path) -> dict[str, Any]:
    """The cluster that a file describes, or a ConfigError with everything that is wrong with it."""
    cluster = _read(path)
    found = kuberay.problems(cluster) if "kind" in cluster else problems(cluster)
    if found := list(found):
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in found))
    return cluster


def check_filled_in(path: Path, cluster: dict[str, Any]) -> None:
    """Raise ConfigError while the file still has a template's examples in it."""
    found = [
        f"{path}: {field}={value}: an example; write your own"
        for field, value in _texts(cluster)
        if UNFILLED.search(value)
    ]
    if found:
        raise ConfigError("\n".join(found))


def problems(cluster: dict[str, Any]) -> Iterator[str]:
    """Of a `ray up` file: the field, the value and the way out of each."""
    if shape := list(_shape(cluster)):
        yield from shape
        return
    try:
        full = prepared(cluster)
    except ConfigError as error:
        yield str(error)
        return
    rules: tuple[Callable[[dict[str, Any]], Iterator[str]], ...] = (_token, _access, _ports, _slots)
    for rule in rules:
        yield from rule(full)
    yield from _local(full) if full["provider"]["type"] == "local" else _sizes(cluster)


def prepared(cluster: dict[str, Any]) -> dict[str, Any]:
    """The cluster with Ray's defaults filled in; ConfigError with the field if Ray's schema does not allow it.

    Private API of Ray 2.59 to 2.61, here and nowhere else; a test pins it.
    """
    import jsonschema  # of Ray's own requirements
    from ray.autoscaler._private import util

    ray = cast(Any, util)
    try:
        full: dict[str, Any] = ray.prepare_config(cluster)
        ray.validate_config(full)
    except jsonschema.ValidationError as error:
        field = ".".join(str(part) for part in error.absolute_path) or "the file"
        raise ConfigError(f"{field}: Ray does not allow it: {error.message}") from None
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"Ray does not take it: {error}") from None
    return full


def _read(path: Path) -> dict[str, Any]:
    try:
        found = msgspec.yaml.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; configs/cluster/ has files to begin from"
        ) from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} describes no cluster; configs/cluster/ has files to begin from")
    return cast(dict[str, Any], found)


def _shape(cluster: dict[str, Any]) -> Iterator[str]:
    """Mistakes that Ray answers by ending the process, or not at all."""
    provider = cluster.get("provider")
    if not isinstance(provider, dict) or "type" not in provider:
        yield "provider.type is missing: local, aws or gcp"
        return
    if provider["type"] != "local":
        return
    for field in ("head_ip", "worker_ips"):
        if not provider.get(field):
            yield f"provider.{field} is missing: the addresses of your machines"
    if not cluster.get("auth", {}).get("ssh_user"):
        yield "auth.ssh_user is missing: who logs in on your machines"
    for field in ("available_node_types", "head_node_type"):
        if field in cluster:
            yield f"{field} is not for provider.type=local: what machines offer stands in their start commands"


def _token(cluster: dict[str, Any]) -> Iterator[str]:
    if not any(path.endswith(MOUNTED_AT) for path in cluster["file_mounts"]):
        yield f"file_mounts={cluster['file_mounts']}: no token is mounted; add `~/{MOUNTED_AT}: ~/{MOUNTED_AT}`"
    everywhere = " ".join((*cluster["initialization_commands"], *cluster["setup_commands"]))
    for field, command in _starts(cluster):
        if "RAY_AUTH_MODE=token" not in f"{everywhere} {command}":
            way = "begin it with `export RAY_AUTH_MODE=token;`"
            yield f"{field}={command!r}: this Ray obeys everybody who reaches it; {way}"
    for field, value in _texts(cluster):
        if re.search(r"RAY_AUTH_TOKEN=", value):
            yield f"{field}: a token in a command is in logs and process lists; mount it as a file (file_mounts)"


def _access(cluster: dict[str, Any]) -> Iterator[str]:
    for field, command in _starts(cluster):
        host = _option(command, "dashboard-host")
        if host is not None and host not in LOOPBACK:
            yield (
                f"{field}: --dashboard-host={host} lets a network start jobs; use --dashboard-host=127.0.0.1, and "
                "`ray dashboard CLUSTER` to look at it"
            )
    for field, value in _texts(cluster):
        if value in EVERYBODY:
            yield f"{field}={value} lets the whole internet in; name your own network, or leave it to Ray"


def _ports(cluster: dict[str, Any]) -> Iterator[str]:
    for field, command in _starts(cluster):
        port = _option(command, "port")
        if port and port.isdecimal() and int(port) in WORKER_PORTS:
            yield f"{field}: --port={port} is one of those that Ray gives to workers (10002 to 19999); use --port=6379"


def _slots(cluster: dict[str, Any]) -> Iterator[str]:
    """Actors are placed by named resources: some node has to offer them."""
    offered: dict[str, float] = {}
    for field, command in _starts(cluster):
        if text := re.search(r"--resources[= ]'([^']*)'", command):
            try:
                offered |= msgspec.json.decode(text[1], type=dict[str, float])
            except msgspec.DecodeError as error:
                yield f"{field}: --resources='{text[1]}' is no JSON of numbers: {error}"
    for name, kind in cluster["available_node_types"].items():
        if name == cluster["head_node_type"] or kind.get("max_workers", 0) > 0:
            offered |= kind.get("resources", {})
    field = "--resources of ray start" if cluster["provider"]["type"] == "local" else "available_node_types.*.resources"
    for slot in (TRAINER_SLOT, ROLLOUT_SLOT):
        if not offered.get(slot):
            others = [name for name in offered if name not in (TRAINER_SLOT, ROLLOUT_SLOT)]
            near = [name for name in others if did_you_mean(slot, [name]).startswith("did")]
            meant = f"; is {near[0]} meant to be it?" if near else f'; add {{"{slot}": 1}} where they shall run'
            yield f"{field}: no node offers {slot}, which actors ask for{meant}"


def _local(cluster: dict[str, Any]) -> Iterator[str]:
    provider = cluster["provider"]
    workers = provider["worker_ips"]
    twice = {address for address in workers if workers.count(address) > 1}
    if provider["head_ip"] in workers:
        twice.add(provider["head_ip"])
    for address in sorted(twice):
        yield f"provider.worker_ips: {address} is named twice; one machine is one node"
    if cluster["max_workers"] < len(workers):
        yield f"max_workers={cluster['max_workers']}: {len(workers)} worker_ips would not all be used; leave it out"
    for field, command in _starts(cluster, STARTS[:1]):
        if "RAY_enable_autoscaler_v2=0" not in command:
            yield (
                f"{field}: Ray's second autoscaler starts one worker too few for provider.type=local; begin the "
                "command with `export RAY_enable_autoscaler_v2=0;`"
            )


def _sizes(cluster: dict[str, Any]) -> Iterator[str]:
    """What a cluster may grow to is what it may cost, so it must be said, not left to defaults."""
    kinds: dict[str, Any] = cluster.get("available_node_types", {})
    workers = {name: kind for name, kind in kinds.items() if name != cluster.get("head_node_type")}
    for name, kind in workers.items():
        least, most = kind.get("min_workers", 0), kind.get("max_workers")
        if most is None:
            yield f"available_node_types.{name}.max_workers is missing: say how many it may become"
        elif least > most:
            yield f"available_node_types.{name}.min_workers={least} is more than its max_workers={most}"
    most, together = cluster.get("max_workers"), sum(kind.get("max_workers") or 0 for kind in workers.values())
    if most is None or not 1 <= most <= together:
        yield f"max_workers={most}: at least 1, and no more than the {together} of all node types together"
    if cluster.get("idle_timeout_minutes", 5) < 1:
        yield f"idle_timeout_minutes={cluster['idle_timeout_minutes']}: nodes would end before actors reach them; use 5"


def _starts(cluster: dict[str, Any], fields: tuple[str, ...] = STARTS) -> Iterator[tuple[str, str]]:
    """Every command that starts a Ray, with its field."""
    for field in fields:
        for index, command in enumerate(cluster[field]):
            if "ray start" in command:
                yield f"{field}[{index}]", command


def _option(command: str, name: str) -> str | None:
    found = re.search(rf"--{name}[= ]'?([^\s']+)", command)
    return found[1] if found else None


def _texts(value: Any, field: str = "") -> Iterator[tuple[str, str]]:
    """Every text in a file, with its field."""
    if isinstance(value, str):
        yield field, value
    elif isinstance(value, dict):
        for key, below in cast(dict[str, Any], value).items():
            yield from _texts(below, f"{field}.{key}".lstrip("."))
    elif isinstance(value, list):
        for index, below in enumerate(cast(list[Any], value)):
            yield from _texts(below, f"{field}[{index}]")
