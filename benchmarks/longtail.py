"""What each part of asynchrony gives where answers are long-tailed: the same prompts, seed and samples in every mode.

    python -m benchmarks.longtail                                     the quickstart's model, on a CPU
    python -m benchmarks.longtail --words models/smollm2 --drafter ngram     SmolLM2 on `benchmarks.lists`, on a GPU
    python -m benchmarks.longtail --words models/smollm2 --modes sync async partial --samples 40960
    python -m benchmarks.longtail --model BIG --head BIGHEAD --frozen-head engine.max_length=256 trainer.lr=2e-6

    sync         training begins when the step's last answer is there, generation when the new weights are
    stream       + forward and backward on the groups that are complete, while the others are written
    async        + answers for the next steps while the trainer works, `max_staleness=2` as by default
    partial      + long answers may take more versions (--staleness), and go on with new weights in the middle
    speculation  + drafts by a head that follows the policy; without --head one is learned from the first run's answers
    fp8          + weights, activations, keys and values in FP8; left out where the engine has none

Modes add up, and differ in nothing else: learning rate and its schedule, correction and aggregation are printed before
they run. Held-out accuracy is measured after the same numbers of samples, every --evaluate-every steps, and a table
says when each mode reached which score. Rates leave the first steps and the last out, in which nothing is left to
generate; the clock stands still during an evaluation, and because engines go on meanwhile, the steps right after one
count as long as those further from it.
`benchmarks.expand --same-vocabulary` makes BIG and BIGHEAD from a small trained pair: answers and acceptance are
real, the cost is a big model's. Further settings are given as key=value and hold for all modes.
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from asyncrl.config import Run, WarmStart
from asyncrl.config.task import ChainsTask
from asyncrl.training.warm_start import make_model
from benchmarks.runs import Point, answers, call, curve, reached, run, steady
from pipelines.compose import compose, from_yaml

TASK = ChainsTask(median_size=2, size_spread=1.2, max_size=25)
"""Right answers have 11 tokens in the middle and 103 at the end."""
MAX_TOKENS = 112
LISTS = Path(__file__).parent / "lists.py"
WORDS = (
    *("task=python", f"task.function={LISTS}:prompts", f"reward.function={LISTS}:reward"),
    *("rollout.group_size=8", "rollout.max_tokens=1024", "engine.max_length=1536", "engine.max_batch=1024"),
    *("engine.memory=0.3", "engine.prefill_chunk=4096", "trainer.token_budget=65536", "correction=cautious_tis"),
    *("evaluation.prompts=1024", "trainer.lr=2e-5", "algorithm.aggregation=sequence"),
    "rollout.fp8.allow_kv_without_qk_norm=true",
)
"""Most answers are a few words, and some are long counts. Those have two thirds of the tokens, and where answers may
take some versions they come late, to one step many and to the next one none: were each token to count the same, what a
step learns would depend on that."""
LONG = 8.0
"""Longest answer over the median, from which a workload counts as long-tailed."""
MODES = ("sync", "stream", "async", "partial", "speculation", "fp8")
GROUP_SIZE = 8
SCORES = 0.5, 0.8, 0.9
MIDDLE = 20_480
"""Samples in the middle of a run, at which scores are compared."""
WANTED = {"partial": 1.6, "speculation": 2.5}
"""Times the samples per second of the synchronous mode, on one GPU."""
MOST_WAIT, MOST_BEHIND = 0.10, 0.03
"""Of the trainer's time, and of the held-out accuracy against the synchronous mode: about what 1,024 prompts tell."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One mode."""

    mode: str
    samples: int
    samples_per_second: float
    to_sync: float
    """Times the samples per second of the first mode that was run."""
    tokens_per_second: float
    trainer_wait: float
    step_seconds: float
    train_seconds: float
    sync_seconds: float
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
    max_staleness: int = 0
    curve: tuple[Point, ...] = ()
    """Held-out scores on the way, with the samples and seconds of training before them."""

    @property
    def tail(self) -> float:
        return self.longest / self.median_length


