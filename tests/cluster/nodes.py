"""Nodes on loopback addresses: an SSH server each, with processes, /tmp/ray, /dev/shm and a home of its own.

`ray stop` ends every Ray of its machine, so each node is a PID namespace, and all of them live in one more (see
`inside.py`): what is killed here is ours.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.support import needs

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
TOOLS = {"unshare": "util-linux", "ip": "iproute2", "ssh-keygen": "openssh-client", "rsync": "rsync"}
SERVER = """\
Port 22
ListenAddress {address}
HostKey {key}
AuthorizedKeysFile {key}.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PidFile none
MaxStartups 100
MaxSessions 100
"""
NODE = """\
set -e
mount --bind {place}/passwd /etc/passwd
mount --bind {place}/shadow /etc/shadow
mkdir -p /tmp/ray
mount -t tmpfs -o mode=1777 tmpfs /tmp/ray
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
exec {sshd} -D -e -f {place}/sshd_config
"""


def missing() -> str:
    """Why there can be no nodes here, or nothing."""
    if os.geteuid():
        return "needs root: an SSH server for each node"
    if SSHD is None:
        return needs.SSH
    for tool, package in TOOLS.items():
        if shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is None:
            return needs.SSH if tool == "rsync" else f"needs {tool}: apt-get install {package}"
    probe = ["unshare", "--mount", "--pid", "--net", "--fork", "--mount-proc", "true"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        return needs.NAMESPACES
    return ""


class Node:
    def __init__(self, place: Path, address: str, key: Path) -> None:
        """`key` lets everybody in who has it, and is the server's own as well."""
        self.address, self.home = address, place / "home"
        self._place, self._key = place, key
        self.home.mkdir(parents=True)
        place.joinpath("passwd").write_text(
            f"root:x:0:0:root:{self.home}:/bin/bash\nsshd:x:100:65534::/run/sshd:/bin/false\n"
        )
        place.joinpath("shadow").write_text("root:*:1::::::\nsshd:!:1::::::\n")
        place.joinpath("sshd_config").write_text(SERVER.format(address=address, key=key))
        Path("/run/sshd").mkdir(exist_ok=True)
        self.start()

    def start(self) -> None:
        words = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "/bin/sh", "-c"]
        with (self._place / "sshd.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*words, NODE.format(place=self._place, sshd=SSHD)], stdout=log, stderr=log
            )

    def kill(self) -> None:
        """As if its power failed: the first process of a PID namespace takes all others with it."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def drain(self) -> str:
        """What a cloud says before it takes a machine back; returns what Ray answers."""
        ray = "RAY_AUTH_MODE=token ~/asyncrl/.venv/bin/ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION"
        words = ["ssh", "-i", str(self._key), "-o", "StrictHostKeyChecking=no", f"root@{self.address}"]
        said = subprocess.run(
            [*words, f"{ray} --reason-message reclaimed --deadline-remaining-seconds 120"],
            capture_output=True,
            text=True,
            check=False,
        )
        return "" if said.returncode == 0 else said.stdout + said.stderr

    def count(self, text: str) -> int:
        """Processes of it with that text in their command line."""
        inside = Path(f"/proc/{self._first()}/root/proc")
        lines = [path.joinpath("cmdline").read_bytes() for path in inside.iterdir() if path.name.isdigit()]
        return sum(text.encode() in line for line in lines)

    def _first(self) -> int:
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        return int(children.read_text().split()[0])


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {timeout_s:.0f} s"
        time.sleep(0.1)
