"""TRL's GRPOTrainer against asyncrl: the same model, prompts, rewards, samples per step, answer limit and machine.

    python3 -m venv /tmp/trl && /tmp/trl/bin/pip install torch==2.13.0 -r benchmarks/peers/requirements.txt
    /tmp/trl/bin/python -m benchmarks.peers.trl_grpo --asyncrl .venv/bin/asyncrl     the quickstart, on a CPU
    python -m benchmarks.peers.trl_grpo --model models/smollm2 [key=value ...]       SmolLM2 on a GPU

On a CPU asyncrl runs first and makes the warm-started model, and TRL generates with transformers. With --model both
generate with vLLM on the card that they train on: TRL in its colocated mode, asyncrl beside its trainer, with the same
share of the memory; `--engine native` takes asyncrl's own engine instead. The figure is completions trained per second.
Start-up and the first steps are left out of both: one of TRL's, which waits for itself in each, four of asyncrl's.
asyncrl spends nothing on groups whose rewards are all equal, TRL computes their gradients, which are zero: the share of
the groups that are learned from is reported for both, and the ratio is only a fair one where it is high.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec

from asyncrl.types import Prompt
from benchmarks.runs import answers, run, steady

Judge = Callable[[str, str, str], float | dict[str, float]]
WANTED = 4.0
"""Times TRL's completions per second."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What both sides are set to."""

    group_size: int = 8
    groups_per_step: int
    max_tokens: int
    lr: float
    prompt_tokens: int = 0
    """Room for a prompt in the context of vLLM; 0 generates with transformers on a CPU."""
    memory: float = 0.3
    """Share of the card for generation."""
    micro_batch: int
    """Samples of one forward and backward in TRL, which pads them; asyncrl packs tokens up to a budget."""

    @property
    def on_gpu(self) -> bool:
        return self.prompt_tokens > 0

    @property
    def samples(self) -> int:
        return self.group_size * self.groups_per_step


QUICKSTART = Setting(groups_per_step=32, max_tokens=80, lr=2e-4, micro_batch=256)
SMOLLM2 = Setting(groups_per_step=64, max_tokens=1024, lr=1e-6, prompt_tokens=512, micro_batch=32)


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """One side."""

    samples_per_second: float
    learned: float
    """Share of the groups whose rewards differ."""
    mean_tokens: float
    """Of the answers."""

    def __str__(self) -> str:
        return (
            f"{self.samples_per_second:.1f} completions trained per second, answers of {self.mean_tokens:.0f} tokens, "
            f"{self.learned:.0%} of the groups learned from"
        )


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    setting: Setting
    asyncrl: Rate | None
    trl: Rate | None
    ratio: float | None


def our_overrides(setting: Setting, model: Path | None, steps: int, engine: str = "vllm") -> list[str]:
    found = [
        f"steps={steps}",
        f"rollout.group_size={setting.group_size}",
        f"rollout.max_tokens={setting.max_tokens}",
        f"flow.groups_per_step={setting.groups_per_step}",
        f"trainer.lr={setting.lr}",
        "evaluation.every=0",
    ]
    if model is None:
        return found
    return [
        *found,
        f"model.path={model}",
        f"engine={engine}",
        f"engine.memory={setting.memory}",
        f"engine.max_batch={setting.samples}",
        f"engine.max_length={setting.prompt_tokens + setting.max_tokens}",
        "engine.reproducible=false" if engine == "vllm" else "engine.device=cuda",
        "trainer.token_budget=65536",
        "trainer.warmup_steps=0",
        "evaluation.prompts=0",
        "checkpoint.every=0",
        "checkpoint.last=false",
    ]


def our_rate(directory: Path) -> Rate:
    lengths, learned = answers(directory)
    rate = steady(directory).samples_per_second
    return Rate(samples_per_second=rate, learned=learned, mean_tokens=mean(lengths))


def their_arguments(setting: Setting, steps: int) -> dict[str, Any]:
    """Of GRPOConfig: as many samples a step, and no more than one update from each."""
    common = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": setting.micro_batch,
        "gradient_accumulation_steps": setting.samples // setting.micro_batch,
        "num_generations": setting.group_size,
        "max_completion_length": setting.max_tokens,
        "max_steps": steps,
        "learning_rate": setting.lr,
        "lr_scheduler_type": "constant",
        "beta": 0.0,
        "temperature": 1.0,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    if not setting.on_gpu:
        return common | {"use_cpu": True, "bf16": False}
    return common | {
        "bf16": True,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": setting.memory,
        "vllm_max_model_length": setting.prompt_tokens + setting.max_tokens,
    }


