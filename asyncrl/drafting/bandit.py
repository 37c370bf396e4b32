"""Which strategy to draft with, by the number of running completions: epsilon-greedy on tokens per second, per range.

**Rate.** What counts is the tokens per second of one completion: the mean of its tokens per step over the mean of the
steps' seconds. Tokens are bounded (1 to depth + 1), so their mean is safe; seconds are not, and one slow step must
not matter, so the longest and the shortest tenth are left out. A median would leave out too much: plain steps are of
two kinds, with and without new prompts, while a step with drafts takes as many prompts as several plain ones.

**Exploration.** An arm without figures is tried first. Later, `epsilon` of the time is shared equally by the arms not
in use, in short runs, since a single odd step would only measure the switch; the first steps after a switch are not
counted. The share of an arm falls with the sixth power of its rate relative to the best one, 0.5 at 0.9 and 0.1 at
0.7, but not below an eighth: it is still looked at, because acceptance changes as the policy and the drafter move.

**Choice.** The arm in use changes only for one that is 2 % better, so that equal ones do not alternate.

`Speculation` at the end is for a bandit in another process, as inside vLLM: it reports, and is told what to do, by two
small files, wherever that process is put.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import mean

import msgspec

from asyncrl.config.drafter import ActiveDrafter, Drafting, Strategy
from asyncrl.types import SpeculationArm

SETTLE = 2
"""Steps after a switch that are not counted."""
RUN_ANSWERS, SHORTEST_RUN, LONGEST_RUN = 64, 8, 32
"""An arm is tried until it has decoded so many completions' steps, within bounds of steps."""
FEWEST = 4
"""Counted steps without which an arm has no figures."""
TRIES = 3
"""Runs after which an arm that got no figures, as no step could be counted, is given up."""
ACCEPTANCE_ANSWERS = 256
"""Acceptance is averaged over the last window of steps, and over the steps of so many completions at least."""
BETTER = 1.02
"""The arm in use is left for one that is so much better."""
CAUTION, LEAST_SHARE = 6, 1 / 8
"""How the share of an arm falls with its rate."""


class Arm(msgspec.Struct):
    """One strategy in one range of batch sizes."""

    strategy: Strategy
    seconds: list[float] = []
    """Of the last counted steps."""
    pace: float = 0.0
    """Their mean, without the extremes."""
    tokens: float = 0.0
    answers: float = 0.0
    """Tokens of completions' steps, both fading."""
    steps: int = 0
    """Counted ones since the start."""
    runs: int = 0

    @property
    def rate(self) -> float:
        """Tokens per second of one completion; 0 without figures."""
        return self.tokens / self.answers / self.pace if len(self.seconds) >= FEWEST else 0.0

    def look_again(self) -> None:
        """A run of trying begins: what is known may be old, and shall not outweigh it."""
        self.runs += 1
        self.seconds = self.seconds[-FEWEST:]
        self.tokens, self.answers = self.tokens / 2, self.answers / 2


class Range(msgspec.Struct):
    """The arms in one range of batch sizes; the first is plain decoding."""

    first: int
    arms: list[Arm]
    batch: float = 0.0
    """Usual batch size, to turn the rate of one completion into that of all."""
    best: int = 0
    trying: int = 0
    left: int = 0
    """Steps that the arm being tried still has."""


