"""TRL's GRPOTrainer against asyncrl: the same model, prompts, rewards, samples per step, answer limit and machine.

    make bench-peer-trl_grpo                                                   the quickstart, on a CPU
    python -m benchmarks.peers.trl_grpo --model models/smollm2 [key=value ...]       SmolLM2 on a GPU

The same optimizer steps are counted on both sides: the first --warm are left out, the next --steps count. Later ones of
asyncrl would be faster, because it spends nothing on groups whose rewards are all equal, and there are more of them as
a model learns; TRL computes their gradients, which are zero. The share of the groups that are learned from is shown for
both. asyncrl runs some steps more than are counted, so that it still generates for those in the last one that counts.
TRL is run once with each of --micro-batches, the samples of one forward and backward, and its best run is compared.

On a CPU asyncrl runs first and makes the warm-started model, and TRL generates with transformers. With --model TRL
generates with vLLM in its colocated mode, asyncrl with each of --engines beside its trainer, with the same share of the
card's memory. Tokens are those of the answers that were trained on.
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
from benchmarks.runs import alone, count, run

Judge = Callable[[str, str, str], float | dict[str, float]]
WANTED = 4.0
"""Times TRL's samples per second."""
FURTHER = 3
"""Steps of asyncrl behind those that count: as many as it writes ahead."""


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
    micro_batches: tuple[int, ...]
    """Samples of one forward and backward in TRL, which pads them; asyncrl packs tokens up to a budget."""

    @property
    def on_gpu(self) -> bool:
        return self.prompt_tokens > 0

    @property
    def samples(self) -> int:
        return self.group_size * self.groups_per_step


QUICKSTART = Setting(groups_per_step=32, max_tokens=80, lr=2e-4, micro_batches=(64, 256))
SMOLLM2 = Setting(groups_per_step=64, max_tokens=1024, lr=1e-6, prompt_tokens=512, micro_batches=(32, 64))


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """One side."""

    side: str
    samples_per_second: float
    tokens_per_second: float
    mean_tokens: float
    """Of the answers."""
    learned: float
    """Share of the groups whose rewards differ."""

    def __str__(self) -> str:
        return (
            f"{self.side:24}{self.samples_per_second:11.1f}{self.tokens_per_second:11,.0f}{self.mean_tokens:14.1f}"
            f"{self.learned:15.0%}"
        )


HEAD = f"{'':24}{'samples/s':>11}{'tokens/s':>11}{'answer tokens':>14}{'groups learned':>15}"


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    setting: Setting
    warm: int
    steps: int
    asyncrl: list[Rate]
    trl: list[Rate]

    @property
    def best(self) -> Rate:
        return max(self.trl, key=lambda rate: rate.samples_per_second)


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


def our_rate(directory: Path, side: str, steps: range) -> Rate:
    counted = count(directory, steps)
    return Rate(
        side=side,
        samples_per_second=counted.samples / counted.seconds,
        tokens_per_second=counted.tokens / counted.seconds,
        mean_tokens=counted.tokens / counted.samples,
        learned=counted.learned,
    )


def their_arguments(setting: Setting, micro_batch: int, steps: int) -> dict[str, Any]:
    """Of GRPOConfig: as many samples a step, and no more than one update from each."""
    common = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": setting.samples // micro_batch,
        "num_generations": setting.group_size,
        "max_completion_length": setting.max_tokens,
        "max_steps": steps,
        "learning_rate": setting.lr,
        "lr_scheduler_type": "constant",
        "beta": 0.0,
        "temperature": 1.0,
        "shuffle_dataset": False,  # the prompts of each step are asyncrl's
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


def their_rate(setting: Setting, model: Path, micro_batch: int, warm: int, steps: int) -> Rate:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    task, reward = task_of(setting)
    steps += warm
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
        args=GRPOConfig(**their_arguments(setting, micro_batch, steps)),
        callbacks=[StepClock()],
    )
    begun = time.perf_counter()
    trainer.train()
    logged = [row for row in trainer.state.log_history if "frac_reward_zero_std" in row][warm:]
    seconds = marks[-1] - (marks[warm - 1] if warm else begun)
    rate, length = (steps - warm) * setting.samples / seconds, mean(row["completions/mean_length"] for row in logged)
    return Rate(
        side=f"TRL, {micro_batch} at a time",
        samples_per_second=rate,
        tokens_per_second=rate * length,
        mean_tokens=length,
        learned=1 - mean(row["frac_reward_zero_std"] for row in logged),
    )


