"""A Ray with an autoscaler whose machines are processes of this one: the real autoscaler, scheduler and raylets.

Ray's own recipe for it (`fake_multinode`) needs a file that its wheel does not have. As a provider of type `external`,
with every key of the configuration spelled out, it works under both generations of the autoscaler.
"""

import json
import os
import re
import secrets
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from socket import socket
from typing import Any

from actors.runtime.auth import LOOPBACK, MODE, TOKEN_PATH, ensure_token
from pipelines.cli.chaos import Processes

REPOSITORY = Path(__file__).parents[1]
HEAD_ID = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"
"""What Ray's fake provider takes for the head node."""
STORE = 100 << 20
UPDATE_S = 1
START_S = 60.0
END_S = 20.0
COUNTED = re.compile(r"nodes ([0-9.]+) ([0-9]+)\n")
"""A line of `fake_provider.watch`."""
EMPTY = (
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "initialization_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
    "cluster_synced_files",
    "rsync_exclude",
    "rsync_filter",
)


def configuration(address: str, workers: int, worker: Mapping[str, float], idle_minutes: float) -> dict[str, Any]:
    return {
        "cluster_name": "fake",
        "max_workers": workers,
        "idle_timeout_minutes": idle_minutes,
        "upscaling_speed": 10.0,
        "provider": {
            "type": "external",
            "module": "benchmarks.fake_provider.Provider",
            "gcs_address": address,
            "head_node_id": HEAD_ID,
            "launch_multiple": True,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "available_node_types": {
            "ray.head.default": {"resources": {}, "node_config": {}, "max_workers": 0},
            "rollout": {"resources": dict(worker), "node_config": {}, "min_workers": 0, "max_workers": workers},
        },
        "head_node_type": "ray.head.default",
        "auth": {},
        "docker": {},
        "file_mounts": {},
        **{key: [] for key in EMPTY},
    }


@contextmanager
def autoscaling_ray(
    place: Path,
    *,
    version: int,
    head: Mapping[str, float],
    worker: Mapping[str, float],
    workers: int,
    variables: Mapping[str, str],
    idle_s: float = 3.0,
) -> Generator[tuple[str, dict[str, str]], None, None]:
    """The address of a Ray under `place`, a short path, and the environment of whoever attaches to it. `variables` are
    those of its actors. Everything that was started is ended."""
    processes = Processes(place)
    ensure_token(place / "token")
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("RAY_")},
        **LOOPBACK,
        **processes.environment,
        **variables,
        MODE: "token",
        TOKEN_PATH: str(place / "token"),
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
    }
    address = f"127.0.0.1:{_free_port()}"
    try:
        _start(place, environment, address, version, head, configuration(address, workers, worker, idle_s / 60))
        yield address, environment
    finally:
        processes.end(END_S)


def _start(
    place: Path, environment: dict[str, str], address: str, version: int, head: Mapping[str, float], config: Any
) -> None:
    (place / "cluster.json").write_text(json.dumps(config))
    custom = {name: amount for name, amount in head.items() if name != "CPU"}
    command = [
        *(str(Path(sys.executable).with_name("ray")), "start", "--head", "--node-ip-address=127.0.0.1"),
        f"--port={address.rpartition(':')[2]}",
        f"--autoscaling-config={place / 'cluster.json'}",
        f"--temp-dir={place / 'ray'}",
        f"--num-cpus={head['CPU']:g}",
        f"--resources={json.dumps(custom)}",
        f"--object-store-memory={STORE}",
        "--include-dashboard=false",
        "--disable-usage-stats",
    ]
    inside = {
        "RAY_FAKE_CLUSTER": "1",
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
        "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
        "RAY_NODE_TYPE_NAME": "ray.head.default",
        "RAY_enable_autoscaler_v2": str(int(version == 2)),
        "AUTOSCALER_UPDATE_INTERVAL_S": str(UPDATE_S),
    }
    done = subprocess.run(
        command, env=environment | inside, capture_output=True, text=True, timeout=START_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"ray start failed:\n{done.stdout}\n{done.stderr}")


def _free_port() -> int:
    """Outside of 10002 to 19999, where Ray's workers listen."""
    while True:
        port = 20_000 + secrets.randbelow(10_000)
        with socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


class NodeCount:
    """How many nodes are alive, second by second, seen by a driver of its own."""

    def __init__(self, address: str, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "benchmarks.fake_provider", address]
        self._watcher = subprocess.Popen(
            command, env=dict(environment), stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
        )
        self.seen: list[tuple[float, int]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._watcher.stdout is not None
        for line in self._watcher.stdout:
            if found := COUNTED.fullmatch(line):  # the autoscaler talks to every driver's output as well
                self.seen.append((float(found[1]), int(found[2])))

    @property
    def now(self) -> int:
        return self.seen[-1][1] if self.seen else 0

    def close(self) -> None:
        self._watcher.kill()
        self._watcher.wait()
        self._reader.join()
