"""How long the answers of a group are, fixed by seed, group and sample: every split of a cluster gets the same work.

Recorded groups come in the order in which they were recorded, again and again: a run with other settings has the same
answers to give.
"""

from functools import cache

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from asyncrl.simulation.profile import Fixed, LogNormal, Profile, Recorded

BLOCK = 512
"""Groups that are drawn together: a generator costs as much as a hundred draws."""


class Answers:
    """Draws the groups of a run."""

    def __init__(self, profile: Profile, *, seed: int, group_size: int, max_tokens: int) -> None:
        self._lengths, self._informative = profile.lengths, profile.informative
        self._seed, self._group_size, self._max_tokens = seed, group_size, max_tokens
        self._block = cache(self._draw)

    def of(self, group: int) -> tuple[list[int], bool]:
        """Tokens of each answer, and whether their rewards differ."""
        lengths, informative = self._block(group // BLOCK)
        return lengths[group % BLOCK], informative[group % BLOCK]

    def _draw(self, block: int) -> tuple[list[list[int]], list[bool]]:
        rng = np.random.default_rng((self._seed, block))
        informative = rng.random(BLOCK) < self._informative
        drawn = _draw(self._lengths, rng, self._group_size, block * BLOCK)
        return np.clip(drawn, 1, self._max_tokens).astype(int).tolist(), informative.tolist()


def _draw(lengths: LogNormal | Fixed | Recorded, rng: Generator, size: int, first: int) -> NDArray[np.float64]:
    """One row a group, from the `first` of the block on."""
    match lengths:
        case Fixed(tokens=tokens):
            return np.full((BLOCK, size), float(tokens))
        case LogNormal(median=median, sigma=sigma, between=between):
            prompt, own = rng.standard_normal((BLOCK, 1)), rng.standard_normal((BLOCK, size))
            return np.round(median * np.exp(sigma * (np.sqrt(between) * prompt + np.sqrt(1 - between) * own)))
        case Recorded(groups=groups):
            chosen = [groups[i % len(groups)] for i in range(first, first + BLOCK)]
            return np.array([row if len(row) == size else rng.choice(row, size) for row in chosen], np.float64)
