"""What is asked next: by how often the model solves it.

    a ticket -> which source is furthest behind its share
             -> a prompt asked before, if it is a replay's turn: one in the band, or one below it
             -> else the next of the source, without those above the band that were asked in the last passes

`Curriculum` is a fold, like the buffer's ledger that it belongs to: `choose` decides and changes nothing; `ask`,
`measure` and `release` are the events. Nothing is drawn at random and nothing depends on a clock, so the same events
give the same choices. It knows prompts by their index in the stream of the task, and never their texts.

Turns are counted: each ticket adds its share to a counter, and a whole one is spent. So every share is kept to within
one, however many tickets there are.
"""

from collections.abc import Sequence
from functools import lru_cache
from random import Random
from typing import NamedTuple

import msgspec

from asyncrl.config import Run
from asyncrl.config.curriculum import Curriculum as Settings
from asyncrl.curriculum.interleaving import Interleaving

REPLAYED = -1
"""In place of the number of draws: the prompt was asked before, and none was drawn."""
WINDOW = 64
"""Groups of a source whose share in the band its weight follows."""
LEAST = 0.1
"""A source keeps a tenth of its weight: it has to be asked for its rate to be known."""
ROUNDING = 1e-9
"""Shares such as 0.1 add up to a little less than 1."""


class Choice(NamedTuple):
    prompt: int
    drawn: int
    """What its source has given then, or REPLAYED."""


class Known(msgspec.Struct, array_like=True, gc=False):
    """What is known of a prompt."""

    attempts: int
    """Groups that were measured."""
    rate: float
    """Mean reward: half of it is the last group's."""


class SourceState(msgspec.Struct, array_like=True):
    drawn: int = 0
    """Prompts given so far, in the order of its passes, with those left out."""
    turn: float = 0.0
    replay_turn: float = 0.0
    hard_turn: float = 0.0
    in_band: float = 1.0
    """Share of its last groups; a new source counts as useful."""
    band: dict[int, None] = msgspec.field(default_factory=dict[int, None])
    """Prompts in the band that wait for a replay, the one measured first in front."""
    below: dict[int, None] = msgspec.field(default_factory=dict[int, None])
    """Likewise, below the band."""


class CurriculumState(msgspec.Struct, array_like=True):
    """All that choices depend on beside the settings."""

    sources: list[SourceState]
    known: dict[int, Known]
    """By prompt: all of a table that were measured, and of an endless source those that may be replayed."""


