"""Runs that differ in one thing, over several seeds, kept in a directory: what a study of learning consists of.

Each seed has one warm start, shared by its runs. Finished runs are kept and not repeated, so a study can be stopped and
started again, and its table is made from whatever is there.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from asyncrl.config import WarmStart
from asyncrl.config.task import ChainsTask
from asyncrl.training.warm_start import make_model
from benchmarks.runs import HERE


class Study:
    def __init__(self, root: Path, **kind: Any) -> None:
        """`kind` is what all runs have in common: a directory is for runs of one kind."""
        self.root = root.resolve()
        self.root.mkdir(parents=True, exist_ok=True)
        note = self.root / "kind.json"
        if note.exists() and (before := json.loads(note.read_bytes())) != kind:
            raise SystemExit(f"--root {root} holds runs with {before}, not {kind}; give another --root")
        note.write_text(json.dumps(kind))

    def directory(self, arm: str, seed: int) -> Path:
        return self.root / f"{arm.replace(', ', '-').replace(' ', '-')}-{seed}"

    def model(self, seed: int) -> Path:
        return self.root / f"model-{seed}"

    def start(self, seeds: Sequence[int], make: Callable[[Path, int], object] | None = None) -> None:
        """The models to begin with."""
        for seed in seeds:
            if not self.model(seed).exists():
                (make or _warm_start)(self.model(seed), seed)

    def run(self, arms: Mapping[str, Sequence[str]], seeds: Sequence[int], common: Sequence[str], jobs: int) -> None:
        """Those that are missing, `jobs` at a time; `arms` are settings, of which `common` are the first."""
        wanted = [(arm, seed) for arm in arms for seed in seeds if self.summary(arm, seed) is None]
        with ThreadPoolExecutor(jobs) as pool:
            runs = [pool.submit(self._train, arm, seed, [*common, *arms[arm]]) for arm, seed in wanted]
            for each in runs:
                each.result()

    def _train(self, arm: str, seed: int, settings: Sequence[str]) -> None:
        print(f"{arm}, seed {seed}", file=sys.stderr, flush=True)
        place = self.directory(arm, seed)
        start = ("model=checkpoint", f"model.path={self.model(seed)}") if self.model(seed).exists() else ()
        command = ["run", *settings, f"name={place.name}", f"root={self.root}", f"seed={seed}", *start]
        log = place.with_suffix(".log")
        with log.open("wb") as file:
            done = subprocess.run([*HERE, *command], stdout=file, stderr=file)
        if done.returncode:
            print(f"{arm}, seed {seed} failed: see {log}", file=sys.stderr, flush=True)

    def summary(self, arm: str, seed: int) -> dict[str, Any] | None:
        """None where the run is not there, or has not ended well."""
        path = self.directory(arm, seed) / "summary.json"
        if not path.is_file() or (found := json.loads(path.read_bytes()))["status"] != "ok":
            return None
        return found

    def finished(self, arm: str, seeds: Sequence[int]) -> dict[int, dict[str, Any]]:
        return {seed: found for seed in seeds if (found := self.summary(arm, seed)) is not None}


def _warm_start(path: Path, seed: int) -> None:
    make_model(WarmStart(), ChainsTask(), seed, path)


def add_options(parser: argparse.ArgumentParser, root: str) -> None:
    """Those that every study has."""
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each of which wants two cores")
    parser.add_argument("--root", type=Path, default=Path(root))


def against(average: float, reference: float | None) -> str:
    return "" if reference is None else f"{100 * (average - reference):+.1f} points"
