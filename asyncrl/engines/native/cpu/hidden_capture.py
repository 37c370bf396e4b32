"""Hidden states of chosen answers, out of the steps of the native engine on a CPU (asyncrl.drafting.hidden_capture)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from asyncrl.drafting.hidden_capture import Part, RolloutTap, Tapped
from asyncrl.engines.cooperative import Job
from asyncrl.engines.native.batch_table import BatchTable
from asyncrl.engines.native.cpu.scheduler import Step
from asyncrl.engines.native.sampling import Column


class Stretch(NamedTuple):
    """Consecutive tokens of an answer, and where their states are among the flat tokens of a step."""

    tapped: Tapped
    start: int
    place: Column


class Capture(NamedTuple):
    """The tapped answers that run in a step."""

    tap: RolloutTap
    rows: list[tuple[int, Tapped]]

    def stretches(self, slots: BatchTable, step: Step, path_N_W: Column | None) -> list[Stretch]:
        """What a recorded step has computed of them. `path_N_W`: the columns that rows keep, where not in order."""
        return [stretch for row, tapped in self.rows for stretch in _stretches(slots, step, row, tapped, path_N_W)]

    def keep(self, found: Sequence[Stretch], states_T_X: Tensor) -> None:
        parts = states_T_X.to(self.tap.dtype).split([len(stretch.place) for stretch in found])
        for stretch, states in zip(found, parts, strict=True):
            stretch.tapped.add(Part(self.tap.version, stretch.start, states))


def watch(tap: RolloutTap | None, jobs: list[Job]) -> Capture | None:
    rows = [] if tap is None else tap.rows(job.request.id for job in jobs)
    return Capture(tap, rows) if tap is not None and rows else None


def _stretches(slots: BatchTable, step: Step, row: int, tapped: Tapped, path_N_W: Column | None) -> list[Stretch]:
    """Of one row: its prefill chunk, if it has one, and the columns that it keeps."""
    job, width = slots.jobs[row], step.layout.width
    source, end = row, int(slots.computed[row])
    if job.leader is not None and job.leader is not job and job.leader.row >= 0:
        # It waits for the prompt of another answer, and computes beside that what it will throw away.
        source = job.leader.row
        end = min(int(slots.computed[source]), len(job.request.tokens) - 1)
    found: list[Stretch] = []
    offset = step.layout.rows * width
    for chunk in step.layout.chunks:
        if chunk.row == source:
            found.append(Stretch(tapped, chunk.start, offset + np.arange(chunk.end - chunk.start)))
        offset += chunk.end - chunk.start
    base = int(step.end_N[source]) - 1
    if base < end:
        columns = np.arange(end - base) if path_N_W is None else path_N_W[source, : end - base]
        found.append(Stretch(tapped, base, source * width + columns))
    return found
