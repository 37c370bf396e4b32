"""A profile from a finished run: what its directory says about lengths, engines, trainer and weight updates.

Paces are found by least squares over all completions and all forwards and backwards. Where trainer and engines share a
machine, each of them is slower while the other is at work; how much is found in the same spans, for they had more or
less company.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import inf
from statistics import fmean, median
from typing import Any

import msgspec
import numpy as np

from asyncrl.config import Run
from asyncrl.data.untrusted import read_table
from asyncrl.errors import ConfigError
from asyncrl.fleet.concurrency import gather_seconds
from asyncrl.simulation.decoding import Decoding
from asyncrl.simulation.fitting import Company, Floats, fit, slowdown
from asyncrl.simulation.profile import Affine, EngineCost, Profile, Recorded, RewardCost, Sharing, SyncCost, TrainerCost
from asyncrl.simulation.recordings import (
    Events,
    Groups,
    Publication,
    Sample,
    Take,
    by_engine,
    complete,
    informative,
    read_publications,
    read_samples,
    read_takes,
    read_waits,
    sent,
)
from asyncrl.system.run_directory import RunDirectory, read_events

MOST_GROUPS = 2048
"""Of the recorded ones, evenly over the run, that a profile keeps."""
FEWEST_WAITS = 10
"""From which on they tell something: the first ones are for the judge's process to start."""
LONG_AGO = 0.2
"""Seconds. What left an engine so long ago lies in the buffer, however slow the way."""
COLD_STEPS, FEWEST_STEPS = 2, 10
"""So many first steps do not count in runs that have at least so many: kernels are compiled, memory is got."""


def calibrate(directory: RunDirectory, run: Run) -> Profile:
    """The costs of `run`, measured from what it left in its directory."""
    if not directory.metrics.is_file():
        raise ConfigError(
            f"{directory.path} has no metrics.parquet: none of its steps is finished, nothing can be measured"
        )
    rows: list[dict[str, Any]] = read_table(directory.metrics).to_pylist()
    events = read_events(directory.events)
    samples = read_samples(directory)
    groups = complete(samples, run.rollout.group_size)
    takes = read_takes(directory, events)
    if not groups or not takes:
        raise ConfigError(f"{directory.path} holds no samples that were trained on: there is nothing to measure")
    every = -(-len(groups) // MOST_GROUPS)
    publications = read_publications(events)
    step, trainer, sharing = paces(samples, _warm(takes), groups, run.engine.max_batch)
    left = sent(samples, gather_seconds(max(run.rollout.replicas, run.elastic.max)))
    return Profile(
        lengths=Recorded(groups=tuple(tuple(s.tokens for s in group) for group in [*groups.values()][::every])),
        prompt_tokens=round(fmean(sample.prompt for sample in samples)),
        engine=EngineCost(
            gpus=run.engine.gpus,
            max_batch=run.engine.max_batch,
            step=step,
            begin_seconds=max(0.0, median(read_waits(directory, run, samples) or [0.0])),
        ),
        trainer=msgspec.structs.replace(
            trainer,
            per_step=_per_step(takes, publications, events),
            per_ask=_per_ask(takes, left),
            token_budget=run.trainer.token_budget,
            context_parallel=run.trainer.context_of(round(fmean(each.prompt + each.tokens for each in samples))),
            expert_parallel=run.trainer.expert_parallel,
        ),
        sync=SyncCost(seconds=fmean(each.seconds for each in publications.values()) if publications else 0.0),
        reward=RewardCost(latency=_latency(takes, left)),
        sharing=sharing,
        informative=fmean(informative(group) for group in groups.values()),
        kl_per_version=_kl_per_version(rows),
        source=f"measured: {directory.path.name}, {len(rows)} steps, {len(samples)} samples",
    )


def _warm(takes: Sequence[Take]) -> list[Take]:
    first, last = takes[0].step, takes[-1].step
    cold = COLD_STEPS if last - first + 1 >= FEWEST_STEPS else 0
    return [take for take in takes if take.step >= first + cold]


# -- paces -----------------------------------------------------------------------------------------------------------


def paces(
    samples: Sequence[Sample], takes: Sequence[Take], groups: Groups, max_batch: int
) -> tuple[Affine, TrainerCost, Sharing]:
    """Of engines and trainer, and what each of them loses while the other is at work.

    A run in which one of them had the other's company always, or never, cannot tell what it is like otherwise; then
    the loss is taken to be mutual.
    """
    begun, ended = np.array([(take.given, take.ended) for take in takes]).T
    trained = np.stack([np.ones(len(takes)), _tokens(takes, groups)], axis=1)
    engines = Company([(s.started, s.finished) for s in own] for own in by_engine(samples).values())
    decoding = Decoding(samples, max_batch, zip(begun, ended, strict=True), since=takes[0].asked)
    alone = partial(engines.alone, begun, ended)
    told = slowdown(trained, alone, engines.share(begun, ended)), decoding.slowdown()
    own, other = (next((f for f in order if f is not None), 0.0) for order in (told, told[::-1]))
    per_take, per_token = fit(trained, alone(own))
    trainer = TrainerCost(per_token=float(per_token), per_take=float(per_take))
    return decoding.step(other), trainer, Sharing(trainer=own, engine=other)


def _tokens(takes: Sequence[Take], groups: Groups) -> Floats:
    """Of the groups that are learned from."""
    trained = [[groups[g] for g in take.groups if g in groups and informative(groups[g])] for take in takes]
    return np.array([sum(sample.tokens for group in found for sample in group) for found in trained], float)


# -- everything else -------------------------------------------------------------------------------------------------


def _per_step(takes: Sequence[Take], publications: Mapping[int, Publication], events: Events) -> float:
    """From a step's last backward, or the publication before if that ends later, to the wait for the next step's first
    groups: the update, and checkpoints. Evaluations do not count."""
    evaluations = [(event["time"], event["seconds"]) for event in events if event["kind"] == "evaluation"]
    found: list[float] = []
    for last, first in pairwise(takes):
        if first.step == last.step + 1:
            before = publications.get(last.step)
            begin = max(last.ended, before.begun + before.seconds if before else 0.0)
            other = sum(seconds for time, seconds in evaluations if begin <= time <= first.asked)
            found.append(max(0.0, first.asked - begin - other))
    return fmean(found) if found else 0.0


def _per_ask(takes: Sequence[Take], left: Mapping[int, float]) -> float:
    """Of takes whose completions had left their engines long before."""
    there = [
        take.given - take.asked
        for take in takes
        if max((left[g] for g in take.groups if g in left), default=inf) < take.asked - LONG_AGO
    ]
    return median(there) if there else 0.0


def _latency(takes: Sequence[Take], left: Mapping[int, float]) -> float:
    """From an engine to the trainer, where the trainer waited for it. The mean, for which completions left together is
    not known exactly; without the longest and the shortest, where it was something else that the trainer waited for."""
    lags = [
        take.given - last
        for take in takes
        if (last := max((left[g] for g in take.groups if g in left), default=0.0)) > take.asked
    ]
    cut = len(lags) // 10
    return max(0.0, fmean(sorted(lags)[cut : len(lags) - cut])) if len(lags) >= FEWEST_WAITS else 0.0


def _kl_per_version(rows: Sequence[Mapping[str, Any]]) -> float:
    """The slope of a line through the origin."""
    age = np.array([row["staleness_mean"] for row in rows])
    kl = np.array([abs(row["mismatch_kl"]) for row in rows])
    usable = np.isfinite(kl)
    return float((age * kl)[usable].sum() / max((age**2)[usable].sum(), 1.0))
