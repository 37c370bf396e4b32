"""Tests that start a Ray in their own process, each file in an interpreter of its own.

Ray reads whom it lets in when it is imported, and other tests import it before.
"""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "file",
    [
        "actors/ray_publisher.py",
        "pipelines/ray_unreachable_engine.py",
        pytest.param("supervision/ray_stopped_processes.py", marks=pytest.mark.nightly),
    ],
)
def test_a_file_in_a_process_of_its_own(file: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / file)]
    done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
