"""How far generation may run ahead of training: as far as `max_staleness` always, or as a figure in a band allows."""

from math import inf
from typing import ClassVar, Self

from asyncrl.config.base import Chosen, Fraction, NonNegative, Positive


class StalenessBase(Chosen, frozen=True, kw_only=True):
    """What the rest of the code asks."""

    @property
    def band(self) -> "Band | None":
        """The band that a figure is held in; None where nothing moves."""
        return None


class FixedStaleness(StalenessBase, frozen=True, kw_only=True, tag="fixed"):
    """The bound is `max_staleness`, and every optimizer step is published."""


class Band(StalenessBase, frozen=True, kw_only=True):
    """A subclass says which figure is held, and its bounds."""

    figure: ClassVar[str]
    """Of a step, by its name in the metrics."""
    worst: ClassVar[float]
    """What a figure that is not finite counts as. It is also the off-policy end: 0 is below the band, else above."""

    low: NonNegative
    high: NonNegative
    window: Positive = 3
    """Steps whose median is judged."""
    publish_every_max: Positive = 4
    """Most optimizer steps between two publications; never more than `max_staleness`."""

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ValueError(f"low={self.low:g} must be below high={self.high:g}")

    @property
    def band(self) -> Self:
        return self


class EssBand(Band, frozen=True, kw_only=True, tag="ess"):
    """Hold the effective sample size of pi / mu between `low` and `high`."""

    figure = "ess"
    worst = 0.0

    low: Fraction = 0.90
    high: Fraction = 0.97


class KlBand(Band, frozen=True, kw_only=True, tag="kl"):
    """Hold the mismatch KL, `log mu - log pi` per token, between `low` and `high`.

    The defaults are those of the ESS band: for a normal log-ratio of variance s, KL = s / 2 and ESS = exp(-s).
    """

    figure = "mismatch_kl"
    worst = inf

    low: NonNegative = 0.015
    high: NonNegative = 0.05


StalenessControl = FixedStaleness | EssBand | KlBand
