"""S11: a cluster that we describe for others has its doors closed too."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

REPOSITORY = Path(__file__).parents[2]
TOKEN = "auth_token"  # noqa: S105  (the name of a file)


def problems(cluster: dict[str, Any]) -> Iterator[str]:
    """What is open in a `ray up` file or a KubeRay manifest."""
    text = msgspec.json.encode(cluster).decode()
    if "--dashboard-host=0.0.0.0" in text or '"dashboard-host":"0.0.0.0"' in text:
        yield "the dashboard is on every address"
    if "0.0.0.0/0" in text:
        yield "the security group lets everybody in"
    if "kind" in cluster:
        spec = cluster["spec"].get("rayClusterSpec", cluster["spec"])
        if spec.get("authOptions", {}).get("mode") != "token":
            yield "authOptions.mode is not token"
        return
    if not any(place.endswith(TOKEN) for place in cluster.get("file_mounts", {})):
        yield "no token is mounted"
    starts = [word for key, words in cluster.items() if key.endswith("start_ray_commands") for word in words]
    for start in (word for word in starts if "ray start" in word):
        if "RAY_AUTH_MODE=token" not in start + " ".join(cluster.get("initialization_commands", [])):
            yield f"{start!r} does not say RAY_AUTH_MODE=token"


def clusters() -> Iterator[Path]:
    """Every YAML file here that starts a Ray."""
    for path in REPOSITORY.rglob("*.y*ml"):
        if not any(part.startswith(".") for part in path.relative_to(REPOSITORY).parts):
            text = path.read_text()
            if "start_ray_commands" in text or "apiVersion: ray.io" in text:
                yield path


def test_s11_the_clusters_we_ship_are_closed() -> None:
    found = {path.name: list(problems(msgspec.yaml.decode(path.read_bytes()))) for path in clusters()}
    assert {name: open_doors for name, open_doors in found.items() if open_doors} == {}


START = "RAY_AUTH_MODE=token ray start --head"
MOUNTED = {"file_mounts": {"~/.ray/auth_token": "./auth_token"}}


@pytest.mark.parametrize(
    ("cluster", "open_door"),
    [
        ({**MOUNTED, "head_start_ray_commands": [START]}, ""),
        ({"head_start_ray_commands": [START]}, "no token is mounted"),
        ({**MOUNTED, "head_start_ray_commands": ["ray start --head"]}, "does not say RAY_AUTH_MODE=token"),
        ({**MOUNTED, "head_start_ray_commands": [f"{START} --dashboard-host=0.0.0.0"]}, "the dashboard is on every"),
        ({**MOUNTED, "provider": {"IpPermissions": [{"CidrIp": "0.0.0.0/0"}]}}, "lets everybody in"),
        ({"kind": "RayCluster", "spec": {"authOptions": {"mode": "token"}}}, ""),
        ({"kind": "RayJob", "spec": {"rayClusterSpec": {}}}, "authOptions.mode is not token"),
    ],
)
def test_s11_the_rules_see_an_open_door(cluster: dict[str, Any], open_door: str) -> None:
    found = list(problems(cluster))
    assert (len(found) == 1 and open_door in found[0]) if open_door else not found
