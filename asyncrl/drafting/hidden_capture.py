"""Hidden states for the drafter, taken out of the steps in which an engine decodes: no forward is made for them.

A completion is chosen before it begins, since its states must be kept as they come. How long it will be is not known
then, so its longest possible length is set aside, and what it leaves over is given back: whether a completion is chosen
never depends on its own length.

Every state belongs to the version whose weights computed it. A completion that went through a weight update gives a
window for each version, and none whose states are of two. Axis suffixes: T tokens, X final hidden state and taps side
by side.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncrl.config.drafter import DrafterTraining
from asyncrl.drafting.windows import SENT_DTYPE, Window
from asyncrl.types import GIVEN, Trajectory

SHORTEST = 2
"""A window of one token has nothing to draft."""


class Budget:
    """Which completions of a training step one source gives: each with the same chance, which follows from the step
    before.

    A step has more tokens than the drafter may get. First come, first served would take short completions, which are
    complete first.
    """

    def __init__(self, tokens: int, longest: int, seed: int) -> None:
        """`tokens` of a step are given, at most one completion more; `longest` of one completion."""
        self._tokens, self._longest = tokens, longest
        self._random = random.Random(seed)
        self._chance = 1.0
        self._offered, self._left = 0, tokens

    def begin_step(self, promised: int = 0) -> None:
        """`promised` tokens of completions that were chosen before are still to come."""
        if self._offered > 0:
            self._chance = min(1.0, self._tokens / self._offered)
        self._offered, self._left = 0, self._tokens - promised

    def chooses(self, tokens: int) -> bool:
        """Whether to take a completion of so many tokens."""
        given = min(tokens, self._longest)
        self._offered += given
        if self._left <= 0 or self._random.random() >= self._chance:
            return False
        self._left -= given
        return True

    def correct(self, offered: int, left: int) -> None:
        """A completion that was `offered` before its end was known is so much shorter; so much more may be taken."""
        self._offered -= offered
        self._left += left


class Part(NamedTuple):
    """What one step computed of a completion."""

    version: int
    start: int
    states_T_X: Tensor

    @property
    def end(self) -> int:
        return self.start + len(self.states_T_X)

    def goes_on(self, last: "Part") -> bool:
        return (self.version, self.start) == (last.version, last.end)

    def between(self, start: int, end: int) -> "Part":
        start = max(start, self.start)
        return Part(self.version, start, self.states_T_X[start - self.start : max(0, end - self.start)])


class Tapped:
    """The last states of one completion, at least `longest` of them."""

    def __init__(self, longest: int, promised: int) -> None:
        self._longest, self.promised = longest, promised
        self.owed: list[Callable[[], Iterable[Part]]] = []
        """Parts that are on their way from an engine's device, turn by turn; each call waits until they have come."""
        self._parts: deque[Part] = deque()
        self._held = 0

    def add(self, part: Part) -> None:
        """What comes again, as after an update that lets keys and values be computed anew, replaces what was there."""
        while self._parts and self._parts[-1].end > part.start:
            last = self._parts.pop()
            self._held -= len(last.states_T_X)
            if last.start < part.start:
                self._keep(last.between(last.start, part.start))
        self._keep(part)
        while self._held - len(self._parts[0].states_T_X) >= self._longest:
            self._held -= len(self._parts.popleft().states_T_X)

    def _keep(self, part: Part) -> None:
        self._parts.append(part)
        self._held += len(part.states_T_X)

    def runs(self) -> Iterator[Part]:
        """Stretches of one version, out of the last `longest` tokens."""
        owed, self.owed = self.owed, []
        for part in chain.from_iterable(parts() for parts in owed):
            self.add(part)
        run: list[Part] = []
        for part in self._parts:
            if run and not part.goes_on(run[-1]):
                yield self._joined(run)
                run = []
            run.append(part)
        if run:
            yield self._joined(run)

    def _joined(self, run: list[Part]) -> Part:
        end = self._parts[-1].end
        whole = Part(run[0].version, run[0].start, torch.cat([part.states_T_X for part in run]))
        return whole.between(end - self._longest, end)


class RolloutTap:
    """Between a rollout actor, which says what completions there are, and its engine, which gives their states."""

    def __init__(
        self,
        settings: DrafterTraining,
        layers: tuple[int, ...],
        hidden_size: int,
        *,
        tokens: int,
        seed: int,
        dtype: torch.dtype = SENT_DTYPE,
    ) -> None:
        """`tokens` of a step are given by this engine: states at `layers` and at the end, each `hidden_size` wide."""
        self.layers, self.dtype = layers, dtype
        self.hidden_size, self.tokens, self.longest = hidden_size, tokens, settings.window_tokens
        self._budget = Budget(tokens, self.longest, seed)
        self._offered: dict[str, int] = {}
        self.tapped: dict[str, Tapped] = {}
        """By request."""
        self.version = 0

    def begin_step(self, version: int) -> None:
        """The engine computes with this version from now on."""
        self.version = version
        self._budget.begin_step(sum(tapped.promised for tapped in self.tapped.values()))

    def offer(self, request: str, most: int) -> None:
        """A completion begins, which with its prompt will have `most` tokens at most."""
        most = self._offered[request] = min(most, self.longest)
        if self._budget.chooses(most):
            self.tapped[request] = Tapped(self.longest, most)

    def rows(self, requests: Iterable[str]) -> list[tuple[int, Tapped]]:
        """Which of these are tapped, by their place."""
        if not self.tapped:
            return []
        found = ((row, self.tapped.get(request)) for row, request in enumerate(requests))
        return [(row, tapped) for row, tapped in found if tapped is not None]

    def end(self, request: str, trajectory: Trajectory | None) -> list[Window]:
        """The windows of a completion, which are given once; without its trajectory it came to nothing."""
        offered, tapped = self._offered.pop(request, None), self.tapped.pop(request, None)
        if offered is None:
            return []
        found = [] if tapped is None or trajectory is None else list(self._windows(tapped, trajectory))
        length = 0 if trajectory is None else min(len(trajectory.tokens) - 1, self.longest)
        self._budget.correct(offered - length, 0 if tapped is None else offered - sum(map(len, found)))
        return found

    def _windows(self, tapped: Tapped, trajectory: Trajectory) -> Iterator[Window]:
        tokens, sampled = trajectory.tokens, trajectory.versions != GIVEN
        for version, start, states_T_X in tapped.runs():
            stop = start + len(states_T_X)
            if stop - start >= SHORTEST:
                hidden_T_E, taps_T_R = states_T_X[:, : self.hidden_size], states_T_X[:, self.hidden_size :]
                yield Window(
                    slot=trajectory.slot,
                    version=version,
                    answer_length=trajectory.sampled_tokens,
                    start=start,
                    tokens_T=torch.from_numpy(tokens[start:stop].astype(np.int32)),
                    sampled_T=torch.from_numpy(sampled[start + 1 : stop + 1].copy()),
                    hidden_T_E=hidden_T_E,
                    taps_T_R=taps_T_R if self.layers else None,
                )
