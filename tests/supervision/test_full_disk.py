"""A disk that fills up before a run, or in the middle of one: every kind of write meets it at some amount of room."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import needs

NAMESPACE = ["unshare", "--mount"]
PAGE = 4096
HERE = ["cluster=inprocess", "model=checkpoint", "model.path=MODEL"]
ON_RAY = ["cluster=local", "model=checkpoint", "model.path=MODEL", "buffer.durability=disk", "checkpoint.every=1"]
Case = tuple[int, int, list[str]]
"""Steps before the disk fills up, how many bytes are left, and settings."""
SOME: tuple[Case, ...] = (
    (0, 10 * PAGE, HERE),
    (2, 20 * PAGE, [*HERE, "checkpoint.every=1"]),  # a checkpoint
    (2, 5 * PAGE, [*HERE, "checkpoint.every=1000"]),  # events or trajectories
    (2, 30 * PAGE, ON_RAY),
)
OTHERS: tuple[Case, ...] = (
    (0, 100 * PAGE, ["cluster=inprocess", "model.steps=20"]),
    (2, 2 * PAGE, [*HERE, "checkpoint.every=1"]),  # metrics
    *((2, pages * PAGE, [*HERE, "checkpoint.every=1000"]) for pages in (0, 3, 9)),  # metrics, events, trajectories
    (2, 0, ON_RAY),
)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(SOME, id="some", marks=pytest.mark.slow),
        pytest.param(OTHERS, id="others", marks=pytest.mark.nightly),
    ],
)
def test_each_ends_with_its_code_and_can_be_resumed(cases: tuple[Case, ...], tmp_path: Path, model: Path) -> None:
    if os.geteuid() or subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode:
        pytest.skip(needs.NAMESPACES)
    words = [*NAMESPACE, sys.executable, "-m", "tests.supervision.full_disk", str(tmp_path), str(model)]
    subprocess.run([*words, json.dumps(cases)], check=True, timeout=1400, cwd=Path(__file__).parents[2])
    facts: list[dict[str, Any]] = json.loads((tmp_path / "facts.json").read_text())
    for (steps, room, _), found in zip(cases, facts, strict=True):
        where = f"with room for {room} bytes from step {steps}: {found['output']}"
        assert not found["traceback"], where
        assert found["begun"] == bool(steps), where
        if not steps:  # the plan refuses it
            assert (found["code"], "choose another root=" in found["said"]) == (2, True), where
            continue
        assert (found["code"], "make room and try again" in found["said"]) == (6, True), where
        assert (found["resumed"], found["sound"]) == (0, 0), where