def compare(options: argparse.Namespace) -> Figures:
    setting = SMOLLM2 if options.model else QUICKSTART
    experiment = "smollm2" if options.model else "quickstart"
    if options.micro_batches:
        setting = msgspec.structs.replace(setting, micro_batches=tuple(options.micro_batches))
    counted = range(options.warm, options.warm + options.steps)
    found = Figures(setting=setting, warm=options.warm, steps=options.steps, asyncrl=[], trl=[])
    print(
        f"steps {counted.start + 1} to {counted.stop} of both, {setting.groups_per_step} groups of "
        f"{setting.group_size} each, answers of at most {setting.max_tokens} tokens\n{HEAD}",
        flush=True,
    )

    def add(rates: list[Rate], rate: Rate) -> None:
        rates.append(rate)
        print(rate, flush=True)
        if options.out:
            options.out.write_bytes(msgspec.json.format(msgspec.json.encode(found)))

    model = options.model and options.model.resolve()
    for engine in (options.engines if options.model else ("native",)) if "asyncrl" in options.sides else ():
        overrides = our_overrides(setting, options.model and model, counted.stop + FURTHER, engine)
        directory, _ = run(*overrides, *options.overrides, asyncrl=options.asyncrl, experiment=experiment)
        model = model or directory / "model"
        add(found.asyncrl, our_rate(directory, f"asyncrl, engine={engine}", counted))
    for micro_batch in setting.micro_batches if "trl" in options.sides else ():
        try:
            add(found.trl, alone(their_rate, setting, model, micro_batch, options.warm, options.steps))
        except RuntimeError as error:
            print(f"TRL, {micro_batch} at a time: {error}", flush=True)
    return found


def verdict(found: Figures) -> str:
    lines = [f"steps {found.warm + 1} to {found.warm + found.steps} of both sides", HEAD]
    lines += [str(rate) for rate in (*found.asyncrl, *found.trl)]
    for ours in found.asyncrl if found.trl else ():
        ratio = ours.samples_per_second / found.best.samples_per_second
        tokens = ours.tokens_per_second / found.best.tokens_per_second
        lines.append(
            f"{ours.side} over the best of TRL: {ratio:.1f}x the samples and {tokens:.1f}x the tokens per second; "
            f"wanted {WANTED:g}x: {'held' if ratio >= WANTED else 'NOT held'}"
        )
    return "\n".join(lines)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further settings of asyncrl")
    parser.add_argument("--model", type=Path, metavar="DIR", help="SmolLM2: compare on a GPU")
    parser.add_argument("--asyncrl", metavar="COMMAND", help="the asyncrl to compare with; this interpreter's own")
    parser.add_argument(
        "--engines", nargs="+", choices=("native", "vllm"), default=["native", "vllm"], help="with --model"
    )
    parser.add_argument("--steps", type=int, help="that are counted; 12, and 5 with --model")
    parser.add_argument("--warm", type=int, default=1, help="steps before them")
    parser.add_argument("--micro-batches", type=int, nargs="+", metavar="N", help="samples of one forward in TRL")
    parser.add_argument("--sides", nargs="+", choices=("asyncrl", "trl"), default=["asyncrl", "trl"])
    parser.add_argument("--out", type=Path, metavar="FILE", help="the figures as JSON")
    options = parser.parse_intermixed_args(words)
    options.steps = options.steps or (5 if options.model else 12)
    if options.model is None and "asyncrl" not in options.sides:
        parser.error("--sides trl needs a --model: the quickstart's is made by asyncrl")
    return options


def main() -> None:
    print(verdict(compare(parse())))


if __name__ == "__main__":
    main()
