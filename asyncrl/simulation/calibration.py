"""A profile from a finished run: what its directory says about lengths, engines, trainer and weight updates.

An engine's pace is found from its answers alone: when each of them began and ended says how many rows the batch had at
every moment. Answer i took D_i seconds for L_i tokens among b_i rows on average, so with a step of s + r * b seconds
D_i = L_i * s + L_i * b_i * r: thousands of equations for two unknowns, solved by least squares. The trainer's costs are
found in the same way, from the times and tokens of its forwards and backwards.
"""

from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncrl.buffer.reader import read_deliveries, read_run
from asyncrl.config import Run
from asyncrl.data.tables import read_table
from asyncrl.engines.settings import VllmEngine
from asyncrl.errors import ConfigError
from asyncrl.rundir import RunDirectory, read_events
from asyncrl.simulation.profile import Affine, EngineCost, Profile, Recorded, RewardCost, SyncCost, TrainerCost

Floats = NDArray[np.float64]
Events = Sequence[Mapping[str, Any]]
MOST_GROUPS = 512
"""Of the recorded ones, evenly over the run, that a profile keeps."""
FEWEST_WAITS = 10
"""From which on they tell something: the first ones are for the judge's process to start."""
SHORTEST = 1e-9
"""Seconds, against divisions by nothing."""


class Sample(NamedTuple):
    """What is needed of a trajectory."""

    group: int
    engine: str
    started: float
    finished: float
    tokens: int
    prompt: int
    reward: float