class Curriculum:
    def __init__(
        self, settings: Settings, weights: Sequence[float], sizes: Sequence[int | None] = (), seed: int = 0
    ) -> None:
        """`sizes`: how many training prompts each source has before it begins again; None: it is endless."""
        assert settings.band is not None
        self._settings, self._seed = settings, seed
        self._low, self._high = settings.band
        self._weights = weights
        self._sizes = sizes or [None] * len(weights)
        self.interleaving = Interleaving(weights)
        self._order = lru_cache(maxsize=2 * len(weights))(self._shuffle)
        self.state = CurriculumState([SourceState() for _ in weights], {})

    # -- the decision --------------------------------------------------------------------------------------------

    def choose(self) -> Choice:
        """The prompt of the next group."""
        sources, shares = self.state.sources, self.shares()
        source = max(range(len(shares)), key=lambda s: sources[s].turn + shares[s])
        replays = sources[source].replay_turn + self._settings.replay >= 1 - ROUNDING
        if replays and (prompt := self._waiting(sources[source])) is not None:
            return Choice(prompt, REPLAYED)
        return self._next(source)

    def shares(self) -> list[float]:
        """Of the tickets, by source."""
        weights = self._weights
        if self._settings.weights == "follow":
            useful = [max(LEAST, source.in_band) for source in self.state.sources]
            weights = [weight * share for weight, share in zip(weights, useful, strict=True)]
        return [weight / sum(weights) for weight in weights]

    def _waiting(self, source: SourceState) -> int | None:
        """The one that has waited longest for a replay."""
        hard = source.hard_turn + self._settings.hard >= 1 - ROUNDING
        first, then = (source.below, source.band) if hard else (source.band, source.below)
        return next(iter(first), next(iter(then), None))

    def _next(self, source: int) -> Choice:
        """In the order of the source, without prompts that are left out of this pass; all of it is left out at most
        once."""
        drawn, size = self.state.sources[source].drawn, self._sizes[source]
        if size is None:
            return Choice(self.interleaving.index(source, drawn), drawn + 1)
        for number in range(drawn, drawn + size):
            if not self._left_out(source, number, size):
                drawn = number
                break
        return Choice(self._prompt(source, drawn, size), drawn + 1)

    def _left_out(self, source: int, number: int, size: int) -> bool:
        prompt, passes = self._prompt(source, number, size), number // size
        known = self.state.known.get(prompt)
        return known is not None and known.rate > self._high and (passes + prompt) % self._settings.revisit != 0

    def _prompt(self, source: int, number: int, size: int) -> int:
        passes, place = divmod(number, size)
        return self.interleaving.index(source, self._order(source, passes, size)[place])

    def _shuffle(self, source: int, passes: int, size: int) -> Sequence[int]:
        """Each pass in another order; the first in that of the source, which has shuffled it."""
        order = list(range(size))
        if passes:
            Random(f"{self._seed}/{source}/{passes}").shuffle(order)
        return order

    # -- the fold ------------------------------------------------------------------------------------------------

    def ask(self, prompt: int, drawn: int) -> None:
        """A group got this prompt."""
        for each, share in zip(self.state.sources, self.shares(), strict=True):
            each.turn += share
        source = self._source(prompt)
        source.turn -= 1
        replayed = drawn == REPLAYED
        source.replay_turn = _capped(source.replay_turn + self._settings.replay - replayed)
        if replayed:
            source.hard_turn = _capped(source.hard_turn + self._settings.hard - (prompt in source.below))
        else:
            source.drawn = drawn
        source.band.pop(prompt, None)
        source.below.pop(prompt, None)

    def measure(self, prompts: Sequence[int], rates: Sequence[float]) -> None:
        """Groups have ended with these mean rewards."""
        for prompt, rate in zip(prompts, rates, strict=True):
            known = self.state.known.setdefault(prompt, Known(0, 0.0))
            known.attempts += 1
            known.rate += (rate - known.rate) / min(known.attempts, 2)
            source = self._source(prompt)
            source.in_band += ((self._low <= rate <= self._high) - source.in_band) / WINDOW
            self._place(prompt)

    def release(self, prompt: int) -> None:
        """A group has ended without a reward: its prompt waits again, if it did before."""
        if prompt in self.state.known:
            self._place(prompt)

    def _place(self, prompt: int) -> None:
        source, rate = self._source(prompt), self.state.known[prompt].rate
        source.band.pop(prompt, None)
        source.below.pop(prompt, None)
        if rate > self._high:
            self._forget(prompt)
            return
        pool = source.below if rate < self._low else source.band
        pool[prompt] = None
        while len(pool) > self._settings.pool:
            oldest = next(iter(pool))
            del pool[oldest]
            self._forget(oldest)

    def _forget(self, prompt: int) -> None:
        """An endless source never comes to it again."""
        if self._sizes[self.interleaving.locate(prompt)[0]] is None:
            del self.state.known[prompt]

    def _source(self, prompt: int) -> SourceState:
        return self.state.sources[self.interleaving.locate(prompt)[0]]


def _capped(turn: float) -> float:
    """Turns that nothing was there for do not pile up."""
    return min(max(turn, -1.0), 1.0)


def make_curriculum(run: Run, sizes: Sequence[int | None]) -> Curriculum | None:
    """None where prompts are asked in the order of their source."""
    if not run.curriculum.on:
        return None
    return Curriculum(run.curriculum, list(run.task.weights.values()), sizes, run.seed)
