"""One run on a real Ray, in namespaces of its own, for all the tests that look at one."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import WarmStart
from asyncrl.config.task import ChainsTask
from asyncrl.training.warm_start import make_model
from tests.support import needs

REPOSITORY = Path(__file__).parents[2]
NAMESPACES = ["unshare", *(["--user", "--map-root-user"] if os.geteuid() else []), "--pid", "--net", "--fork"]


@pytest.fixture(scope="session")
def doors() -> Iterator[dict[str, Any]]:
    """The facts that `inside.py` found."""
    probe = [*NAMESPACES, "--mount-proc", "/sbin/ip", "link", "set", "lo", "up"]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip(needs.NAMESPACES)
    directory = Path(tempfile.mkdtemp(prefix="doors-"))  # short: Ray's sockets lie below it
    try:
        model = make_model(WarmStart(steps=1, hidden_size=32, layers=1), ChainsTask(), 0, directory / "model")
        words = [sys.executable, "-m", "tests.security.inside", str(directory), str(model)]
        done = subprocess.run(
            [*NAMESPACES, "--mount-proc", *words],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        yield json.loads((directory / "facts.json").read_text())
    finally:
        shutil.rmtree(directory, ignore_errors=True)
