"""Manages the cluster of a file with Ray's own commands: up, exec, rsync-down, down.

They use SSH, so no port of the cluster is opened for us. Ray's output is shown when a command fails.
"""

import re
import secrets
import shlex
import subprocess
import sys
from collections import deque
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from actors.runtime import auth
from asyncrl.config.base import Settings
from asyncrl.errors import ClusterError, ConfigError
from pipelines.cluster import rules

RAY = Path(sys.executable).with_name("ray")
CLIENTS = {"aws": ("boto3", "boto3"), "gcp": ("googleapiclient", "google-api-python-client")}
"""The client library that Ray needs for a provider: module and package."""
JOIN_SECONDS = 1800
"""For the nodes that a cluster begins with: machines may have to be made, and install gigabytes."""
STAGE = re.compile(r"\[\d/\d\] .*")
"""Ray's own progress."""
SHOWN_LINES = 25
KEY_ON_HEAD = "~/ray_bootstrap_key.pem"
"""The `ssh_private_key` of the file, which `ray up` leaves there for the workers."""
SSH_OPTIONS = (
    *("-oBatchMode=yes", "-oConnectTimeout=10", "-oServerAliveInterval=5"),
    *("-oStrictHostKeyChecking=no", "-oUserKnownHostsFile=/dev/null"),
)
"""No prompts, no endless waits; and, as Ray does it, without checking host keys."""


class OnCluster(Settings, frozen=True):
    """`metadata.asyncrl` of a cluster file."""

    directory: str = "~/asyncrl"
    """The checkout on the head."""
    overrides: tuple[str, ...] = ()
    """Overrides that come first for every run on this cluster."""