class Bandit:
    def __init__(self, drafter: Drafting, seed: int, learned: Sequence[Range] = ()) -> None:
        """`learned` by an earlier one (`state`) is taken over where ranges and strategies are the same."""
        self._settings = drafter.adaptive
        self._random = Random(seed)
        self._ranges = [
            Range(first=first, arms=[Arm(strategy) for strategy in drafter.strategies])
            for first in drafter.adaptive.ranges
        ]
        self._restore(learned)
        self._counted: Strategy | None = None
        self._settled = 0

    def choose(self, batch: int) -> Strategy:
        """What to draft with in the next step, in which `batch` completions run."""
        here = self._range(batch)
        if here.left == 0:
            index = self._arm_to_try(here, batch)
            if index is None:
                return here.arms[here.best].strategy
            here.trying, here.left = index, _run(batch)
            here.arms[index].look_again()
        here.left -= 1
        return here.arms[here.trying].strategy

    def record(self, batch: int, strategy: Strategy, tokens: int, seconds: float) -> None:
        """One step of `batch` completions under `strategy` gave `tokens` in `seconds`."""
        self._settled = self._settled + 1 if strategy == self._counted else 0
        self._counted = strategy
        if self._settled < SETTLE or seconds <= 0:
            return
        here = self._range(batch)
        arm = next(arm for arm in here.arms if arm.strategy == strategy)
        window = self._settings.window
        keep = math.exp(-batch / max(ACCEPTANCE_ANSWERS, window * batch))
        arm.tokens, arm.answers = arm.tokens * keep + tokens, arm.answers * keep + batch
        arm.seconds = [*arm.seconds, seconds][-window:]
        arm.pace = _middle(arm.seconds)
        arm.steps += 1
        here.batch = batch if here.batch == 0 else here.batch + (batch - here.batch) / window
        leader = max(range(len(here.arms)), key=lambda index: here.arms[index].rate)
        if here.arms[leader].rate > BETTER * here.arms[here.best].rate:
            here.best = leader

    def report(self) -> tuple[SpeculationArm, ...]:
        """What was measured. Within a range the rates are of one batch size, so that their ratios are gains."""
        return tuple(
            SpeculationArm(here.first, arm.strategy.depth, arm.strategy.nodes, arm.steps, arm.rate * here.batch)
            for here in self._ranges
            for arm in here.arms
            if arm.rate
        )

    def state(self) -> list[Range]:
        """All that was learned; msgspec can encode it."""
        return self._ranges

    def _restore(self, learned: Sequence[Range]) -> None:
        old = {here.first: here for here in learned}
        for index, here in enumerate(self._ranges):
            before = old.get(here.first)
            if before and [arm.strategy for arm in before.arms] == [arm.strategy for arm in here.arms]:
                self._ranges[index] = before

    def _range(self, batch: int) -> Range:
        return next((here for here in reversed(self._ranges) if here.first <= batch), self._ranges[0])

    def _arm_to_try(self, here: Range, batch: int) -> int | None:
        unknown = [index for index, arm in enumerate(here.arms) if not arm.rate and arm.runs < TRIES]
        if unknown:
            return min(unknown, key=lambda index: here.arms[index].runs)
        best = here.arms[here.best]
        share = self._settings.epsilon / max(1, len(here.arms) - 1) / _run(batch)
        draw = self._random.random()
        for index, arm in enumerate(here.arms):
            if arm is not best and arm.rate:
                draw -= share * max((arm.rate / best.rate) ** CAUTION, LEAST_SHARE) * best.pace / arm.pace
                if draw < 0:
                    return index
        return None


def _middle(values: list[float]) -> float:
    """The mean without a tenth at each end, one value at least."""
    cut = max(1, len(values) // 10) if len(values) > 2 else 0
    return mean(sorted(values)[cut : len(values) - cut])


def _run(batch: int) -> int:
    return SETTLE + min(max(RUN_ANSWERS // max(batch, 1), SHORTEST_RUN), LONGEST_RUN)


class Report(msgspec.Struct, frozen=True):
    """What the process with the bandit says."""

    arms: tuple[SpeculationArm, ...] = ()
    depth: int | None = None
    """The one that it was told to use; None: the bandit chooses."""
    learned: Sequence[Range] = ()
    """All that the bandit knows; what our engine writes here before the start is what it begins with."""


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """What that process has to know, and the folder in which it and our engine write to each other."""

    drafter: ActiveDrafter
    folder: str

    def report(self) -> Report:
        path = Path(self.folder, "report")
        return msgspec.json.decode(path.read_bytes(), type=Report) if path.exists() else Report()

    def order(self, depth: int | None) -> None:
        """Draft so many tokens in every step; None: the bandit chooses."""
        self.write("depth", depth)

    def ordered(self) -> int | None:
        path = Path(self.folder, "depth")
        return msgspec.json.decode(path.read_bytes(), type=int | None) if path.exists() else None

    def write(self, name: str, said: Report | int | None) -> None:
        """Whole or not at all, for whoever reads meanwhile."""
        draft = Path(self.folder, f"{name}.new")
        draft.write_bytes(msgspec.json.encode(said))
        draft.rename(draft.with_suffix(""))
