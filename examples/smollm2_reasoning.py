"""SmolLM2-135M-Instruct learns to reverse lists of words by asynchronous GRPO, on one GPU.

    python examples/smollm2_reasoning.py models/smollm2 [native|vllm]

How to get the model and what to expect: docs/recipe-smollm2.md.
"""

import sys

from asyncrl.config import Checkpoint, Evaluation, Flow, Reward, Rollout, Run, Trainer
from asyncrl.config.engine import NativeEngine, VllmEngine
from asyncrl.config.task import ReasoningGymTask
from pipelines.train import train


def smollm2(model: str, engine: str = "native", root: str = "runs") -> Run:
    return Run(
        name="smollm2",
        root=root,
        steps=100,
        max_staleness=2,
        engine=VllmEngine() if engine == "vllm" else NativeEngine(),
        model=Checkpoint(path=model),
        task=ReasoningGymTask(
            dataset="word_sequence_reversal", options={"min_words": 2, "max_words": 4}, instruction="", examples=4
        ),
        reward=Reward(function="asyncrl.tasks.reasoning_gym:graded_reward", workers=2),
        rollout=Rollout(chat=True, group_size=16, max_tokens=32, precision="bf16"),
        flow=Flow(groups_per_step=64, groups_per_take=8),
        trainer=Trainer(lr=3e-5, warmup_steps=5, dtype="bf16"),
        evaluation=Evaluation(every=10, prompts=256),
    )


if __name__ == "__main__":
    sys.exit(train(smollm2(*sys.argv[1:])))
