"""Every correction on the same task, off-policy enough to hurt: held-out accuracy against the synchronous run.

    python -m benchmarks.corrections [--seeds 0 1 2] [--only naive none] [--steps 150] [--root runs/corrections]

The quickstart at max_staleness=4 and lr 1e-3. Each seed has one warm start, shared by its runs. Finished runs are kept
and not repeated, so the command can be stopped and started again; the table is printed from whatever is there.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean

from asyncrl.config import WarmStart
from asyncrl.tasks.settings import ChainsTask
from asyncrl.training.warm_start import make_model

PRESETS = Path(__file__).parents[1] / "configs" / "correction"
NOT_A_PRESET = {"custom", "importance"}
STALENESS, LR = 4, 1e-3


def presets() -> list[str]:
    return sorted({path.stem for path in PRESETS.glob("*.yaml")} - NOT_A_PRESET)


def train(name: str, seed: int, root: Path, steps: int) -> None:
    model = root / f"model-{seed}"
    if not model.exists():
        make_model(WarmStart(), ChainsTask(), seed, model)
    settings = ["max_staleness=0"] if name == "sync" else [f"max_staleness={STALENESS}", f"correction={name}"]
    command = [
        *("asyncrl", "run", "experiment=quickstart", f"name={name}-{seed}", f"root={root}", f"seed={seed}"),
        *("model=checkpoint", f"model.path={model}", f"trainer.lr={LR}", f"steps={steps}", "checkpoint.every=0"),
        *("evaluation.every=25", "sentinel.max_kl=0", *settings),
    ]
    log = root / f"{name}-{seed}.log"
    with log.open("wb") as file:
        subprocess.run([Path(sys.executable).parent / command[0], *command[1:]], stdout=file, stderr=file, check=True)


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
    parser.add_argument("--root", type=Path, default=Path("runs/corrections"))
    options = parser.parse_args()
    root = options.root.resolve()
    root.mkdir(parents=True, exist_ok=True)
    names = ["sync", *options.only]
    for seed in options.seeds:
        for name in names:
            if not scores(root, name, seed):
                print(f"{name}, seed {seed}", file=sys.stderr, flush=True)
                train(name, seed, root, options.steps)
    print(table(root, ["sync", *presets()], options.seeds))


if __name__ == "__main__":
    main()
