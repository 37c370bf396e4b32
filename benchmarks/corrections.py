"""Every correction on the same task, off-policy enough to hurt: held-out accuracy against the synchronous run.

    python -m benchmarks.corrections [--seeds 0 1 2] [--only naive none] [--steps 150] [--jobs 1]
        [--root runs/corrections]

The quickstart at max_staleness=4 and lr 1e-3. Each seed has one warm start, shared by its runs. Finished runs are kept
and not repeated, so the command can be stopped and started again; the table is printed from whatever is there.
`--jobs` runs so many at a time, each of which wants two cores.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean

from asyncrl.config import WarmStart
from asyncrl.config.task import ChainsTask
from asyncrl.training.warm_start import make_model
from benchmarks.runs import HERE

PRESETS = Path(__file__).parents[1] / "configs" / "correction"
NOT_A_PRESET = {"custom", "importance"}
STALENESS, LR, HELD_OUT = 4, 1e-3, 1024


def presets() -> list[str]:
    return sorted({path.stem for path in PRESETS.glob("*.yaml")} - NOT_A_PRESET)


def train(name: str, seed: int, root: Path, steps: int) -> None:
    print(f"{name}, seed {seed}", file=sys.stderr, flush=True)
    settings = ["max_staleness=0"] if name == "sync" else [f"max_staleness={STALENESS}", f"correction={name}"]
    command = [
        *("run", "experiment=quickstart", f"name={name}-{seed}", f"root={root}", f"seed={seed}"),
        *("model=checkpoint", f"model.path={root / f'model-{seed}'}", f"trainer.lr={LR}", f"steps={steps}"),
        *(
            "evaluation.every=50",
            f"evaluation.prompts={HELD_OUT}",
            "checkpoint.every=0",
            "sentinel.max_kl=0",
            *settings,
        ),
    ]
    log = root / f"{name}-{seed}.log"
    with log.open("wb") as file:
        done = subprocess.run([*HERE, *command], stdout=file, stderr=file)
    if done.returncode:
        print(f"{name}, seed {seed} failed: see {log}", file=sys.stderr, flush=True)


def scores(root: Path, name: str, seed: int) -> list[float]:
    """Held-out accuracy over the run, sampled; empty if it is not there."""
    summary = root / f"{name}-{seed}" / "summary.json"
    if not summary.is_file() or (found := json.loads(summary.read_bytes()))["status"] != "ok":
        return []
    return [found["evaluations"][step]["sampled"] for step in sorted(found["evaluations"], key=int)]


def table(root: Path, names: list[str], seeds: list[int]) -> str:
    lines = [f"| correction | {' | '.join(f'seed {s}' for s in seeds)} | mean | lowest on the way | against sync |"]
    lines.append("|---" * (len(seeds) + 4) + "|")
    reference: float | None = None
    for name in names:
        found = {seed: values for seed in seeds if (values := scores(root, name, seed))}
        if not found:
            continue
        average = mean(values[-1] for values in found.values())
        reference = average if name == "sync" else reference
        cells = [f"{found[seed][-1]:.3f}" if seed in found else "-" for seed in seeds]
        lowest = min(value for values in found.values() for value in values[1:])
        against = "" if reference is None or name == "sync" else f"{100 * (average - reference):+.1f} points"
        lines.append(f"| {name} | {' | '.join(cells)} | {average:.3f} | {lowest:.3f} | {against} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=presets(), default=presets(), metavar="PRESET")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--root", type=Path, default=Path("runs/corrections"))
    options = parser.parse_args()
    root = options.root.resolve()
    root.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        if not (root / f"model-{seed}").exists():
            make_model(WarmStart(), ChainsTask(), seed, root / f"model-{seed}")
    wanted = [(name, seed) for name in ["sync", *options.only] for seed in options.seeds]
    missing = [(name, seed) for name, seed in wanted if not scores(root, name, seed)]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda each: train(*each, root, options.steps), missing))
    print(table(root, ["sync", *presets()], options.seeds))


if __name__ == "__main__":
    main()
