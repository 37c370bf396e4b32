"""The last line of a test run: how many tests were skipped, and how to have them run."""

import subprocess
import sys
from pathlib import Path

from tests.support import needs

REPOSITORY = Path(__file__).parents[1]
SKIPPED = """
import pytest
from tests.support import needs

@pytest.mark.parametrize("n", range(3))
def test_gpu(n):
    pytest.skip(needs.GPU)

@pytest.mark.skipif(True, reason=needs.package("wandb"))
def test_wandb(): ...

@pytest.fixture
def broken():
    pytest.skip("it is broken")

def test_broken(broken): ...

def test_it(): ...
"""


def test_reasons_are_counted_the_commonest_first() -> None:
    assert needs.total([]) == ""
    assert needs.total([f"Skipped: {needs.GPU}"]) == "1 skipped: 1 needs a GPU (make test-gpu)"
    reasons = [needs.package("mlflow"), *[needs.GPU] * 2, needs.SSH, "it is broken"]
    assert needs.total(reasons) == (
        "5 skipped: 2 need a GPU (make test-gpu), 1 (it is broken), 1 needs an SSH server and rsync "
        "(apt-get install openssh-server rsync), 1 needs asyncrl[mlflow] (pip install 'asyncrl[mlflow]')"
    )


def test_it_closes_what_several_processes_ran(tmp_path: Path) -> None:
    file = tmp_path / "test_skipped.py"
    file.write_text(SKIPPED)
    options = ["-c", "/dev/null", "--rootdir", str(tmp_path), "-p", "tests.conftest", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", *options, str(file)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = needs.total([*[needs.GPU] * 3, needs.package("wandb"), "it is broken"])
    assert said == done.stdout.splitlines()[-1], done.stdout
