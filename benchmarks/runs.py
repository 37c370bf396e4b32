"""Runs `asyncrl run` as a user would and reads its summary."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def run(*overrides: str, asyncrl: str | None = None) -> tuple[Path, dict[str, Any]]:
    """One run of the quickstart with these overrides; returns its directory and summary."""
    command = asyncrl or str(Path(sys.executable).with_name("asyncrl"))
    root = Path(tempfile.mkdtemp(prefix="asyncrl-bench-"))
    subprocess.run([command, "run", "experiment=quickstart", f"root={root}", "name=run", *overrides], check=True)
    return root / "run", json.loads((root / "run" / "summary.json").read_text())
