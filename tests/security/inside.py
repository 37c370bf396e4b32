"""A real run on a Ray of its own, looked at from every side: `python -m tests.security.inside DIRECTORY MODEL`.

It is process 1 of a fresh PID and network namespace with one address that is not the loopback's, so every socket and
process it sees belongs to the run. What it finds goes to DIRECTORY/facts.json; the tests judge it.
"""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from pathlib import Path
from typing import Any

PUBLIC = "10.9.8.7"
"""The address of this machine, as others would know it."""
CLIENT = """
import sys
from actors.runtime.spawn import cluster
from asyncrl.errors import ConfigError
try:
    with cluster(sys.argv[1], cpus=0):
        print("let in")
except ConfigError as error:
    print(error)
"""
CLIENTS = {
    "wrong token": {"RAY_AUTH_TOKEN": "f" * 64},
    "no token": {},
    "anonymous": {"RAY_AUTH_MODE": "disabled"},
}
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""As a client of a Ray on the loopback; otherwise Ray takes 127.0.0.1 for the public address."""


def main(directory: Path, model: Path) -> None:
    for command in (f"addr add {PUBLIC}/32 dev lo", "link set lo up", f"route add default dev lo src {PUBLIC}"):
        subprocess.run(["/sbin/ip", *command.split()], check=True)
    before = listeners()
    home = directory / "home"
    (home / ".ray").mkdir(parents=True)
    (home / ".ray" / "auth_token").write_text("e" * 64)  # as Ray itself leaves it: readable by everybody
    (home / ".ray" / "auth_token").chmod(0o644)
    environment = os.environ | {"HOME": str(home), "RAY_TMPDIR": str(directory), "OMP_NUM_THREADS": "1"}
    facts: dict[str, Any] = {"before": before}
    with (directory / "output").open("wb") as output:
        run = subprocess.Popen(command_of(directory, model), stdout=output, stderr=output, env=environment)
        try:
            wait_for(directory / "root" / "run" / "checkpoints" / "step-1", run)
            facts |= look(directory, environment)
        finally:
            run.send_signal(signal.SIGINT)
            facts["code"] = run.wait(timeout=90)
    facts["left"] = [str(path) for path in directory.glob("asyncrl-*/auth_token")]
    facts["modes"] = {str(path.relative_to(directory)): mode(path) for path in (directory / "root").rglob("*")}
    (directory / "facts.json").write_text(json.dumps(facts))


def command_of(directory: Path, model: Path) -> list[str]:
    settings = (
        "experiment=quickstart",
        "model=checkpoint",
        f"model.path={model}",
        "engine=fake",
        "engine.step_seconds=0.01",
    )
    size = (
        "steps=100000",
        "flow.groups_per_step=2",
        "flow.groups_per_take=1",
        "rollout.group_size=2",
        "evaluation.prompts=0",
    )
    kept = ("checkpoint.every=1", "checkpoint.keep=2", "sentinel.max_kl=0", "weights.probe=false", "cluster=local")
    place = (f"root={directory / 'root'}", "name=run")
    return [str(Path(sys.executable).with_name("asyncrl")), "run", *settings, *size, *kept, *place]


def wait_for(path: Path, run: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 90
    while not path.exists():
        if run.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"no {path}; the run printed:\n{(path.parents[3] / 'output').read_text()[-3000:]}")
        time.sleep(0.05)


def look(directory: Path, environment: dict[str, str]) -> dict[str, Any]:
    (ray,) = directory.glob("asyncrl-*")
    (port_file,) = ray.glob("ray/session_2*/gcs_server_port_*")
    token = ray / "auth_token"
    secret = token.read_text()
    address = f"127.0.0.1:{port_file.read_text()}"
    here = listeners()
    clients = CLIENTS | {"right token": {"RAY_AUTH_TOKEN_PATH": str(token)}}
    with ThreadPoolExecutor() as pool:
        answers = pool.map(lambda extra: knock(address, environment, directory, extra), clients.values())
        posts = pool.map(post_job, [port for _, port, _ in here])
        found = {"clients": dict(zip(clients, answers, strict=True)), "posts": list(posts)}
    return found | {
        "listeners": here,
        "public": [port for _, port, _ in here if connects(PUBLIC, port)],
        "token": mode(token),
        "token directory": mode(ray),
        "default token": mode(directory / "home" / ".ray" / "auth_token"),
        "arguments": [pid for pid in processes() if secret.encode() in read(f"/proc/{pid}/cmdline")],
        "environments": [pid for pid in processes() if secret.encode() in read(f"/proc/{pid}/environ")],
        "processes": len(processes()),
        "written": [
            str(path)
            for path in directory.rglob("*")
            if path.is_file() and path != token and secret.encode() in path.read_bytes()
        ],
        "files": sum(path.is_file() for path in ray.rglob("*")),
    }


def knock(address: str, environment: dict[str, str], directory: Path, extra: dict[str, str]) -> str:
    """What a client is told. Clients have a home without a token."""
    home = {"HOME": str(directory / "nobody"), **LOOPBACK}
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, address],
        env=environment | home | extra,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout.strip() or done.stderr[-2000:]


def post_job(port: int) -> tuple[int, int | str, str]:
    """Ray's way to run any command: answered with a status, or not in HTTP at all."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request(
            "POST", "/api/jobs/", json.dumps({"entrypoint": "true"}), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        return port, answer.status, answer.read(4096).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return port, type(error).__name__, ""


def listeners() -> list[tuple[str, int, int]]:
    """Address, port and inode of every listening TCP socket in this namespace."""
    found: list[tuple[str, int, int]] = []
    for table, family in (("/proc/net/tcp", socket.AF_INET), ("/proc/net/tcp6", socket.AF_INET6)):
        for line in Path(table).read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            raw, port = local.split(":")
            words = b"".join(bytes.fromhex(raw[i : i + 8])[::-1] for i in range(0, len(raw), 8))
            if state == "0A":
                found.append((socket.inet_ntop(family, words), int(port, 16), int(line.split()[9])))
    return found


def is_loopback(host: str) -> bool:
    address = ip_address(host)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def connects(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError:
        return False
    return True


def processes() -> list[int]:
    """All others; this one knows the token because it has just read it."""
    return [
        int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal() and int(path.name) != os.getpid()
    ]


def read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:  # it has ended
        return b""


def mode(path: Path) -> str:
    return f"{path.lstat().st_mode & 0o777:o}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