def settings(mode: str, options: argparse.Namespace, drafter: list[str]) -> list[str]:
    """What sets a mode apart."""
    groups = options.groups
    ahead = (f"max_staleness={options.staleness}",)
    whole, early = f"flow.groups_per_take={groups}", f"flow.groups_per_take={max(1, groups // 4)}"
    match mode:
        case "sync":
            return ["max_staleness=0", whole]
        case "stream":
            return ["max_staleness=0", early]
        case "async":
            return [f"max_staleness={Run().max_staleness}", early]
        case "partial":
            return [*ahead, early]
        case "speculation":
            return [*ahead, early, *drafter]
        case _:
            return [*ahead, early, *drafter, "rollout.precision=fp8_full"]


def common(options: argparse.Namespace) -> list[str]:
    on_gpu = options.model or options.words
    precision = options.precision or ("bf16" if on_gpu else "fp32")
    chains = [*(f"task.{name}={getattr(TASK, name)}" for name in TASK.__struct_fields__)]
    return [
        *(WORDS if options.words else [*chains, f"rollout.max_tokens={MAX_TOKENS}"]),
        f"seed={options.seed}",
        f"steps={options.steps}",
        # At a constant rate asynchronous runs swing, and how they end would be luck.
        *([f"trainer.decay_steps={options.steps // 3}"] if options.words else []),
        f"engine={options.engine}",
        *(["engine.device=cuda"] if on_gpu and options.engine == "native" else []),
        f"flow.groups_per_step={options.groups}",
        f"rollout.precision={precision}",
        f"trainer.dtype={precision}",
        f"evaluation.every={options.evaluate_every}",
        "checkpoint.every=0",
        "checkpoint.last=false",
        *options.overrides,
    ]


def drafting(options: argparse.Namespace, root: Path, model: Path) -> list[str]:
    """The drafter of the last modes; a head that nobody brought is learned from the answers of the first mode."""
    chosen = [f"drafter={options.drafter}", f"drafter.tokens={options.draft_tokens}"]
    if options.drafter == "ngram":
        return chosen
    head = options.head or root / "head"
    if not (head / "config.json").is_file():
        first = root / options.modes[0]
        kind = ("--kind", options.drafter)
        call("drafter", "train", str(first), *kind, "--checkpoint", str(model), "--out", str(head))
    frozen = ["drafter.training.on=false"] if options.frozen_head else []
    return [*chosen, f"drafter.path={head.resolve()}", *frozen]


def same(runs: Sequence[Run]) -> str:
    """What all modes learn with, from their own settings; modes that differ in it are not comparable."""
    learning = {msgspec.json.encode((run.trainer, run.correction, run.algorithm, run.seed, run.steps)) for run in runs}
    if len(learning) > 1:
        raise SystemExit("modes differ in trainer, correction or algorithm: nothing could be said about asynchrony")
    run, trainer = runs[0], runs[0].trainer
    kinds = [f"{part.__struct_config__.tag}({_unusual(part)})" for part in (run.algorithm, run.correction)]
    return (
        f"all modes: seed {run.seed}, {run.steps} steps of {run.samples_per_step} samples, lr {trainer.lr:g} (grows "
        f"over the first {trainer.warmup_steps} steps, falls over the last {trainer.decay_steps}), {kinds[0]}, "
        f"correction {kinds[1]}, aggregation by {run.algorithm.aggregation}; held-out: {run.evaluation.prompts} "
        "prompts, sampled"
    )


def _unusual(part: Any) -> str:
    defaults = type(part)()
    names = [name for name in part.__struct_fields__ if getattr(part, name) != getattr(defaults, name)]
    return ", ".join(f"{name}={getattr(part, name)}" for name in names)


