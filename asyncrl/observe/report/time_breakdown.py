"""Where the time of the training loop went: every moment of it belongs to one cause.

    train, update                                   training
    checkpoint                                      checkpoint
    the trainer is idle while a version travels     sync
    the trainer waits for groups, and               by the step's waits:
        more completions are judged than generated      reward
        none is generated                           other
        few are generated                           tail
        else                                        generation
    anything else: calls, bookkeeping               other

Evaluations, and what lies between two attempts of a run, are no part of the loop.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

Cause = Literal["training", "checkpoint", "sync", "reward", "tail", "generation", "other"]
CAUSES: tuple[Cause, ...] = get_args(Cause)
FEW = 0.25
"""Of the most completions that ever ran at a time: fewer than this share are the tail of a batch."""
Times = npt.NDArray[np.float64]


class Running(NamedTuple):
    """How many completions were being generated, at any moment, from when each began and ended; both sorted."""

    started: Times
    finished: Times

    @classmethod
    def of(cls, started: Times, finished: Times) -> "Running":
        return cls(np.sort(started), np.sort(finished))

    def at(self, moments: Times) -> Times:
        before = np.searchsorted(self.started, moments, side="right")
        return (before - np.searchsorted(self.finished, moments, side="right")).astype(np.float64)

    @property
    def most(self) -> float:
        return float(self.at(self.started).max(initial=0.0))


class Pieces(NamedTuple):
    """The loop cut into pieces of one cause, in order, without the time outside of it."""

    starts: Times
    ends: Times
    causes: npt.NDArray[np.int64]
    """Indices into CAUSES."""

    def seconds(self) -> dict[Cause, float]:
        sums = np.bincount(self.causes, weights=self.ends - self.starts, minlength=len(CAUSES))
        return {cause: float(sums[index]) for index, cause in enumerate(CAUSES)}


class Judged(NamedTuple):
    """Completions that were with the reward function on average, from one step's end to the next."""

    ends: Times
    mean: Times

    def at(self, moments: Times) -> Times:
        if not len(self.ends):
            return np.zeros_like(moments)
        return self.mean[np.minimum(np.searchsorted(self.ends, moments), len(self.ends) - 1)]


def split(events: Sequence[Mapping[str, Any]], running: Running, judged: Judged) -> Pieces:
    """`events` in the order in which they were written."""
    spans = {kind: _spans(events, *kinds) for kind, kinds in _KINDS.items()}
    loop, attempts = _spans_of_loop(events), spans["evaluation"]
    edges = np.unique(np.concatenate([*(np.concatenate(s) for s in spans.values()), *loop, *_tails(running, loop)]))
    starts, ends = edges[:-1], edges[1:]
    middles = (starts + ends) / 2
    inside = _covered(middles, loop) & ~_covered(middles, attempts)
    starts, ends, middles = starts[inside], ends[inside], middles[inside]
    causes = np.full(len(middles), CAUSES.index("other"))
    waits = _covered(middles, spans["wait"])
    causes[waits] = _of_waits(starts[waits], ends[waits], running, judged)
    for cause in ("sync", "checkpoint", "training"):  # the later ones win: whoever works does not wait
        causes[_covered(middles, spans[cause])] = CAUSES.index(cause)
    return _joined(Pieces(starts, ends, causes))


_KINDS = {
    "wait": ("wait_batch",),
    "sync": ("publish", "wait_sync"),
    "checkpoint": ("checkpoint",),
    "training": ("train", "update"),
    "evaluation": ("evaluation",),
}


def _of_waits(starts: Times, ends: Times, running: Running, judged: Judged) -> npt.NDArray[np.int64]:
    """Whoever holds most of the samples that a step waits for is what it waits for."""
    middles, lengths = (starts + ends) / 2, ends - starts
    counts, judging = running.at(middles), judged.at(middles)
    if not len(running.started):
        return np.where(judging > 0, CAUSES.index("reward"), CAUSES.index("generation"))
    step = np.searchsorted(judged.ends, middles) if len(judged.ends) else np.zeros(len(middles), np.int64)
    weight = np.bincount(step, weights=lengths)
    mean = np.bincount(step, weights=lengths * counts) / np.maximum(weight, 1e-12)
    few = np.where(counts > 0, CAUSES.index("tail"), CAUSES.index("other"))
    quiet = np.where(counts < FEW * running.most, few, CAUSES.index("generation"))
    return np.where(judging > mean[step], CAUSES.index("reward"), quiet)


def _spans(events: Sequence[Mapping[str, Any]], *kinds: str) -> tuple[Times, Times]:
    found = [(e["time"], e["time"] + e["seconds"]) for e in events if e["kind"] in kinds and e.get("seconds")]
    pairs = np.array(found, np.float64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def _spans_of_loop(events: Sequence[Mapping[str, Any]]) -> tuple[Times, Times]:
    """From each beginning to the end, or to the last sign of life before the actors were placed anew."""
    starts: list[float] = []
    ends: list[float] = []
    inside = False
    for event in events:
        if event["kind"] == "loop_started":
            inside = True
            starts.append(event["time"])
            ends.append(event["time"])
        elif event["kind"] in _PLACED_ANEW:
            inside = False
        elif inside:
            ends[-1] = max(ends[-1], event["time"] + (event.get("seconds") or 0.0))
            inside = event["kind"] != "loop_ended"
    return np.array(starts, np.float64), np.array(ends, np.float64)


_PLACED_ANEW = ("environment", "fleet_started", "restart")


def _tails(running: Running, loop: tuple[Times, Times]) -> tuple[Times, ...]:
    """Moments at which completions become none, few or many, so that no piece is of two kinds."""
    if not len(running.started):
        return ()
    moments = np.sort(np.concatenate(running))
    counts = running.at(moments)
    level = (counts > 0).astype(np.int64) + (counts >= FEW * running.most)
    changes = moments[1:][level[1:] != level[:-1]]
    return (changes[(changes > loop[0].min(initial=np.inf)) & (changes < loop[1].max(initial=0.0))],)


def _covered(moments: Times, spans: tuple[Times, Times]) -> npt.NDArray[np.bool_]:
    starts, ends = np.sort(spans[0]), np.sort(spans[1])
    return np.searchsorted(starts, moments, side="right") > np.searchsorted(ends, moments, side="right")


def _joined(pieces: Pieces) -> Pieces:
    """Neighbours of one cause become one piece."""
    if not len(pieces.starts):
        return pieces
    new = np.ones(len(pieces.starts), np.bool_)
    new[1:] = (pieces.causes[1:] != pieces.causes[:-1]) | (pieces.starts[1:] > pieces.ends[:-1])
    last = np.append(np.flatnonzero(new)[1:] - 1, len(new) - 1)
    return Pieces(pieces.starts[new], pieces.ends[last], pieces.causes[new])
