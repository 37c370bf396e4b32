"""Times from a run's directory: when completions began and ended, and when the trainer got and used them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from asyncrl.buffer.reader import read_admissions, read_deliveries, read_run
from asyncrl.config import Run
from asyncrl.system.run_directory import RunDirectory

Events = Sequence[Mapping[str, Any]]


class Sample(NamedTuple):
    """What is needed of a trajectory."""

    group: int
    engine: str
    started: float
    finished: float
    tokens: int
    prompt: int
    reward: float


Groups = Mapping[int, Sequence[Sample]]


class Take(NamedTuple):
    """A forward and backward, from asking for groups to its end."""

    step: int
    asked: float
    given: float
    """The trainer has the groups, and reads them."""
    ended: float
    groups: tuple[int, ...]


class Publication(NamedTuple):
    """Engines get new weights."""

    begun: float
    seconds: float


def read_samples(directory: RunDirectory) -> list[Sample]:
    found: list[Sample] = []
    for each in read_run(directory.trajectories):
        sampled = each.sampled_tokens
        prompt = sum(map(len, each.segments)) - sampled
        times = (each.started, each.finished)
        found.append(Sample(each.slot.group, each.engine, *times, sampled, prompt, each.reward))
    return found


def read_waits(directory: RunDirectory, run: Run, samples: Iterable[Sample]) -> list[float]:
    """From the ticket of a group to the beginning of each of its completions."""
    admitted = {group: due - run.flow.group_timeout_s for group, due in read_admissions(directory.trajectories).items()}
    return [sample.started - admitted[sample.group] for sample in samples if sample.group in admitted]


def read_takes(directory: RunDirectory, events: Events) -> list[Take]:
    """In order. The journal knows which groups, the events know when."""
    deliveries = read_deliveries(directory.trajectories)
    found: list[Take] = []
    waited: Mapping[str, Any] | None = None
    for event in events:
        if event["kind"] == "wait_batch":
            waited = event
        elif event["kind"] == "train" and waited is not None and deliveries.get(event["step"]):
            times = waited["time"], waited["time"] + waited["seconds"], event["time"] + event["seconds"]
            found.append(Take(event["step"], *times, deliveries[event["step"]].pop(0)))
            waited = None
    return found


def read_publications(events: Events) -> dict[int, Publication]:
    """By version."""
    return {
        event["version"]: Publication(event["time"], event["seconds"]) for event in events if event["kind"] == "publish"
    }


def complete(samples: Iterable[Sample], size: int) -> dict[int, list[Sample]]:
    """Groups by number, of completions that have tokens."""
    found: dict[int, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.group, []).append(sample)
    return {n: g for n, g in sorted(found.items()) if len(g) == size and all(sample.tokens for sample in g)}


def by_engine(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.engine, []).append(sample)
    return dict(sorted(found.items()))


def sent(samples: Iterable[Sample], gather: float) -> dict[int, float]:
    """When the last completion of each group left its engine: finished ones wait for others, as in the delivery
    queue."""
    found: dict[int, float] = {}
    for own in by_engine(samples).values():
        leaves = -1.0
        for sample in sorted(own, key=lambda sample: sample.finished):
            if sample.finished > leaves:
                leaves = sample.finished + gather
            found[sample.group] = max(leaves, found.get(sample.group, leaves))
    return found


def informative(group: Sequence[Sample]) -> bool:
    return len({sample.reward for sample in group}) > 1