def task_of(setting: Setting) -> tuple[Any, Judge]:
    from asyncrl.tasks.registry import make_task

    if not setting.on_gpu:
        from asyncrl.config.task import ChainsTask
        from asyncrl.tasks.chains import reward

        return make_task(ChainsTask(), 0), reward
    from asyncrl.tasks.reasoning_gym import graded_reward
    from pipelines.compose import compose

    return make_task(compose(["experiment=smollm2"]).task, 0), graded_reward


def shown(prompt: Prompt, *, chat: bool) -> str | list[dict[str, str]]:
    """As TRL takes it: text, or the turns of a chat."""
    turns = (*prompt.earlier, prompt.text)
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)] if chat else prompt.text


def their_rate(setting: Setting, model: Path, steps: int) -> Rate:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    task, reward = task_of(setting)
    prompts = [task.prompt("train", index) for index in range(steps * setting.groups_per_step)]
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    marks: list[float] = []

    class StepClock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append(time.perf_counter())
            rate = f", {setting.samples / (marks[-1] - marks[-2]):.1f} samples/s" if len(marks) > 1 else ""
            print(f"TRL step {len(marks)}/{steps}{rate}", flush=True)

    def judge(prompts: list[Any], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        # TRL hands over text without special tokens; in the quickstart the end of an answer is one, and counts.
        answered = [tokenizer.decode(ids, skip_special_tokens=setting.on_gpu) for ids in completion_ids]
        given = [reward(str(p), c, a) for p, c, a in zip(prompts, answered, answer, strict=True)]
        return [sum(each.values()) if isinstance(each, dict) else each for each in given]

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype="float32"),  # masters, as asyncrl's
        processing_class=tokenizer,
        reward_funcs=judge,
        train_dataset=Dataset.from_dict(
            {
                "prompt": [shown(prompt, chat=setting.on_gpu) for prompt in prompts],
                "answer": [prompt.answer for prompt in prompts],
            }
        ),
        args=GRPOConfig(**their_arguments(setting, steps)),
        callbacks=[StepClock()],
    )
    trainer.train()
    logged = [row for row in trainer.state.log_history if "frac_reward_zero_std" in row]
    return Rate(
        samples_per_second=(steps - 1) * setting.samples / (marks[-1] - marks[0]),
        learned=1 - mean(row["frac_reward_zero_std"] for row in logged),
        mean_tokens=mean(row["completions/mean_length"] for row in logged),
    )


def compare(options: argparse.Namespace) -> Figures:
    setting = SMOLLM2 if options.model else QUICKSTART
    if options.micro_batch:
        setting = msgspec.structs.replace(setting, micro_batch=options.micro_batch)
    experiment = "smollm2" if options.model else "quickstart"
    ours = theirs = None
    model = options.model and options.model.resolve()
    if "asyncrl" in options.sides:
        overrides = our_overrides(setting, model, options.our_steps or (20 if options.model else 150), options.engine)
        directory, _ = run(*overrides, *options.overrides, asyncrl=options.asyncrl, experiment=experiment)
        model = model or directory / "model"
        ours = our_rate(directory)
        print(f"asyncrl: {ours}", flush=True)
    if "trl" in options.sides:
        theirs = their_rate(setting, model, 1 + options.steps)
        print(f"TRL: {theirs}", flush=True)
    ratio = ours.samples_per_second / theirs.samples_per_second if ours and theirs else None
    return Figures(setting=setting, asyncrl=ours, trl=theirs, ratio=ratio)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further settings of asyncrl")
    parser.add_argument("--model", type=Path, metavar="DIR", help="SmolLM2: compare on a GPU")
    parser.add_argument("--asyncrl", metavar="COMMAND", help="the asyncrl to compare with; this interpreter's own")
    parser.add_argument("--engine", choices=("vllm", "native"), default="vllm", help="of asyncrl with --model")
    parser.add_argument("--steps", type=int, default=6, help="TRL steps measured, after one that is not")
    parser.add_argument("--our-steps", type=int, metavar="N", help="asyncrl steps (150; with --model 20)")
    parser.add_argument("--micro-batch", type=int, metavar="N", help="samples of one forward in TRL")
    parser.add_argument("--sides", nargs="+", choices=("asyncrl", "trl"), default=["asyncrl", "trl"])
    parser.add_argument("--out", type=Path, metavar="FILE", help="the figures as JSON")
    options = parser.parse_intermixed_args(words)
    if options.model is None and "asyncrl" not in options.sides:
        parser.error("--sides trl needs a --model: the quickstart's is made by asyncrl")
    return options


def main() -> None:
    options = parse()
    found = compare(options)
    if options.out:
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    if found.ratio:
        verdict = "held" if found.ratio >= WANTED else "NOT held"
        print(f"completions trained per second, asyncrl / TRL: {found.ratio:.1f}x, wanted {WANTED:g}x: {verdict}")


if __name__ == "__main__":
    main()
