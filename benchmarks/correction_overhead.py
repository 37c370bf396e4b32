"""What the default correction and its diagnostics cost, as a share of the trainer's time.

    OMP_NUM_THREADS=1 python -m benchmarks.correction_overhead [--steps 30]

The quickstart's model trains on steps of its size (32 groups of 8, long-tailed lengths). Time spent in the correction
and in the diagnostics is taken inside the very same steps, around the functions that do it.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch

from asyncrl.algorithms import registry
from asyncrl.config import Run, Trainer, WarmStart
from asyncrl.config.task import ChainsTask
from asyncrl.training import learner as learning
from asyncrl.training.learner import Learner
from asyncrl.training.warm_start import make_model
from asyncrl.types import Group, Segment, Slot, Trajectory

GROUPS, SAMPLES, VOCABULARY = 32, 8, 32
TIMED = {"correct": registry, "figures": learning, "shares": learning, "most_off_policy": learning, "alarms": learning}
"""Functions, and where the learner finds them."""


def make_groups(rng: np.random.Generator) -> list[Group]:
    def answer(length: int) -> Segment:
        return Segment.sampled(rng.integers(0, VOCABULARY, length), rng.uniform(-3.6, -3.3, length), 0)

    def trajectory(slot: Slot, prompt: Segment) -> Trajectory:
        length = int(min(67, max(2, 15 * rng.lognormal(0.0, 0.75))))
        return Trajectory(
            slot=slot,
            prompt="p",
            segments=(prompt, answer(length)),
            reward=float(rng.integers(0, 2)),
            finish="stop",
            started=0.0,
            finished=1.0,
            engine="e",
        )

    prompts = [Segment.given(rng.integers(0, VOCABULARY, 12)) for _ in range(GROUPS)]
    return [
        Group(id=g, trajectories=tuple(trajectory(Slot(g, s), prompt) for s in range(SAMPLES)))
        for g, prompt in enumerate(prompts)
    ]


class Clock:
    """Adds up the time spent in a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.seconds = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        began = perf_counter()
        try:
            return self._function(*args, **kwargs)
        finally:
            self.seconds += perf_counter() - began


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    steps = parser.parse_args(words).steps
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(WarmStart(steps=1), ChainsTask(), 0, folder)
        trainer = Learner(model, Run(trainer=Trainer(lr=1e-5)))
    clocks = {name: Clock(getattr(place, name)) for name, place in TIMED.items()}
    observe = Clock(trainer._observe)  # pyright: ignore[reportPrivateUsage]
    for name, place in TIMED.items():
        setattr(place, name, clocks[name])
    trainer._observe = observe  # pyright: ignore[reportPrivateUsage]
    total = 0.0
    for step in range(steps + 3):
        if step == 3:  # the first steps warm up
            total = 0.0
            for clock in (*clocks.values(), observe):
                clock.seconds = 0.0
        groups = make_groups(rng)
        began = perf_counter()
        for first in range(0, GROUPS, 4):
            trainer.accumulate(groups[first : first + 4])
        trainer.step()
        total += perf_counter() - began
    inside = observe.seconds + sum(clock.seconds for clock in clocks.values())
    print(f"{steps} steps of {GROUPS} x {SAMPLES}: {1e3 * total / steps:.1f} ms a step")
    for name, seconds in [*((n, clocks[n].seconds) for n in TIMED), ("observe", observe.seconds)]:
        print(f"{name:>24}: {1e3 * seconds / steps:6.2f} ms a step")
    print(f"{'correction + diagnostics':>24}: {1e3 * inside / steps:6.2f} ms a step = {inside / total:.2%}")


if __name__ == "__main__":
    main()
