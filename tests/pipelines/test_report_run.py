"""The report of real runs, whose bottleneck was made."""

import json
import re
from pathlib import Path

from tests.support import quickstart_runs
from tests.support.command import asyncrl

SLOW = """
import time

def reward(prompt, completion, answer):
    time.sleep(0.1)
    return float(len(completion) % 2)
"""


def test_a_slow_reward_function_is_named(tmp_path: Path, model: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    slow = f"reward.function={tmp_path}/slow.py:reward"
    quickstart_runs.run(tmp_path, model, slow, "evaluation.prompts=0", "steps=2")
    written = asyncrl("report", tmp_path / "run").out.strip()
    assert written == str(tmp_path / "run" / "report.html")
    found = re.search(r'id="data">(.*?)</script>', Path(written).read_text(), re.DOTALL)
    assert found is not None
    data = json.loads(found[1])
    assert data["headline"]["bound"] == "reward"
    assert "reward.workers=2" in data["headline"]["advice"]
    assert dict(data["environment"])["python"]
    assert {"newest", "longest", "off-policy"} <= {kind["name"] for kind in data["samples"]["kinds"]}
