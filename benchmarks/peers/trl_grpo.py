"""The quickstart under TRL's GRPOTrainer (transformers generation) against asyncrl: same model, task and machine.

    python3 -m venv /tmp/trl && /tmp/trl/bin/pip install torch==2.13.0 -r benchmarks/peers/requirements.txt
    /tmp/trl/bin/python -m benchmarks.peers.trl_grpo --asyncrl .venv/bin/asyncrl

asyncrl runs first and makes the warm-started model; TRL then trains the same model on the same prompts with the same
group size, answer limit and samples per step. The figure is completions trained per second, start-up left out of both.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.runs import run

GROUP_SIZE, GROUPS_PER_STEP, MAX_TOKENS = 8, 32, 80


def trl_samples_per_second(model: Path, steps: int) -> float:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from asyncrl.tasks.base import make_task
    from asyncrl.tasks.chains import reward
    from asyncrl.tasks.settings import ChainsTask

    task = make_task(ChainsTask(), 0)
    prompts = [task.prompt("train", index) for index in range((steps + 1) * GROUPS_PER_STEP)]
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    marks: list[float] = []

    class StepClock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append(time.perf_counter())

    def judge(prompts: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        # TRL hands over text without special tokens; the end of an answer is one, and counts.
        answered = [tokenizer.decode(ids) for ids in completion_ids]
        return [reward(p, c, a) for p, c, a in zip(prompts, answered, answer, strict=True)]

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        processing_class=tokenizer,
        reward_funcs=judge,
        train_dataset=Dataset.from_dict({"prompt": [p.text for p in prompts], "answer": [p.answer for p in prompts]}),
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=GROUP_SIZE * GROUPS_PER_STEP,
            num_generations=GROUP_SIZE,
            max_completion_length=MAX_TOKENS,
            max_steps=steps + 1,
            learning_rate=2e-4,
            beta=0.0,
            temperature=1.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        callbacks=[StepClock()],
    )
    trainer.train()
    return steps * GROUP_SIZE * GROUPS_PER_STEP / (marks[-1] - marks[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--asyncrl", default=".venv/bin/asyncrl", help="the asyncrl command to compare with")
    parser.add_argument("--steps", type=int, default=6, help="TRL steps measured, after one that is not")
    options = parser.parse_args()
    directory, summary = run("evaluation.every=0", asyncrl=options.asyncrl)
    ours, theirs = summary["samples_per_second"], trl_samples_per_second(directory / "model", options.steps)
    print(f"completions trained per second: asyncrl {ours:.0f}, TRL {theirs:.0f}, ratio {ours / theirs:.1f}x")


if __name__ == "__main__":
    main()
