"""How far generation may run ahead of training: as far as `max_staleness` always, or as a figure in a band allows."""

from asyncrl.config.base import Fraction, NonNegative, Positive, Settings


class FixedStaleness(Settings, frozen=True, kw_only=True, tag_field="type", tag="fixed"):
    """The bound is `max_staleness`, and every optimizer step is published."""


class _Band(Settings, frozen=True, kw_only=True, tag_field="type"):
    """A subclass says which figure is held, and its bounds."""

    low: NonNegative
    high: NonNegative
    window: Positive = 3
    """Steps whose median is judged."""
    publish_every_max: Positive = 4
    """Most optimizer steps between two publications; never more than `max_staleness`."""

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ValueError(f"low={self.low:g} must be below high={self.high:g}")


class EssBand(_Band, frozen=True, kw_only=True, tag="ess"):
    """Hold the effective sample size of pi / mu between `low` and `high`."""

    low: Fraction = 0.90
    high: Fraction = 0.97


class KlBand(_Band, frozen=True, kw_only=True, tag="kl"):
    """Hold the mismatch KL, `log mu - log pi` per token, between `low` and `high`.

    The defaults are those of the ESS band: for a normal log-ratio of variance s, KL = s / 2 and ESS = exp(-s).
    """

    low: NonNegative = 0.015
    high: NonNegative = 0.05


StalenessControl = FixedStaleness | EssBand | KlBand
