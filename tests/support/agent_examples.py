"""Examples of agents, run as a reader runs them."""

import json
import subprocess
import sys
from pathlib import Path

from tests.support.chat_families import HERMES
from tests.support.tiny_chat import save_chat_tokenizer, tiny_chat_model

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, directory: Path) -> None:
    """With a tiny model whose chat template knows tools."""
    model = tiny_chat_model(directory / "model")
    save_chat_tokenizer(model, HERMES)
    command = [sys.executable, str(EXAMPLES / name), str(model)]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (run,) = (directory / "runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 3
