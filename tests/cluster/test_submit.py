"""What `asyncrl submit` refuses before it touches a machine, and the run that outlives its connection."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from asyncrl.errors import ClusterError, ConfigError
from pipelines.cli import main
from pipelines.cluster.submit import submit
from pipelines.compose import compose

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """Filled in, with a head that nobody can log in to."""
    described = msgspec.yaml.decode((REPOSITORY / "configs" / "cluster" / "local.yaml").read_bytes())
    described["provider"] |= {"head_ip": "127.0.0.1", "worker_ips": ["127.0.0.2"]}
    described["auth"] = {"ssh_user": "nobody-at-all", "ssh_private_key": str(tmp_path / "key")}
    described["file_mounts"]["~/.ray/auth_token"] = str(tmp_path / "home" / "token")
    path = tmp_path / "cluster.yaml"
    path.write_bytes(msgspec.yaml.encode(described))
    return path


@pytest.mark.parametrize("value", ["auto", "local", "inprocess", "10.0.0.5:6379"])
def test_cluster_files_are_no_choices_of_a_setting(value: str) -> None:
    assert compose(["seed=3", f"cluster={value}"]).cluster == value
    assert compose([f"+cluster={value}", "cluster=local"]).cluster == "local"


@pytest.mark.parametrize(
    ("override", "refusal"),
    [
        ("stepss=3", "unknown key stepss: did you mean steps?"),
        ("root=runs", "root=runs must be a directory that all nodes see"),
    ],
)
def test_settings_are_refused_before_a_machine_is_touched(override: str, refusal: str, cluster: Path) -> None:
    with pytest.raises(ConfigError, match=refusal):
        submit(cluster, [override])


def test_a_run_is_not_fetched_over_another(cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    with pytest.raises(ConfigError, match="runs/mine exists already, where the run is fetched to"):
        submit(cluster, ["name=mine"], down=True)


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs ssh: apt-get install openssh-client")
def test_a_head_that_lets_nobody_in_is_named_at_once(cluster: Path, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"the head does not let us in: ssh .*nobody-at-all@127.0.0.1"):
        submit(cluster, ["experiment=quickstart"])
    token = tmp_path / "home" / "token"
    assert (oct(token.stat().st_mode & 0o777), len(token.read_text())) == ("0o600", 64)


def test_a_template_and_a_manifest_are_refused_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    for name, refusal in (("aws", "ImageId=ami-CHANGE_ME: an example"), ("kuberay-job", "kubectl apply -f")):
        assert main(["submit", str(REPOSITORY / "configs" / "cluster" / f"{name}.yaml")]) == 2
        assert refusal in capsys.readouterr().err


def job(home: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pipelines.cluster.job", *words]
    environment = {**os.environ, "HOME": str(home)}
    return subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_job_outlives_who_began_it_and_its_end_is_told(tmp_path: Path) -> None:
    flag = tmp_path / "go"
    program = f"echo begun; while [ ! -e {flag} ]; do sleep 0.05; done; echo 'no end of line' | tr -d '\\n'; exit 7"
    assert job(tmp_path, "start", "a", "/bin/sh", "-c", program).returncode == 0
    again = job(tmp_path, "start", "a", "true")
    assert (again.returncode, "name=a runs already" in again.stderr) == (1, True)
    flag.touch()
    assert job(tmp_path, "follow", "a", "MARK").stdout == "MARK\nbegun\nno end of line\nMARK 7\n"
    assert job(tmp_path, "start", "a", "/bin/sh", "-c", "echo anew").returncode == 0
    assert job(tmp_path, "follow", "a", "MARK").stdout == "MARK\nanew\n\nMARK 0\n"


def test_a_job_is_interrupted_as_by_a_person(tmp_path: Path) -> None:
    program = "import pathlib, sys, time\npathlib.Path(sys.argv[1]).touch()\ntry: time.sleep(60)\n"
    program += "except KeyboardInterrupt: sys.exit(130)"
    assert job(tmp_path, "start", "b", sys.executable, "-c", program, str(tmp_path / "ready")).returncode == 0
    while not (tmp_path / "ready").exists():
        time.sleep(0.05)
    assert job(tmp_path, "stop", "b").returncode == 0
    assert job(tmp_path, "follow", "b", "MARK").stdout.endswith("MARK 130\n")


def test_a_job_whose_supervisor_was_killed_is_lost(tmp_path: Path) -> None:
    assert job(tmp_path, "start", "c", "sleep", "60").returncode == 0
    process = tmp_path / ".asyncrl/jobs/c/process"
    while not process.exists():
        time.sleep(0.05)
    os.kill(int(process.with_name("supervisor").read_text()), signal.SIGKILL)
    os.kill(int(process.read_text()), signal.SIGKILL)
    assert job(tmp_path, "follow", "c", "MARK").stdout == "MARK\n\nMARK 1\n"


def test_a_process_that_got_the_number_of_an_old_job_is_left_alone(tmp_path: Path) -> None:
    place = tmp_path / ".asyncrl/jobs/d"
    place.mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as stranger:
        for name in ("supervisor", "process"):
            (place / name).write_text(str(stranger.pid))
            os.utime(place / name, (0, 0))
        assert job(tmp_path, "stop", "d").returncode == 0
        assert job(tmp_path, "start", "d", "true").returncode == 0
        assert job(tmp_path, "follow", "d", "MARK").stdout == "MARK\n\nMARK 0\n"
        assert stranger.poll() is None
        stranger.kill()
