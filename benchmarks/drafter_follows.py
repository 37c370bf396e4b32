"""Does a drafter that is trained along keep up with a policy that moves, and does it change what is learned?

    python -m benchmarks.drafter_follows [--seeds 0 1 2] [--steps 100] [--root runs/drafter]

The quickstart without a drafter, with a frozen EAGLE-3 head, and with one that is trained along; both start from a head
that was trained for the first policy. Four tokens are always drafted (no bandit). Acceptance is a mean over ten steps.
What the drafter costs the trainer is seen in its own time per sample, against the frozen head's.
Finished runs are kept and not repeated, so the command can be stopped and started again.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

ASYNCRL = str(Path(sys.executable).with_name("asyncrl"))
DRAFTING = ("drafter=eagle3", "drafter.tokens=4", "drafter.adaptive.on=false")
KINDS = {
    "plain": (),
    "frozen": (*DRAFTING, "drafter.training.on=false"),
    "online": (*DRAFTING, "drafter.training.tokens_per_step=512"),
}
WINDOW = 10


def summary(run: Path) -> dict[str, Any] | None:
    file = run / "summary.json"
    found = json.loads(file.read_text()) if file.is_file() else {}
    return found if found.get("status") == "ok" else None


def train(root: Path, kind: str, seed: int, steps: int) -> None:
    run, first = root / f"{kind}-{seed}", root / f"plain-{seed}"
    if summary(run):
        return
    print(run.name, file=sys.stderr, flush=True)
    settings = [f"name={run.name}", f"root={root}", f"seed={seed}", f"steps={steps}", "evaluation.every=25"]
    if kind != "plain":
        head = root / f"head-{seed}"
        if not (head / "config.json").exists():
            call(root, "drafter", "train", str(first), "--checkpoint", str(first / "model"), "--out", str(head))
        settings += ["model=checkpoint", f"model.path={first / 'model'}", f"drafter.path={head}"]
    call(root, "run", "experiment=quickstart", *KINDS[kind], *settings)


def call(root: Path, *words: str) -> None:
    with (root / "log.txt").open("ab") as log:
        subprocess.run([ASYNCRL, *words], check=True, stdout=log, stderr=log)


def acceptance(run: Path) -> list[float]:
    """Mean tokens per check over each ten steps that follow each other."""
    rows = [{"drafts": 0, "accepted_tokens": 0}, *pq.read_table(run / "metrics.parquet").to_pylist()]
    spans = zip(rows, rows[WINDOW:], strict=False)
    gained = [(b["accepted_tokens"] - a["accepted_tokens"], b["drafts"] - a["drafts"]) for a, b in spans]
    return [1 + accepted / drafts for accepted, drafts in gained if drafts]


def line(root: Path, kind: str, seed: int) -> str | None:
    run = root / f"{kind}-{seed}"
    found = summary(run)
    if found is None:
        return None
    rows = pq.read_table(run / "metrics.parquet").to_pylist()
    busy = 1e3 * sum(row["train_seconds"] for row in rows) / found["samples_trained"]
    text = f"| {seed} | {kind} | {found['eval_last']:.3f} | {found['samples_per_second']:.0f} | {busy:.2f} "
    if kind == "plain":
        return text + "| | | |"
    means = acceptance(run)
    return text + f"| {means[0]:.2f} | {max(means):.2f} | {means[-1]:.2f} ({means[-1] / max(means):.0%} of best) |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--root", type=Path, default=Path("runs/drafter"))
    options = parser.parse_args()
    root = options.root.resolve()
    root.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        for kind in dict.fromkeys(["plain", *options.kinds]):
            train(root, kind, seed, options.steps)
    print(
        "| seed | drafter | held-out | samples/s | trainer ms/sample | accepted, first | best | last |\n"
        + "|---" * 8
        + "|"
    )
    for seed in options.seeds:
        print("\n".join(filter(None, (line(root, kind, seed) for kind in KINDS))))


if __name__ == "__main__":
    main()
