"""The simulator against real runs, against published figures, and against the clock.

    python -m benchmarks.simulator                  all of it; minutes, most of them real runs
    python -m benchmarks.simulator --only published
    python -m benchmarks.simulator --only clusters  published figures of trainers, weight updates and runs on clusters

Each real pair is two runs with different settings: the first is measured, the second predicted from it and compared.
Real runs want an otherwise idle machine: both runs of a pair must have the same machine for a prediction to mean
anything.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from asyncrl.config import Buffer, Flow, Rollout, Run, WarmStart
from asyncrl.config.engine import FakeEngine
from asyncrl.config.task import ChainsTask
from asyncrl.simulation.calibration import calibrate
from asyncrl.simulation.loop import simulate
from asyncrl.simulation.profile import Affine, EngineCost, LogNormal, Profile, Recorded, SyncCost, TrainerCost
from asyncrl.simulation.sizing import shortened, size
from asyncrl.system.run_directory import RunDirectory
from asyncrl.training.warm_start import make_model
from benchmarks.published import Line, nemo_lines, projected_lines, verl_lines
from benchmarks.published_clusters import MISSED, cluster_lines, missed
from benchmarks.runs import WARM_STEPS, steady
from benchmarks.runs import run as run_really
from pipelines.compose import from_yaml

COMMON = ("evaluation.prompts=0", "evaluation.every=0", "checkpoint.every=0", "trainer.device=cpu")
COIN = Path(__file__).with_name("coin.py")
FAKE = (
    *("engine=fake", "engine.vocabulary=12", "engine.step_seconds=0.02", "engine.median_tokens=24"),
    *("rollout.max_tokens=200", "flow.groups_per_step=16", f"reward.function={COIN}:reward", "sentinel.max_kl=0"),
)


class Pair(NamedTuple):
    """What is measured, and what is predicted from it."""

    common: tuple[str, ...]
    measured: tuple[str, ...]
    predicted: tuple[tuple[str, ...], ...]


# Measured are the synchronous runs: in them both sides are alone at times, and batches have all sizes.
PAIRS = {
    "fake": Pair(
        FAKE,
        ("max_staleness=0",),
        (
            ("max_staleness=2",),
            ("max_staleness=2", "engine.sigma=1.3"),
            ("max_staleness=1", "rollout.replicas=2", "engine.max_batch=32"),
        ),
    ),
    "native": Pair((), ("max_staleness=0",), (("max_staleness=2",), ("max_staleness=2", "flow.groups_per_step=16"))),
}


LEAST_WAIT = 10.0
"""Percent of the time. Errors of shorter waits are relative to this one: a wait of 1 % that is predicted as 2 % is an
error of a hundredth of the time, and hurts nobody."""


def real(steps: int, names: Iterable[str]) -> Iterator[Line]:
    """Throughput and wait of real runs without their first and last steps; waits are percents of the time."""
    root = Path(tempfile.mkdtemp(prefix="asyncrl-simulator-"))
    model = make_model(WarmStart(), ChainsTask(), 0, root / "model")
    start = (*COMMON, "model=checkpoint", f"model.path={model}", f"steps={steps}")
    for name in names:
        pair = PAIRS[name]
        profile: Profile | None = None
        measured: Run | None = None
        for place, own in enumerate((pair.measured, *pair.predicted)):
            directory, _ = run_really(*start, *pair.common, *own, directory=root / f"{name}-{place}")
            settings = from_yaml(directory / "config.yaml")
            profile = profile or calibrate(RunDirectory.open(directory), settings)
            measured = measured or settings
            ran = steady(directory, ends=settings.max_staleness + 1)
            found = simulate(settings, _with_engine(profile, measured, settings), warm_up=WARM_STEPS).rates
            what, kind = f"{name} {' '.join(own)}", "predicted" if place else "measured"
            yield Line(f"{what}: samples/s", ran.samples_per_second, found.samples_per_second, kind)
            waits = 100 * ran.trainer_wait, 100 * found.trainer_wait
            yield Line(f"{what}: trainer waits, %", *waits, kind, LEAST_WAIT)


def _with_engine(profile: Profile, measured: Run, settings: Run) -> Profile:
    """The measured costs with another engine's batch. A fake engine draws the same answers at another spread."""
    engine = msgspec.structs.replace(profile.engine, max_batch=settings.engine.max_batch)
    before, after, lengths = measured.engine, settings.engine, profile.lengths
    if isinstance(before, FakeEngine) and isinstance(after, FakeEngine) and isinstance(lengths, Recorded):
        groups = tuple(tuple(_drawn_again(length, before, after) for length in group) for group in lengths.groups)
        lengths = Recorded(groups=groups)
    return msgspec.structs.replace(profile, engine=engine, lengths=lengths)


def _drawn_again(length: int, before: FakeEngine, after: FakeEngine) -> int:
    """The same draw from a normal distribution, as another fake engine makes a length of it."""
    spread = after.sigma / before.sigma
    return max(1, round(after.median_tokens * (length / before.median_tokens) ** spread))


def large(gpus: int = 4096) -> float:
    """Seconds to find the best split of a large cluster; 16,384 answers a step."""
    settings = Run(
        steps=100,
        max_staleness=2,
        rollout=Rollout(group_size=16, max_tokens=28_672),
        flow=Flow(groups_per_step=1024, groups_per_take=64, group_timeout_s=1e6),
        buffer=Buffer(max_bytes=1 << 40),
    )
    profile = Profile(
        lengths=LogNormal(median=2000, sigma=1.0, between=0.5),
        engine=EngineCost(step=Affine(seconds=0.006, per_row=5e-5), per_context_token=1e-9),
        trainer=TrainerCost(per_token=2e-3),
        sync=SyncCost(seconds=5.0, pause=1.0),
        source="an invented one, for the clock",
    )
    begun = time.perf_counter()
    found = size(shortened(settings, None), profile, gpus)
    seconds = time.perf_counter() - begun
    best = found.splits[found.best]
    print(
        f"{gpus} GPUs, {len(found.splits)} splits in {seconds:.0f} s on {os.cpu_count()} cores; simulated best "
        f"{best.rollout_gpus} : {best.trainer_gpus}, {best.rates.samples_per_second:.0f} samples/s"
    )
    return seconds


def show(lines: Iterable[Line], left: str) -> None:
    print(f"{'':62}{left:>10}{'simulated':>11}{'':>7}")
    for line in lines:
        print(
            f"{line.what:62}{line.published:>10.4g}{line.simulated:>11.4g}{line.error:>+7.0%}  {line.kind}", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("real", "published", "clusters", "large"))
    parser.add_argument("--runs", nargs="+", choices=tuple(PAIRS), default=list(PAIRS), help="pairs of real runs")
    parser.add_argument("--steps", type=int, default=40, help="of each real run")
    options = parser.parse_args()
    if options.only in (None, "published"):
        show([*nemo_lines(), *projected_lines(), *verl_lines()], "published")
        print("verl with answers of twice the length:")
        show(verl_lines(2.0), "published")
    if options.only in (None, "clusters"):
        lines = [*cluster_lines()]
        show(lines, "published")
        for row in sorted(missed(lines)):
            print(f"missed: {row}: {MISSED.get(row, 'why, is not known')}")
    if options.only in (None, "large"):
        large()
    if options.only in (None, "real"):
        show(real(options.steps, options.runs), "real")


if __name__ == "__main__":
    main()
