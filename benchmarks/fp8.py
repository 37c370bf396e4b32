"""FP8 rollouts against others on the quickstart: held-out accuracy and mismatch, with and without correction.

    python -m benchmarks.fp8 [SETTING=VALUE ...] [--seeds 0 1 2] [--arms fp32 fp8_full] [--steps 150] [--lr 2e-4]
        [--jobs 1] [--root runs/fp8]
    python -m benchmarks.fp8 engine.memory=0.1 --device cuda --shape qwen3-0.6b --lr 1e-5 --arms bf16 fp8_full --seeds 0
        --jobs 2 --root runs/fp8-0.6b

On a CPU the native engine simulates FP8: this is about learning and says nothing about speed. With `--shape` the model
is expanded without changing its function (`benchmarks.expand`). Its numbers have many copies, each of which learns,
so it wants so much smaller a learning rate.

Completions of the evaluation are sampled in the run's own precision. Finished runs are kept (`benchmarks.studies`).
"""

import argparse
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from asyncrl.config import WarmStart
from asyncrl.config.task import ChainsTask
from asyncrl.data.untrusted import read_table
from asyncrl.training.warm_start import make_model
from benchmarks.expand import SHAPES
from benchmarks.expand import main as expand
from benchmarks.studies import Study, add_options, against

ON = {"cpu": (), "cuda": ("engine.device=cuda", "trainer.device=cuda", "trainer.dtype=bf16")}
ARMS = {
    "bf16": ("rollout.precision=bf16",),
    "fp32": ("rollout.precision=fp32",),
    "fp8": ("rollout.precision=fp8",),
    "fp8_kv": ("rollout.precision=fp8_kv",),
    "fp8_full": ("rollout.precision=fp8_full",),
    "fp8_full, KV scales by the engine": ("rollout.precision=fp8_full", "rollout.kv_scales=engine"),
    "fp8_full, cautious TIS": ("rollout.precision=fp8_full", "correction=cautious_tis"),
    "fp32, uncorrected": ("rollout.precision=fp32", "correction=naive"),
    "fp8_full, uncorrected": ("rollout.precision=fp8_full", "correction=naive"),
}
REFERENCES = {"cpu": "fp32", "cuda": "bf16"}
HELD_OUT = 1024


class Found(NamedTuple):
    """One finished run."""

    accuracy: float
    kl: float
    """Mean |mismatch_kl| over the steps."""
    k3: float
    ess: float


def start(path: Path, seed: int, shape: str) -> None:
    """A model to begin with."""
    small = make_model(WarmStart(), ChainsTask(), seed, path.with_name(f"small-{seed}"))
    expand([str(small), str(path), "--shape", shape, "--same-vocabulary", "--dtype", "fp32"])


def found(study: Study, arm: str, seeds: list[int]) -> dict[int, Found]:
    """Of the runs that have ended well."""
    runs: dict[int, Found] = {}
    for seed, told in study.finished(arm, seeds).items():
        rows: list[dict[str, Any]] = read_table(study.directory(arm, seed) / "metrics.parquet").to_pylist()
        last = max(told["evaluations"], key=int)
        runs[seed] = Found(
            accuracy=told["evaluations"][last]["sampled"],
            kl=mean(abs(row["mismatch_kl"]) for row in rows),
            k3=mean(row["mismatch_k3"] for row in rows),
            ess=mean(row["ess"] for row in rows),
        )
    return runs


def table(study: Study, seeds: list[int], usual: str) -> str:
    lines = [
        f"| rollouts | {' | '.join(f'seed {s}' for s in seeds)} | mean | against {usual} | KL (k1) | KL (k3) | ESS |"
    ]
    lines.append("|---" * (len(seeds) + 6) + "|")
    reference: float | None = None
    for arm in sorted(ARMS, key=lambda arm: arm != usual):
        runs = found(study, arm, seeds)
        if not runs:
            continue
        average = mean(run.accuracy for run in runs.values())
        cells = [f"{runs[seed].accuracy:.3f}" if seed in runs else "-" for seed in seeds]
        kl, k3, ess = (mean(getattr(run, name) for run in runs.values()) for name in ("kl", "k3", "ess"))
        lines.append(
            f"| {arm} | {' | '.join(cells)} | {average:.3f} | {against(average, reference)} | {kl:.1e} | {k3:.1e} | "
            f"{ess:.4f} |"
        )
        reference = average if arm == usual else reference
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "runs/fp8")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--prompts", type=int, default=HELD_OUT)
    parser.add_argument("--device", choices=ON, default="cpu")
    parser.add_argument("--shape", choices=SHAPES, help="of the model; as it is made, unless given")
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE", help="for all runs")
    options = parser.parse_args()
    kind = {name: getattr(options, name) for name in ("device", "shape", "settings", "steps", "lr", "prompts")}
    study = Study(options.root, **kind)
    study.start(options.seeds, partial(start, shape=options.shape) if options.shape else None)
    common = [
        *("experiment=quickstart", "engine=native", f"steps={options.steps}", f"trainer.lr={options.lr}"),
        *(f"evaluation.prompts={options.prompts}", "checkpoint.every=0", "sentinel.max_kl=0", *ON[options.device]),
    ]
    arms = {arm: [*ARMS[arm], *options.settings] for arm in options.arms}
    study.run(arms, options.seeds, common, options.jobs)
    print(table(study, options.seeds, REFERENCES[options.device]))


if __name__ == "__main__":
    main()
