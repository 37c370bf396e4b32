"""The doctor's judgements on machines with one thing wrong, and what it gathers from this one."""

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.observe.doctor import gather
from asyncrl.observe.doctor.checks import CHECKS, Verdict, judge
from asyncrl.observe.doctor.facts import Cuda, Disk, Facts, Gpu, Leftovers
from asyncrl.system.devices import has_gpu
from pipelines.cli.doctor import doctor

GIB = 1 << 30
SOUND = Facts(
    packages={"ray": "2.60.0", "torch": "2.13.0+cpu"}, requirements={"ray": "<2.62,>=2.59", "torch": ">=2.11"}
)
CARD = Gpu(name="NVIDIA L4", driver="580.1", memory=24 * GIB)
WITH_GPU: dict[str, Any] = {
    "gpu_devices": 1,
    "gpus": (CARD,),
    "cuda": Cuda(torch="13.0", works=True, nccl="22800", ipc=True),
    "mps": True,
    "vllm": "0.29.0",
}

BAD: list[tuple[dict[str, Any], str, str, str, str]] = [
    ({"python": (3, 10, 4)}, "python", "problem", "3.10.4 is too old", "make PYTHON=python3.12 install"),
    ({"packages": {"torch": "2.13.0"}}, "ray", "problem", "is not installed", "pip install 'ray<2.62,>=2.59'"),
    ({"packages": SOUND.packages | {"ray": "2.40.0"}}, "ray", "problem", "too old to be safe", "pip install 'ray"),
    ({"packages": SOUND.packages | {"ray": "2.62.0"}}, "ray", "warning", "outside of what is tested", "pip install"),
    ({"packages": SOUND.packages | {"torch": "2.10"}}, "torch", "warning", "2.10 is outside", "'torch>=2.11'"),
    ({"vllm": "0.12.0"}, "vllm", "warning", "0.12.0, engine=vllm needs", "pip install 'asyncrl[vllm]'"),
    (WITH_GPU | {"vllm": None}, "vllm", "warning", "not installed", "pip install 'asyncrl[vllm]'"),
    ({"gpu_devices": 2}, "gpu", "problem", "their driver does not answer", "nvidia-smi"),
    (WITH_GPU | {"cuda": Cuda()}, "gpu", "problem", "built without CUDA", "--force-reinstall torch"),
    (WITH_GPU | {"cuda": Cuda(torch="13.0")}, "gpu", "problem", "CUDA 13.0 and cannot use them", "torch.cuda.init"),
    (WITH_GPU | {"cuda": Cuda(torch="13.0", works=True)}, "nccl", "warning", "no cupy", "pip install 'asyncrl[nccl]'"),
    (
        WITH_GPU | {"cuda": Cuda(torch="13.0", works=True, nccl="22800")},
        *("cuda ipc", "warning", "is refused here", "weights.transport=nccl"),
    ),
    (WITH_GPU | {"mps": False}, "mps", "warning", "take turns on the GPU", "nvidia-cuda-mps-control -d"),
    ({"memory": GIB}, "memory", "warning", "1.0 GiB available", "ps aux"),
    ({"shared_memory": (64 << 20, 64 << 20)}, "shared memory", "problem", "0.06 of 0.06 GiB", "--shm-size=8g"),
    ({"shared_memory": (8 * GIB, GIB)}, "shared memory", "warning", "1.00 of 8.00 GiB", "ls -lS /dev/shm"),
    ({"disk": Disk(directory="/x", writable=False)}, "disk", "problem", "cannot be written to", "chmod u+rwx /x"),
    ({"disk": Disk(directory="/x", free=1 << 20)}, "disk", "problem", "/x has 0 GiB free", "root="),
    ({"disk": Disk(directory="/x", free=5 * GIB)}, "disk", "warning", "/x has 5 GiB free", "root="),
    ({"disk": Disk(directory="/x", fsync_s=None)}, "disk", "problem", "refuses fsync", "root="),
    ({"disk": Disk(directory="/x", fsync_s=0.5)}, "disk", "warning", "fsync takes 500 ms", "root="),
    ({"open_files": (1024, 65536)}, "open files", "warning", "1024 a process", "ulimit -n 65536"),
    ({"open_files": (1024, 1024)}, "open files", "problem", "at most 1024", "--ulimit nofile=65536"),
    ({"loopback": False}, "ports", "problem", "no port of 127.0.0.1", "ip link set lo up"),
    ({"taken_ports": (6379,)}, "ports", "warning", "6379 taken", "ss -ltnp 'sport = :6379'"),
    ({"bubblewrap": False, "sandbox": "missing"}, "sandbox", "warning", "no bubblewrap", "apt-get install bubblewrap"),
    ({"sandbox": "no sandbox can be made here (x): y"}, "sandbox", "warning", "(x)", "user.max_user_namespaces"),
    ({"py_spy": False}, "py-spy", "warning", "not installed", "pip install py-spy"),
    ({"ptrace_scope": 1, "root": False}, "py-spy", "warning", "may not look", "kernel.yama.ptrace_scope=0"),
    ({"newest_file": 7200.0}, "clock", "problem", "is 2.0 h before our own files", "timedatectl"),
    ({"disk": Disk(directory="/x", ahead_s=30.0)}, "clock", "warning", "differs by 30 s", "timedatectl"),
    (
        {"leftovers": Leftovers(processes=(7, 8))},
        "leftovers",
        "warning",
        "whose run is dead: 7 8",
        "asyncrl doctor --clean",
    ),
    (
        {"leftovers": Leftovers(directories=("/tmp/asyncrl-a",), bytes=GIB)},
        *("leftovers", "warning", "1 directories", "rm -r /tmp/asyncrl-a"),
    ),
]


