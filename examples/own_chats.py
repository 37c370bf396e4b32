"""Chats of your own: a supervised start on them, then reinforcement learning from where it ends.

    python examples/own_chats.py [CHATS.jsonl]

Each line is a chat: {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}, ...]}.
Without a file some are made: solved problems of the quickstart, two to a chat, for a small model that is bad at them.
"""

import json
import sys
from pathlib import Path

from asyncrl.config.task import ChainsTask
from asyncrl.tasks.registry import make_task
from pipelines.compose import compose
from pipelines.train import train

QUICK = ["cluster=inprocess", "flow.groups_per_take=2", "evaluation.prompts=32", "rollout.max_tokens=80"]


def made(path: Path, count: int = 400) -> Path:
    """Other problems than those that RL is asked, because the seed is another."""
    task = make_task(ChainsTask(), seed=1)
    with path.open("w") as file:
        for number in range(count):
            messages: list[dict[str, str]] = []
            for problem in (task.prompt("train", 2 * number), task.prompt("train", 2 * number + 1)):
                messages.append({"role": "user", "content": problem.text})
                messages.append({"role": "assistant", "content": problem.answer.removesuffix("$")})
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def start(chats: Path, name: str = "chats", steps: int = 40) -> Path:
    """Returns the model directory that it ends with."""
    own = ["pipeline=sft", f"sft.path={chats}", f"name={name}", f"steps={steps}", "model.steps=100", "trainer.lr=3e-3"]
    train(compose([*QUICK, *own, "flow.groups_per_step=16", "evaluation.every=20"]))
    return Path("runs", name, "checkpoints", f"step-{steps}")


def reinforce(model: Path, name: str = "reinforced", steps: int = 5) -> None:
    own = ["model=checkpoint", f"model.path={model}", f"name={name}", f"steps={steps}", "trainer.lr=3e-4"]
    train(compose([*QUICK, *own, "flow.groups_per_step=8"]))


if __name__ == "__main__":
    given = Path(sys.argv[1]) if len(sys.argv) > 1 else made(Path("own_chats.jsonl"))
    reinforce(start(given))
