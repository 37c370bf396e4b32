"""`asyncrl init DIR`: a small project that runs as it is, to be changed file by file into one's own."""

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

from asyncrl.config import WarmStart
from asyncrl.config.task import ChainsTask
from asyncrl.errors import ConfigError
from asyncrl.system.storage import storing
from asyncrl.tasks.registry import make_task

PROMPTS = 96
STEPS = 200
"""Of the supervised start: enough that the model solves some prompts, and few enough that it has much to learn."""
TASK = ChainsTask(median_size=2, max_size=4)

REWARD = '''\
"""The reward: a plain function, called for one completion at a time in a process of its own."""

from os.path import commonprefix


def reward(prompt: str, completion: str, answer: str) -> dict[str, float]:
    """`answer` is the reference from prompts.jsonl. The reward is the sum of its parts; a number alone will do."""
    begins_right = len(commonprefix([completion, answer])) / len(answer)
    return {"right": float(completion == answer), "begins_right": 0.2 * begins_right}
'''
SCRIPT = """\
#!/bin/sh
# Trains a model on prompts.jsonl with the reward of reward.py. Settings may follow, and win over those below:
#   ./run.sh steps=100
#   MODEL=~/models/Qwen3-0.6B ./run.sh rollout.chat=true rollout.max_tokens=512
set -e
cd "$(dirname "$0")"
exec asyncrl "${COMMAND:-run}" model=checkpoint model.path="${MODEL:-model}" task=jsonl task.path=prompts.jsonl \\
    reward.function=reward.py:reward task.held_out=0.2 name="${NAME:-run-$(date +%Y%m%d-%H%M%S)}" \\
    steps=20 flow.groups_per_step=8 rollout.max_tokens=48 trainer.lr=2e-4 \\
    evaluation.every=10 evaluation.prompts=16 "$@"
"""
README = """\
# {name}

Written by `asyncrl init`. It runs as it is, on a CPU:

    COMMAND=plan ./run.sh    # what would run, and what the reward gives to a prompt
    ./run.sh                 # train; the progress is printed, the run is written to runs/
    asyncrl report runs/*    # one HTML page with curves, completions, and what limits the run

- `prompts.jsonl`: {prompts} prompts, one JSON object a line, each with a reference. Write your own rows; a row may
  be a chat.
- `reward.py`: the reward, a plain function. Change it, and look at what it returns with `COMMAND=plan ./run.sh`.
- `model/`: a model of 0.3 M parameters that has seen {steps} batches of such sums. `MODEL=DIRECTORY ./run.sh` takes
  another, a Hugging Face model directory.
- `run.sh`: the command. Any setting can be added as `key=value`; `asyncrl plan --config` lists them.

A prompt is a chain of sums such as `a3b+2c-1=`: a is 3, b is a+2, c is b-1. The reference works it out, `a3b+25c-14$`:
each result stands behind its sum, and `$` is the end. The small model knows only the characters of such chains.
"""


def init(directory: Path, say: Callable[[str], None]) -> None:
    """ConfigError if something is there already."""
    if directory.exists():
        raise ConfigError(f"{directory} exists already: give `asyncrl init` the name of a new directory")
    # Beside it, so that one that is interrupted leaves nothing in the way of the next.
    scratch = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    with storing(directory):
        scratch.mkdir(parents=True)
        try:
            _fill(scratch, directory, say)
            scratch.rename(directory)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    run, readme = shlex.quote(str(directory / "run.sh")), directory / "README.md"
    say(f"{directory} is ready: start with\n  {run}\n{readme} says what each file is, and how to make it yours")


def _fill(scratch: Path, directory: Path, say: Callable[[str], None]) -> None:
    rows = [make_task(TASK, 0).prompt("train", number) for number in range(PROMPTS)]
    lines = [json.dumps({"prompt": row.text, "answer": row.answer}) + "\n" for row in rows]
    (scratch / "prompts.jsonl").write_text("".join(lines))
    (scratch / "reward.py").write_text(REWARD)
    (scratch / "README.md").write_text(README.format(name=directory.resolve().name, prompts=PROMPTS, steps=STEPS))
    script = scratch / "run.sh"
    script.write_text(SCRIPT)
    script.chmod(script.stat().st_mode | 0o100)
    say(f"making a model of 0.3 M parameters in {directory / 'model'}, which takes a minute at most")
    from asyncrl.training.warm_start import make_model

    make_model(WarmStart(steps=STEPS), TASK, 0, scratch / "model")