def measure(mode: str, directory: Path, summary: dict[str, Any], sync: float | None, every: int) -> Figures:
    lengths, learned = answers(directory)
    pace = steady(directory, ends=1, every=every)
    return Figures(
        mode=mode,
        samples=summary["samples_trained"],
        samples_per_second=pace.samples_per_second,
        to_sync=pace.samples_per_second / (sync or pace.samples_per_second),
        tokens_per_second=pace.tokens_per_second,
        trainer_wait=pace.trainer_wait,
        step_seconds=pace.step_seconds,
        train_seconds=pace.train_seconds,
        sync_seconds=pace.sync_seconds,
        held_out=summary["eval_last"],
        held_out_first=summary["eval_first"],
        staleness_max=summary["staleness_max"],
        accepted=summary["acceptance_length_mean"],
        learned=learned,
        median_length=median(lengths),
        longest=max(lengths),
        peak_memory_bytes=summary["trainer_peak_memory_bytes"],
        max_staleness=from_yaml(directory / "config.yaml").max_staleness,
        curve=tuple(curve(directory, every)),
    )


def line(found: Figures) -> str:
    drafts = f", {found.accepted:.2f} tokens per check" if found.accepted else ""
    return (
        f"{found.mode:12}{found.samples_per_second:9.1f} samples/s {found.to_sync:5.2f}x  trainer waits "
        f"{found.trainer_wait:4.0%}, steps take {found.step_seconds:.3f} s ({found.train_seconds:.3f} forward and "
        f"backward, {found.sync_seconds:.3f} publishing), held-out {found.held_out_first:.3f} -> "
        f"{found.held_out:.3f} after {found.samples} samples, {found.learned:.0%} of the groups learned from; answers "
        f"{found.median_length:g} to {found.longest} tokens (tail {found.tail:.1f}){drafts}"
    )


def table(found: Sequence[Figures], scores: Sequence[float], middle: int) -> list[str]:
    """When each mode had learned how much: by samples, and by seconds of training."""
    heads = "".join(f"{f'to {score:g}: samples':>17}{'seconds':>9}" for score in scores)
    lines = [f"{'mode':12}{'staleness':>10}{'samples/s':>11}{'to sync':>9}{f'at {middle}':>10}{heads}{'last':>7}"]
    for each in found:
        here = next((f"{point.held_out:.3f}" for point in each.curve if point.samples == middle), "-")
        times = [reached(each.curve, score) for score in scores]
        cells = "".join(f"{t.samples:17}{t.seconds:9.1f}" if t else f"{'-':>17}{'-':>9}" for t in times)
        lines.append(
            f"{each.mode:12}{each.max_staleness:10}{each.samples_per_second:11.1f}{each.to_sync:8.2f}x{here:>10}{cells}"
            f"{each.held_out:7.3f}"
        )
    return lines


def bars(found: Sequence[Figures]) -> list[str]:
    """Meant for one GPU and a big model."""
    first, lines = found[0], list[str]()

    def bar(held: bool, text: str) -> None:
        lines.append(f"{'held    ' if held else 'NOT held'} {text}")

    tail = min(figures.tail for figures in found)
    bar(tail >= LONG, f"long-tailed: the longest answer is {tail:.1f} times the median, wanted {LONG:g}")
    for each in found[1:] if first.mode == "sync" else ():
        if wanted := WANTED.get(each.mode):
            bar(each.to_sync >= wanted, f"{each.mode}: {each.to_sync:.2f}x sync, wanted {wanted:g}x")
        if each.mode not in ("stream", "async"):
            bar(each.trainer_wait <= MOST_WAIT, f"{each.mode}: trainer waits {each.trainer_wait:.0%}, at most 10 %")
        ahead = each.held_out - first.held_out
        bar(ahead >= -MOST_BEHIND, f"{each.mode}: held-out {100 * ahead:+.1f} points, at most 3 behind sync")
    return lines


