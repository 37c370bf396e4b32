"""The examples run as their first lines say."""

import json
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_own_run(tmp_path: Path, model: Path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": f"a{i}b+1=", "answer": f"a{i}b+1{i + 1}"}) + "\n" for i in range(9))
    )
    command = [sys.executable, str(EXAMPLES / "own_run.py"), str(model), str(prompts), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    summary = json.loads((tmp_path / "own" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["samples_trained"]) == ("ok", 4, 64)
    assert summary["staleness_max"] <= 1