class Cluster:
    def __init__(self, path: Path) -> None:
        """Raises ConfigError with everything that is wrong with the file."""
        self.path = path
        self._file = rules.check(path)
        if "kind" in self._file:
            raise ConfigError(f"{path} is for Kubernetes: kubectl apply -f {path} (docs/scaling.md)")
        rules.check_filled_in(path, self._file)
        self._provider: dict[str, Any] = self._file["provider"]
        self.settings = self._settings()
        module, package = CLIENTS.get(self._provider["type"], ("ray", "ray"))
        if find_spec(module) is None:
            raise ConfigError(f"{path}: provider.type={self._provider['type']} needs {package}: pip install {package}")

    def _settings(self) -> OnCluster:
        try:
            settings = msgspec.convert(self._file.get("metadata", {}).get("asyncrl", {}), OnCluster)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{self.path}: metadata.asyncrl: {error}") from None
        if not re.fullmatch(r"[~/\w.-]+", settings.directory):
            raise ConfigError(
                f"{self.path}: metadata.asyncrl.directory={settings.directory}: a plain path, as ~/asyncrl"
            )
        return settings

    @property
    def nodes(self) -> int:
        """Those that it begins with, the head among them."""
        kinds = self._file.get("available_node_types", {}).values()
        return 1 + len(self._provider.get("worker_ips", ())) + sum(kind.get("min_workers", 0) for kind in kinds)

    def up(self) -> None:
        """Bring it up, or the checkout on it up to date: a Ray that runs is not restarted, nor are its jobs lost."""
        mounts = self._file["file_mounts"].items()
        auth.ensure_token(Path(next(ours for theirs, ours in mounts if theirs.endswith(rules.MOUNTED_AT))).expanduser())
        self._check_access()
        restart = ["--no-restart"] if self._runs() else []
        options = ("--yes", "--no-config-cache", "--disable-usage-stats", *restart)
        self._ray("`ray up` did not bring it up", "up", *options, str(self.path))
        log = f"ray exec {self.path} 'tail -n 100 /tmp/ray/session_latest/logs/monitor*'"
        self.on_head(f"not all nodes came; look at {log}", "wait", str(self.nodes), str(JOIN_SECONDS))

    def _check_access(self) -> None:
        """Check that a machine that must exist already accepts our login. Ray would try for a quarter of an hour."""
        if self._provider["type"] != "local":
            return
        host, login = self._provider.get("external_head_ip", self._provider["head_ip"]), self._file["auth"]
        words = ["ssh", *SSH_OPTIONS]
        if key := login.get("ssh_private_key"):
            words += ["-i", str(Path(key).expanduser())]
        if proxy := login.get("ssh_proxy_command"):
            words += ["-o", f"ProxyCommand={proxy}"]
        words += [f"{login['ssh_user']}@{host}", "true"]
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ClusterError(f"{self.path}: the head does not let us in: {' '.join(words)}\n{done.stderr.strip()}")

    def down(self) -> None:
        wrong = f"machines may still run: ray down {self.path}"
        if workers := self._provider.get("worker_ips"):  # of which `ray down` stops only the head
            login = f"ssh {' '.join(SSH_OPTIONS)} -i {KEY_ON_HEAD} {self._file['auth']['ssh_user']}@$node"
            each = f"""{login} "bash -lic '. ~/.bashrc; ray stop'" </dev/null &"""
            self._ray(
                wrong, "exec", str(self.path), f"ray stop; for node in {shlex.join(workers)}; do {each} done; wait"
            )
        self._ray(wrong, "down", "--yes", str(self.path))
        if self._runs():  # Ray goes on where it could not stop itself, as where `ray` is not on the PATH of a login
            raise ClusterError(f"{self.path}: `ray down` has not stopped the head's Ray; {wrong}")

    def fetch(self, source: str, target: Path) -> None:
        target.mkdir(parents=True, mode=0o700)
        wrong = f"{source} could not be fetched, so the cluster stays up: ray rsync-down {self.path} {source} {target}"
        self._ray(wrong, "rsync-down", str(self.path), f"{source}/", f"{target}/")

    def on_head(self, wrong: str, module: str, *words: str) -> None:
        """Run one of our modules there; `wrong` says what it means if it fails."""
        self._ray(wrong, "exec", str(self.path), self._python(module, *words))

    def follow(self, name: str) -> int | None:
        """Print the log of a run until it ends; its exit code, or None if the connection ended before it."""
        mark = f"asyncrl-{secrets.token_hex(8)}"  # Ray and SSH print lines of their own before and after
        begun, code = False, None
        with self._start("exec", str(self.path), self._python("job", "follow", name, mark)) as ray:
            assert ray.stdout is not None
            for line in map(str.rstrip, ray.stdout):
                if line.startswith(mark):
                    begun, code = True, int(line.removeprefix(mark) or -1) if begun else None
                elif begun and code is None:
                    print(line, flush=True)
        return code

    def _runs(self) -> bool:
        with self._start("exec", str(self.path), self._python("wait", "1", "0")) as ray:
            ray.communicate()
        return ray.returncode == 0

    def _python(self, module: str, *words: str) -> str:
        command = shlex.join([".venv/bin/python", "-m", f"pipelines.cluster.{module}", *words])
        return f"cd {self.settings.directory} && {command}"

    def _ray(self, wrong: str, *words: str) -> None:
        kept = deque[str](maxlen=SHOWN_LINES)
        with self._start(*words) as ray:
            assert ray.stdout is not None
            for line in map(str.rstrip, ray.stdout):
                kept.append(line)
                if stage := STAGE.search(line):
                    say(f"  {stage[0]}")
        if ray.returncode:
            raise ClusterError("\n".join(("what Ray said last:", *kept, f"{self.path}: {wrong}")))

    def _start(self, *words: str) -> "subprocess.Popen[str]":
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        return subprocess.Popen(
            [RAY, *words], stdin=null, stdout=pipe, stderr=subprocess.STDOUT, text=True, errors="replace"
        )


def say(text: str) -> None:
    """On stderr: stdout is the run's."""
    print(text, file=sys.stderr, flush=True)