def failure(directory: Path) -> str:
    """Why a run ended, as its summary says; one that was refused has none."""
    path = directory / "summary.json"
    return json.loads(path.read_text())["error"] if path.is_file() else "the run was refused, see above"


def compare(options: argparse.Namespace) -> list[Figures]:
    root = (options.root or Path(tempfile.mkdtemp(prefix="asyncrl-longtail-"))).resolve()
    model = options.words or options.model
    model = model or make_model(WarmStart(steps=options.warm_start), TASK, options.seed, root / "model")
    experiment = "smollm2" if options.words else "quickstart"
    plain = [[f"experiment={experiment}", *common(options), *settings(mode, options, [])] for mode in options.modes]
    print(same([compose(words) for words in plain]), flush=True)
    found: list[Figures] = []
    for mode in options.modes:
        own = settings(mode, options, drafting(options, root, model) if mode in ("speculation", "fp8") else [])
        start = ("model=checkpoint", f"model.path={model.resolve()}")
        try:
            directory, summary = run(*start, *common(options), *own, experiment=experiment, directory=root / mode)
        except subprocess.CalledProcessError:
            if mode != "fp8":
                raise
            print(f"fp8          left out: {failure(root / mode)}", flush=True)
            continue
        first = found[0].samples_per_second if found else None
        found.append(measure(mode, directory, summary, first, options.evaluate_every))
        print(line(found[-1]), flush=True)
        if options.out:
            options.out.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    return found


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--model", type=Path, metavar="DIR", help="of the chains task; without it a warm start is made")
    parser.add_argument("--words", type=Path, metavar="DIR", help="SmolLM2: `benchmarks.lists` in place of chains")
    parser.add_argument("--engine", choices=("native", "vllm"), default="native")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="bf16 with --model, else fp32")
    parser.add_argument("--drafter", choices=("eagle3", "eagle", "ngram"), default="eagle3")
    parser.add_argument("--head", type=Path, metavar="DIR", help="a head trained for the model")
    parser.add_argument("--draft-tokens", type=int, default=3, help="drafted in a step, at most")
    parser.add_argument("--frozen-head", action="store_true", help="do not train it along")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--groups", type=int, help="groups of a step; 32, and 64 with --words")
    parser.add_argument("--staleness", type=int, help="versions that an answer may take; 8, and 20 with --words")
    parser.add_argument("--steps", type=int, help="40, and 110 with --words")
    parser.add_argument("--samples", type=int, metavar="N", help="instead of --steps")
    parser.add_argument("--evaluate-every", type=int, metavar="N", help="steps; 0 (at the end only), 8 with --words")
    parser.add_argument("--scores", type=float, nargs="+", default=list(SCORES), metavar="S", help="held-out, to reach")
    parser.add_argument("--middle", type=int, default=MIDDLE, metavar="N", help="samples at which scores are compared")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm-start", type=int, default=800, metavar="N", help="supervised steps without --model")
    parser.add_argument("--root", type=Path, metavar="DIR", help="where the runs are kept")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the figures as JSON")
    options = parser.parse_intermixed_args(words)
    options.groups = options.groups or (64 if options.words else 32)
    if options.samples:
        options.steps = max(1, options.samples // (options.groups * GROUP_SIZE))
    options.steps = options.steps or (110 if options.words else 40)
    if options.evaluate_every is None:
        options.evaluate_every = 8 if options.words else 0
    options.staleness = options.staleness or (20 if options.words else 8)
    if options.modes[0] in ("speculation", "fp8") and options.head is None and options.drafter != "ngram":
        parser.error("a head is learned from the mode before speculation: add one to --modes, or give --head")
    return options


def main() -> None:
    options = parse()
    found = compare(options)
    print("\n".join([*table(found, options.scores, options.middle), *bars(found)]))
    print("  ".join(f"{figures.mode} {figures.to_sync:.2f}x" for figures in found))


if __name__ == "__main__":
    main()
