"""How many groups are kept ready: as few as the trainer needs in order not to wait. Pure: no files, no clock.

A group that lies ready ages with every update. Where the trainer is the slower side, and W groups are complete or just
begun in front of its steps of P, samples are about W / P versions old, and `max_staleness` is the age of the long tail
alone. The least W that does not starve the trainer depends on how long groups take, which nobody knows beforehand and
which changes as a model learns. So it is sought while the run goes on. What the trainer lacked is the share of a step
for which it waited while it would have taken any group, or, if that is more, all that it waited less a tenth: a wait
for stragglers in their last step is hardly shortened by further groups, but where it is long, engines should work on.

    it lacked more than `LITTLE`, now and lately    W grows by that share of P
    lately less                                     W shrinks, at most by a sixteenth, and to P / 2: with less in front
                                                    of it the trainer asks often for little, which takes time too

Where engines are the slower side W grows to 2 P, or less if they are full before: in simulated runs more than that made
samples a quarter older and at most 5 % more of them.
"""

from math import ceil

from asyncrl.config.run import Run

LITTLE = 0.01
TOLERATED = 0.1
LATELY = 0.2
"""What the last step counts in what was lacked lately."""
SHRINK = 1 / 16


class ReadyWindow:
    """`observe` after each optimizer step."""

    def __init__(self, run: Run) -> None:
        self._fixed = None if run.flow.max_ready_groups == "auto" else run.flow.max_ready_groups
        if run.max_staleness == 0:  # a step is admitted as a whole: nothing in it can be fresher
            self._fixed = self._fixed or 0
        self._per_step = run.flow.groups_per_step
        self._least = max(run.flow.groups_per_take, self._per_step / 2)
        places = max(run.rollout.replicas, run.elastic.max) * run.engine.max_batch
        beside = min(self._per_step, ceil(places / run.rollout.group_size))
        self._most = min(run.capacity_groups, self._per_step + beside)
        self._window = float(self._per_step)
        self._lately: float | None = None

    @property
    def groups(self) -> int:
        """No group is admitted while so many are complete or just begun; 0: as many as `max_staleness` allows."""
        return ceil(self._window) if self._fixed is None else self._fixed

    def observe(self, waited: float, starved: float) -> int:
        """Take in the share of a step's time for which the trainer waited, and for which it did so while it would have
        taken any group. The first step waits for the first groups, whatever is admitted: it says nothing."""
        if self._lately is None:
            self._lately = 0.0
            return self.groups
        lacked = max(starved, waited - TOLERATED)
        self._lately += LATELY * (lacked - self._lately)
        if min(lacked, self._lately) > LITTLE:
            self._window = min(self._window + (lacked - LITTLE) * self._per_step, self._most)
        elif self._lately < LITTLE:
            self._window = max(self._window * (1 - SHRINK * (1 - self._lately / LITTLE)), self._least)
        return self.groups