def calibrate(directory: RunDirectory, run: Run) -> Profile:
    """The costs of `run`, measured from what it left in its directory."""
    if not directory.metrics.is_file():
        raise ConfigError(
            f"{directory.path} has no metrics.parquet: none of its steps is finished, nothing can be measured"
        )
    rows: list[dict[str, Any]] = read_table(directory.metrics).to_pylist()
    events = read_events(directory.events)
    samples = _samples(directory)
    groups = _complete(samples, run.rollout.group_size)
    takes = _takes(directory, events)
    if not groups or not takes:
        raise ConfigError(f"{directory.path} holds no answers that were trained on: there is nothing to measure")
    every = -(-len(groups) // MOST_GROUPS)
    published = [row["sync_seconds"] for row in rows if row["sync_seconds"] > 0]
    return Profile(
        lengths=Recorded(groups=tuple(tuple(s.tokens for s in group) for group in [*groups.values()][::every])),
        prompt_tokens=round(fmean(sample.prompt for sample in samples)),
        engine=EngineCost(
            gpus=run.engine.tensor_parallel if isinstance(run.engine, VllmEngine) else 1,
            max_batch=run.engine.max_batch,
            step=step_time(samples, run.engine.max_batch),
        ),
        trainer=_trainer(takes, groups, events),
        sync=SyncCost(seconds=fmean(published) if published else 0.0),
        reward=RewardCost(latency=_latency(takes, groups)),
        informative=fmean(_informative(group) for group in groups.values()),
        kl_per_version=_kl_per_version(rows),
        source=f"measured: {directory.path.name}, {len(rows)} steps, {len(samples)} answers",
    )


def _samples(directory: RunDirectory) -> list[Sample]:
    found: list[Sample] = []
    for each in read_run(directory.trajectories):
        sampled = each.sampled_tokens
        prompt = sum(map(len, each.segments)) - sampled
        times = (each.started, each.finished)
        found.append(Sample(each.slot.group, each.engine, *times, sampled, prompt, each.reward))
    return found


def _complete(samples: Iterable[Sample], size: int) -> dict[int, list[Sample]]:
    """Groups by number, of answers that have tokens."""
    found: dict[int, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.group, []).append(sample)
    return {n: g for n, g in sorted(found.items()) if len(g) == size and all(sample.tokens for sample in g)}


def _informative(group: Sequence[Sample]) -> bool:
    return len({sample.reward for sample in group}) > 1


# -- engines ---------------------------------------------------------------------------------------------------------


def step_time(samples: Sequence[Sample], max_batch: int) -> Affine:
    """Seconds of a decoding step by batch size."""
    seconds: list[Floats] = []
    rows: list[Floats] = []
    tokens: list[float] = []
    for engine in sorted({sample.engine for sample in samples}):
        own = [sample for sample in samples if sample.engine == engine]
        spent, row_seconds = _spent(own, max_batch)
        seconds.append(spent)
        rows.append(row_seconds / np.maximum(spent, SHORTEST))
        tokens += [float(sample.tokens) for sample in own]
    D, b, L = np.concatenate(seconds), np.concatenate(rows), np.array(tokens)
    fixed, per_row = _least(np.stack([L, L * b], axis=1), D)
    return Affine(seconds=fixed, per_row=per_row)


def _least(columns: Floats, result: Floats) -> tuple[float, float]:
    """Two coefficients, neither below 0. Their proportion is that of the least squares of the relative error, so that
    short spans count as much as long ones; their size is such that the sum is right."""
    scaled = columns / np.maximum(result, SHORTEST)[:, None]
    found, *_ = np.linalg.lstsq(scaled, np.ones(len(result)), rcond=None)
    if found.min() < 0:
        found = np.where(found == found.max(), 1.0, 0.0)
    found *= result.sum() / max(float((columns @ found).sum()), SHORTEST)
    return float(found[0]), float(found[1])


def _spent(samples: Sequence[Sample], max_batch: int) -> tuple[Floats, Floats]:
    """Of one engine: seconds of each answer in the batch, and the integral of the batch's size over them."""
    entered = _entered(samples, max_batch)
    finished = np.array([sample.finished for sample in samples])
    times = np.concatenate([finished, entered])  # who leaves at the moment that another one joins has left before
    order = np.argsort(times, kind="stable")
    times = times[order]
    batch = np.cumsum(np.where(order < len(samples), -1, 1))[:-1]
    passed = np.concatenate([[0.0], np.cumsum(np.diff(times) * np.clip(batch, 1, max_batch))])
    return finished - entered, passed[np.searchsorted(times, finished)] - passed[np.searchsorted(times, entered)]


def _entered(samples: Sequence[Sample], max_batch: int) -> Floats:
    """When each answer got its row: at once, or when one of a full batch was finished; first come, first served."""
    entered = np.zeros(len(samples))
    running: list[float] = []
    for i in sorted(range(len(samples)), key=lambda i: samples[i].started):
        begin = samples[i].started
        while running and running[0] <= begin:
            heappop(running)
        if len(running) >= max_batch:
            begin = heappop(running)
        entered[i] = min(begin, samples[i].finished)
        heappush(running, samples[i].finished)
    return entered


# -- the trainer -----------------------------------------------------------------------------------------------------


class _Take(NamedTuple):
    """A forward and backward, from the delivery of its groups to its end."""

    step: int
    waited_from: float
    begun: float
    ended: float
    groups: tuple[int, ...]


def _takes(directory: RunDirectory, events: Iterable[Mapping[str, Any]]) -> list[_Take]:
    """In order. The journal knows which groups, the events know when."""
    deliveries = read_deliveries(directory.trajectories)
    found: list[_Take] = []
    waited: Mapping[str, Any] | None = None
    for event in events:
        if event["kind"] == "wait_batch":
            waited = event
        elif event["kind"] == "train" and waited is not None and deliveries.get(event["step"]):
            times = waited["time"], waited["time"] + waited["seconds"], event["time"] + event["seconds"]
            found.append(_Take(event["step"], *times, deliveries[event["step"]].pop(0)))
            waited = None
    return found


def _trainer(takes: Sequence[_Take], groups: Mapping[int, Sequence[Sample]], events: Events) -> TrainerCost:
    """Per forward and backward, and per token of the groups that are learned from; never less than nothing."""
    trained = [[groups[g] for g in take.groups if g in groups and _informative(groups[g])] for take in takes]
    tokens = np.array([sum(sample.tokens for group in found for sample in group) for found in trained], float)
    seconds = np.array([take.ended - take.begun for take in takes])
    per_take, per_token = _least(np.stack([np.ones(len(takes)), tokens], axis=1), seconds)
    return TrainerCost(per_token=per_token, per_take=per_take, per_step=_per_step(takes, events))


def _per_step(takes: Sequence[_Take], events: Events) -> float:
    """From a step's last backward, or the publication before if that ends later, to the wait for the next step's first
    groups: the update, and checkpoints. Evaluations do not count."""
    published = {event["version"]: event["time"] + event["seconds"] for event in events if event["kind"] == "publish"}
    evaluations = [(event["time"], event["seconds"]) for event in events if event["kind"] == "evaluation"]
    found: list[float] = []
    for last, first in pairwise(takes):
        if first.step == last.step + 1:
            begin = max(last.ended, published.get(last.step, 0.0))
            other = sum(seconds for time, seconds in evaluations if begin <= time <= first.waited_from)
            found.append(max(0.0, first.waited_from - begin - other))
    return fmean(found) if found else 0.0


def _latency(takes: Sequence[_Take], groups: Mapping[int, Sequence[Sample]]) -> float:
    """From the last token to the trainer, where the trainer waited for it; without the wait for company.

    A low quantile, for often it was not the last answer that the trainer waited for, but one that had a place reserved.
    """
    lags = [
        take.begun - last
        for take in takes
        if (last := max((s.finished for g in take.groups for s in groups.get(g, ())), default=0.0)) > take.waited_from
    ]
    if len(lags) < FEWEST_WAITS:
        return 0.0
    return max(0.0, float(np.quantile(lags, 0.1)) - RewardCost().gather / 2)


def _kl_per_version(rows: Sequence[Mapping[str, Any]]) -> float:
    """The slope of a line through the origin."""
    age = np.array([row["staleness_mean"] for row in rows])
    kl = np.array([abs(row["mismatch_kl"]) for row in rows])
    usable = np.isfinite(kl)
    return float((age * kl)[usable].sum() / max((age**2)[usable].sum(), 1.0))
