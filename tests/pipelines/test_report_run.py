"""The report of real runs, whose bottleneck was made."""

import json
import re
import subprocess
from pathlib import Path

from tests.support.quickstart_runs import COMMAND, finish, start

SLOW = """
import time

def reward(prompt, completion, answer):
    time.sleep(0.1)
    return float(len(completion) % 2)
"""


def test_a_slow_reward_function_is_named(tmp_path: Path, model: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    finish(start(tmp_path, model, f"reward.function={tmp_path}/slow.py:reward", "evaluation.prompts=0", "steps=2"))
    written = _report(tmp_path / "run")
    assert written == str(tmp_path / "run" / "report.html")
    found = re.search(r'id="data">(.*?)</script>', Path(written).read_text(), re.DOTALL)
    assert found is not None
    data = json.loads(found[1])
    assert data["headline"]["bound"] == "reward"
    assert "reward.workers=2" in data["headline"]["advice"]
    assert dict(data["environment"])["python"]
    assert {"newest", "longest", "off-policy"} <= {kind["name"] for kind in data["samples"]["kinds"]}


def _report(run: Path) -> str:
    """What the command prints."""
    return subprocess.run([COMMAND, "report", str(run)], capture_output=True, text=True, check=True).stdout.strip()
