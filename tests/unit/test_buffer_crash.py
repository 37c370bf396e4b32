"""Real processes, real SIGKILL. Run `python -m tests.crash_loop` for more of them."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_thirty_kills_lose_and_double_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.crash_loop", str(tmp_path / "run"), "--kills", "30", "--seed", "7"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["kills"] == 30
    assert result["acknowledged"] > 30
    assert result["steps"] > 3
    assert result["lost"] == result["duplicated"] == result["bad_files"] == result["trained_twice"] == 0
