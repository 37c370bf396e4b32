"""FP8 rollouts against others on the quickstart: held-out accuracy and mismatch, with and without correction.

    python -m benchmarks.fp8 [SETTING=VALUE ...] [--seeds 0 1 2] [--arms fp32 fp8_full] [--steps 150] [--lr 2e-4]
        [--jobs 1] [--root runs/fp8]
    python -m benchmarks.fp8 engine.memory=0.1 --device cuda --shape qwen3-0.6b --lr 1e-5 --arms bf16 fp8_full --seeds 0
        --jobs 2 --root runs/fp8-0.6b

On a CPU the native engine simulates FP8: this is about learning and says nothing about speed. With `--shape` the model
is expanded without changing its function (`benchmarks.expand`). Its numbers have many copies, each of which learns,
so it wants so much smaller a learning rate.

Answers of the evaluation are sampled in the run's own precision. Each seed has one warm start, shared by its runs.
Finished runs are kept and not repeated; the table is printed from whatever is there, so a root is for runs of one kind.
`--jobs` runs so many at a time, each of which wants two cores.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from asyncrl.config import WarmStart
from asyncrl.config.task import ChainsTask
from asyncrl.data.untrusted import read_table
from asyncrl.training.warm_start import make_model
from benchmarks.expand import SHAPES
from benchmarks.expand import main as expand
from benchmarks.runs import HERE

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


def directory(root: Path, arm: str, seed: int) -> Path:
    return root / f"{arm.replace(', ', '-').replace(' ', '-')}-{seed}"


def claim(options: argparse.Namespace) -> None:
    """Nothing but arms and seeds may differ between the runs of a table."""
    kind = {name: getattr(options, name) for name in ("device", "shape", "settings", "steps", "lr", "prompts")}
    options.root.mkdir(parents=True, exist_ok=True)
    note = options.root / "kind.json"
    if note.exists() and (before := json.loads(note.read_bytes())) != kind:
        raise SystemExit(f"--root {options.root} holds runs with {before}, not {kind}; give another --root")
    note.write_text(json.dumps(kind))


def start(path: Path, seed: int, shape: str | None) -> None:
    """A model to begin with."""
    if shape is None:
        make_model(WarmStart(), ChainsTask(), seed, path)
        return
    small = make_model(WarmStart(), ChainsTask(), seed, path.with_name(f"small-{seed}"))
    expand([str(small), str(path), "--shape", shape, "--same-vocabulary", "--dtype", "fp32"])


def train(arm: str, seed: int, options: argparse.Namespace) -> None:
    print(f"{arm}, seed {seed}", file=sys.stderr, flush=True)
    place = directory(options.root, arm, seed)
    command = [
        *("run", "experiment=quickstart", "engine=native", f"name={place.name}", f"root={options.root}"),
        *("model=checkpoint", f"model.path={options.root / f'model-{seed}'}", f"seed={seed}", f"steps={options.steps}"),
        *(f"trainer.lr={options.lr}", f"evaluation.prompts={options.prompts}", "checkpoint.every=0"),
        *("sentinel.max_kl=0", *ON[options.device], *ARMS[arm], *options.settings),
    ]
    log = place.with_suffix(".log")
    with log.open("wb") as file:
        done = subprocess.run([*HERE, *command], stdout=file, stderr=file)
    if done.returncode:
        print(f"{arm}, seed {seed} failed: see {log}", file=sys.stderr, flush=True)


def found(root: Path, arm: str, seed: int) -> Found | None:
    """None where the run is not there, or has not ended well."""
    place = directory(root, arm, seed)
    summary = place / "summary.json"
    if not summary.is_file() or (told := json.loads(summary.read_bytes()))["status"] != "ok":
        return None
    rows: list[dict[str, Any]] = read_table(place / "metrics.parquet").to_pylist()
    last = max(told["evaluations"], key=int)
    return Found(
        accuracy=told["evaluations"][last]["sampled"],
        kl=mean(abs(row["mismatch_kl"]) for row in rows),
        k3=mean(row["mismatch_k3"] for row in rows),
        ess=mean(row["ess"] for row in rows),
    )


def table(root: Path, seeds: list[int], usual: str) -> str:
    lines = [
        f"| rollouts | {' | '.join(f'seed {s}' for s in seeds)} | mean | against {usual} | KL (k1) | KL (k3) | ESS |"
    ]
    lines.append("|---" * (len(seeds) + 6) + "|")
    reference: float | None = None
    for arm in sorted(ARMS, key=lambda arm: arm != usual):
        runs = {seed: run for seed in seeds if (run := found(root, arm, seed)) is not None}
        if not runs:
            continue
        average = mean(run.accuracy for run in runs.values())
        reference = average if arm == usual else reference
        cells = [f"{runs[seed].accuracy:.3f}" if seed in runs else "-" for seed in seeds]
        against = "" if reference is None or arm == usual else f"{100 * (average - reference):+.1f} points"
        kl, k3, ess = (mean(getattr(run, name) for run in runs.values()) for name in ("kl", "k3", "ess"))
        lines.append(f"| {arm} | {' | '.join(cells)} | {average:.3f} | {against} | {kl:.1e} | {k3:.1e} | {ess:.4f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--prompts", type=int, default=HELD_OUT)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device", choices=ON, default="cpu")
    parser.add_argument("--shape", choices=SHAPES, help="of the model; as it is made, unless given")
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE", help="for all runs")
    parser.add_argument("--root", type=Path, default=Path("runs/fp8"))
    options = parser.parse_args()
    options.root = options.root.resolve()
    claim(options)
    for seed in options.seeds:
        if not (options.root / f"model-{seed}").exists():
            start(options.root / f"model-{seed}", seed, options.shape)
    wanted = [(arm, seed) for arm in options.arms for seed in options.seeds]
    missing = [(arm, seed) for arm, seed in wanted if found(options.root, arm, seed) is None]
    with ThreadPoolExecutor(options.jobs) as pool:
        for run in [pool.submit(train, arm, seed, options) for arm, seed in missing]:
            run.result()
    print(table(options.root, options.seeds, REFERENCES[options.device]))


if __name__ == "__main__":
    main()
