"""`ray up` for real: three nodes on loopback addresses, a run on them, a node that dies and returns, a second run, one
whose node is drained, `ray down`.

Started by `test_ray_up.py` with a directory, as the first process of PID, network and mount namespaces of its own, and
writes `facts.json` there. `ray stop`, which is part of it, ends every Ray that it can see: outside, that would be
yours.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.system.run_directory import read_events
from pipelines.cli.check import check
from tests.cluster.nodes import Node, wait_until

REPOSITORY = Path(__file__).parents[2]
COMMAND = str(Path(sys.executable).with_name("asyncrl"))
HEAD, *WORKERS = "127.0.0.1", "127.0.0.2", "127.0.0.3"
SMALL = (
    "experiment=quickstart",
    "engine=native",
    "flow.groups_per_step=4",
    "flow.groups_per_take=1",
    "rollout.group_size=4",
    "rollout.replicas=2",
    "evaluation.prompts=8",
    "checkpoint.every=2",
    "checkpoint.keep=100",
)


def main(directory: Path) -> None:
    if os.getpid() != 1:
        sys.exit("this ends every Ray in sight: start it by `make test-cluster`, which gives it namespaces of its own")
    run("ip", "link", "set", "lo", "up")
    for place in ("/tmp/ray", "/dev/shm"):
        Path(place).mkdir(exist_ok=True)
        run("mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", place)
    key = directory / "key"
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
    nodes = [Node(directory / address, address, key) for address in (HEAD, *WORKERS)]
    facts = story(directory, nodes, cluster_file(directory, key))
    (directory / "facts.json").write_text(json.dumps(facts))


def run(*words: str) -> None:
    subprocess.run(words, check=True)


def cluster_file(directory: Path, key: Path) -> Path:
    """The one that we ship, with what a user fills in. Nothing can be installed here, for want of a network."""
    cluster = msgspec.yaml.decode((REPOSITORY / "configs" / "cluster" / "local.yaml").read_bytes())
    cluster["cluster_name"] = f"asyncrl-{directory.name}"
    cluster["provider"] |= {"head_ip": HEAD, "worker_ips": list(WORKERS)}
    cluster["auth"] = {"ssh_user": "root", "ssh_private_key": str(key)}
    cluster["file_mounts"]["~/asyncrl"] = str(REPOSITORY)
    cluster["setup_commands"][0] = f"ln -sfn {sys.prefix} ~/asyncrl/.venv"
    cluster["metadata"]["asyncrl"]["overrides"][0] = f"root={directory / 'shared'}"
    path = directory / "cluster.yaml"
    path.write_bytes(msgspec.yaml.encode(cluster))
    return path


def story(directory: Path, nodes: list[Node], cluster: Path) -> dict[str, Any]:
    operator, shared = directory / "operator", directory / "shared"
    operator.mkdir()
    environment = {**os.environ, "HOME": str(operator), "OMP_NUM_THREADS": "1"}
    facts: dict[str, Any] = {"begun": time.monotonic()}

    def submit(*words: str) -> "subprocess.Popen[bytes]":
        with (directory / "submit.log").open("ab") as log:
            command = [COMMAND, "submit", str(cluster), *SMALL, *words]
            return subprocess.Popen(command, cwd=operator, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def note(fact: str, value: Any = None) -> None:
        facts[fact] = value
        facts["seconds"] = facts.get("seconds", {}) | {fact: round(time.monotonic() - facts["begun"], 1)}
        print(facts["seconds"], flush=True)  # shown if the story does not come to its end

    note("alone", knock(operator, environment, "0" * 64, "auto"))
    first = submit("name=first", "steps=20", "model.steps=200")
    wait_until(
        lambda: (shared / "first" / "checkpoints" / "step-2").exists() or first.poll() is not None, "2 steps", 400
    )
    note("engines", {node.address: node.count("ray::RolloutActor") for node in nodes})
    nodes[2].kill()
    nodes[2].start()
    note("first", first.wait(timeout=300))
    note("strangers", [knock(operator, environment, token, f"{HEAD}:6379") for token in ("", "0" * 64)])
    started = (shared / "first" / "model").resolve()
    own = "model=checkpoint", f"model.path={started}"
    note("second", submit("name=second", "steps=2", *own).wait(timeout=300))
    third = submit("name=third", "steps=100000", *own, "--down")
    wait_until(
        lambda: (shared / "third" / "checkpoints" / "step-2").exists() or third.poll() is not None, "2 steps", 300
    )
    note("drain", nodes[0].drain())
    note("third", third.wait(timeout=300))
    note("output", (directory / "submit.log").read_text())
    runs = {"first": shared / "first", "second": shared / "second", "third": operator / "runs" / "third"}
    note("sound", {name: path.exists() and check(path).sound for name, path in runs.items()})
    note("lost", [event for event in read_events(runs["first"] / "events.jsonl") if event["kind"] == "engine_lost"])
    note("left", {node.address: node.count("/ray/") for node in nodes})
    note("mounted", {node.address: oct((node.home / ".ray/auth_token").stat().st_mode & 0o777) for node in nodes})
    return facts


def knock(operator: Path, environment: dict[str, str], token: str, cluster: str) -> tuple[int, str]:
    """What somebody hears who joins with that token, or without one."""
    home = operator / f"stranger-{len(token)}"
    home.mkdir(exist_ok=True)
    other = environment | {"HOME": str(home)} | ({"RAY_AUTH_TOKEN": token} if token else {})
    words = [COMMAND, "run", *SMALL, f"root={home}", f"cluster={cluster}"]
    done = subprocess.run(words, cwd=home, env=other, capture_output=True, text=True, timeout=100, check=False)
    return done.returncode, done.stderr


if __name__ == "__main__":
    main(Path(sys.argv[1]))