@pytest.mark.parametrize(("facts", "check", "level", "found", "mend"), BAD)
def test_each_fault_is_named_with_its_command(facts: dict[str, Any], check: str, level: str, found: str, mend: str):
    wrong = [verdict for verdict in judge(msgspec.structs.replace(SOUND, **facts)) if verdict.level != "ok"]
    (verdict,) = wrong  # nothing else suffers
    assert (verdict.check, verdict.level) == (check, level)
    assert found in verdict.found
    assert mend in verdict.mend


@pytest.mark.parametrize("facts", [{}, WITH_GPU, {"shared_memory": None}, {"ptrace_scope": 1, "root": True}])
def test_a_sound_machine_has_nothing_to_mend(facts: dict[str, Any]) -> None:
    verdicts = judge(msgspec.structs.replace(SOUND, **facts))
    assert {verdict.level for verdict in verdicts} == {"ok"}
    assert not any(verdict.mend for verdict in verdicts)


def test_every_check_has_a_fault_above() -> None:
    blamed = {check for _, check, *_ in BAD}
    names = {verdict.check for verdict in judge(msgspec.structs.replace(SOUND, **WITH_GPU))}
    assert names - {"packages", "transformers"} <= blamed
    assert len(CHECKS) == 16


def test_the_command_looks_at_this_machine(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("asyncrl")), "doctor", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    verdicts = msgspec.json.decode(done.stdout, type=list[Verdict])
    assert done.returncode == int(any(verdict.level == "problem" for verdict in verdicts)), done.stdout
    by_check = {verdict.check: verdict for verdict in verdicts}
    assert by_check["python"].found == ".".join(map(str, sys.version_info[:3]))
    assert "torch" in by_check["packages"].found
    assert str(tmp_path) in by_check["disk"].found
    assert list(tmp_path.iterdir()) == []


def test_problems_end_the_command_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("pipelines.cli.doctor.gather", lambda root: msgspec.structs.replace(SOUND, loopback=False))
    assert doctor() == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "ip link set lo up" in line] == ["problem"]
    assert lines[-1] == "1 problem, 0 warnings"
    monkeypatch.setattr("pipelines.cli.doctor.gather", lambda root: msgspec.structs.replace(SOUND, py_spy=False))
    assert doctor() == 0


def test_a_place_that_cannot_be_written_to_is_seen(tmp_path: Path) -> None:
    assert gather._disk(tmp_path / "not" / "there").writable
    assert not gather._disk(Path("/proc/self")).writable


def test_a_dead_owners_directory_is_left_over_and_a_living_ones_is_not(tmp_path: Path) -> None:
    for name in ("dead", "alive"):
        (tmp_path / f"asyncrl-{name}" / "ray").mkdir(parents=True)
        (tmp_path / f"asyncrl-{name}" / ".owner").touch()
        (tmp_path / f"asyncrl-{name}" / "ray" / "log").write_bytes(bytes(1000))
    descriptor = os.open(tmp_path / "asyncrl-alive" / ".owner", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    left = gather.leftovers(tmp_path)
    os.close(descriptor)
    assert left.directories == (str(tmp_path / "asyncrl-dead"),)
    assert left.bytes == 1000


def test_a_ray_whose_driver_is_dead_is_found_by_its_directory(tmp_path: Path) -> None:
    """A process with a raylet's name and arguments; its directory has no living owner."""
    (tmp_path / "asyncrl-dead").mkdir()
    raylet = tmp_path / "raylet"
    raylet.symlink_to(sys.executable)
    words = [str(raylet), "-c", "import time; time.sleep(60)", f"--raylet_socket_name={tmp_path}/asyncrl-dead/ray/x"]
    process = subprocess.Popen(words)
    try:
        deadline = time.monotonic() + 10
        while not (found := gather.leftovers(tmp_path).processes) and time.monotonic() < deadline:
            time.sleep(0.01)  # the kernel shows its arguments a moment after it began
        assert found == (process.pid,)
    finally:
        process.kill()
        process.wait()


def test_the_question_to_torch_is_answered_with_and_without_a_gpu() -> None:
    found = json.loads(
        subprocess.run([sys.executable, "-c", gather.CUDA_PROBE], capture_output=True, check=True).stdout
    )
    assert found["works"] == has_gpu()


def test_requirements_are_read_from_our_own_metadata() -> None:
    wanted = dict(gather._requirements())
    assert wanted["torch"].startswith("<") or wanted["torch"].startswith(">=")
    assert wanted["msgspec"].startswith(">=")  # its extra is left out
    assert "pytest" not in wanted
