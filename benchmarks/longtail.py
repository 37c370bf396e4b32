"""What each part of asynchrony gives where answers are long-tailed: the same prompts, seed and samples in every mode.

    python -m benchmarks.longtail                                     the quickstart's model, on a CPU
    python -m benchmarks.longtail --model BIG --head BIGHEAD --engine native engine.memory=0.4

    sync         training begins when the step's last answer is there, generation when the new weights are
    stream       + forward and backward on the groups that are complete, while the others are written
    partial      + generation runs up to two versions ahead, and answers go on with new weights in the middle
    speculation  + drafts by a head that follows the policy; without --head one is learned from the first run's answers

Modes add up. Held-out accuracy is measured after the same number of samples. `asyncrl.models.expand` makes BIG and
BIGHEAD from a small trained pair: answers and acceptance are real, the cost is a big model's. Further settings are
given as key=value and hold for all modes.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from asyncrl.config import WarmStart
from asyncrl.tasks.settings import ChainsTask
from asyncrl.training.warm_start import make_model
from benchmarks.runs import answers, call, run

TASK = ChainsTask(median_size=2, size_spread=1.2, max_size=25)
"""Right answers have 11 tokens in the middle and 103 at the end."""
MAX_TOKENS = 112
LONG = 8.0
"""Longest answer over the median, from which a workload counts as long-tailed."""
MODES = ("sync", "stream", "partial", "speculation")


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One mode."""

    mode: str
    samples: int
    samples_per_second: float
    to_sync: float
    """Times the samples per second of the first mode that was run."""
    tokens_per_second: float
    trainer_wait: float
    held_out: float
    held_out_first: float
    staleness_max: int
    accepted: float | None
    """Tokens per check of a draft."""
    learned: float
    """Share of the groups whose rewards differ: only those are trained on."""
    median_length: float
    longest: int
    peak_memory_bytes: float | None

    @property
    def tail(self) -> float:
        return self.longest / self.median_length


def settings(mode: str, groups: int, drafter: list[str]) -> list[str]:
    """What sets a mode apart."""
    whole, early = f"flow.groups_per_take={groups}", f"flow.groups_per_take={max(1, groups // 8)}"
    match mode:
        case "sync":
            return ["max_staleness=0", whole]
        case "stream":
            return ["max_staleness=0", early]
        case "partial":
            return ["max_staleness=2", early]
        case _:
            return ["max_staleness=2", early, *drafter]


def common(options: argparse.Namespace) -> list[str]:
    precision = options.precision or ("bf16" if options.model else "fp32")
    return [
        *(f"task.{name}={getattr(TASK, name)}" for name in TASK.__struct_fields__),
        f"rollout.max_tokens={MAX_TOKENS}",
        f"seed={options.seed}",
        f"steps={options.steps}",
        f"engine={options.engine}",
        f"flow.groups_per_step={options.groups}",
        f"rollout.precision={precision}",
        f"trainer.dtype={precision}",
        "evaluation.every=0",
        "checkpoint.every=0",
        *options.overrides,
    ]


def drafting(options: argparse.Namespace, root: Path, model: Path) -> list[str]:
    """The drafter of the last mode; a head that nobody brought is learned from the answers of the first mode."""
    if options.drafter == "ngram":
        return ["drafter=ngram"]
    head = options.head or root / "head"
    if not (head / "config.json").is_file():
        first = root / options.modes[0]
        kind = ("--kind", options.drafter)
        call("drafter", "train", str(first), *kind, "--checkpoint", str(model), "--out", str(head))
    return [f"drafter={options.drafter}", f"drafter.path={head}"]


def measure(mode: str, directory: Path, summary: dict[str, Any], sync: float | None) -> Figures:
    lengths, learned = answers(directory)
    rate = summary["samples_per_second"]
    return Figures(
        mode=mode,
        samples=summary["samples_trained"],
        samples_per_second=rate,
        to_sync=rate / (sync or rate),
        tokens_per_second=summary["generated_tokens_per_second"],
        trainer_wait=summary["trainer_wait_fraction"],
        held_out=summary["eval_last"],
        held_out_first=summary["eval_first"],
        staleness_max=summary["staleness_max"],
        accepted=summary["acceptance_length_mean"],
        learned=learned,
        median_length=median(lengths),
        longest=max(lengths),
        peak_memory_bytes=summary["trainer_peak_memory_bytes"],
    )


def line(found: Figures) -> str:
    drafts = f", {found.accepted:.2f} tokens per check" if found.accepted else ""
    return (
        f"{found.mode:12}{found.samples_per_second:9.1f} samples/s {found.to_sync:5.2f}x  trainer waits "
        f"{found.trainer_wait:4.0%}  held-out {found.held_out_first:.3f} -> {found.held_out:.3f} after {found.samples} "
        f"samples, {found.learned:.0%} of the groups learned from; answers {found.median_length:g} to {found.longest} "
        f"tokens (tail {found.tail:.1f}){drafts}"
    )


def compare(options: argparse.Namespace) -> list[Figures]:
    root = (options.root or Path(tempfile.mkdtemp(prefix="asyncrl-longtail-"))).resolve()
    model = options.model or make_model(WarmStart(steps=options.warm_start), TASK, options.seed, root / "model")
    found: list[Figures] = []
    for mode in options.modes:
        own = settings(mode, options.groups, drafting(options, root, model) if mode == "speculation" else [])
        start = ("model=checkpoint", f"model.path={model}")
        directory, summary = run(*start, *common(options), *own, directory=root / mode)
        found.append(measure(mode, directory, summary, found[0].samples_per_second if found else None))
        print(line(found[-1]), flush=True)
        if options.out:
            options.out.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    return found


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--model", type=Path, metavar="DIR", help="of the chains task; without it a warm start is made")
    parser.add_argument("--engine", choices=("native", "vllm"), default="native")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="bf16 with --model, else fp32")
    parser.add_argument("--drafter", choices=("eagle3", "eagle", "ngram"), default="eagle3")
    parser.add_argument("--head", type=Path, metavar="DIR", help="a head trained for the model")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--groups", type=int, default=32, help="groups of a step")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm-start", type=int, default=800, metavar="N", help="supervised steps without --model")
    parser.add_argument("--root", type=Path, metavar="DIR", help="where the runs are kept")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the figures as JSON")
    options = parser.parse_intermixed_args(words)
    if options.modes[0] == "speculation" and options.head is None and options.drafter != "ngram":
        parser.error("a head is learned from the mode before speculation: add one to --modes, or give --head")
    return options


def main() -> None:
    found = compare(parse())
    if min(figures.tail for figures in found) < LONG:
        print(f"the workload is not long-tailed: longest over median answer is below {LONG:g} in some mode")
    print("  ".join(f"{figures.mode} {figures.to_sync:.2f}x" for figures in found))


if __name__ == "__main__":
    main()
