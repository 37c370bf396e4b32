"""Every cluster file that we ship is fit to be used; every way to spoil one is refused with its field."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.errors import ConfigError
from pipelines.cluster import kuberay, rules
from pipelines.cluster.commands import Cluster

CLUSTERS = Path(__file__).parents[2] / "configs" / "cluster"
RAY_UP = ("local", "aws", "gcp")
KUBERAY = ("kuberay-cluster", "kuberay-job")
START = "head_start_ray_commands"
Spoil = Callable[[dict[str, Any]], object]


def read(name: str) -> dict[str, Any]:
    return msgspec.yaml.decode((CLUSTERS / f"{name}.yaml").read_bytes())


def write(path: Path, cluster: dict[str, Any]) -> Path:
    path.write_bytes(msgspec.yaml.encode(cluster))
    return path


@pytest.mark.parametrize("name", [*RAY_UP, *KUBERAY])
def test_what_we_ship_is_in_order_and_has_to_be_filled_in(name: str) -> None:
    path = CLUSTERS / f"{name}.yaml"
    cluster = rules.check(path)
    with pytest.raises(ConfigError, match="an example; write your own"):
        rules.check_filled_in(path, cluster)


def test_every_file_is_looked_at() -> None:
    assert {path.stem for path in CLUSTERS.glob("*.yaml")} == {*RAY_UP, *KUBERAY, "kuberay-network"}


def swapped(field: str, old: str, new: str) -> Spoil:
    """The same commands, with other words in them."""

    def spoil(cluster: dict[str, Any]) -> None:
        assert old in " ".join(cluster[field])
        cluster[field] = [command.replace(old, new) for command in cluster[field]]

    return spoil


def kind(name: str, **changed: Any) -> Spoil:
    return lambda cluster: cluster["available_node_types"][name].update(changed)


def without(field: str) -> Spoil:
    return lambda cluster: cluster.pop(field)


BAD_RAY_UP: dict[str, tuple[str, Spoil, str]] = {
    "no token": ("local", lambda c: c["file_mounts"].pop("~/.ray/auth_token"), "file_mounts={.*no token is mounted"),
    "no token mode": (
        "local",
        swapped(START, "RAY_AUTH_MODE=token", "X=1"),
        r"head_start_ray_commands\[1\]=.*obeys everybody",
    ),
    "worker without token mode": (
        "aws",
        swapped("worker_start_ray_commands", "RAY_AUTH_MODE=token", "X=1"),
        r"worker_start_ray_commands\[1\]=.*obeys everybody",
    ),
    "token in a command": (
        "local",
        swapped(START, "RAY_AUTH_MODE=token", "RAY_AUTH_MODE=token RAY_AUTH_TOKEN=abc"),
        r"head_start_ray_commands\[1\]: a token in a command",
    ),
    "open dashboard": (
        "aws",
        swapped(START, "--dashboard-host=127.0.0.1", "--dashboard-host=0.0.0.0"),
        r"head_start_ray_commands\[1\]: --dashboard-host=0.0.0.0 lets a network start jobs",
    ),
    "Ray's own start commands": ("gcp", without(START), r"head_start_ray_commands\[1\]: --dashboard-host=0.0.0.0"),
    "open security group": (
        "aws",
        lambda c: c["provider"].update(security_group={"IpPermissions": [{"IpRanges": [{"CidrIp": "0.0.0.0/0"}]}]}),
        r"provider.security_group.IpPermissions\[0\].IpRanges\[0\].CidrIp=0.0.0.0/0 lets the whole internet in",
    ),
    "a worker's port": ("local", swapped(START, "--port=6379", "--port=10500"), "--port=10500 is one of those"),
    "second autoscaler": (
        "local",
        swapped(START, "RAY_enable_autoscaler_v2=0", ""),
        r"head_start_ray_commands\[1\]: Ray's second autoscaler",
    ),
    "no engine's place": (
        "local",
        swapped("worker_start_ray_commands", "rollout_slot", "rollout_slots"),
        "no node offers rollout_slot, which actors ask for; is rollout_slots meant to be it?",
    ),
    "places on no node": ("aws", kind("trainer", max_workers=0, min_workers=0), "no node offers trainer_slot"),
    "broken resources": (
        "local",
        swapped(START, '{"trainer_slot": 1}', "{trainer_slot: 1}"),
        r"--resources='{trainer_slot: 1}' is no JSON",
    ),
    "unknown size": (
        "gcp",
        lambda c: c["available_node_types"]["rollout"].pop("max_workers"),
        "max_workers is missing",
    ),
    "upside down": ("aws", kind("rollout", min_workers=9), "rollout.min_workers=9 is more than its max_workers=8"),
    "more than all": (
        "aws",
        lambda c: c.update(max_workers=100),
        "max_workers=100: at least 1, and no more than the 10",
    ),
    "no patience": ("aws", lambda c: c.update(idle_timeout_minutes=0), "idle_timeout_minutes=0"),
    "one machine twice": (
        "local",
        lambda c: c["provider"]["worker_ips"].append(c["provider"]["head_ip"]),
        "provider.worker_ips: 192.0.2.1 is named twice",
    ),
    "no machines": ("local", lambda c: c["provider"].pop("worker_ips"), "provider.worker_ips is missing"),
    "no provider": ("local", without("provider"), "provider.type is missing"),
    "unknown provider": ("aws", lambda c: c["provider"].update(type="awz"), "awz"),
    "kinds of machines": (
        "local",
        lambda c: c.update(head_node_type="head"),
        "head_node_type is not for provider.type",
    ),
    "unknown field": ("aws", lambda c: c.update(idle_timeout=5), "'idle_timeout' was unexpected"),
    "wrong type": ("aws", lambda c: c.update(max_workers="many"), "max_workers"),
}


@pytest.mark.parametrize("case", BAD_RAY_UP)
def test_a_bad_ray_up_file_is_refused_with_its_field(case: str, tmp_path: Path) -> None:
    name, spoil, refusal = BAD_RAY_UP[case]
    cluster = read(name)
    spoil(cluster)
    path = write(tmp_path / "cluster.yaml", cluster)
    with pytest.raises(ConfigError, match=refusal) as refused:
        rules.check(path)
    assert all(line.startswith(f"{path}: ") for line in str(refused.value).splitlines())


def spec(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["spec"].get("rayClusterSpec", manifest["spec"])


BAD_KUBERAY: dict[str, tuple[str, Spoil, str]] = {
    "another kind": ("kuberay-job", lambda m: m.update(kind="RayService"), "kind=RayService"),
    "no token": ("kuberay-job", lambda m: spec(m).pop("authOptions"), "spec.rayClusterSpec.authOptions.mode=None"),
    "open dashboard": (
        "kuberay-cluster",
        lambda m: spec(m)["headGroupSpec"]["rayStartParams"].clear(),
        "spec.headGroupSpec.rayStartParams.dashboard-host=None: KubeRay opens it",
    ),
    "unreachable dashboard": (
        "kuberay-job",
        lambda m: spec(m)["headGroupSpec"]["rayStartParams"].update({"dashboard-host": "127.0.0.1"}),
        "KubeRay asks it for the job's state; leave it out",
    ),
    "open service": (
        "kuberay-cluster",
        lambda m: spec(m)["headGroupSpec"].update(serviceType="LoadBalancer"),
        "spec.headGroupSpec.serviceType=LoadBalancer",
    ),
    "no autoscaler": (
        "kuberay-cluster",
        lambda m: spec(m).pop("enableInTreeAutoscaling"),
        "enableInTreeAutoscaling=None",
    ),
    "first autoscaler": ("kuberay-cluster", lambda m: spec(m)["autoscalerOptions"].update(version="v1"), "version=v1"),
    "no patience": (
        "kuberay-cluster",
        lambda m: spec(m)["autoscalerOptions"].update(idleTimeoutSeconds=1),
        "autoscalerOptions.idleTimeoutSeconds=1",
    ),
    "no version": ("kuberay-job", lambda m: spec(m).pop("rayVersion"), "rayVersion is missing"),
    "no engines": ("kuberay-cluster", lambda m: spec(m)["workerGroupSpecs"].pop(), "no group offers rollout_slot"),
    "plain resources": (
        "kuberay-cluster",
        lambda m: spec(m)["workerGroupSpecs"][1]["rayStartParams"].update(resources='{"rollout_slot": 1}'),
        r"workerGroupSpecs\[1\].rayStartParams.resources=",
    ),
    "sizes": (
        "kuberay-cluster",
        lambda m: spec(m)["workerGroupSpecs"][0].update(replicas=3),
        r"workerGroupSpecs\[0\]: minReplicas=1, replicas=3, maxReplicas=2",
    ),
    "restarts": (
        "kuberay-cluster",
        lambda m: spec(m)["workerGroupSpecs"][0]["template"]["spec"].update(restartPolicy="Always"),
        "restartPolicy=Always",
    ),
    "no limits": (
        "kuberay-job",
        lambda m: spec(m)["headGroupSpec"]["template"]["spec"]["containers"][0].pop("resources"),
        r"headGroupSpec.template.spec.containers\[0\].resources.limits.cpu is missing",
    ),
    "another command": (
        "kuberay-job",
        lambda m: m["spec"].update(entrypoint="asyncrl run"),
        "spec.entrypoint='asyncrl run'",
    ),
    "left running": (
        "kuberay-job",
        lambda m: m["spec"].update(shutdownAfterJobFinishes=False),
        "shutdownAfterJobFinishes",
    ),
    "no cluster": ("kuberay-job", lambda m: m["spec"].pop("rayClusterSpec"), "headGroupSpec is missing"),
}


@pytest.mark.parametrize("case", BAD_KUBERAY)
def test_a_bad_manifest_is_refused_with_its_field(case: str) -> None:
    name, spoil, refusal = BAD_KUBERAY[case]
    manifest = read(name)
    spoil(manifest)
    with pytest.raises(ConfigError, match=refusal):
        raise ConfigError("\n".join(kuberay.problems(manifest)))


def test_rays_own_check_fills_in_defaults_and_names_the_field() -> None:
    """The private API that `cluster_schema` stands on."""
    full = rules.prepared({"cluster_name": "x", "provider": {"type": "aws"}})
    assert any("--dashboard-host=0.0.0.0" in command for command in full[START])
    with pytest.raises(ConfigError, match=r"max_workers: Ray does not allow it: 'x' is not of type 'integer'"):
        rules.prepared({"cluster_name": "x", "provider": {"type": "aws"}, "max_workers": "x"})


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"directory": "~/a; rm -rf ~"}, "metadata.asyncrl.directory=~/a; rm -rf ~: a plain path"),
        ({"overides": []}, "metadata.asyncrl: Object contains unknown field `overides`"),
    ],
)
def test_our_own_settings_in_a_cluster_file(change: dict[str, Any], refusal: str, tmp_path: Path) -> None:
    cluster = read("local")
    cluster["provider"] |= {"head_ip": "10.0.0.1", "worker_ips": ["10.0.0.2"]}
    cluster["metadata"]["asyncrl"] |= change
    with pytest.raises(ConfigError, match=refusal):
        Cluster(write(tmp_path / "cluster.yaml", cluster))


@pytest.mark.parametrize(("text", "refusal"), [("a: [", "is not YAML"), ("- a", "describes no cluster")])
def test_no_cluster_at_all(text: str, refusal: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=refusal):
        rules.check(path)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        rules.check(tmp_path / "none.yaml")
