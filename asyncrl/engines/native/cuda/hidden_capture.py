"""Hidden states of chosen completions on a GPU (asyncrl.drafting.hidden_capture), kept by the steps themselves.

A tapped completion has places in a pool on the device, which its tokens take in turn. The step that decodes them
writes there, as a part of its captured graph; rows that are not tapped, and padding, write to place 0, which nobody
reads. When the completion ends, its states go to the host beside the running step, and the places are free once they
are there.

Prompts give none: their final states would have to be computed for that alone. So a window begins with the state that
the first token is sampled from, and each state is followed by the next one, whatever is computed again in between.
Where no places are left, a completion is not tapped until there are.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncrl.drafting.hidden_capture import Part, RolloutTap, Tapped
from asyncrl.engines.cooperative import Job
from asyncrl.engines.native.batch_table import BatchTable
from asyncrl.engines.native.cuda.inputs import Fields, Shape
from asyncrl.engines.native.cuda.timeline import Mark, Timeline
from asyncrl.engines.native.sampling import Column


class StatePool:
    """The device's side."""

    def __init__(self, tap: RolloutTap, timeline: Timeline) -> None:
        self.layers, self.places = tap.layers, tap.tokens + 2 * tap.longest
        width = tap.hidden_size * (1 + len(tap.layers))
        self.states_P_X = torch.zeros(1 + self.places, width, dtype=tap.dtype, device=timeline.device)

    def write(self, place_T: Tensor, states: Sequence[Tensor]) -> None:
        """As a part of a step: final hidden states and taps of its tokens."""
        self.states_P_X.index_copy_(0, place_T.long(), torch.cat(list(states), -1).to(self.states_P_X.dtype))


class Capture(NamedTuple):
    """A completion that is tapped."""

    tapped: Tapped
    place_L: Column
    """Of its position p, place number p modulo L."""
    begins: list[tuple[int, int]]
    """Versions that have computed it, and the first position of each."""


class HiddenCapture:
    """The host's side."""

    def __init__(self, tap: RolloutTap, pool: StatePool, slots: BatchTable, timeline: Timeline, width: int) -> None:
        """A step may write `width` states of a row, some of them behind what it keeps."""
        self._tap, self._pool, self._slots, self._timeline, self._width = tap, pool, slots, timeline, width
        self._free_P = np.arange(1, 1 + pool.places)
        self._left = pool.places
        self._captures: dict[Job, Capture] = {}
        self._leaving: deque[tuple[Mark, Column]] = deque()

    def place(self, fields: Fields, shape: Shape, version: int) -> None:
        """Tell a step, whose rows are filled in, where to keep their states; it computes with this version."""
        fields.kept_X[: shape.rows * shape.width] = 0
        while self._leaving and self._leaving[0][0].passed:
            self._give_back(self._leaving.popleft()[1])
        kept_N_W = fields.kept_X[: shape.rows * shape.width].reshape(shape.rows, shape.width)
        for row, tapped in self._tap.rows(job.request.id for job in self._slots.jobs):
            start, count = int(fields.start_N[row]), int(fields.count_N[row])
            capture = self._capture(self._slots.jobs[row], tapped) if count else None
            if capture is None:
                continue
            if not capture.begins or capture.begins[-1][0] != version:
                capture.begins.append((version, start))
            kept_N_W[row, :count] = capture.place_L[np.arange(start, start + count) % len(capture.place_L)]

    def end(self, job: Job) -> None:
        """Bring what the job has to the host, before it gives up its row. The step of its last token has been read."""
        capture = self._captures.pop(job, None)
        if capture is None:
            return
        end = int(self._slots.known[job.row]) - 1  # the state of the last token has nothing to predict
        start = max(capture.begins[0][1], end - self._tap.longest)
        if start >= end:
            self._give_back(capture.place_L)
            return
        place_T = capture.place_L[np.arange(start, end) % len(capture.place_L)]
        states_T_X, mark = self._timeline.fetch(self._pool.states_P_X, torch.from_numpy(place_T))
        self._leaving.append((mark, capture.place_L))

        def parts() -> Iterable[Part]:
            mark.wait()
            for (version, begin), (_, stop) in pairwise([*capture.begins, (-1, end)]):
                if max(begin, start) < stop:
                    yield Part(version, start, states_T_X).between(begin, stop)

        capture.tapped.owed.append(parts)

    def _capture(self, job: Job, tapped: Tapped) -> Capture | None:
        found = self._captures.get(job)
        wanted = tapped.promised + self._width
        if found is None and wanted <= self._left:
            self._left -= wanted
            found = Capture(tapped, self._free_P[self._left : self._left + wanted].copy(), [])
            self._captures[job] = found
        return found

    def _give_back(self, place_L: Column) -> None:
        self._free_P[self._left : self._left + len(place_L)] = place_L
        self._left += len(place_L)
